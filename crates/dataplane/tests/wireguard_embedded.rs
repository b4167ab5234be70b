//! The embedded WireGuard behind the common trait.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod mesh_common;
mod wireguard_common;

use fairlead_dataplane::wireguard::{Backend, Preference};

#[test]
fn the_embedded_wireguard() {
    wireguard_common::exercise(Preference::Embedded, Backend::Embedded);
}

//! The embedded WireGuard behind the common trait.
#![cfg(test)]

mod mesh_common;
mod wireguard_common;

use fairlead_dataplane::wireguard::{Backend, Preference};

#[test]
fn the_embedded_wireguard() {
    wireguard_common::exercise(Preference::Embedded, Backend::Embedded);
}

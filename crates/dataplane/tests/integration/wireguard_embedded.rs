//! The embedded WireGuard behind the common trait.

use fairlead_dataplane::wireguard::{Backend, Preference};

use crate::wireguard_common;

#[test]
fn the_embedded_wireguard() {
    wireguard_common::exercise(Preference::Embedded, Backend::Embedded);
}

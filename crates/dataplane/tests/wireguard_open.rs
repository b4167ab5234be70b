//! Names that cannot be used.
#![cfg(test)]

mod mesh_common;

use fairlead_dataplane::wireguard::{Preference, Settings, open};
use mesh_common::{in_namespace, run};

#[test]
fn a_link_of_another_kind_is_refused_and_left_alone() {
    for preference in [Preference::Auto, Preference::Kernel, Preference::Embedded] {
        in_namespace(|| {
            run("ip link add wire_kube type bridge");
            let before = run("ip -o link");
            let settings =
                Settings { interface: "wire_kube".into(), mtu: 1420, preference, handover_socket: None };
            let error = open(&settings).err().expect("a bridge is no WireGuard device").to_string();
            assert!(error.contains("wire_kube") && error.contains("bridge"), "{error}");
            assert_eq!(run("ip -o link"), before);
        });
    }
}

#[test]
fn a_bad_name_is_an_error_that_says_so() {
    in_namespace(|| {
        let settings = Settings {
            interface: "much-too-long-a-name".into(),
            mtu: 1420,
            preference: Preference::Embedded,
            handover_socket: None,
        };
        let error = open(&settings).err().expect("the kernel allows 15 characters").to_string();
        assert!(error.contains("much-too-long-a-name"), "{error}");
    });
}

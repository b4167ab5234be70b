//! The kernel's WireGuard, on kernels that have it. `FAIRLEAD_KERNEL_WIREGUARD=1` says that this one must; without it, a
//! kernel without it must be reported as such.

use crate::mesh_common::in_namespace;
use crate::wireguard_common;
use fairlead_dataplane::wireguard::{Backend, Preference, Settings, open};
use fairlead_netlink::wireguard::WireGuard;

#[test]
fn the_kernels_wireguard() {
    let required = std::env::var("FAIRLEAD_KERNEL_WIREGUARD").is_ok_and(|value| value == "1");
    match in_namespace(WireGuard::open) {
        Ok(_) => {
            wireguard_common::exercise(Preference::Kernel, Backend::Kernel);
            wireguard_common::exercise(Preference::Auto, Backend::Kernel);
        }
        Err(error) if required => panic!("FAIRLEAD_KERNEL_WIREGUARD=1, but {error}"),
        Err(error) => {
            assert!(error.is_unsupported(), "{error}");
            testbed_netns::skipped(
                "this kernel has no WireGuard, and FAIRLEAD_KERNEL_WIREGUARD does not demand it",
            );
            a_missing_module_is_reported();
        }
    }
}

fn a_missing_module_is_reported() {
    let settings = |preference| Settings {
        interface: format!("wgk-{}", std::process::id()),
        mtu: 1420,
        preference,
        handover_socket: None,
    };
    in_namespace(|| {
        let error = open(&settings(Preference::Kernel)).err().expect("there is no WireGuard to open");
        assert!(error.is_unsupported(), "{error}");
        let text = error.to_string();
        assert!(text.contains("no WireGuard") && text.contains("module"), "{text}");
        let device = open(&settings(Preference::Auto)).unwrap();
        assert_eq!(device.backend(), Backend::Embedded);
        device.delete().unwrap();
    });
}

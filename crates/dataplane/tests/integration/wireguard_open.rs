//! Names that cannot be used, and links that vanish.

use std::time::{Duration, Instant};

use crate::mesh_common::{Namespace, in_namespace, run};
use fairlead_dataplane::wireguard::{MarkedDevice, Preference, Settings, open};

/// Only bounds a failing test.
const TIMEOUT: Duration = Duration::from_secs(30);

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

/// Renamed or moved, it stays attached to the embedded device, and nothing leads packets there any more.
#[test]
fn a_link_that_another_program_took_away_is_told_and_made_anew() {
    let elsewhere = Namespace::new();
    let settings = Settings {
        interface: "taken0".into(),
        mtu: 1420,
        preference: Preference::Embedded,
        handover_socket: None,
    };
    for take_away in [
        "ip link set taken0 down; ip link set taken0 name other".to_owned(),
        format!("ip link set taken0 netns {}", elsewhere.path()),
        "ip link delete taken0".to_owned(),
    ] {
        in_namespace(|| {
            let device = open(&settings).unwrap();
            device.state().unwrap();
            run(&take_away);
            let deadline = Instant::now() + TIMEOUT;
            let error = loop {
                match device.state() {
                    // The packet loop may yet have to see it.
                    Ok(_) => assert!(Instant::now() < deadline, "{take_away}: it is not told"),
                    Err(error) => break error.to_string(),
                }
            };
            assert!(error.contains("taken0"), "{error}");
            drop(device);
            let device = open(&settings).unwrap();
            device.state().unwrap();
            assert!(run("ip -o link show taken0").contains(",UP"));
            device.delete().unwrap();
            assert!(!run("ip -o link").contains("taken0"));
        });
    }
}

#[test]
fn a_device_without_its_link_is_deleted_without_an_error() {
    let settings = |interface: &str| Settings {
        interface: interface.into(),
        mtu: 1420,
        preference: Preference::Embedded,
        handover_socket: None,
    };
    in_namespace(|| {
        let (node, beside) =
            (open(&settings("gone0")).unwrap(), MarkedDevice::open(&settings("gone1"), "TEST:gone").unwrap());
        run("ip link delete gone0; ip link delete gone1");
        node.delete().unwrap();
        beside.delete().unwrap();
        let node = open(&settings("gone0")).unwrap();
        run("ip link delete gone0");
        let deadline = Instant::now() + TIMEOUT;
        while node.state().is_ok() {
            assert!(Instant::now() < deadline);
        }
        node.delete().unwrap();
    });
}

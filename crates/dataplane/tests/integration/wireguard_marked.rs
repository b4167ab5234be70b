//! A device beside that of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use fairlead_dataplane::wireguard::{Error, MarkedDevice, Preference, Settings};
use fairlead_keys::{DeviceChange, DeviceConfig, PeerConfig, PrivateKey, PublicKey};
use fairlead_netlink::wireguard::WireGuard;

use crate::mesh_common::{in_namespace, run};

const ALIAS: &str = "TEST:laptop";

fn settings(preference: Preference) -> Settings {
    Settings { interface: "marked0".into(), mtu: 1380, preference, handover_socket: None }
}

fn config() -> DeviceConfig {
    let peer = PeerConfig {
        endpoint: "192.0.2.1:51820".parse().ok(),
        persistent_keepalive: Some(10),
        allowed_ips: vec!["10.64.0.0/16".parse().unwrap()],
        ..PeerConfig::default()
    };
    let peers = BTreeMap::from([(PublicKey([9; 32]), peer)]);
    DeviceConfig { private_key: PrivateKey([64; 32]), listen_port: 61_007, fwmark: 0, peers }
}

/// The kernel's too where there is one.
fn preferences() -> Vec<Preference> {
    let has_kernel = in_namespace(WireGuard::open).is_ok();
    let kernel = has_kernel.then_some(Preference::Kernel);
    kernel.into_iter().chain([Preference::Embedded, Preference::Auto]).collect()
}

/// Change that would bring the device to [`config`].
fn missing(device: &mut MarkedDevice) -> DeviceChange {
    let DeviceConfig { private_key, listen_port, fwmark, peers } = config();
    let wanted = (&private_key, listen_port, fwmark);
    device.state().unwrap().change_of(wanted, &peers, |_, peer| (peer, peer.endpoint))
}

/// Tries again: a child of the other test, between `fork` and `execve`, has the sockets of a device that was just dropped.
fn configure(device: &mut MarkedDevice) {
    let change = missing(device);
    let end = Instant::now() + Duration::from_secs(10);
    while let Err(error) = device.change(&change) {
        assert!(Instant::now() < end, "{error}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_device_is_adopted_by_its_alias_and_leaves_nothing() {
    for preference in preferences() {
        in_namespace(|| {
            let settings = settings(preference);
            let mut device = MarkedDevice::open(&settings, ALIAS).unwrap();
            let link = device.link();
            configure(&mut device);
            assert!(missing(&mut device).is_empty());
            drop(device);
            assert!(run("ip -o link show dev marked0").contains(ALIAS), "it outlives its process");
            let mut device = MarkedDevice::open(&settings, ALIAS).unwrap();
            assert_eq!(device.link(), link);
            configure(&mut device);
            let keys: BTreeSet<PublicKey> = device.state().unwrap().peers.into_keys().collect();
            assert_eq!(keys, BTreeSet::from([PublicKey([9; 32])]));
            device.delete().unwrap();
            assert!(!run("ip -o link").contains("marked0"));
        });
    }
}

#[test]
fn links_of_others_are_refused_and_nothing_of_a_node_is_touched() {
    for preference in preferences() {
        in_namespace(|| {
            run("nft add table inet fairlead_path_socket; sysctl -qw net.ipv4.conf.default.rp_filter=1");
            for make in ["ip link add marked0 type bridge", "ip tuntap add dev marked0 mode tun"] {
                run(make);
                let before = run("ip -o link");
                let error = MarkedDevice::open(&settings(preference), ALIAS).err().unwrap();
                assert!(
                    matches!(error, Error::NotOurs { .. }) && error.to_string().contains("marked0"),
                    "{error}"
                );
                assert_eq!(run("ip -o link"), before);
                run("ip link delete marked0");
            }
            let device = MarkedDevice::open(&settings(preference), ALIAS).unwrap();
            assert!(run("nft list tables").contains("fairlead_path_socket"));
            assert_eq!(run("sysctl -n net.ipv4.conf.marked0.rp_filter").trim(), "1");
            assert!(MarkedDevice::open(&settings(preference), "TEST:other").is_err());
            device.delete().unwrap();
            assert!(run("nft list tables").contains("fairlead_path_socket"));
        });
    }
}

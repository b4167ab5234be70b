use std::thread::JoinHandle;

use fairlead_keys::{DeviceChange, PeerConfig, PrivateKey};
use testbed_netns::{Namespace, in_namespace, sh};

use super::*;
use crate::Settings;
use crate::pump::{self, Handle};

const MTU: u16 = 1420;
const PORT: u16 = 51_820;

/// One as of a kernel that knows no headers (`IFF_VNET_HDR`).
fn without_headers() -> Tun {
    let tun = Tun { file: open_tun().unwrap(), name: "wg0".to_owned(), offloads: Offloads::default() };
    tun.attach(0).unwrap();
    tun.set_mtu(MTU).unwrap();
    tun
}

#[test]
fn one_that_another_program_removed_counts_as_removed() {
    in_namespace(|| {
        let tun = Tun::open("wg0", MTU).unwrap();
        sh("ip link delete wg0");
        tun.delete().unwrap();
        let tun = Tun::open("wg0", MTU).unwrap();
        tun.delete().unwrap();
        assert!(!sh("ip -o link").contains("wg0"));
    });
}

/// The packet loop of one end: the host with the inner address `10.8.0.HOST` and the outer one `192.0.2.HOST`.
struct End {
    namespace: Namespace,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl End {
    fn start(host: u8, open: impl FnOnce() -> Tun + Send) -> Self {
        let namespace = Namespace::new();
        let settings = Settings::new("wg0", MTU.into());
        let (handle, _, thread) = namespace.run(|| pump::spawn(&settings, (open(), None), MTU)).unwrap();
        namespace.sh(&format!("ip addr add 10.8.0.{host}/24 dev wg0; ip link set wg0 up"));
        Self { namespace, handle, thread: Some(thread) }
    }

    fn configure(&self, own: u8, other: u8) {
        let config = PeerConfig {
            endpoint: format!("192.0.2.{other}:{PORT}").parse().ok(),
            allowed_ips: vec![format!("10.8.0.{other}/32").parse().unwrap()],
            ..PeerConfig::default()
        };
        let change = DeviceChange {
            private_key: Some(PrivateKey([own; 32])),
            listen_port: Some(PORT),
            set_peers: [(PrivateKey([other; 32]).public_key(), config)].into(),
            ..DeviceChange::default()
        };
        self.handle.change(change).unwrap();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.handle.stop();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[test]
fn packets_pass_one_whose_kernel_knows_no_headers() {
    let (plain, other) = (End::start(1, without_headers), End::start(2, || Tun::open("wg0", MTU).unwrap()));
    plain.namespace.veth("veth0", &other.namespace, "veth0");
    for (host, end) in [(1, &plain), (2, &other)] {
        end.namespace.sh(&format!("ip addr add 192.0.2.{host}/24 dev veth0"));
        end.configure(host, 3 - host);
    }
    // Of 28 to 1420 bytes, and what is cut into several packets.
    for size in [0, 100, 1392, 4000] {
        plain.namespace.sh(&format!("ping -n -c 3 -i 0.01 -W 30 -s {size} 10.8.0.2"));
        other.namespace.sh(&format!("ping -n -c 3 -i 0.01 -W 30 -s {size} 10.8.0.1"));
    }
}

//! Another independent judge: the WireGuard of a kernel that has it. `testbed/vm` runs this in a virtual machine.

use std::fs;
use std::process::Command;

use crate::common::{NAME, Namespace, Node, cable, keys, set_peer, transfer, until};
use fairlead_keys::{PresharedKey, PrivateKey, PublicKey};

const INNER: [&str; 2] = ["10.8.0.9/32", "fd00:8::9/128"];

/// A namespace with WireGuard of the kernel, and the inner addresses `10.8.0.9` and `fd00:8::9`.
struct Kernel {
    namespace: Namespace,
    public: PublicKey,
}

impl Kernel {
    /// With our device as its only peer.
    fn start(namespace: Namespace, node: &Node, more: &str) -> Self {
        let (private, public) = keys();
        namespace.run(|| fs::write("/run/wireguard/key", private.to_base64())).unwrap();
        let [v4, v6] = node.inner_prefixes();
        namespace.sh(&format!(
            "ip link add {NAME} type wireguard
             wg set {NAME} private-key /run/wireguard/key listen-port 51820 \
                 peer {} allowed-ips {v4},{v6} {more}
             ip addr add 10.8.0.9/24 dev {NAME}; ip addr add fd00:8::9/64 dev {NAME} nodad
             ip link set {NAME} mtu 1420 up",
            node.public
        ));
        Self { namespace, public }
    }
}

/// A cable between two namespaces, in a kernel that has TUN, too.
fn cable_with_tun() -> (Namespace, Namespace) {
    let loaded = Command::new("modprobe").arg("tun").status().unwrap();
    assert!(loaded.success(), "modprobe tun: {loaded}");
    cable()
}

/// Each end sends in both families, to the other and at once with it.
fn exchange(node: &Node, kernel: &Kernel) {
    for (ours, theirs) in node.inner().into_iter().zip(["10.8.0.9", "fd00:8::9"]) {
        let theirs = theirs.parse().unwrap();
        node.reaches(theirs);
        std::thread::scope(|scope| {
            scope.spawn(|| transfer(&node.namespace, &kernel.namespace, theirs, 1));
            scope.spawn(|| transfer(&kernel.namespace, &node.namespace, ours, 1));
        });
    }
    let state = node.peer(&kernel.public);
    assert!(state.last_handshake.is_some() && state.tx_bytes > 2 << 20 && state.rx_bytes > 2 << 20);
}

#[test]
#[ignore = "needs WireGuard in the kernel: cargo xtask test vm -- understand_each_other"]
fn the_kernel_answers() {
    for endpoint in ["192.0.2.2:51820", "[2001:db8::2]:51820"] {
        let (a, b) = cable_with_tun();
        let node = Node::start(a, 1);
        let kernel = Kernel::start(b, &node, "");
        node.change(&set_peer(kernel.public, Some(endpoint), &INNER));
        exchange(&node, &kernel);
    }
}

#[test]
#[ignore = "needs WireGuard in the kernel: cargo xtask test vm -- understand_each_other"]
fn the_kernel_initiates_with_a_preshared_key() {
    let (a, b) = cable_with_tun();
    let node = Node::start(a, 1);
    let secret = PrivateKey([42; 32]);
    b.run(|| fs::write("/run/wireguard/psk", secret.to_base64())).unwrap();
    let more = "preshared-key /run/wireguard/psk endpoint 192.0.2.1:51820";
    let kernel = Kernel::start(b, &node, more);
    let mut change = set_peer(kernel.public, None, &INNER);
    change.set_peers.values_mut().for_each(|config| config.preshared_key = Some(PresharedKey(secret.0)));
    node.change(&change);
    // Its first keepalive is what makes it begin.
    kernel.namespace.sh(&format!("wg set {NAME} peer {} persistent-keepalive 25", node.public));
    until("it came to us", || node.peer(&kernel.public).last_handshake.is_some());
    exchange(&node, &kernel);
}

/// New sessions beside the one that carries a transfer.
#[test]
#[ignore = "needs WireGuard in the kernel: cargo xtask test vm -- understand_each_other"]
fn sessions_are_renewed_under_load() {
    let (a, b) = cable_with_tun();
    let node = Node::start(a, 1);
    let kernel = Kernel::start(b, &node, "");
    node.change(&set_peer(kernel.public, Some("192.0.2.2:51820"), &INNER));
    node.reaches("10.8.0.9".parse().unwrap());
    std::thread::scope(|scope| {
        let transfers = scope.spawn(|| exchange(&node, &kernel));
        while !transfers.is_finished() {
            let handshakes = std::iter::once(kernel.public).collect();
            node.change(&fairlead_keys::DeviceChange {
                handshakes,
                ..fairlead_keys::DeviceChange::default()
            });
            // Longer than a round trip of a machine that is emulated beside others.
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
    });
}

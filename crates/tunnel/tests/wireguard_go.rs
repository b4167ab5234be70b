//! An independent judge: wireguard-go, from its Go module, talks to the embedded WireGuard.

#![cfg(test)]

mod common;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::handover::{Handover, Pings, assert_lossless};
use common::{NAME, Namespace, Node, cable, keys, set_peer, transfer, until};
use fairlead_api::wireguard::{PrivateKey, PublicKey};
use nix::fcntl::{Flock, FlockArg};

const MODULE: &str = "golang.zx2c4.com/wireguard";
const VERSION: &str = "v0.0.0-20260522210424-ecfc5a8d5446";

/// The program, built once per machine into the user's cache.
fn wireguard_go() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME says where the cache is")).join(".cache"),
        PathBuf::from,
    );
    let directory = cache.join("fairlead").join(format!("wireguard-go-{VERSION}"));
    fs::create_dir_all(&directory).unwrap();
    let lock = File::create(directory.join("lock")).unwrap();
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno).unwrap();
    let program = directory.join("wireguard");
    if !program.exists() {
        let built = Command::new("go")
            .args(["install", &format!("{MODULE}@{VERSION}")])
            .env("GOBIN", &directory)
            .output()
            .expect("Go is needed to build wireguard-go");
        assert!(built.status.success(), "building wireguard-go: {}", String::from_utf8_lossy(&built.stderr));
    }
    program
}

/// A running wireguard-go with inner addresses `10.8.0.9` and `fd00:8::9`.
struct Judge {
    namespace: Namespace,
    process: Child,
    private: PrivateKey,
    public: PublicKey,
}

impl Judge {
    fn start(namespace: Namespace) -> Self {
        let program = wireguard_go();
        let process = namespace
            .run(|| {
                Command::new(program).args(["-f", NAME]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
            })
            .unwrap();
        let (private, public) = keys();
        let judge = Self { namespace, process, private, public };
        until("wireguard-go answers", || {
            let show = || Command::new("wg").args(["show", NAME]).output().unwrap().status.success();
            judge.namespace.run(show)
        });
        judge.namespace.sh(&format!(
            "ip addr add 10.8.0.9/24 dev {NAME}; ip addr add fd00:8::9/64 dev {NAME} nodad; \
             ip link set {NAME} mtu 1420 up"
        ));
        judge
    }

    /// Configures it with our device as its only peer.
    fn peer_with(&self, node: &Node, more: &str) {
        let key = self.private.to_base64();
        let [v4, v6] = node.inner_prefixes();
        self.namespace.run(|| fs::write("/run/wireguard/key", key)).unwrap();
        self.namespace.sh(&format!(
            "wg set {NAME} private-key /run/wireguard/key listen-port 51820 peer {} allowed-ips {v4},{v6} {more}",
            node.public
        ));
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

const INNER: [&str; 2] = ["10.8.0.9/32", "fd00:8::9/128"];

fn exchange(node: &Node, judge: &Judge) {
    for address in ["10.8.0.9", "fd00:8::9"] {
        node.reaches(address.parse().unwrap());
        transfer(&node.namespace, &judge.namespace, address.parse().unwrap(), 4);
    }
    for address in node.inner() {
        transfer(&judge.namespace, &node.namespace, address, 4);
    }
    let latest = judge.namespace.sh(&format!("wg show {NAME} latest-handshakes"));
    assert!(!latest.trim_end().ends_with("\t0"), "{latest}");
}

#[test]
fn we_initiate() {
    for endpoint in ["192.0.2.2:51820", "[2001:db8::2]:51820"] {
        let (a, b) = cable();
        let (node, judge) = (Node::start(a, 1), Judge::start(b));
        judge.peer_with(&node, "");
        node.change(&set_peer(judge.public, Some(endpoint), &INNER));
        exchange(&node, &judge);
    }
}

#[test]
fn wireguard_go_initiates() {
    for endpoint in ["192.0.2.1:51820", "[2001:db8::1]:51820"] {
        let (a, b) = cable();
        let (node, judge) = (Node::start(a, 1), Judge::start(b));
        node.change(&set_peer(judge.public, None, &INNER));
        // Its first keepalive is what makes it begin.
        judge.peer_with(&node, &format!("endpoint {endpoint} persistent-keepalive 25"));
        until("it came to us", || node.peer(&judge.public).last_handshake.is_some());
        exchange(&node, &judge);
    }
}

#[test]
fn a_preshared_key_is_mixed_in() {
    let (a, b) = cable();
    let (node, judge) = (Node::start(a, 1), Judge::start(b));
    let secret = PrivateKey([42; 32]);
    judge.namespace.run(|| fs::write("/run/wireguard/psk", secret.to_base64())).unwrap();
    judge.peer_with(&node, "preshared-key /run/wireguard/psk");
    let mut change = set_peer(judge.public, Some("192.0.2.2:51820"), &INNER);
    change.set_peers.values_mut().for_each(|config| config.preshared_key = Some(secret.0));
    node.change(&change);
    exchange(&node, &judge);
}

#[test]
fn a_device_that_is_handed_over_loses_nothing() {
    let (a, b) = cable();
    let (mut node, judge) = (Node::start(a, 1), Judge::start(b));
    judge.peer_with(&node, "");
    node.change(&set_peer(judge.public, Some("192.0.2.2:51820"), &INNER));
    node.reaches("10.8.0.9".parse().unwrap());
    let pings = [
        Pings::start(&node.namespace, "10.8.0.9".parse().unwrap()),
        Pings::start(&judge.namespace, node.inner()[0]),
    ];
    for _ in 0..3 {
        Handover::new().complete(&mut node, judge.public, Some("192.0.2.2:51820"), &INNER);
    }
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
}

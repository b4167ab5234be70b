//! An independent judge: wireguard-go, from its Go module.

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use fairlead_keys::{PrivateKey, PublicKey};
use nix::fcntl::{Flock, FlockArg};

use super::{MTU, NAME, Namespace, Node, keys, until};

const MODULE: &str = "golang.zx2c4.com/wireguard";
const VERSION: &str = "v0.0.0-20260522210424-ecfc5a8d5446";

/// Inner addresses of the program, as prefixes.
pub(crate) const INNER: [&str; 2] = ["10.8.0.9/32", "fd00:8::9/128"];

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
pub(crate) struct Judge {
    pub(crate) namespace: Namespace,
    process: Child,
    private: PrivateKey,
    pub(crate) public: PublicKey,
}

impl Judge {
    pub(crate) fn start(namespace: Namespace) -> Self {
        let program = wireguard_go();
        let process = namespace
            .run(|| {
                Command::new(program).args(["-f", NAME]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
            })
            .unwrap();
        let (private, public) = keys();
        let judge = Self { namespace, process, private, public };
        // Not with wg(8): it removes a control socket that refuses it, also one whose process is about to listen.
        until("wireguard-go answers", || {
            judge.namespace.run(|| UnixStream::connect(format!("/run/wireguard/{NAME}.sock")).is_ok())
        });
        judge.namespace.sh(&format!(
            "ip addr add 10.8.0.9/24 dev {NAME}; ip addr add fd00:8::9/64 dev {NAME} nodad; \
             ip link set {NAME} mtu {MTU} up"
        ));
        // The kernel may take up to a second to use an IPv6 address on a new link (`linkwatch_schedule_work` in `net/core/link_watch.c`).
        until("the host takes packets to its address", || {
            !judge.namespace.sh("ip -6 route show table local fd00:8::9").is_empty()
        });
        judge
    }

    /// Configures it with our device as its only peer.
    pub(crate) fn peer_with(&self, node: &Node, more: &str) {
        let key = self.private.to_base64();
        let [v4, v6] = node.inner_prefixes();
        self.namespace.run(|| fs::write("/run/wireguard/key", key)).unwrap();
        self.namespace.sh(&format!(
            "wg set {NAME} private-key /run/wireguard/key listen-port 51820 peer {} allowed-ips {v4},{v6} {more}",
            node.public
        ));
    }

    pub(crate) fn inner(&self) -> [IpAddr; 2] {
        ["10.8.0.9", "fd00:8::9"].map(|address| address.parse().unwrap())
    }

    /// Makes it begin a handshake with its next packet: it forbids itself to send in its sessions when it gets another key, and gets its
    /// own one back. It receives in them as before. In between its packets wait, of which it keeps 128.
    pub(crate) fn gives_up_its_sessions(&self) {
        // With both changes in one moment it may begin two handshakes at once, of which the peer refuses the second one: that costs 5 s.
        self.namespace.sh(&format!(
            "wg genkey > /run/wireguard/other
             wg set {NAME} private-key /run/wireguard/other
             sleep 0.01
             wg set {NAME} private-key /run/wireguard/key"
        ));
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

//! Namespaces, a veth pair between two of them, and devices inside.

pub(crate) mod flow;
pub(crate) mod forwarder;
pub(crate) mod handover;
pub(crate) mod wireguard_go;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use fairlead_keys::{DeviceChange, PeerConfig, PeerState, PrivateKey, PublicKey};
use fairlead_tunnel::{Device, Error, Settings};
pub(crate) use testbed_netns::Namespace;

/// Bounds every wait; nothing asserts how long something took.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// The port of every device.
pub(crate) const PORT: u16 = 51_820;
/// The name of every interface; namespaces keep them apart.
pub(crate) const NAME: &str = "wg0";
/// The MTU of every interface unless a test sets another.
pub(crate) const MTU: u32 = 1_420;

/// A namespace with its own `/run/wireguard`, where control sockets are.
pub(crate) fn namespace() -> Namespace {
    Namespace::with_own("/run/wireguard")
}

/// Two namespaces with a cable: `192.0.2.1`, `2001:db8::1` at one end, `…2` at the other.
pub(crate) fn cable() -> (Namespace, Namespace) {
    let (a, b) = (namespace(), namespace());
    a.veth("veth0", &b, "veth0");
    for (namespace, host) in [(&a, 1), (&b, 2)] {
        namespace.sh(&format!(
            "ip addr add 192.0.2.{host}/24 dev veth0; ip addr add 2001:db8::{host}/64 dev veth0 nodad"
        ));
    }
    (a, b)
}

/// Keys as `wg(8)` makes them.
pub(crate) fn keys() -> (PrivateKey, PublicKey) {
    let output =
        Command::new("sh").args(["-ec", "k=$(wg genkey); echo $k; echo $k | wg pubkey"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (private, public) = text.trim().split_once('\n').expect("wg(8) is installed");
    (private.parse().unwrap(), public.parse().unwrap())
}

/// Starts a device on an interface that a stopped one has left. A child of this process has every descriptor from its fork(2) to its execve(2):
/// while another test starts a program, the interface may still be in use.
pub(crate) fn start_again(threads: usize, mtu: u32) -> Device {
    let start = Instant::now();
    let settings = Settings { threads: Some(threads), ..Settings::new(NAME, mtu) };
    loop {
        match Device::start(settings.clone()) {
            Err(Error::AttachTun { source, .. })
                if source.kind() == ErrorKind::ResourceBusy && start.elapsed() < TIMEOUT =>
            {
                thread::sleep(Duration::from_millis(10));
            }
            result => return result.unwrap(),
        }
    }
}

/// A device in its namespace with its keys.
pub(crate) struct Node {
    pub(crate) namespace: Namespace,
    /// `None` while it is stopped.
    pub(crate) device: Option<Device>,
    pub(crate) private: PrivateKey,
    pub(crate) public: PublicKey,
    pub(crate) host: u8,
    mtu: u32,
}

impl Node {
    /// Starts a device with inner addresses `10.8.0.HOST` and `fd00:8::HOST`, without peers.
    pub(crate) fn start(namespace: Namespace, host: u8) -> Self {
        Self::start_with_mtu(namespace, host, MTU)
    }

    /// The same with another MTU of the interface.
    pub(crate) fn start_with_mtu(namespace: Namespace, host: u8, mtu: u32) -> Self {
        let (private, public) = keys();
        let mut node = Self { namespace, device: None, private, public, host, mtu };
        node.restart();
        node.namespace.sh(&format!(
            "ip addr add 10.8.0.{host}/24 dev {NAME}; ip addr add fd00:8::{host}/64 dev {NAME} nodad; ip link set {NAME} up"
        ));
        node
    }

    /// Starts the device on a new interface, or on the one that is there. The first host has one thread for everything, others have
    /// more, however many processors there are.
    pub(crate) fn restart(&mut self) {
        let threads = if self.host == 1 { 0 } else { 2 };
        self.device = Some(self.namespace.run(|| start_again(threads, self.mtu)));
        self.change(&DeviceChange {
            private_key: Some(self.private.clone()),
            listen_port: Some(PORT),
            ..DeviceChange::default()
        });
    }

    pub(crate) fn device(&self) -> &Device {
        self.device.as_ref().unwrap()
    }

    pub(crate) fn change(&self, change: &DeviceChange) {
        self.device().change(change).unwrap();
    }

    /// Adds the other node with its own inner addresses.
    pub(crate) fn peer_with(&self, other: &Self, endpoint: Option<&str>) {
        self.change(&set_peer(other.public, endpoint, &other.inner_prefixes()));
    }

    /// Starts a handshake although there may be a session.
    pub(crate) fn shakes_hands_with(&self, key: PublicKey) {
        self.change(&DeviceChange { handshakes: [key].into(), ..DeviceChange::default() });
    }

    pub(crate) fn inner_prefixes(&self) -> [String; 2] {
        [format!("10.8.0.{}/32", self.host), format!("fd00:8::{}/128", self.host)]
    }

    pub(crate) fn inner(&self) -> [IpAddr; 2] {
        [format!("10.8.0.{}", self.host).parse().unwrap(), format!("fd00:8::{}", self.host).parse().unwrap()]
    }

    pub(crate) fn peer(&self, key: &PublicKey) -> PeerState {
        self.device().state().unwrap().peers.remove(key).unwrap()
    }

    /// Pings until answered.
    pub(crate) fn reaches(&self, address: IpAddr) {
        until(&format!("{address} answers"), || self.pings(address));
    }

    /// One ping; whether it was answered within a second.
    pub(crate) fn pings(&self, address: IpAddr) -> bool {
        let ping = format!("ping -n -c 1 -W 1 {address}");
        self.namespace.run(|| Command::new("sh").args(["-c", &ping]).output().unwrap().status.success())
    }

    pub(crate) fn index(&self) -> String {
        self.namespace.sh(&format!(
            "cat /sys/class/net/{NAME}/ifindex 2>/dev/null || ip -o link show {NAME} | cut -d: -f1"
        ))
    }
}

/// A connected pair; the first one knows where the second is.
pub(crate) fn pair() -> (Node, Node) {
    let (a, b) = cable();
    let (a, b) = (Node::start(a, 1), Node::start(b, 2));
    b.peer_with(&a, None);
    a.peer_with(&b, Some("192.0.2.2:51820"));
    a.reaches(b.inner()[0]);
    (a, b)
}

pub(crate) fn set_peer(key: PublicKey, endpoint: Option<&str>, allowed: &[impl AsRef<str>]) -> DeviceChange {
    let config = PeerConfig {
        endpoint: endpoint.map(|endpoint| endpoint.parse().unwrap()),
        allowed_ips: allowed.iter().map(|prefix| prefix.as_ref().parse().unwrap()).collect(),
        ..PeerConfig::default()
    };
    DeviceChange { set_peers: BTreeMap::from([(key, config)]), ..DeviceChange::default() }
}

/// Waits for `condition`.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "still not: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Sends `megabytes` of a pattern by TCP and checks every byte on arrival.
pub(crate) fn transfer(from: &Namespace, to: &Namespace, address: IpAddr, megabytes: usize) {
    let listener = to.run(|| TcpListener::bind(SocketAddr::new(address, 0))).unwrap();
    let target = listener.local_addr().unwrap();
    let pattern: Vec<u8> =
        (0..megabytes << 20).map(|index: usize| (index ^ (index >> 8) ^ (index >> 16)) as u8).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = from.run(|| TcpStream::connect_timeout(&target, TIMEOUT)).unwrap();
            stream.set_write_timeout(Some(TIMEOUT)).unwrap();
            stream.write_all(&pattern).unwrap();
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut received = Vec::with_capacity(pattern.len());
        stream.read_to_end(&mut received).unwrap();
        assert!(received == pattern, "the transfer to {address} arrived damaged");
    });
}

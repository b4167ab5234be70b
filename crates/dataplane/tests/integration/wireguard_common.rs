//! Tests for both implementations: two nodes in two namespaces, joined by a veth pair.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use fairlead_dataplane::mesh::{Applier, Bypass, MeshState};
use fairlead_dataplane::wireguard::{Backend, Preference, Settings, WireGuardDevice, open};
use fairlead_keys::{
    DeviceChange, DeviceConfig, DeviceState, PeerConfig, PeerState, PresharedKey, PrivateKey, PublicKey,
};
use fairlead_netlink::changes_sent;

use crate::mesh_common::{Namespace, run};

const PORT: u16 = 51820;
const MTU: u32 = 1420;
/// Only bounds a failing test.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Node {
    pub(crate) namespace: Namespace,
    settings: Settings,
    private_key: PrivateKey,
    public_key: PublicKey,
    number: u8,
}

impl Node {
    /// All namespaces share the directory of control sockets, so the names contain our process ID.
    fn new(number: u8, preference: Preference) -> Self {
        let namespace = Namespace::new();
        namespace.sh("sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.default.rp_filter=1");
        let private_key = run("wg genkey");
        let public_key = run(&format!("echo {} | wg pubkey", private_key.trim())).trim().parse().unwrap();
        let settings = Settings {
            interface: format!("wg{number}-{}", std::process::id()),
            mtu: MTU,
            preference,
            handover_socket: None,
        };
        Self { namespace, settings, private_key: private_key.parse().unwrap(), public_key, number }
    }

    fn open(&self) -> Box<dyn WireGuardDevice> {
        self.namespace.run(|| open(&self.settings)).unwrap()
    }

    /// Gives the device its addresses, and leads packets to the other node into it as the node program does.
    fn join(&self, other: &Self) {
        let (me, it, link) = (self.number, other.number, &self.settings.interface);
        self.namespace.sh(&format!(
            "ip addr replace 10.77.0.{me}/32 dev {link}; ip addr replace fd77::{me}/128 dev {link} nodad"
        ));
        let state = MeshState {
            interface: link.clone(),
            mtu: MTU,
            addresses: Vec::new(),
            targets_v4: vec![format!("10.77.0.{it}/32").parse().unwrap()],
            targets_v6: vec![format!("fd77::{it}/128").parse().unwrap()],
            bypass: Bypass::default(),
            plain: Vec::new(),
            narrow: Vec::new(),
            masqueraded: Vec::new(),
            without_default: Vec::new(),
            listen_port: 51820,
            sources: Vec::new(),
            uplinks: Vec::new(),
        };
        self.namespace.run(|| Applier::default().apply(&state)).unwrap();
    }

    fn config(&self, other: &Self, endpoint: Option<&str>) -> DeviceConfig {
        let allowed_ips = [format!("10.77.0.{}/32", other.number), format!("fd77::{}/128", other.number)];
        let peer = PeerConfig {
            preshared_key: Some(PresharedKey([42; 32])),
            endpoint: endpoint.map(|address| SocketAddr::new(address.parse().unwrap(), PORT)),
            persistent_keepalive: Some(25),
            allowed_ips: allowed_ips.iter().map(|net| net.parse().unwrap()).collect(),
        };
        DeviceConfig {
            private_key: self.private_key.clone(),
            listen_port: PORT,
            fwmark: 0x20,
            peers: BTreeMap::from([(other.public_key, peer)]),
        }
    }

    fn ping(&self, other: &Self) {
        let it = other.number;
        let (from4, from6) = (format!("10.77.0.{}", self.number), format!("fd77::{}", self.number));
        self.namespace.sh(&format!(
            "ping -c 3 -i 0.2 -W 30 -I {from4} 10.77.0.{it}; ping -c 3 -i 0.2 -W 30 -I {from6} fd77::{it}"
        ));
    }

    fn link(&self) -> String {
        self.namespace.sh(&format!("ip -o link show {}", self.settings.interface))
    }
}

fn change_to(state: &DeviceState, desired: &DeviceConfig) -> DeviceChange {
    let DeviceConfig { private_key, listen_port, fwmark, peers } = desired;
    state.change_of((private_key, *listen_port, *fwmark), peers, |_, peer| (peer, peer.endpoint))
}

fn reconcile(device: &dyn WireGuardDevice, desired: &DeviceConfig) {
    let change = change_to(&device.state().unwrap(), desired);
    assert!(!change.is_empty());
    device.change(&change).unwrap();
    let left = change_to(&device.state().unwrap(), desired);
    assert!(left.is_empty(), "applied, but still to do: {left:?}");
}

fn only_peer(state: &DeviceState) -> &PeerState {
    assert_eq!(state.peers.len(), 1);
    state.peers.values().next().unwrap()
}

/// Everything in one test, because the count of sent changes is that of the whole process.
pub(crate) fn exercise(preference: Preference, expected: Backend) {
    let (a, b) = (Node::new(1, preference), Node::new(2, preference));
    a.namespace.veth("eth0", &b.namespace, "eth0");
    a.namespace.sh("ip addr add 192.0.2.1/24 dev eth0");
    b.namespace.sh("ip addr add 192.0.2.2/24 dev eth0; ip addr add 192.0.2.3/24 dev eth0");
    for node in [&a, &b] {
        // The kernel looks for a route before it asks for a mark: a node without a default route sends nothing.
        node.namespace.sh("ip route add default dev eth0; ip -6 route add default dev eth0");
    }
    let (device_a, device_b) = (a.open(), b.open());
    assert_eq!((device_a.backend(), device_a.interface()), (expected, a.settings.interface.as_str()));
    let link = a.link();
    assert!(link.contains("mtu 1420") && link.contains(",UP"), "{link}");

    reconcile(&*device_a, &a.config(&b, Some("192.0.2.2")));
    reconcile(&*device_b, &b.config(&a, None));
    a.join(&b);
    b.join(&a);
    a.ping(&b);
    b.ping(&a);
    let state = device_a.state().unwrap();
    assert!(only_peer(&state).last_handshake.is_some() && only_peer(&state).rx_bytes > 0, "{state:?}");
    agrees_with_wg(&a, &state);

    unchanged_sends_nothing(&a, &*device_a, &a.config(&b, Some("192.0.2.2")));
    path_socket(&b, &*device_a);
    endpoint_change_keeps_the_session(&a, &b, &*device_a);
    let device_a = restart(&a, &b, device_a);
    removal(&a, device_a);
    device_b.delete().unwrap();
}

/// Setting every peer again to what it is changes no value, touches no link, address, route or rule (`ip monitor` would
/// tell), and sends nothing to the peer (nftables counts).
fn unchanged_sends_nothing(node: &Node, device: &dyn WireGuardDevice, desired: &DeviceConfig) {
    let before = device.state().unwrap();
    assert!(change_to(&before, desired).is_empty());
    let again = DeviceChange { set_peers: desired.peers.clone(), ..DeviceChange::default() };
    assert!(!again.is_empty());
    node.namespace
        .sh("nft 'add table inet judge; add chain inet judge out { type filter hook output priority 0; }; \
         add rule inet judge out udp sport 51820 counter'");
    // The kernel changes an address itself when no neighbour has it.
    node.namespace
        .sh("timeout 20 sh -c 'while ip -6 address show tentative | grep -q .; do sleep 0.1; done'");
    let monitor = Monitor::start(&node.namespace);
    let sent = changes_sent();
    for _ in 0..10 {
        device.change(&again).unwrap();
    }
    assert_eq!(changes_sent(), sent);
    assert_eq!(device.state().unwrap(), before);
    let counted = node.namespace.sh("nft list table inet judge");
    assert!(counted.contains("counter packets 0 "), "{counted}");

    assert_eq!(monitor.finish(&node.namespace), [""; 0]);
    node.namespace.sh("nft delete table inet judge");
}

/// `ip monitor` in a namespace. A link of its own shows when it listens, and what it was told before the end.
struct Monitor {
    process: Child,
    lines: Receiver<String>,
}

impl Monitor {
    fn start(namespace: &Namespace) -> Self {
        let mut command = Command::new("ip");
        command.args(["-o", "monitor", "link", "address", "route", "rule"]).stdout(Stdio::piped());
        let mut process = namespace.run(|| command.spawn()).unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        namespace.sh("ip link add judge0 type bridge");
        for mtu in 1_000.. {
            namespace.sh(&format!("ip link set judge0 mtu {mtu}"));
            if lines.recv_timeout(Duration::from_millis(100)).is_ok() {
                break;
            }
        }
        Self { process, lines }
    }

    /// The changes since the start.
    fn finish(mut self, namespace: &Namespace) -> Vec<String> {
        namespace.sh("ip link del judge0");
        let mut changes = Vec::new();
        loop {
            let line = self.lines.recv_timeout(TIMEOUT).unwrap();
            match (line.contains("judge0"), line.contains("Deleted")) {
                (true, true) => break,
                (true, false) => {}
                (false, _) => changes.push(line),
            }
        }
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        changes
    }
}

/// A path probe arrives past the tunnel, and the answer leaves from the same port.
fn path_socket(other: &Node, device: &dyn WireGuardDevice) {
    let socket = device.open_path_socket().unwrap().unwrap();
    let health = socket.maintain();
    assert_eq!((health.families.len(), &health.failures[..]), (2, &[][..]));
    assert!(device.open_path_socket().unwrap().is_none(), "one at a time");
    let stranger = other.namespace.run(|| UdpSocket::bind("192.0.2.3:0")).unwrap();
    stranger.set_read_timeout(Some(TIMEOUT)).unwrap();
    let probe = [&fairlead_wire::probe::MAGIC[..], b"a question"].concat();
    stranger.send_to(&probe, ("192.0.2.1", PORT)).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    let question = loop {
        assert!(Instant::now() < deadline, "the datagram did not arrive: {:?}", socket.stats());
        match socket.try_receive() {
            Some(datagram) => break datagram,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert_eq!((question.remote, question.payload), (stranger.local_addr().unwrap(), probe));
    socket.send(question.local, question.remote, b"an answer").unwrap();
    let mut answer = [0; 64];
    let (length, from) = stranger.recv_from(&mut answer).unwrap();
    assert_eq!((&answer[..length], from), (&b"an answer"[..], "192.0.2.1:51820".parse().unwrap()));
}

fn endpoint_change_keeps_the_session(a: &Node, b: &Node, device: &dyn WireGuardDevice) {
    let before = device.state().unwrap();
    let desired = a.config(b, Some("192.0.2.3"));
    reconcile(device, &desired);
    a.ping(b);
    let after = device.state().unwrap();
    assert_eq!(only_peer(&after).last_handshake, only_peer(&before).last_handshake, "a new session was made");
    assert!(only_peer(&after).rx_bytes > only_peer(&before).rx_bytes);
    assert_eq!(only_peer(&after).config.endpoint, Some("192.0.2.3:51820".parse().unwrap()));
}

/// The next process finds the link, its addresses and the marks in place.
fn restart(a: &Node, b: &Node, device: Box<dyn WireGuardDevice>) -> Box<dyn WireGuardDevice> {
    let index = |link: String| link.split(':').next().unwrap().to_owned();
    let (before, link) = (device.state().unwrap(), index(a.link()));
    let backend = device.backend();
    drop(device);
    assert_eq!(index(a.link()), link, "the link was removed with its owner");
    let sent = changes_sent();
    let device = a.open();
    assert_eq!(changes_sent(), sent, "adopting an unchanged device changes nothing");
    assert_eq!((index(a.link()), device.backend()), (link, backend));
    let desired = a.config(b, Some("192.0.2.2"));
    match backend {
        Backend::Kernel => {
            assert_eq!(only_peer(&device.state().unwrap()).last_handshake, only_peer(&before).last_handshake)
        }
        Backend::Embedded => assert!(device.state().unwrap().peers.is_empty(), "its state is in the process"),
    }
    reconcile(&*device, &desired);
    a.ping(b);
    device
}

fn removal(a: &Node, device: Box<dyn WireGuardDevice>) {
    let without_peers = DeviceConfig { peers: BTreeMap::new(), ..a.config(a, None) };
    reconcile(&*device, &without_peers);
    device.delete().unwrap();
    a.namespace.run(fairlead_dataplane::mesh::remove).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while a.namespace.sh("ip -o link").contains(&a.settings.interface) {
        assert!(Instant::now() < deadline, "the link is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `wg show NAME dump`: private key, public key, port, mark; then per peer public key, preshared key, endpoint, allowed
/// addresses, handshake, received, sent, keepalive.
fn agrees_with_wg(node: &Node, state: &DeviceState) {
    let text = node.namespace.sh(&format!("wg show {} dump", node.settings.interface));
    let mut lines = text.lines().map(|line| line.split('\t').collect::<Vec<_>>());
    let device = lines.next().unwrap();
    assert_eq!(device[0], node.private_key.to_base64());
    assert_eq!(device[1], node.public_key.to_string());
    assert_eq!((device[2], device[3]), ("51820", "0x20"));
    let peer = lines.next().unwrap();
    let (key, known) = state.peers.first_key_value().unwrap();
    assert_eq!(peer[0], key.to_string());
    assert_eq!(peer[1], known.config.preshared_key.unwrap().to_base64());
    assert_eq!(peer[2], known.config.endpoint.unwrap().to_string());
    let allowed = |texts: &mut dyn Iterator<Item = String>| texts.collect::<BTreeSet<_>>();
    assert_eq!(
        allowed(&mut peer[3].split(',').map(str::to_owned)),
        allowed(&mut known.config.allowed_ips.iter().map(ToString::to_string))
    );
    let handshake = known.last_handshake.unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(peer[4], handshake.as_secs().to_string());
    assert_eq!(peer[7], "25");
    assert!(lines.next().is_none(), "{text}");
}

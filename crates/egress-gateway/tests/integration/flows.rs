//! A client, two gateways that translate it to the same addresses, and a server:
//!
//! ```text
//!         +-- a --+
//! client -+   |   +- server
//!         +-- b --+
//! ```
//!
//! The gateways' kernels are real, and so is what copies connections between them. Rules and routes are made by `nft` and `ip`; which gateway
//! holds the addresses is what the test says.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fairlead_egress_gateway::source_addresses::peers::{Hold, Identity, Peers};
use fairlead_egress_gateway::source_addresses::sync::{Copier, SyncMetrics};
use fairlead_source_addresses::copies::incoming::Addresses;
use fairlead_source_addresses::copies::{Slot, Slots};
use fairlead_source_addresses::members::{Member, Members};
use fairlead_wire::egress_peers::{Answer, Heartbeat};
use testbed_netns::Namespace;
use tokio::sync::watch;

pub(crate) const PORT: u16 = 5557;
pub(crate) const SOURCES: [&str; 2] = ["192.0.2.9", "2001:db8::9"];
pub(crate) const SERVERS: [&str; 2] = ["198.51.100.1", "2001:db8:5::1"];
pub(crate) const ECHO: u16 = 9000;
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Sources have random ports, so that a gateway that does not know a connection would choose another.
const RULES: &str = "
    table inet t {
        chain forward { type filter hook forward priority 0; ct state invalid drop; }
        chain source { type nat hook postrouting priority srcnat;
            oifname server meta nfproto ipv4 meta l4proto { tcp, udp, icmp } snat ip to 192.0.2.9:1024-65535 fully-random
            oifname server meta nfproto ipv6 meta l4proto { tcp, udp, ipv6-icmp } snat ip6 to [2001:db8::9]:1024-65535 fully-random
        }
    }";

struct NoHold;

impl Hold for NoHold {
    fn heartbeat(&self, _: &str, heartbeat: Heartbeat) -> Answer {
        Answer { sequence: heartbeat.sequence, ..Answer::default() }
    }

    fn answer(&self, _: &str, _: Answer) {}
}

/// As the hold protocol sends them.
async fn heartbeats(peers: &Peers) {
    loop {
        for member in peers.connections().borrow().keys() {
            peers.heartbeat(member, Heartbeat::default());
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

struct Known;

impl Addresses for Known {
    fn is_client(&self, address: IpAddr) -> bool {
        ["10.0.0.2", "fd00::2"].iter().any(|client| client.parse() == Ok(address))
    }

    fn is_destination(&self, address: IpAddr) -> bool {
        SERVERS.iter().any(|server| server.parse() == Ok(address))
    }
}

/// A gateway: a namespace, and a thread in it that copies connections.
pub(crate) struct Gateway {
    pub(crate) name: &'static str,
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) slots: watch::Sender<Arc<Slots>>,
    members: watch::Sender<Option<Arc<Members>>>,
    pub(crate) metrics: SyncMetrics,
    pub(crate) complete: watch::Receiver<BTreeSet<u32>>,
    member: Member,
    _stop: tokio_util::sync::DropGuard,
}

impl Gateway {
    fn new(name: &'static str, address: &str) -> Self {
        let namespace = Arc::new(Namespace::new());
        let identity = Identity::generate().unwrap();
        let member =
            Member { uid: String::new(), addresses: vec![address.parse().unwrap()], key: identity.key };
        let (slots, members) = (watch::Sender::new(Arc::default()), watch::Sender::new(None));
        let (of_slots, of_members) = (slots.subscribe(), members.subscribe());
        let (metrics, stop) = (SyncMetrics::default(), tokio_util::sync::CancellationToken::new());
        let (inside, counted, stopped) = (Arc::clone(&namespace), metrics.clone(), stop.clone());
        let (ready, complete) = mpsc::channel();
        thread::Builder::new()
            .name(format!("copies-{name}"))
            .spawn(move || {
                inside.enter();
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .thread_name(format!("copies-{name}"))
                    .thread_keep_alive(Duration::from_secs(3600))
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    let listener = fairlead_transport::listen(([0, 0, 0, 0], PORT).into()).unwrap();
                    let (peers, heard) = Peers::new(of_members);
                    let copier = Copier::new(Arc::clone(&peers), heard, of_slots, Arc::new(Known), counted);
                    ready.send(copier.complete()).unwrap();
                    tokio::select! {
                        () = copier.run(stopped.clone()) => {}
                        never = Arc::clone(&peers).run(listener, identity, PORT, Arc::new(NoHold)) => match never {},
                        () = heartbeats(&peers) => {}
                        () = stopped.cancelled() => {}
                    }
                });
            })
            .unwrap();
        let complete = complete.recv().unwrap();
        Self { name, namespace, slots, members, metrics, complete, member, _stop: stop.drop_guard() }
    }

    /// Tells it who holds the addresses.
    pub(crate) fn set_holder(&self, holder: &str, term: u64) {
        let slot = Slot {
            addresses: SOURCES.map(|source| source.parse().unwrap()).to_vec(),
            term,
            holder: Some(holder.to_owned()),
            is_held: self.name == holder,
        };
        self.slots.send_replace(Arc::new([(0, slot)].into()));
    }

    /// Output of `conntrack -L` on translated connections that have not ended, without timeouts.
    pub(crate) fn listed(&self) -> BTreeSet<String> {
        let list = |family: &str, source: &str| {
            self.namespace.sh(&format!("conntrack -L -f {family} --reply-dst {source} 2>/dev/null"))
        };
        let lines = [list("ipv4", SOURCES[0]), list("ipv6", SOURCES[1])];
        let words = |line: &str| {
            let mut words: Vec<&str> = line.split_whitespace().collect();
            words.remove(2);
            words.retain(|word| !word.starts_with("use="));
            words.join(" ")
        };
        let has_ended = |line: &str| line.contains(" TIME_WAIT ") || line.contains(" CLOSE ");
        lines.iter().flat_map(|lines| lines.lines()).filter(|line| !has_ended(line)).map(words).collect()
    }
}

pub(crate) struct Bed {
    pub(crate) client: Namespace,
    pub(crate) server: Namespace,
    pub(crate) a: Gateway,
    pub(crate) b: Gateway,
}

impl Bed {
    /// All goes by gateway a, which holds the addresses.
    pub(crate) fn new() -> Self {
        let (client, server) = (Namespace::new(), Namespace::new());
        let (a, b) = (Gateway::new("a", "10.9.0.1"), Gateway::new("b", "10.9.0.2"));
        a.namespace.veth("peer", &b.namespace, "peer");
        for (gateway, number) in [(&a, 1), (&b, 2)] {
            let Gateway { name, namespace, .. } = gateway;
            // `ip link set a up` would be about an address.
            let link = format!("gateway-{name}");
            namespace.veth("client", &client, &link);
            namespace.veth("server", &server, &link);
            namespace.sh(&format!(
                "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
                sysctl -qw net.netfilter.nf_conntrack_tcp_loose=0
                ip addr add 10.9.0.{number}/24 dev peer
                ip addr add 10.1.{number}.1/24 dev client; ip addr add 10.2.{number}.1/24 dev server
                ip addr add fd01:{number}::1/64 dev client nodad; ip addr add fd02:{number}::1/64 dev server nodad
                ip route add 10.0.0.2 via 10.1.{number}.2; ip -6 route add fd00::2 via fd01:{number}::2
                ip route add {} via 10.2.{number}.2; ip -6 route add {} via fd02:{number}::2
                nft '{RULES}'",
                SERVERS[0], SERVERS[1],
            ));
            client.sh(&format!(
                "ip addr add 10.1.{number}.2/24 dev {link}; ip addr add fd01:{number}::2/64 dev {link} nodad"
            ));
            server.sh(&format!(
                "ip addr add 10.2.{number}.2/24 dev {link}; ip addr add fd02:{number}::2/64 dev {link} nodad"
            ));
        }
        client.sh("sysctl -qw net.ipv4.ip_local_port_range='1024 65535'
            ip addr add 10.0.0.2/32 dev lo; ip addr add fd00::2/128 dev lo nodad");
        server.sh(&format!(
            "ip addr add {}/32 dev lo; ip addr add {}/128 dev lo nodad",
            SERVERS[0], SERVERS[1]
        ));
        let others =
            |gateway: &Gateway| Some(Arc::new([(gateway.name.to_owned(), gateway.member.clone())].into()));
        a.members.send_replace(others(&b));
        b.members.send_replace(others(&a));
        let bed = Self { client, server, a, b };
        bed.move_to("a", 1);
        echo(&bed.server);
        bed
    }

    /// Moves addresses and routes to a gateway.
    pub(crate) fn move_to(&self, holder: &str, term: u64) {
        let number = if holder == "a" { 1 } else { 2 };
        let sources = SOURCES;
        for gateway in [&self.a, &self.b] {
            gateway.set_holder(holder, term);
        }
        self.client.sh(&format!(
            "ip route replace default via 10.1.{number}.1 src 10.0.0.2; ip -6 route replace default via fd01:{number}::1 src fd00::2"
        ));
        self.server.sh(&format!(
            "ip route replace {} via 10.2.{number}.1; ip -6 route replace {} via fd02:{number}::1",
            sources[0], sources[1],
        ));
    }

    pub(crate) fn connect(&self, server: &str) -> TcpStream {
        let address = SocketAddr::new(server.parse().unwrap(), ECHO);
        let stream = self.client.run(|| TcpStream::connect_timeout(&address, LIMIT)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Waits until both gateways print the same connections, and returns them.
    pub(crate) fn wait_for_same(&self) -> BTreeSet<String> {
        let began = Instant::now();
        loop {
            let (a, b) = (self.a.listed(), self.b.listed());
            if a == b {
                return a;
            }
            let difference: Vec<_> = a.symmetric_difference(&b).collect();
            assert!(began.elapsed() < LIMIT, "{difference:#?}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Sends a line and has it back.
pub(crate) fn say(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    stream.write_all(text.as_bytes())?;
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer)?;
    assert_eq!(answer, text.as_bytes());
    Ok(())
}

/// Threads that send back what they receive. They end with the test program. UDP is answered with the sender's address in front.
fn echo(server: &Namespace) {
    for address in SERVERS {
        let address = SocketAddr::new(address.parse().unwrap(), ECHO);
        let (listener, socket) =
            server.run(|| (TcpListener::bind(address).unwrap(), UdpSocket::bind(address).unwrap()));
        thread::spawn(move || {
            for stream in listener.incoming() {
                thread::spawn(move || {
                    let mut stream = stream.unwrap();
                    let mut buffer = [0; 1024];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        if stream.write_all(&buffer[..length]).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        thread::spawn(move || {
            let mut buffer = [0; 1024];
            while let Ok((_, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(from.to_string().as_bytes(), from);
            }
        });
    }
}

//! Two sites behind real NATs: sockets in namespaces of this machine's kernel, a STUN server, and a relay that is a queue.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use fairlead_keys::PublicKey;
use fairlead_wire::stun;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use testbed_lab::{Host, Lab, Nat, NatSite};

/// The loopback port that stands for the first node by way of the relay.
const RELAY_PORT: u16 = 1000;
/// Delay by way of the relay, in one direction.
const RELAY_DELAY: Duration = Duration::from_millis(20);
const STUN_PORT: u16 = 3478;

pub(crate) struct Datagram {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) payload: Vec<u8>,
}

pub(crate) struct Network {
    pub(crate) sites: [NatSite; 2],
    pub(crate) hosts: [Host; 2],
    stun: (UdpSocket, SocketAddr),
    sockets: BTreeMap<SocketAddr, UdpSocket>,
    readable: Epoll,
    /// Datagrams on their way by the relay, each with the time of its arrival.
    relayed: VecDeque<(Duration, Datagram)>,
    _lab: Lab,
}

/// Loopback endpoint that stands for a node by way of the relay.
pub(crate) fn relay_endpoint(node: usize) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], RELAY_PORT + u16::try_from(node).unwrap()))
}

impl Network {
    pub(crate) fn new(nats: [Nat; 2]) -> Self {
        let lab = Lab::new().unwrap();
        let server = lab.public_site("servers").host("stun").unwrap();
        let stun = server.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, STUN_PORT)).unwrap()).unwrap();
        stun.set_nonblocking(true).unwrap();
        let site = |number: usize| {
            let lan = format!("192.168.{}.0/24", number + 1).parse().unwrap();
            lab.nat_site(&format!("site-{number}"), nats[number], lan).unwrap()
        };
        let sites = [site(0), site(1)];
        let hosts = [0, 1].map(|number| sites[number].host(&format!("host-{number}")).unwrap());
        Self {
            sites,
            hosts,
            stun: (stun, SocketAddr::from((server.address(), STUN_PORT))),
            sockets: BTreeMap::new(),
            readable: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap(),
            relayed: VecDeque::new(),
            _lab: lab,
        }
    }

    pub(crate) fn stun_server(&self) -> SocketAddr {
        self.stun.1
    }

    /// As if the routers and the nodes were new.
    pub(crate) fn restart(&mut self) {
        self.sockets.clear();
        self.relayed.clear();
        self.sites.iter().for_each(|site| site.router().lose_mappings().unwrap());
    }

    /// Entries of connection tracking, at the router that has more.
    pub(crate) fn tracked(&self) -> usize {
        let count = |site: &NatSite| -> usize {
            site.router().shell("conntrack -C").unwrap().trim().parse().unwrap()
        };
        self.sites.iter().map(count).max().unwrap()
    }

    pub(crate) fn send(&mut self, now: Duration, datagram: Datagram) {
        let Datagram { from, to, payload } = datagram;
        let site = self.site_of(from);
        if to.ip().is_loopback() {
            let receiver = usize::from(to.port() - RELAY_PORT);
            let to = SocketAddr::from((self.hosts[receiver].address(), crate::nats::PORT));
            let datagram = Datagram { from: relay_endpoint(site), to, payload };
            self.relayed.push_back((now + RELAY_DELAY, datagram));
            return;
        }
        if !self.sockets.contains_key(&from) {
            let socket = self.hosts[site].run(|| UdpSocket::bind(from).unwrap()).unwrap();
            socket.set_nonblocking(true).unwrap();
            let tag = u64::from(from.port()) << 1 | u64::from(site == 1);
            self.readable.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, tag)).unwrap();
            self.sockets.insert(from, socket);
        }
        // A router may say that a port is unreachable; the agent is told nothing of it.
        let _ = self.sockets[&from].send_to(&payload, to);
    }

    /// The relay has no UDP ports.
    pub(crate) fn ask_port(&mut self, _now: Duration, _from: SocketAddr, _peer: &PublicKey) {}

    /// Datagrams that have arrived, with the inner addresses they were sent to.
    pub(crate) fn arrivals(&mut self, now: Duration) -> Vec<Datagram> {
        self.answer_stun();
        let mut arrived = Vec::new();
        while self.relayed.front().is_some_and(|(at, _)| *at <= now) {
            arrived.extend(self.relayed.pop_front().map(|(_, datagram)| datagram));
        }
        let mut events = [EpollEvent::empty(); 64];
        let count = self.readable.wait(&mut events, EpollTimeout::ZERO).unwrap();
        for event in &events[..count] {
            let port = u16::try_from(event.data() >> 1).unwrap();
            let to = SocketAddr::from((self.hosts[usize::from(event.data() & 1 == 1)].address(), port));
            let mut buffer = [0; 2048];
            while let Some(Ok((length, from))) = self.sockets.get(&to).map(|it| it.recv_from(&mut buffer)) {
                arrived.push(Datagram { from, to, payload: buffer[..length].to_vec() });
            }
        }
        arrived
    }

    /// Closes the sockets that no node has any more.
    pub(crate) fn close_unless(&mut self, is_open: impl Fn(SocketAddr) -> bool) {
        self.sockets.retain(|address, _| is_open(*address));
    }

    fn answer_stun(&self) {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = self.stun.0.recv_from(&mut buffer) {
            if let Some(request) = stun::server::parse_request(&buffer[..length]) {
                let answer = stun::server::success(request.request.transaction, from);
                self.stun.0.send_to(&answer, from).unwrap();
            }
        }
    }

    fn site_of(&self, address: SocketAddr) -> usize {
        self.hosts.iter().position(|host| IpAddr::V4(host.address()) == address.ip()).unwrap()
    }
}

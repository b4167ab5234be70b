//! A network of NAT routers in memory: datagrams take time, are translated, filtered and lost.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use fairlead_wire::stun;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The loopback port that stands for the first node by way of the relay.
const RELAY_PORT: u16 = 1000;

/// What stands for a node by way of the relay.
pub(crate) fn relay_endpoint(node: usize) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], RELAY_PORT + u16::try_from(node).unwrap()))
}

/// Mapping and filtering of a router (RFC 4787, sections 4.1 and 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nat {
    /// One mapping for all destinations; lets everything in.
    FullCone,
    /// One mapping for all destinations; lets in only what was sent to.
    PortRestricted,
    /// A mapping for each destination, with ports that count up; lets in only what was sent to.
    Symmetric,
    /// The same with random ports.
    SymmetricRandom,
}

/// A router. Its hosts are those whose address has the same first three bytes as `inside`.
#[derive(Debug)]
pub(crate) struct Router {
    nat: Nat,
    inside: [u8; 3],
    outside: Ipv4Addr,
    /// Inner address and, for symmetric NATs, destination, by outer port; and the other way round.
    mappings: BTreeMap<u16, (SocketAddr, Option<SocketAddr>)>,
    ports: BTreeMap<(SocketAddr, Option<SocketAddr>), u16>,
    /// The lowest port that was never given out.
    next: u16,
    random: SmallRng,
    /// Outer port and remote address of what was sent out.
    sent_to: BTreeSet<(u16, SocketAddr)>,
}

impl Router {
    pub(crate) fn new(nat: Nat, inside: [u8; 3], outside: Ipv4Addr) -> Self {
        Self {
            nat,
            inside,
            outside,
            mappings: BTreeMap::new(),
            ports: BTreeMap::new(),
            next: 40_000,
            random: SmallRng::seed_from_u64(outside.to_bits().into()),
            sent_to: BTreeSet::new(),
        }
    }

    pub(crate) fn has_inside(&self, ip: IpAddr) -> bool {
        matches!(ip, IpAddr::V4(ip) if ip.octets()[..3] == self.inside)
    }

    /// The outer address of what `from` sends to `to`; a new mapping if there is none yet.
    pub(crate) fn outer(&mut self, from: SocketAddr, to: SocketAddr) -> SocketAddr {
        let is_symmetric = matches!(self.nat, Nat::Symmetric | Nat::SymmetricRandom);
        let key = (from, is_symmetric.then_some(to));
        let port = self.ports.get(&key).copied().unwrap_or_else(|| {
            let port = self.new_port();
            self.mappings.insert(port, key);
            self.ports.insert(key, port);
            port
        });
        SocketAddr::from((self.outside, port))
    }

    /// Another host behind this router takes so many ports.
    pub(crate) fn take_ports(&mut self, count: u16) {
        self.next += count;
    }

    pub(crate) fn reseed(&mut self, seed: u64) {
        self.random = SmallRng::seed_from_u64(seed);
    }

    fn new_port(&mut self) -> u16 {
        if self.nat == Nat::SymmetricRandom {
            let ports = std::iter::repeat_with(|| self.random.random_range(1024..=u16::MAX));
            return ports.take(100_000).find(|port| !self.mappings.contains_key(port)).unwrap();
        }
        self.next += 1;
        self.next - 1
    }

    fn inner(&self, from: SocketAddr, to: SocketAddr) -> Option<SocketAddr> {
        // No hairpinning (RFC 4787, section 6).
        let (inner, _) = self.mappings.get(&to.port()).filter(|_| from.ip() != IpAddr::V4(self.outside))?;
        let is_open = self.nat == Nat::FullCone || self.sent_to.contains(&(to.port(), from));
        is_open.then_some(*inner)
    }

    /// It was restarted: every mapping is gone, and new ones have other ports.
    pub(crate) fn rebind(&mut self) {
        self.mappings.clear();
        self.ports.clear();
        self.sent_to.clear();
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Datagram {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) payload: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) routers: Vec<Router>,
    /// Pairs of addresses between which nothing passes, in this direction.
    pub(crate) black_holes: BTreeSet<(IpAddr, IpAddr)>,
    /// One-way delay within a site, and through the Internet.
    pub(crate) delays: (Duration, Duration),
    under_way: BTreeMap<(Duration, u64), Datagram>,
    sent: u64,
    /// Private addresses of any site are reached from any other.
    are_sites_linked: bool,
    /// Of a thousand datagrams through the Internet so many are lost.
    pub(crate) loss: u32,
    /// A STUN server, if there is one.
    pub(crate) stun: Option<SocketAddr>,
    /// Nodes that a relay connects. Loopback ports, in this order, stand for them.
    pub(crate) relayed: Vec<SocketAddr>,
    random: SmallRng,
}

impl Network {
    pub(crate) fn new(routers: Vec<Router>) -> Self {
        let delays = (Duration::from_millis(1), Duration::from_millis(20));
        Self {
            routers,
            black_holes: BTreeSet::new(),
            delays,
            under_way: BTreeMap::new(),
            sent: 0,
            are_sites_linked: false,
            loss: 0,
            stun: None,
            relayed: Vec::new(),
            random: SmallRng::seed_from_u64(1),
        }
    }

    pub(crate) fn link_sites(&mut self) {
        self.are_sites_linked = true;
    }

    pub(crate) fn send(&mut self, now: Duration, datagram: Datagram) {
        let Datagram { mut from, to, payload } = datagram;
        if to.ip().is_loopback() {
            self.relay(now, from, to, payload);
            return;
        }
        let mut delay = self.delays.0;
        let site = self.routers.iter().position(|router| router.has_inside(from.ip()));
        let linked = self.are_sites_linked && self.routers.iter().any(|router| router.has_inside(to.ip()));
        if !linked && !site.is_some_and(|site| self.routers[site].has_inside(to.ip())) {
            delay = self.delays.1;
            if let Some(router) = site.map(|site| &mut self.routers[site]) {
                from = router.outer(from, to);
                router.sent_to.insert((from.port(), to));
            }
        }
        self.sent += 1;
        if delay > self.delays.0 && self.random.random_range(0..1000) < self.loss {
            return;
        }
        if self.black_holes.contains(&(from.ip(), to.ip())) {
            return;
        }
        if self.stun == Some(to) {
            let Some(request) = stun::server::parse_request(&payload) else { return };
            let payload = stun::server::success(request.request.transaction, from);
            self.under_way.insert((now + 2 * delay, self.sent), Datagram { from: to, to: from, payload });
            return;
        }
        self.under_way.insert((now + delay, self.sent), Datagram { from, to, payload });
    }

    /// Over TCP: in order, and nothing is lost.
    fn relay(&mut self, now: Duration, from: SocketAddr, to: SocketAddr, payload: Vec<u8>) {
        let sender = self.relayed.iter().position(|node| node.ip() == from.ip()).unwrap();
        let Some(to) = self.relayed.get(usize::from(to.port() - RELAY_PORT)).copied() else { return };
        self.sent += 1;
        let from = relay_endpoint(sender);
        self.under_way.insert((now + 2 * self.delays.1, self.sent), Datagram { from, to, payload });
    }

    /// What arrives now, with its inner destination.
    pub(crate) fn arrivals(&mut self, now: Duration) -> Vec<Datagram> {
        let later = self.under_way.split_off(&(now, u64::MAX));
        let arrived = std::mem::replace(&mut self.under_way, later);
        arrived.into_values().filter_map(|datagram| self.translate(datagram)).collect()
    }

    fn translate(&self, datagram: Datagram) -> Option<Datagram> {
        if datagram.from.ip().is_loopback() {
            return Some(datagram);
        }
        let outside = |router: &&Router| IpAddr::V4(router.outside) == datagram.to.ip();
        match self.routers.iter().find(outside) {
            Some(router) => {
                let to = router.inner(datagram.from, datagram.to)?;
                Some(Datagram { to, ..datagram })
            }
            // Private addresses are not routed in the Internet.
            None => {
                let site = self.routers.iter().find(|router| router.has_inside(datagram.to.ip()));
                let is_near = |site: &Router| self.are_sites_linked || site.has_inside(datagram.from.ip());
                site.is_none_or(is_near).then_some(datagram)
            }
        }
    }
}

//! NAT routers: how they map, filter, forget, and choose ports (RFC 4787).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Mapping and filtering of a router (RFC 4787, sections 4.1 and 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Nat {
    /// One mapping for all destinations; lets everything in.
    FullCone,
    /// One mapping for all destinations; lets in what comes from addresses that were sent to.
    AddressRestricted,
    /// One mapping for all destinations; lets in only what was sent to.
    PortRestricted,
    /// A mapping for each destination, with ports that count up; lets in only what was sent to.
    Symmetric,
    /// The same with random ports.
    SymmetricRandom,
    /// A firewall that lets no UDP through.
    NoUdp,
}

impl Nat {
    fn is_symmetric(self) -> bool {
        matches!(self, Self::Symmetric | Self::SymmetricRandom)
    }
}

/// Inner address and, for symmetric NATs, destination.
type Flow = (SocketAddr, Option<SocketAddr>);

/// A router. Its hosts are those whose address has the same first three bytes as `inside`.
#[derive(Debug)]
pub(crate) struct Router {
    pub(crate) nat: Nat,
    inside: [u8; 3],
    outside: Ipv4Addr,
    /// Hosts inside reach each other at their outer addresses (RFC 4787, section 6).
    pub(crate) hairpins: bool,
    /// The outer port is the inner one where that is free.
    pub(crate) preserves_ports: bool,
    /// Lifetime of a mapping or an opening of the filter that nothing is sent through; unlimited if `None`.
    pub(crate) lifetime: Option<Duration>,
    /// Flow and time of the last datagram from inside, by outer port.
    mappings: BTreeMap<u16, (Flow, Duration)>,
    ports: BTreeMap<Flow, u16>,
    /// The lowest port that was never given out.
    next: u16,
    random: SmallRng,
    /// When something was last sent from an outer port to a remote address.
    sent_to: BTreeMap<(u16, SocketAddr), Duration>,
}

impl Router {
    pub(crate) fn new(nat: Nat, inside: [u8; 3], outside: Ipv4Addr) -> Self {
        Self {
            nat,
            inside,
            outside,
            hairpins: false,
            preserves_ports: false,
            lifetime: None,
            mappings: BTreeMap::new(),
            ports: BTreeMap::new(),
            next: 40_000,
            random: SmallRng::seed_from_u64(outside.to_bits().into()),
            sent_to: BTreeMap::new(),
        }
    }

    pub(crate) fn has_inside(&self, ip: IpAddr) -> bool {
        matches!(ip, IpAddr::V4(ip) if ip.octets()[..3] == self.inside)
    }

    pub(crate) fn is_at(&self, ip: IpAddr) -> bool {
        ip == IpAddr::V4(self.outside)
    }

    /// The outer address of what `from` sends to `to`; a new mapping if there is none yet.
    pub(crate) fn outer(&mut self, now: Duration, from: SocketAddr, to: SocketAddr) -> SocketAddr {
        let flow = (from, self.nat.is_symmetric().then_some(to));
        let known = self.ports.get(&flow).copied();
        let is_alive = |port: &u16| self.mappings.get(port).is_some_and(|(_, used)| self.lasts(now, *used));
        let port = known.filter(is_alive).unwrap_or_else(|| {
            if let Some(port) = known {
                self.forget(port);
            }
            let port = self.new_port(from);
            self.ports.insert(flow, port);
            port
        });
        self.mappings.insert(port, (flow, now));
        SocketAddr::from((self.outside, port))
    }

    /// A datagram leaves: its source outside.
    pub(crate) fn send(&mut self, now: Duration, from: SocketAddr, to: SocketAddr) -> SocketAddr {
        let outer = self.outer(now, from, to);
        self.sent_to.insert((outer.port(), to), now);
        outer
    }

    /// The inner destination of what comes from outside, if it is let in.
    pub(crate) fn inner(&self, now: Duration, from: SocketAddr, to: SocketAddr) -> Option<SocketAddr> {
        if self.is_at(from.ip()) && !self.hairpins {
            return None;
        }
        let ((inner, _), used) = self.mappings.get(&to.port())?;
        let opening = |remote: &SocketAddr| match self.nat {
            Nat::FullCone => true,
            Nat::AddressRestricted => remote.ip() == from.ip(),
            _ => *remote == from,
        };
        let of_port = (to.port(), LOWEST)..=(to.port(), HIGHEST);
        let is_open = self.nat == Nat::FullCone
            || self.sent_to.range(of_port).any(|((_, remote), at)| opening(remote) && self.lasts(now, *at));
        (is_open && self.lasts(now, *used)).then_some(*inner)
    }

    /// Another host behind this router takes so many ports.
    pub(crate) fn take_ports(&mut self, count: u16) {
        self.next += count;
    }

    pub(crate) fn reseed(&mut self, seed: u64) {
        self.random = SmallRng::seed_from_u64(seed);
    }

    /// It was restarted: every mapping is gone, and new ones have other ports.
    pub(crate) fn rebind(&mut self) {
        self.mappings.clear();
        self.ports.clear();
        self.sent_to.clear();
        self.preserves_ports = false;
    }

    fn lasts(&self, now: Duration, used: Duration) -> bool {
        self.lifetime.is_none_or(|lifetime| now.saturating_sub(used) < lifetime)
    }

    fn forget(&mut self, port: u16) {
        self.mappings.remove(&port);
        self.sent_to.retain(|(from, _), _| *from != port);
    }

    fn new_port(&mut self, from: SocketAddr) -> u16 {
        if self.preserves_ports && !self.mappings.contains_key(&from.port()) {
            return from.port();
        }
        if self.nat == Nat::SymmetricRandom {
            let ports = std::iter::repeat_with(|| self.random.random_range(1024..=u16::MAX));
            return ports.take(100_000).find(|port| !self.mappings.contains_key(port)).unwrap();
        }
        self.next += 1;
        self.next - 1
    }
}

const LOWEST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
const HIGHEST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::BROADCAST), u16::MAX);

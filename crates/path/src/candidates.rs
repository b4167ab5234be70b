//! The endpoints at which a peer may be reached, best first.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use fairlead_address::{Nat64, canonical, is_private, is_reachable};
use ipnet::IpNet;

/// The limit on candidates from [`order`]. With the attempts of [`crate::Config`] all are tried within 90 s.
pub const MAX_CANDIDATES: usize = 16;
/// Number of ranks by which an endpoint through a NAT64 comes after the endpoint itself: behind all others.
const NAT64_RANKS: u8 = 8;
/// The limit per source, so that a peer's many addresses do not displace its observed endpoints.
const MAX_PER_SOURCE: usize = 8;

/// The source of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// Configured: an annotation or a static peer.
    Manual,
    /// Other nodes observed the peer there.
    Observed,
    /// One of the peer's own addresses.
    Host,
    /// An IPv4 endpoint of the peer, through the NAT64 of this node's network.
    Nat64,
    /// The device learned it from an authenticated packet of the peer; no other source names it.
    Roamed,
    /// The endpoint stands for the peer by way of a relay.
    Relay,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Manual => "manual",
            Self::Observed => "observed",
            Self::Host => "host",
            Self::Nat64 => "nat64",
            Self::Roamed => "roamed",
            Self::Relay => "relay",
        })
    }
}

/// An endpoint that may reach a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// Address and WireGuard port.
    pub address: SocketAddr,
    /// Source of the endpoint.
    pub source: Source,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            Source::Relay if self.address.ip().is_loopback() => {
                write!(f, "{} (relay over TCP)", self.address)
            }
            Source::Relay => write!(f, "{} (relay over UDP)", self.address),
            source => write!(f, "{} ({source})", self.address),
        }
    }
}

/// This node's own addresses and networks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnView {
    /// Addresses on its interfaces.
    pub addresses: Vec<IpAddr>,
    /// Addresses at which other nodes observed it; empty before the first observation.
    pub public_ips: Vec<IpAddr>,
    /// Prefixes it reaches without the default route: connected ones, and those of specific routes.
    pub prefixes: Vec<IpNet>,
    /// NAT64 by which it reaches IPv4 endpoints that it has no route to.
    pub nat64: Nat64,
}

/// The known endpoints of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerView {
    /// The configured endpoint.
    pub manual: Option<SocketAddr>,
    /// Addresses of the peer itself, in its order of preference.
    pub host: Vec<SocketAddr>,
    /// Endpoints at which other nodes observed it, newest first.
    pub observed: Vec<SocketAddr>,
}

/// Whether this node and the peer are behind one NAT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Neighbourhood {
    /// Both are observed at one address.
    Same,
    /// Both are observed, at different addresses.
    Different,
    Unknown,
}

/// Orders the usable candidates of a peer, each address once, at most [`MAX_CANDIDATES`]:
///
/// 1. The configured endpoint.
/// 2. Its own addresses on our connected prefixes, unless it is behind another NAT: there an equal private prefix is
///    most likely another network.
/// 3. Its public addresses.
/// 4. Its observed endpoints.
/// 5. Its private addresses on other prefixes, which a router of the site may reach.
/// 6. Behind our own NAT: its observed endpoints, which need a NAT that supports hairpinning (RFC 4787, 6).
/// 7. Private addresses of a peer behind another NAT.
/// 8. Through a NAT64, in the same order: IPv4 endpoints that this node has no route to.
///
/// Addresses of a family this node does not have are left out, except configured ones; link-local, loopback, multicast,
/// unspecified and own addresses and port 0 always. Equal ranks keep the order given. An endpoint within the prefix of a NAT64 is
/// the IPv4 endpoint in it.
pub fn order(own: &OwnView, peer: &PeerView) -> Vec<Candidate> {
    let peer = &peer.without_nat64(&own.nat64);
    let named = peer
        .manual
        .iter()
        .map(|address| (*address, Source::Manual))
        .chain(peer.host.iter().map(|address| (*address, Source::Host)))
        .chain(peer.observed.iter().map(|address| (*address, Source::Observed)))
        .map(|(address, source)| Candidate { address: canonical(address), source })
        .filter(|candidate| may_be_probed(own, candidate.address));
    let neighbourhood = neighbourhood(own, peer);
    let mut ranked: Vec<(u8, Candidate)> =
        named.flat_map(|candidate| ranked(own, neighbourhood, candidate)).collect();
    ranked.sort_by_key(|(rank, _)| *rank);

    let mut seen = BTreeSet::new();
    ranked.retain(|(_, candidate)| seen.insert(candidate.address));
    let mut hosts = 0usize;
    let mut observed = 0usize;
    let mut translated = 0usize;
    ranked.retain(|(_, candidate)| {
        let kind = match candidate.source {
            Source::Host => &mut hosts,
            Source::Nat64 => &mut translated,
            Source::Observed => &mut observed,
            Source::Manual | Source::Roamed | Source::Relay => return true,
        };
        *kind = kind.saturating_add(1);
        *kind <= MAX_PER_SOURCE
    });
    ranked.truncate(MAX_CANDIDATES);
    ranked.into_iter().map(|(_, candidate)| candidate).collect()
}

impl PeerView {
    /// The endpoints as nodes in other networks see them.
    fn without_nat64(&self, nat64: &Nat64) -> Self {
        let original = |endpoints: &[SocketAddr]| endpoints.iter().map(|it| nat64.original(*it)).collect();
        Self {
            manual: self.manual.map(|endpoint| nat64.original(endpoint)),
            host: original(&self.host),
            observed: original(&self.observed),
        }
    }
}

/// A candidate, or what leads to it through a NAT64, with their ranks.
fn ranked(
    own: &OwnView,
    neighbourhood: Neighbourhood,
    candidate: Candidate,
) -> impl Iterator<Item = (u8, Candidate)> {
    let rank = rank(own, neighbourhood, &candidate);
    let translated = own.nat64.endpoints(candidate.address);
    let is_native = translated.is_empty() && has_family(own, &candidate);
    let translated = translated.into_iter().filter(|address| may_be_probed(own, *address));
    let translated = translated
        .map(move |address| (rank.saturating_add(NAT64_RANKS), Candidate { address, source: Source::Nat64 }));
    is_native.then_some((rank, candidate)).into_iter().chain(translated)
}

fn may_be_probed(own: &OwnView, endpoint: SocketAddr) -> bool {
    let ip = endpoint.ip();
    let is_own = own.addresses.iter().any(|address| address.to_canonical() == ip);
    endpoint.port() != 0 && is_reachable(ip) && !is_own
}

fn has_family(own: &OwnView, candidate: &Candidate) -> bool {
    let ip = candidate.address.ip();
    let same_family = |address: &IpAddr| address.is_ipv4() == ip.is_ipv4() && is_reachable(*address);
    candidate.source == Source::Manual
        || own.addresses.is_empty()
        || own.addresses.iter().map(IpAddr::to_canonical).any(|address| same_family(&address))
}

fn neighbourhood(own: &OwnView, peer: &PeerView) -> Neighbourhood {
    let seen_at: BTreeSet<IpAddr> = peer.observed.iter().map(|seen| seen.ip().to_canonical()).collect();
    let own_public: BTreeSet<IpAddr> = own.public_ips.iter().map(IpAddr::to_canonical).collect();
    if own_public.intersection(&seen_at).next().is_some() {
        return Neighbourhood::Same;
    }
    // Only public addresses of one family distinguish two sites.
    let differ = |ipv4: bool| {
        let in_family = |ip: &&IpAddr| ip.is_ipv4() == ipv4 && !is_private(**ip);
        own_public.iter().any(|ip| in_family(&ip)) && seen_at.iter().any(|ip| in_family(&ip))
    };
    // In IPv6 every host has an address of its own: different addresses prove nothing.
    if differ(true) { Neighbourhood::Different } else { Neighbourhood::Unknown }
}

fn rank(own: &OwnView, neighbourhood: Neighbourhood, candidate: &Candidate) -> u8 {
    let ip = candidate.address.ip();
    let connected = own.prefixes.iter().any(|prefix| prefix.prefix_len() > 0 && prefix.contains(&ip));
    let public = !is_private(ip);
    match (candidate.source, neighbourhood) {
        (Source::Manual, _) => 0,
        (_, Neighbourhood::Different) if !public && connected => 6,
        (_, Neighbourhood::Different) if !public => 7,
        (Source::Host, _) if connected => 1,
        (Source::Host, _) if public => 2,
        (Source::Observed | Source::Roamed, _) if connected && !public => 1,
        (Source::Observed | Source::Roamed, Neighbourhood::Same) if public => 5,
        (Source::Observed | Source::Roamed, _) if public => 3,
        _ => 4,
    }
}

#[cfg(test)]
mod tests;

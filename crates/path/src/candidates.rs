//! Where a peer may be reached, best first.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use crate::addresses::{canonical, is_private, is_reachable};

/// Most candidates [`order`] returns. With the attempt windows of [`crate::rotation::Config`] all are tried in a minute
/// and a half.
pub const MAX_CANDIDATES: usize = 16;
/// Most of one kind, so that a peer with many addresses does not hide what others saw of it.
const MAX_OF_A_KIND: usize = 8;

/// Where a candidate comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// A person wrote it: annotation or static configuration.
    Manual,
    /// Other nodes saw the peer there.
    Observed,
    /// One of the peer's own addresses.
    Host,
    /// An authenticated packet of the peer came from there, and nobody had named it.
    Roamed,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Manual => "manual",
            Self::Observed => "observed",
            Self::Host => "host",
            Self::Roamed => "roamed",
        })
    }
}

/// One endpoint that may lead to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// Address and WireGuard port.
    pub address: SocketAddr,
    /// Who says so.
    pub source: Source,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.source)
    }
}

/// What this node knows of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnView {
    /// Addresses on its interfaces.
    pub addresses: Vec<IpAddr>,
    /// Addresses that others see it at; empty while nobody has said.
    pub public_ips: Vec<IpAddr>,
    /// Prefixes it reaches without a default route: on a link of its own, or by a specific route.
    pub prefixes: Vec<IpNet>,
}

/// What is known of where a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerView {
    /// What a person wrote.
    pub manual: Option<SocketAddr>,
    /// Its own addresses, in its order of preference.
    pub host: Vec<SocketAddr>,
    /// Where other nodes see it, newest first.
    pub observed: Vec<SocketAddr>,
}

/// Whether both are behind one NAT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Neighbourhood {
    /// Both are seen at one address.
    Same,
    /// They are seen at different addresses.
    Different,
    Unknown,
}

/// Lists the candidates for a peer: usable ones only, each address once, at most [`MAX_CANDIDATES`].
///
/// 1. What a person wrote.
/// 2. Its own addresses on prefixes we are connected to, unless it is known to be elsewhere: there an equal
///    private prefix is most likely another network with the same numbers.
/// 3. Its public addresses.
/// 4. Where others see it.
/// 5. Its private addresses elsewhere, which a router of the site may know.
/// 6. Behind our own NAT: where others see it, because that needs a NAT that turns packets back (RFC 4787, 6).
/// 7. Private addresses of a peer known to be behind another NAT.
///
/// Addresses of a family we have none of are left out, except manual ones. Link-local, loopback, multicast and
/// unspecified ones, our own and port 0 never appear. Equal ranks keep the order given.
pub fn order(own: &OwnView, peer: &PeerView) -> Vec<Candidate> {
    let named = peer
        .manual
        .iter()
        .map(|address| (*address, Source::Manual))
        .chain(peer.host.iter().map(|address| (*address, Source::Host)))
        .chain(peer.observed.iter().map(|address| (*address, Source::Observed)))
        .map(|(address, source)| Candidate { address: canonical(address), source })
        .filter(|candidate| usable(own, candidate));
    let neighbourhood = neighbourhood(own, peer);
    let mut ranked: Vec<(u8, Candidate)> =
        named.map(|candidate| (rank(own, neighbourhood, &candidate), candidate)).collect();
    ranked.sort_by_key(|(rank, _)| *rank);

    let mut seen = BTreeSet::new();
    ranked.retain(|(_, candidate)| seen.insert(candidate.address));
    let (mut hosts, mut observed) = (0usize, 0usize);
    ranked.retain(|(_, candidate)| {
        let kind = match candidate.source {
            Source::Host => &mut hosts,
            Source::Observed => &mut observed,
            Source::Manual | Source::Roamed => return true,
        };
        *kind = kind.saturating_add(1);
        *kind <= MAX_OF_A_KIND
    });
    ranked.truncate(MAX_CANDIDATES);
    ranked.into_iter().map(|(_, candidate)| candidate).collect()
}

fn usable(own: &OwnView, candidate: &Candidate) -> bool {
    let ip = candidate.address.ip();
    let ours = own.addresses.iter().any(|address| address.to_canonical() == ip);
    if candidate.address.port() == 0 || !is_reachable(ip) || ours {
        return false;
    }
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
    // Only public addresses of one family can tell two places apart.
    let differ = |ipv4: bool| {
        let in_family = |ip: &&IpAddr| ip.is_ipv4() == ipv4 && !is_private(**ip);
        own_public.iter().any(|ip| in_family(&ip)) && seen_at.iter().any(|ip| in_family(&ip))
    };
    // In IPv6 every host has an address of its own: different ones say nothing.
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

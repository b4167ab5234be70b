//! The sender's own candidates, in the padding of a request that goes over a relay: the receiver tries them at once, long before it reads
//! them from the API server.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The most candidates of one request.
pub const MAX_CANDIDATES: usize = 16;
/// Kind, address, port.
const CANDIDATE_LENGTH: usize = 19;
const KIND_HOST: u8 = 1;
const KIND_SERVER_REFLEXIVE: u8 = 2;
const KIND_PEER_REFLEXIVE: u8 = 3;

/// Kind of a candidate, by the way in which the node knows it (RFC 8445, section 5.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CandidateKind {
    /// An address of the node.
    Host,
    /// Peers see the node there.
    PeerReflexive,
    /// A STUN server sees the node there, or a gateway maps the address to it.
    ServerReflexive,
}

/// An endpoint at which the sender may be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// Kind of the candidate, as the sender knows it.
    pub kind: CandidateKind,
    /// Address and WireGuard port.
    pub address: SocketAddr,
}

/// A count and as many candidates, the first [`MAX_CANDIDATES`] of the list; nothing without any.
pub(super) fn to_bytes(candidates: &[Candidate]) -> Vec<u8> {
    if candidates.is_empty() {
        return Vec::new();
    }
    let candidates = candidates.get(..MAX_CANDIDATES).unwrap_or(candidates);
    let mut bytes = Vec::with_capacity(candidates.len().saturating_mul(CANDIDATE_LENGTH).saturating_add(1));
    bytes.push(u8::try_from(candidates.len()).unwrap_or_default());
    for candidate in candidates {
        bytes.push(match candidate.kind {
            CandidateKind::Host => KIND_HOST,
            CandidateKind::PeerReflexive => KIND_PEER_REFLEXIVE,
            CandidateKind::ServerReflexive => KIND_SERVER_REFLEXIVE,
        });
        bytes.extend(mapped(candidate.address.ip()));
        bytes.extend(candidate.address.port().to_be_bytes());
    }
    bytes
}

/// Reads what follows a request with candidates. A list that is longer than allowed, or than what follows, is none; a kind of a
/// later build is left out.
pub fn parse_candidates(bytes: &[u8]) -> Vec<Candidate> {
    let Some((count, list)) = bytes.split_first() else { return Vec::new() };
    let count = usize::from(*count);
    let list = list.get(..count.saturating_mul(CANDIDATE_LENGTH)).filter(|_| count <= MAX_CANDIDATES);
    let (candidates, _) = list.unwrap_or_default().as_chunks();
    candidates.iter().filter_map(candidate).collect()
}

fn candidate(bytes: &[u8; CANDIDATE_LENGTH]) -> Option<Candidate> {
    let [kind, ip @ .., high, low] = *bytes;
    let kind = match kind {
        KIND_HOST => CandidateKind::Host,
        KIND_PEER_REFLEXIVE => CandidateKind::PeerReflexive,
        KIND_SERVER_REFLEXIVE => CandidateKind::ServerReflexive,
        _ => return None,
    };
    let ip = Ipv6Addr::from(ip).to_canonical();
    Some(Candidate { kind, address: SocketAddr::new(ip, u16::from_be_bytes([high, low])) })
}

/// IPv4 as an IPv4-mapped IPv6 address.
pub(super) fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

//! Counters of a server.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::{AllocationCounters, Counters, StunCounters};

/// Counters and sizes of a relay at one moment, for metrics.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Counters of the core.
    pub counters: Counters,
    /// Counters of the core for datagrams to and from other replicas.
    pub forwarding: Counters,
    /// Other replicas that it is connected to.
    pub replicas: usize,
    /// Links now.
    pub links: usize,
    /// Connections that were accepted.
    pub connections: u64,
    /// Connections that did not become links, by reason.
    pub rejections: Vec<(Rejection, u64)>,
    /// Counters of STUN requests.
    pub stun: StunCounters,
    /// Counters of the UDP ports for pairs of peers.
    pub allocations: AllocationCounters,
    /// Number of these ports that are open.
    pub relay_ports: usize,
}

/// Counters of the server besides those of the core.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    pub(super) connections: AtomicU64,
    /// Counters of rejections, in the order of [`Rejection::ALL`].
    pub(super) rejections: [AtomicU64; Rejection::ALL.len()],
}

/// Reason why a connection ended before it was a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rejection {
    /// A newer connection needed its place.
    Displaced,
    /// The relay has no room for a further client.
    Full,
    /// The key or the token is not allowed.
    NotAllowed,
    /// The caller was no client of this protocol, or the connection failed.
    Protocol,
    /// The registration took too long.
    Timeout,
    /// The TLS handshake failed.
    Tls,
    /// The registration names another relay.
    WrongName,
    /// The registration does not prove the key.
    WrongProof,
}

impl Rejection {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Displaced,
        Self::Full,
        Self::NotAllowed,
        Self::Protocol,
        Self::Timeout,
        Self::Tls,
        Self::WrongName,
        Self::WrongProof,
    ];

    /// The value of the label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Displaced => "displaced",
            Self::Full => "full",
            Self::NotAllowed => "not_allowed",
            Self::Protocol => "protocol",
            Self::Timeout => "timeout",
            Self::Tls => "tls",
            Self::WrongName => "wrong_name",
            Self::WrongProof => "wrong_proof",
        }
    }
}

impl Statistics {
    pub(super) fn count(&self, rejection: Rejection) {
        for (each, count) in Rejection::ALL.iter().zip(&self.rejections) {
            count.fetch_add(u64::from(*each == rejection), Ordering::Relaxed);
        }
    }
}

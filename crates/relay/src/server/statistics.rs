//! What a server counts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::{AllocationCounters, Counters, StunCounters};

/// What a relay has done and has, for metrics.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// What the core counted.
    pub counters: Counters,
    /// What of it concerns other replicas.
    pub forwarding: Counters,
    /// Other replicas that it is connected to.
    pub replicas: usize,
    /// Links now.
    pub links: usize,
    /// Connections that were accepted.
    pub connections: u64,
    /// Connections that did not become links, by reason.
    pub rejections: Vec<(Rejection, u64)>,
    /// What STUN requests were answered.
    pub stun: StunCounters,
    /// What UDP ports for pairs of peers passed on.
    pub allocations: AllocationCounters,
    /// How many of these ports are open.
    pub relay_ports: usize,
}

/// What the server counts besides the core.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    pub(super) connections: AtomicU64,
    /// By [`Rejection::ALL`].
    pub(super) rejections: [AtomicU64; Rejection::ALL.len()],
}

/// Why a connection ended before it was a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rejection {
    /// A newer connection needed its place.
    Displaced,
    /// The relay has no room for a further client.
    Full,
    /// The key or the token is not allowed.
    NotAllowed,
    /// It was no client of this protocol, or the connection failed.
    Protocol,
    /// It took too long.
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

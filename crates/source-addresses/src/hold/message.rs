//! Messages between gateways, and their reads and writes of Leases at the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A gateway says that it holds a slot, and asks for a promise not to take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The slot.
    pub slot: u32,
    /// Term of the hold.
    pub term: u64,
}

/// Condition of a gateway, as it says it itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Condition {
    /// Whether it may take slots.
    pub ready: bool,
    /// Whether the network behind it answers. If not, others come first.
    pub healthy: bool,
    /// Number of slots that it holds and has not handed over.
    pub held: u32,
    /// Slots of which it has a full copy of the holder's connections.
    pub copies: BTreeSet<u32>,
}

/// Message of a gateway to all others, every [`super::HEARTBEAT`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Heartbeat {
    /// Counted from 1 by the sender's process; the answer has it.
    pub sequence: u64,
    /// Slots that the sender claims.
    pub claims: Vec<Claim>,
    /// Condition of the sender.
    pub condition: Condition,
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// Sequence number of the heartbeat.
    pub sequence: u64,
    /// Condition of the sender.
    pub condition: Condition,
    /// Reports on all slots that the sender knows.
    pub slots: BTreeMap<u32, Report>,
}

/// Report of a gateway on a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// The greatest term that it knows.
    pub term: u64,
    /// Whether it promises what the heartbeat asks for.
    pub promised: bool,
    /// Time from now for which it, or another to which it has promised so, has the slot; `None` if it knows of none.
    pub blocked: Option<Duration>,
}

/// A slot's Lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lease {
    /// `metadata.resourceVersion`, which grows (KEP-5504) unless etcd is restored from a backup.
    pub version: u64,
    /// `spec.holderIdentity`; `None` if it was released, or never held.
    pub holder: Option<String>,
    /// `spec.leaseTransitions`
    pub term: u64,
    /// Gateway that is to take the slot after it was released.
    pub successor: Option<String>,
}

/// Purpose of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteKind {
    /// The holder goes on.
    Renew,
    /// Another gateway becomes the holder.
    Take,
    /// The holder gives the slot up.
    Release,
    /// Nothing but another version, so that an earlier write with the same base cannot succeed any more.
    Void,
}

/// A write of a slot's Lease, which succeeds only if the Lease has the version `base`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The slot.
    pub slot: u32,
    /// Purpose of the write.
    pub kind: WriteKind,
    /// The version that the Lease must have.
    pub base: u64,
    /// Holder that the Lease is to have; see [`Lease::holder`].
    pub holder: Option<String>,
    /// See [`Lease::term`].
    pub term: u64,
    /// See [`Lease::successor`].
    pub successor: Option<String>,
    /// Time at which it began, on the clock of this gateway.
    pub began: Duration,
}

/// Outcome of a write, as far as its sender can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The Lease has this version now.
    Done(u64),
    /// The Lease had another version, or the API server refuses: nothing was written.
    Refused,
    /// There was no answer in time: it may have been written, or be written later.
    Unknown,
}

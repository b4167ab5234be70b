//! What gateways say to each other, and what they read and write at the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A gateway says that it holds a slot, and asks for a promise not to take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The slot.
    pub slot: u32,
    /// With this term.
    pub term: u64,
}

/// What a gateway says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Condition {
    /// Whether it may take slots.
    pub ready: bool,
    /// Whether the network behind it answers. If not, others come first.
    pub healthy: bool,
    /// How many slots it holds.
    pub held: u32,
    /// Slots of which it has a full copy of the holder's connections.
    pub copies: BTreeSet<u32>,
}

/// What a gateway sends to all others, every [`super::HEARTBEAT`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Heartbeat {
    /// Counted from 1 by the sender's process; the answer has it.
    pub sequence: u64,
    /// What it claims.
    pub claims: Vec<Claim>,
    /// What the sender says of itself.
    pub condition: Condition,
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// That of the heartbeat.
    pub sequence: u64,
    /// What the sender says of itself.
    pub condition: Condition,
    /// Of each slot that its sender knows.
    pub slots: BTreeMap<u32, Report>,
}

/// What a gateway knows of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// The greatest term that it knows.
    pub term: u64,
    /// Whether it promises what the heartbeat asks for.
    pub promised: bool,
    /// How long from now it, or another to which it has promised so, has the slot.
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
    /// Who is to take what was released.
    pub successor: Option<String>,
}

/// What a write is for.
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
    /// What it is for.
    pub kind: WriteKind,
    /// The version that the Lease must have.
    pub base: u64,
    /// What it is to say.
    pub holder: Option<String>,
    /// See [`Lease::term`].
    pub term: u64,
    /// See [`Lease::successor`].
    pub successor: Option<String>,
    /// When it began.
    pub began: Duration,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The Lease has this version now.
    Done(u64),
    /// The Lease had another version, or the API server refuses: nothing was written.
    Refused,
    /// There was no answer in time: it may have been written, or be written later.
    Unknown,
}

//! Store that replicas share, as far as one of them knows it, and updates that are to be written to it.

use std::time::Instant;

use super::SharedAffiliate;

/// Knowledge of a replica about the store.
#[derive(Debug, Default)]
pub(super) struct Replica {
    /// Revisions of one history of the store are comparable, others are not.
    pub(super) epoch: u64,
    /// The last revision that the watch has told of; 0 while the store is listed.
    pub(super) position: i64,
    pub(super) hold: Hold,
}

/// Whether affiliates expire.
#[derive(Debug, Default, Clone, Copy)]
pub(super) enum Hold {
    #[default]
    No,
    Since(Instant),
    Until(Instant),
}

/// An update that has to be written before it counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// The affiliate with the update.
    pub affiliate: SharedAffiliate,
    /// The revision of what it replaces; 0 if nothing is known to be there.
    pub replaces: i64,
    pub(super) epoch: u64,
}

impl Replica {
    pub(super) fn holds_expiries(&self, now: Instant) -> bool {
        match self.hold {
            Hold::No => false,
            Hold::Since(_) => true,
            Hold::Until(end) => end > now,
        }
    }
}

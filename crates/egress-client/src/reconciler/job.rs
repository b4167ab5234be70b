//! Jobs: each brings the namespace of one pod to what it should have.

use std::sync::Arc;

use fairlead_egress::client::plan::Desired;
use fairlead_ipam::Key;

use super::super::sandboxes::Sandbox;

/// One piece of work.
pub(crate) struct Job {
    pub(crate) key: Key,
    pub(crate) sandbox: Arc<Sandbox>,
    pub(crate) work: Work,
    /// Whether the work was done before: differences were then caused by others.
    pub(crate) is_check: bool,
    /// Changes of the namespace are not reported yet.
    pub(crate) wants_signal: bool,
}

/// State to which a namespace is to be brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Work {
    /// A client's.
    Client(Desired),
    /// A gateway's.
    Gateway,
    /// Without anything of egress.
    Nothing,
}

impl Work {
    /// Whether a table of nftables belongs to it, whose changes are to be noticed.
    pub(super) fn has_nftables(&self) -> bool {
        matches!(self, Self::Client(desired) if desired.answers_by_uplink())
    }
}

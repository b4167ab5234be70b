//! A watch of a cluster, and its notifications.

use std::sync::Arc;

use fairlead_wire::discovery::server::WatchResponse;

use super::Source;

/// A watch of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchId(pub(super) u64);

#[derive(Debug)]
pub(super) struct Watch {
    pub(super) cluster: Arc<str>,
    pub(super) source: Source,
    /// The last change that it was told.
    pub(super) known: u64,
    /// Whether it is still told what there was when it began.
    pub(super) in_snapshot: bool,
    /// Whether it has been told everything, and waits.
    pub(super) is_waiting: bool,
}

/// Notification of a watch.
#[derive(Debug, Clone, PartialEq)]
pub enum Notification<M = WatchResponse> {
    /// No message: the watcher has all. It is among [`Discovery::take_ready`](super::Discovery::take_ready) when there is more.
    Nothing,
    /// The next message.
    Message(M),
    /// End of the watch: its client read nothing while too many affiliates were deleted, or its cluster is not accepted any more.
    Ended,
}

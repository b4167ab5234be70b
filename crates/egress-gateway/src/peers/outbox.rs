//! What waits to be sent to one member.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fairlead_wire::egress_peers::Heartbeat;
use tokio::sync::Notify;

/// One heartbeat at most.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: Mutex<Waiting>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    is_connected: bool,
    heartbeat: Option<Heartbeat>,
}

impl Outbox {
    /// Replaces the heartbeat that waits; `false` if there is no connection.
    pub(super) fn heartbeat(&self, heartbeat: Heartbeat) -> bool {
        let mut waiting = self.locked();
        if waiting.is_connected {
            waiting.heartbeat = Some(heartbeat);
            self.wake.notify_one();
        }
        waiting.is_connected
    }

    fn locked(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

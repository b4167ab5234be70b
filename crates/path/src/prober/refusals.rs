//! Messages that a datagram did not reach the peer's endpoint (ICMP), from anyone.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;

/// Least time between two that count.
const MIN_INTERVAL: Duration = Duration::from_millis(200);

/// Consequence of such a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hint {
    /// The path in use is asked now.
    Check,
    /// Nothing.
    Ignore,
    /// There may be traffic that was not seen yet.
    Observe,
}

impl Prober {
    /// Takes a message about `remote`. It decides nothing: only requests that are not answered do.
    pub(crate) fn unreachable(&mut self, now: Duration, remote: SocketAddr) -> Hint {
        let is_recent = self.checks.refused.is_some_and(|at| now.saturating_sub(at) < MIN_INTERVAL);
        if self.paths.current != Some(remote) || !self.traffic.session.is_up || is_recent {
            return Hint::Ignore;
        }
        self.checks.refused = Some(now);
        match &mut self.checks.due {
            Some((due, false)) => {
                *due = (*due).min(now);
                Hint::Check
            }
            // It is asked anyway.
            Some((_, true)) => Hint::Ignore,
            None => Hint::Observe,
        }
    }
}

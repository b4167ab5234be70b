//! Traffic of the session with a peer: whether there is a session, and whether it is in use.

use std::net::SocketAddr;
use std::time::Duration;

/// Time after traffic in which the path in use is checked.
const ACTIVE: Duration = Duration::from_secs(60);
/// Bytes between two observations that are no traffic: a handshake and keepalives.
const IDLE_BYTES: u64 = 300;

/// Session with the peer, as the WireGuard device shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Session {
    /// A session is alive.
    pub(crate) is_up: bool,
    pub(crate) endpoint: Option<SocketAddr>,
    pub(crate) rx_bytes: u64,
    pub(crate) tx_bytes: u64,
}

/// Traffic of the session.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) session: Session,
    active_until: Option<Duration>,
    /// Time at which the session was first seen up.
    up_since: Option<Duration>,
}

impl Traffic {
    /// Takes the state of the device, and returns the one before.
    pub(super) fn observe(&mut self, now: Duration, session: Session) -> Session {
        let before = std::mem::replace(&mut self.session, session);
        let moved = |now: u64, before: u64| now.saturating_sub(before) > IDLE_BYTES;
        if moved(session.rx_bytes, before.rx_bytes) || moved(session.tx_bytes, before.tx_bytes) {
            self.continues(now);
        }
        if session.is_up != before.is_up {
            self.up_since = session.is_up.then_some(now);
        }
        before
    }

    /// Packets were sent or received.
    pub(super) fn continues(&mut self, now: Duration) {
        self.active_until = Some(now.saturating_add(ACTIVE));
    }

    pub(super) fn is_active(&self, now: Duration) -> bool {
        self.session.is_up && self.active_until.is_some_and(|until| now < until)
    }

    /// Whether there is a session that is neither new nor in use: it is left in peace.
    pub(super) fn is_idle(&self, now: Duration) -> bool {
        let is_new = self.up_since.is_none_or(|since| now.saturating_sub(since) < ACTIVE);
        self.session.is_up && !is_new && !self.is_active(now)
    }
}

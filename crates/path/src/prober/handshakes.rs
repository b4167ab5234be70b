//! Handshakes that are not answered, and those that the peer has asked for.

use std::time::Duration;

/// Time for which handshakes are unanswered, over a path that answers requests, before the peer is asked to start one. The embedded
/// WireGuard repeats an initiation after 0.3, 1 and 2 s.
const UNANSWERED: Duration = Duration::from_secs(2);
/// Time between requests to start a handshake: the first ones, and those to a peer that did not do it.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
const SLOW_ASK_INTERVAL: Duration = Duration::from_secs(60);
/// Number of the first requests. While a path answers, no other is tried: where only handshakes are lost, that has to end.
const FIRST_ASKS: u32 = 5;
/// Least time between handshakes that a peer asks for.
const MIN_HANDSHAKE_INTERVAL: Duration = Duration::from_secs(5);
/// Least time between requests to find out whether the peer that asks is there.
const MIN_TRY_INTERVAL: Duration = Duration::from_millis(500);

/// Handshakes that each of the two has asked of the other.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// Bytes sent to the peer while there was a session. What was sent since are initiations.
    sent: u64,
    /// Since when they have been unanswered while the path in use answers requests.
    unanswered_since: Option<Duration>,
    /// Number of requests to the peer since there was a session.
    asked: u32,
    /// Not before this time is it asked again.
    next_ask: Duration,
    /// Time at which the request is to be sent.
    pub(super) due: Option<Duration>,
    /// Time at which this node last started a handshake because the peer asked, and at which it last tried the paths for that.
    started: Option<Duration>,
    tried: Option<Duration>,
}

impl Handshakes {
    /// Takes what the device says: whether it has a session, and how many bytes it has sent to the peer. `works` says whether the path in use
    /// answers requests.
    pub(super) fn observe(&mut self, now: Duration, works: bool, has_session: bool, tx_bytes: u64) {
        if has_session {
            let Self { started, tried, .. } = *self;
            *self = Self { sent: tx_bytes, started, tried, ..Self::default() };
            return;
        }
        // A device that was made anew counts from zero.
        self.sent = self.sent.min(tx_bytes);
        if !works || tx_bytes == self.sent {
            self.unanswered_since = None;
            return;
        }
        let since = *self.unanswered_since.get_or_insert(now);
        if now.saturating_sub(since) < UNANSWERED || now < self.next_ask {
            return;
        }
        self.asked = self.asked.saturating_add(1);
        let interval = if self.asked < FIRST_ASKS { ASK_INTERVAL } else { SLOW_ASK_INTERVAL };
        self.next_ask = now.saturating_add(interval);
        self.due = Some(now);
    }

    /// Whether a request to start a handshake is due. It is sent now.
    pub(super) fn take_request(&mut self, now: Duration) -> bool {
        self.due.take_if(|due| *due <= now).is_some()
    }

    /// Whether this node has started one a moment ago because the peer asked.
    pub(super) fn was_just_started(&self, now: Duration) -> bool {
        is_recent(now, self.started, MIN_HANDSHAKE_INTERVAL)
    }

    /// This node starts one because the peer asked.
    pub(super) fn start(&mut self, now: Duration) {
        self.started = Some(now);
    }

    /// The paths are to be tried because the peer asked. `None` if that was done a moment ago, otherwise whether it was ever done.
    pub(super) fn try_paths(&mut self, now: Duration) -> Option<bool> {
        if is_recent(now, self.tried, MIN_TRY_INTERVAL) {
            return None;
        }
        Some(self.tried.replace(now).is_some())
    }
}

fn is_recent(now: Duration, at: Option<Duration>, interval: Duration) -> bool {
    at.is_some_and(|at| now.saturating_sub(at) < interval)
}

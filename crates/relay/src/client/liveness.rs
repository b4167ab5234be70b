//! Whether a link is alive: it is asked when it has been silent. Without a clock.

use std::time::{Duration, Instant};

/// Silence after which an idle link is asked: it also keeps mappings of NATs on the way, which live a minute or more.
const IDLE: Duration = Duration::from_secs(15);
/// Silence after a datagram of this client before the link is asked.
const UNANSWERED: Duration = Duration::from_millis(500);
/// Time limit of an answer: TCP repeats the ping twice or three times meanwhile.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of an answer while datagrams are sent.
const BUSY_TIMEOUT: Duration = Duration::from_millis(1500);

/// Next step for a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing before this moment.
    Wait(Instant),
    /// Send a ping.
    Ping,
    /// The relay does not answer.
    End,
}

/// Times of what was sent and received over one link.
#[derive(Debug, Clone, Copy)]
pub(super) struct Liveness {
    received: Instant,
    /// Time of the first datagram that was sent after that.
    sent: Option<Instant>,
    /// Time of the ping that waits for its answer.
    pinged: Option<Instant>,
}

impl Liveness {
    pub(super) fn new(now: Instant) -> Self {
        Self { received: now, sent: None, pinged: None }
    }

    /// A datagram was sent.
    pub(super) fn sent(&mut self, now: Instant) {
        self.sent.get_or_insert(now);
    }

    /// Something was received, whatever it is.
    pub(super) fn received(&mut self, now: Instant) {
        // An answer to the ping may still come: its round-trip time is of interest.
        self.received = now;
        self.sent = None;
    }

    /// The answer to the ping was received. Returns its round-trip time.
    pub(super) fn answered(&mut self, now: Instant) -> Option<Duration> {
        Some(now.saturating_duration_since(self.pinged.take()?))
    }

    /// Decides on the next step. After [`Action::Ping`] the ping counts as sent.
    pub(super) fn poll(&mut self, now: Instant) -> Action {
        let silent_since = self.pinged.map(|at| at.max(self.received));
        if let Some(since) = silent_since {
            let end = since + if self.sent.is_some() { BUSY_TIMEOUT } else { TIMEOUT };
            return if now >= end { Action::End } else { Action::Wait(end) };
        }
        let idle = self.received + IDLE;
        let due = self.sent.map_or(idle, |at| idle.min(at + UNANSWERED));
        if now < due {
            return Action::Wait(due);
        }
        self.pinged = Some(now);
        Action::Ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_idle_link_is_asked_every_fifteen_seconds() {
        let start = Instant::now();
        let mut link = Liveness::new(start);
        assert_eq!(link.poll(start), Action::Wait(start + 15 * SECOND));
        let asked = start + 15 * SECOND;
        assert_eq!(link.poll(asked), Action::Ping);
        assert_eq!(link.poll(asked), Action::Wait(asked + 2 * SECOND));
        let answered = asked + Duration::from_millis(30);
        link.received(answered);
        assert_eq!(link.answered(answered), Some(Duration::from_millis(30)));
        assert_eq!(link.poll(answered), Action::Wait(answered + 15 * SECOND));
    }

    #[test]
    fn a_link_that_takes_datagrams_and_says_nothing_ends_within_two_seconds() {
        let start = Instant::now();
        let mut link = Liveness::new(start);
        link.sent(start);
        link.sent(start + SECOND / 4);
        assert_eq!(link.poll(start), Action::Wait(start + SECOND / 2));
        assert_eq!(link.poll(start + SECOND / 2), Action::Ping);
        assert_eq!(link.poll(start + SECOND), Action::Wait(start + 2 * SECOND));
        assert_eq!(link.poll(start + 2 * SECOND), Action::End);
    }

    #[test]
    fn whatever_is_received_shows_that_the_link_is_alive() {
        let start = Instant::now();
        let mut link = Liveness::new(start);
        link.sent(start);
        assert_eq!(link.poll(start + SECOND), Action::Ping);
        // The answer waits behind datagrams of others.
        link.received(start + 2 * SECOND);
        assert_eq!(link.poll(start + 3 * SECOND), Action::Wait(start + 4 * SECOND));
        assert_eq!(link.poll(start + 4 * SECOND), Action::End, "but an answer has to come");
    }
}

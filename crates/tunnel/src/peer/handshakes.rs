//! Handshakes with a peer: what has come of the last, and when the next is due.

use std::time::{Duration, Instant, SystemTime};

use fairlead_keys::PublicKey;
use fairlead_limits::doubled;
use fairlead_wireguard::Initiation;

use super::repeats::Repeats;

/// Time to wait for the confirmation of an answered handshake before this node starts one of its own.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the answer to a handshake (`REKEY_TIMEOUT`, WireGuard paper 6.1).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Handshakes of both sides.
#[derive(Default)]
pub(super) struct Handshakes {
    /// None can be begun: the peer's key is a point of low order (RFC 7748, section 6.1), with which no secret is made.
    pub(super) has_unusable_key: bool,
    /// A cookie has come, and no initiation was sent with it yet.
    pub(super) has_new_cookie: bool,
    /// Time at which a handshake was last started.
    attempted: Option<Instant>,
    /// Time at which a handshake of the peer was last answered that the peer has not confirmed yet.
    answered: Option<Instant>,
    /// Number of handshakes in a row that were started only for a keepalive and not answered.
    pub(super) unanswered: u32,
    repeats: Option<Repeats>,
    /// Time at which a handshake was last completed.
    pub(super) completed: Option<SystemTime>,
}

impl Handshakes {
    /// Begins a series of messages at a new endpoint.
    pub(super) fn start_series(&mut self, at: Instant) {
        self.unanswered = 0;
        self.repeats = Some(Repeats::new(at));
        // The first keepalive is no other handshake.
        self.attempted = Some(at);
    }

    /// Takes note of an initiation of this node.
    pub(super) fn sent(&mut self, initiation: &Initiation, now: Instant) {
        self.attempted = Some(now);
        if let Some(repeats) = &mut self.repeats {
            repeats.sent(initiation);
        }
    }

    /// Takes note of an answer of this node.
    pub(super) fn answered(&mut self, now: Instant) {
        self.answered = Some(now);
    }

    /// A cookie has come.
    pub(super) fn receive_cookie(&mut self) {
        self.has_new_cookie = true;
        self.repeats.iter_mut().for_each(Repeats::forget_last);
    }

    /// Whether the peer is about to confirm one.
    pub(super) fn await_confirmation(&self, now: Instant) -> bool {
        self.answered.is_some_and(|at| now.saturating_duration_since(at) < CONFIRMATION_TIMEOUT)
    }

    /// There is a session that the peer has, too.
    pub(super) fn complete(&mut self, wall: SystemTime) {
        self.completed = Some(wall);
        self.end();
    }

    /// None is under way any more.
    pub(super) fn end(&mut self) {
        self.answered = None;
        self.repeats = None;
    }

    /// Time at which the next message of a series is due.
    pub(super) fn next_repeat(&self) -> Option<Instant> {
        let due = self.repeats.as_ref()?.due()?;
        let confirmation = self.answered.and_then(|at| at.checked_add(CONFIRMATION_TIMEOUT));
        Some(confirmation.map_or(due, |until| due.max(until)))
    }

    /// Takes the next message of a series from it; `None` if it is to be a new one.
    pub(super) fn take_copy(&mut self) -> Option<Initiation> {
        self.repeats.as_mut().and_then(Repeats::take_copy)
    }

    /// Time at which a keepalive asks for the next one; pauses grow up to `longest`.
    pub(super) fn next(&self, now: Instant, peer: &PublicKey, longest: Duration) -> Option<Instant> {
        let pause = self.pause(peer, longest);
        let asked = self.attempted.map_or(Some(now), |last| last.checked_add(pause))?;
        let answered = self.answered.and_then(|at| at.checked_add(ANSWER_TIMEOUT));
        Some(answered.map_or(asked, |until| asked.max(until)))
    }

    /// Doubles with each handshake that was not answered, up to `longest`, and is up to a quarter longer, differently for each
    /// peer, or all would be asked at once.
    fn pause(&self, peer: &PublicKey, longest: Duration) -> Duration {
        let doubled = doubled(ANSWER_TIMEOUT, self.unanswered, longest);
        let [first, ..] = peer.0;
        let spread = u32::from(first.wrapping_add(u8::try_from(self.unanswered % 256).unwrap_or_default()));
        doubled.saturating_mul(1024_u32.saturating_add(spread)) / 1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_wait_for_what_was_answered() {
        let (mut handshakes, now, peer) = (Handshakes::default(), Instant::now(), PublicKey([0; 32]));
        let longest = Duration::from_secs(12);
        assert_eq!(handshakes.next(now, &peer, longest), Some(now));
        handshakes.start_series(now);
        assert_eq!(handshakes.next(now, &peer, longest), Some(now + ANSWER_TIMEOUT));
        handshakes.unanswered = 1;
        let pause = Duration::from_secs(10) * 1025 / 1024;
        assert_eq!(handshakes.next(now, &peer, longest), Some(now + pause));
        let later = now + pause;
        handshakes.answered(later);
        assert_eq!(handshakes.next(later, &peer, longest), Some(later + ANSWER_TIMEOUT));
        assert!(handshakes.await_confirmation(later));
        assert_eq!(handshakes.next_repeat(), Some(later + CONFIRMATION_TIMEOUT));
        handshakes.end();
        assert_eq!(handshakes.next_repeat(), None);
    }
}

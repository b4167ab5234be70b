//! When a peer's timers run, and when it rests.

use std::time::{Duration, Instant};

use fairlead_limits::doubled;
use fairlead_wireguard::{Due, Tunnel};

use super::{CONFIRMATION_TIMEOUT, Context, Peer};

/// Time for the answer to a handshake (`REKEY_TIMEOUT`, WireGuard paper 6.1).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long after an inner packet was sent one is missed that answers it, or at least a keepalive.
pub(crate) const MISSED_AFTER: Duration = Duration::from_millis(500);

/// How peers without a session share this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The longest pause between handshakes that only a keepalive asks for; at least the interval of the keepalive.
    pub(crate) max_pause: Duration,
}

impl Peer {
    /// Whether it takes the memory of sessions.
    #[cfg(test)]
    pub(crate) fn has_state(&self) -> bool {
        self.tunnel.is_some()
    }

    /// Runs the timers that are due.
    pub(crate) fn tick(&mut self, pace: &Pace, context: &mut Context<'_>) {
        let now = context.now.instant;
        self.previous.take_if(|previous| previous.until <= now);
        self.run_protocol_timers(context);
        self.repeat(context);
        if self.keepalive_at(now, pace).is_some_and(|due| due <= now) {
            self.keep_alive(context);
        }
    }

    /// Runs those of the protocol; also after packets, which may ask for a new session.
    pub(crate) fn run_protocol_timers(&mut self, context: &mut Context<'_>) {
        let now = context.now.instant;
        while let Some(due) = self.tunnel.as_mut().and_then(|tunnel| tunnel.take_due(now, context.random)) {
            match due {
                // Nothing needs the session of a handshake that was not answered. With a cookie the next one is.
                Due::Handshake if !std::mem::take(&mut self.has_new_cookie) && self.is_idle(now) => {
                    self.rest()
                }
                Due::Handshake => self.initiate(true, context),
                Due::Keepalive => drop(self.send_empty(context)),
                // A session that works stays.
                Due::GaveUp => {
                    self.staged.clear();
                    self.rest_if_idle(now);
                }
                Due::Expired => self.rest_if_idle(now),
            }
        }
    }

    fn rest_if_idle(&mut self, now: Instant) {
        if self.is_idle(now) {
            self.rest();
        }
    }

    /// Whether there is neither a session, also one that the peer has yet to confirm, nor a packet that waits for one, nor a repetition
    /// to come.
    fn is_idle(&self, now: Instant) -> bool {
        let has_session = |tunnel: &Tunnel| tunnel.is_established(now) || tunnel.awaits_confirmation(now);
        self.staged.is_empty()
            && self.next_repeat().is_none()
            && !self.tunnel.as_deref().is_some_and(has_session)
    }

    /// Starts a handshake, also beside a session, which serves on until there is a new one.
    pub(crate) fn start_handshake(&mut self, context: &mut Context<'_>) {
        self.unanswered = 0;
        self.initiate(true, context);
    }

    /// When to call [`Self::tick`]. `None` if only a message or a change brings work.
    pub(crate) fn poll_timeout(&self, now: Instant, pace: &Pace) -> Option<Instant> {
        let protocol = self.tunnel.as_ref().and_then(|tunnel| tunnel.poll_timeout());
        let previous = self.previous.as_ref().map(|previous| previous.until);
        let others = [self.next_repeat(), self.keepalive_at(now, pace), self.missed_at(now)];
        protocol.into_iter().chain(previous).chain(others.into_iter().flatten()).min()
    }

    /// When packets that were sent have been unanswered for [`MISSED_AFTER`].
    fn missed_at(&self, now: Instant) -> Option<Instant> {
        self.waiting_since.filter(|_| self.is_live(now))?.checked_add(MISSED_AFTER)
    }

    /// Whether packets have been unanswered for [`MISSED_AFTER`]. That is said once, and again for later packets.
    pub(crate) fn take_unanswered(&mut self, now: Instant) -> bool {
        let is_missed = self.missed_at(now).is_some_and(|at| at <= now);
        if is_missed {
            self.waiting_since = None;
        }
        is_missed
    }

    /// Ends handshakes and sessions; frees their state if nothing in it has to be remembered, as the time stamp of the peer's last
    /// handshake has to be.
    pub(super) fn rest(&mut self) {
        self.answered = None;
        self.repeats = None;
        if let Some(tunnel) = &mut self.tunnel {
            tunnel.forget_sessions();
        }
        self.tunnel.take_if(|tunnel| tunnel.is_empty());
    }

    /// The next repetition of a handshake towards a new endpoint, if it is due.
    pub(super) fn repeat(&mut self, context: &mut Context<'_>) {
        if self.next_repeat().is_none_or(|due| due > context.now.instant) {
            return;
        }
        match self.repeats.as_mut().and_then(|repeats| repeats.take_copy()) {
            Some(copy) => self.emit(&copy, context),
            None => self.initiate(true, context),
        }
    }

    fn next_repeat(&self) -> Option<Instant> {
        let due = self.repeats.as_ref()?.due()?;
        let confirmation = self.answered.and_then(|at| at.checked_add(CONFIRMATION_TIMEOUT));
        Some(confirmation.map_or(due, |until| due.max(until)))
    }

    pub(super) fn keepalive_interval(&self) -> Option<Duration> {
        self.persistent_keepalive
            .filter(|seconds| *seconds > 0)
            .map(|seconds| Duration::from_secs(seconds.into()))
    }

    /// When the next persistent keepalive is due, or the handshake that it needs.
    fn keepalive_at(&self, now: Instant, pace: &Pace) -> Option<Instant> {
        let interval = self.keepalive_interval().filter(|_| self.may_ask())?;
        if self.is_live(now) {
            return self.last_sent.map_or(Some(now), |last| last.checked_add(interval));
        }
        if self.tunnel.as_ref().is_some_and(|tunnel| tunnel.is_handshaking()) {
            return None;
        }
        let pause = self.pause(pace.max_pause.max(interval));
        let asked = self.attempted.map_or(Some(now), |last| last.checked_add(pause))?;
        let answered = self.answered.and_then(|at| at.checked_add(ANSWER_TIMEOUT));
        Some(answered.map_or(asked, |until| asked.max(until)))
    }

    /// Doubles with each handshake that was not answered, up to `longest`, and is up to a quarter longer, differently for each
    /// peer, or all would be asked at once.
    fn pause(&self, longest: Duration) -> Duration {
        let doubled = doubled(ANSWER_TIMEOUT, self.unanswered, longest);
        let [first, ..] = self.key.0;
        let spread = u32::from(first.wrapping_add(u8::try_from(self.unanswered % 256).unwrap_or_default()));
        doubled.saturating_mul(1024_u32.saturating_add(spread)) / 1024
    }
}

//! When a peer's timers run, and when it rests.

use std::time::{Duration, Instant};

use gotatun::noise::Tunn;
use gotatun::noise::errors::WireGuardError;
use gotatun::packet::WgKind;

use super::{Now, Peer};

/// How often the timers of a peer run that is in use: WireGuard's timers are of seconds.
pub(crate) const TICK: Duration = Duration::from_millis(250);
/// How often while it has a session and no packet goes through it. Before the first packet the timers run at once.
const IDLE_TICK: Duration = Duration::from_secs(5);
/// The library's clock may be behind by this much when it handles a message.
const MAX_LAG: Duration = Duration::from_secs(1);
/// Time without an inner packet after which none is waited for: longer than `KEEPALIVE_TIMEOUT + REKEY_TIMEOUT`, after which an
/// answer that is missing causes a handshake.
const IDLE_AFTER: Duration = Duration::from_secs(20);
/// Time for the answer to a handshake (`REKEY_TIMEOUT`, WireGuard paper 6.1). Where a packet waits, the library repeats it
/// for `REKEY_ATTEMPT_TIME`.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long after an inner packet was sent one is missed that answers it, or at least a keepalive.
pub(crate) const MISSED_AFTER: Duration = Duration::from_millis(500);

/// How peers without a session share this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// How often the timers of peers in use run.
    pub(crate) tick: Duration,
    /// The longest pause between handshakes that only a keepalive asks for; at least the interval of the keepalive.
    pub(crate) max_pause: Duration,
}

impl Peer {
    /// The library's state, awake and with its clock set.
    pub(super) fn tunnel(&mut self, now: Now) -> &mut Tunn {
        let (key, preshared_key, protocol) = (&self.key, self.preshared_key, &self.protocol);
        let is_new = self.tunnel.is_none();
        let tunnel = self.tunnel.get_or_insert_with(|| protocol.tunnel(key, preshared_key));
        if std::mem::take(&mut self.resting) {
            self.attempted = Some(now.instant);
            self.ticked = Some(now.instant);
            if !is_new {
                // Its timers have not run for long: without this they would end what begins now.
                tunnel.reset();
            }
        }
        tunnel
    }

    /// Whether it takes the memory of sessions.
    #[cfg(test)]
    pub(crate) fn has_state(&self) -> bool {
        self.tunnel.is_some()
    }

    /// Runs the library's timers if its clock is behind.
    pub(super) fn catch_up(&mut self, now: Now, out: &mut Vec<WgKind>) {
        let is_behind = |at| now.instant.saturating_duration_since(at) > MAX_LAG;
        if !self.resting && self.ticked.is_none_or(is_behind) {
            self.run_protocol_timers(now, out);
        }
    }

    /// Runs the timers that are due.
    pub(crate) fn tick(&mut self, now: Now, pace: &Pace, out: &mut Vec<WgKind>) {
        self.previous.take_if(|previous| previous.until <= now.instant);
        if self.is_given_up(now.instant) {
            self.rest();
        } else if !self.resting {
            self.run_protocol_timers(now, out);
        }
        self.repeat(now, out);
        if self.keepalive_at(now.instant, pace).is_some_and(|due| due <= now.instant) {
            self.keep_alive(now, out);
        }
    }

    /// Starts a handshake, also beside a session, which serves on until there is a new one. The library repeats it.
    pub(crate) fn start_handshake(&mut self, now: Now, out: &mut Vec<WgKind>) {
        self.unanswered = 0;
        self.catch_up(now, out);
        self.initiate(true, now, out);
    }

    fn run_protocol_timers(&mut self, now: Now, out: &mut Vec<WgKind>) {
        self.ticked = Some(now.instant);
        let Some(tunnel) = &mut self.tunnel else { return };
        match tunnel.update_timers() {
            Ok(None) => {}
            Ok(Some(message)) => {
                if matches!(message, WgKind::HandshakeInit(_)) {
                    self.attempted = Some(now.instant);
                }
                self.emit(message, now, out);
            }
            Err(WireGuardError::ConnectionExpired) => self.staged.clear(),
            Err(error) => tracing::debug!(?error, "WireGuard timer"),
        }
        if !self.has_session() {
            self.confirmed = false;
        }
    }

    /// When to call [`Self::tick`]. `None` if only a message or a change brings work.
    pub(crate) fn poll_timeout(&self, now: Instant, pace: &Pace) -> Option<Instant> {
        let in_use = self.last_data.is_some_and(|at| now.saturating_duration_since(at) < IDLE_AFTER);
        let is_idle = !in_use && self.staged.is_empty() && self.repeats.is_none() && self.is_live();
        let interval = if is_idle { IDLE_TICK } else { pace.tick };
        let protocol = self.ticked.unwrap_or(now).checked_add(interval).filter(|_| !self.resting);
        let others = [self.next_repeat(), self.keepalive_at(now, pace), self.missed_at()];
        protocol.into_iter().chain(others.into_iter().flatten()).min()
    }

    /// When packets that were sent have been unanswered for [`MISSED_AFTER`].
    fn missed_at(&self) -> Option<Instant> {
        self.waiting_since.filter(|_| self.is_live())?.checked_add(MISSED_AFTER)
    }

    /// Whether packets have been unanswered for [`MISSED_AFTER`]. That is said once, and again for later packets.
    pub(crate) fn take_unanswered(&mut self, now: Instant) -> bool {
        let is_missed = self.missed_at().is_some_and(|at| at <= now);
        if is_missed {
            self.waiting_since = None;
        }
        is_missed
    }

    /// Whether there is nothing but an unanswered handshake, for which no packet waits.
    fn is_given_up(&self, now: Instant) -> bool {
        let is_over =
            |at: Option<Instant>| at.is_none_or(|at| now.saturating_duration_since(at) >= ANSWER_TIMEOUT);
        !self.resting
            && self.staged.is_empty()
            && self.next_repeat().is_none()
            && is_over(self.attempted)
            && is_over(self.unconfirmed.map(|(_, at)| at))
            && !self.is_live()
    }

    /// Stops the library's timers; frees its state if nothing in it has to be remembered.
    pub(super) fn rest(&mut self) {
        self.resting = true;
        self.confirmed = false;
        self.unconfirmed = None;
        self.repeats = None;
        match &mut self.tunnel {
            // It forgets the keys, and remembers the time stamp of the peer's last handshake.
            Some(tunnel) if self.was_heard => tunnel.reset(),
            _ => self.tunnel = None,
        }
    }

    pub(super) fn keepalive_interval(&self) -> Option<Duration> {
        self.persistent_keepalive
            .filter(|seconds| *seconds > 0)
            .map(|seconds| Duration::from_secs(seconds.into()))
    }

    /// When the next persistent keepalive is due, or the handshake that it needs.
    fn keepalive_at(&self, now: Instant, pace: &Pace) -> Option<Instant> {
        let interval = self.keepalive_interval().filter(|_| self.path.is_some())?;
        if self.is_live() {
            return self.last_sent.map_or(Some(now), |last| last.checked_add(interval));
        }
        if !self.resting {
            // A handshake is under way.
            return None;
        }
        let pause = self.pause(pace.max_pause.max(interval));
        self.attempted.map_or(Some(now), |last| last.checked_add(pause))
    }

    /// Doubles with each handshake that was not answered, up to `longest`, and is up to a quarter longer, differently for each
    /// peer, or all would be asked at once.
    fn pause(&self, longest: Duration) -> Duration {
        let doubled = ANSWER_TIMEOUT.saturating_mul(2_u32.saturating_pow(self.unanswered));
        let [first, ..] = self.key.0;
        let spread = u32::from(first.wrapping_add(u8::try_from(self.unanswered % 256).unwrap_or_default()));
        doubled.min(longest).saturating_mul(1024_u32.saturating_add(spread)) / 1024
    }
}

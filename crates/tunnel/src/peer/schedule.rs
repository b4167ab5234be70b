//! Times at which a peer's timers run, and at which the peer rests.

use std::time::{Duration, Instant};

use fairlead_wireguard::Due;

use super::{Context, Peer};

/// Pace of handshakes with peers without a session, which share this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The longest pause between handshakes that only a keepalive asks for; at least the interval of the keepalive.
    pub(crate) max_pause: Duration,
}

impl Peer {
    /// Whether it takes the memory of sessions.
    #[cfg(test)]
    pub(crate) fn has_state(&self) -> bool {
        self.sessions.tunnel.is_some()
    }

    /// Runs the timers that are due.
    pub(crate) fn tick(&mut self, pace: &Pace, context: &mut Context<'_>) {
        let now = context.now.instant;
        self.sessions.end_previous(now);
        self.run_protocol_timers(context);
        self.repeat(context);
        if self.keepalive_at(now, pace).is_some_and(|due| due <= now) {
            self.keep_alive(context);
        }
    }

    /// Runs those of the protocol; also after packets, which may ask for a new session.
    pub(crate) fn run_protocol_timers(&mut self, context: &mut Context<'_>) {
        let now = context.now.instant;
        while let Some(due) =
            self.sessions.tunnel.as_mut().and_then(|tunnel| tunnel.take_due(now, context.random))
        {
            match due {
                // Nothing needs the session of a handshake that was not answered. With a cookie the next one is.
                Due::Handshake
                    if !std::mem::take(&mut self.handshakes.has_new_cookie) && self.is_idle(now) =>
                {
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
        self.staged.is_empty() && self.handshakes.next_repeat().is_none() && !self.sessions.exist(now)
    }

    /// Starts a handshake, also beside a session, which serves on until there is a new one.
    pub(crate) fn start_handshake(&mut self, context: &mut Context<'_>) {
        self.handshakes.unanswered = 0;
        self.initiate(true, context);
    }

    /// Time at which to call [`Self::tick`]. `None` if only a message or a change brings work.
    pub(crate) fn poll_timeout(&self, now: Instant, pace: &Pace) -> Option<Instant> {
        let protocol = self.sessions.tunnel.as_ref().and_then(|tunnel| tunnel.poll_timeout());
        let previous = self.sessions.previous_until();
        let others = [self.handshakes.next_repeat(), self.keepalive_at(now, pace), self.missed_at(now)];
        protocol.into_iter().chain(previous).chain(others.into_iter().flatten()).min()
    }

    /// Time at which an answer to packets in the session is missed.
    fn missed_at(&self, now: Instant) -> Option<Instant> {
        self.traffic.missed_at().filter(|_| self.is_live(now))
    }

    /// Whether an answer to packets in the session is missed. That is said once, and again for later packets.
    pub(crate) fn take_unanswered(&mut self, now: Instant) -> bool {
        let is_missed = self.missed_at(now).is_some_and(|at| at <= now);
        if is_missed {
            self.traffic.stop_waiting();
        }
        is_missed
    }

    /// Ends handshakes and sessions.
    pub(super) fn rest(&mut self) {
        self.handshakes.end();
        self.sessions.end();
    }

    /// The next repetition of a handshake towards a new endpoint, if it is due.
    pub(super) fn repeat(&mut self, context: &mut Context<'_>) {
        if self.handshakes.next_repeat().is_none_or(|due| due > context.now.instant) {
            return;
        }
        match self.handshakes.take_copy() {
            Some(copy) => self.emit(&copy, context),
            None => self.initiate(true, context),
        }
    }

    pub(super) fn keepalive_interval(&self) -> Option<Duration> {
        self.persistent_keepalive
            .filter(|seconds| *seconds > 0)
            .map(|seconds| Duration::from_secs(seconds.into()))
    }

    /// Time at which the next persistent keepalive is due, or the handshake that it needs.
    fn keepalive_at(&self, now: Instant, pace: &Pace) -> Option<Instant> {
        let interval = self.keepalive_interval().filter(|_| self.may_ask())?;
        if self.is_live(now) {
            return self.traffic.last_sent.map_or(Some(now), |last| last.checked_add(interval));
        }
        if self.sessions.are_handshaking() {
            return None;
        }
        self.handshakes.next(now, &self.key, pace.max_pause.max(interval))
    }
}

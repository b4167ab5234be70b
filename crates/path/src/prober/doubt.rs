//! Sending both ways: between the first answer that is late and the moment when the path in use has failed and was left, packets go
//! over the relay as well, so that what the path loses arrives all the same.
//!
//! Both nodes have to do it, and one of them may notice nothing: its own packets are lost. So a node whose path is in doubt sends a
//! request over the relay, and the peer then checks its own path at once.

use std::net::SocketAddr;
use std::time::Duration;

use super::{Path, Prober};

/// The answer to a check is late after twice the round-trip time, but not before this.
const MIN_WAIT: Duration = Duration::from_millis(50);
/// How long packets are sent both ways at most, until a path in use has answered.
const LONGEST: Duration = Duration::from_secs(2);
/// The same once the path was left: until the device uses the other one.
const LEAVING: Duration = Duration::from_millis(500);

/// Whether the path in use is in doubt.
#[derive(Debug, Default)]
pub(super) struct Doubt {
    /// When the answer to the last check is late.
    late_at: Option<Duration>,
    /// Until when packets go over the relay as well.
    until: Option<Duration>,
    /// The path was left since.
    has_left: bool,
}

impl Doubt {
    /// When something is due.
    pub(super) fn next(&self) -> Option<Duration> {
        self.late_at.into_iter().chain(self.until).min()
    }

    /// The path in use has answered.
    pub(super) fn end(&mut self) {
        self.late_at = None;
        // What the other path answers says nothing of when the device uses it.
        self.until.take_if(|_| !self.has_left);
    }

    /// Another path is used from now on.
    pub(super) fn leave(&mut self, now: Duration) {
        let soon = now.saturating_add(LEAVING);
        *self = Self { late_at: None, until: self.until.map(|until| until.min(soon)), has_left: true };
    }
}

impl Prober {
    /// Where packets to the peer are to go besides the path in use: the relay's loopback port, which shares the fate of no path over UDP.
    pub(crate) fn also(&self, now: Duration) -> Option<SocketAddr> {
        self.doubt.until.filter(|until| now < *until && self.session.is_up)?;
        self.loopback_port()
    }

    /// A check is sent; `timeout` after that it is missed.
    pub(super) fn await_check(&mut self, now: Duration, timeout: Duration) {
        let round_trip = self.round_trip().unwrap_or_default();
        let wait = round_trip.saturating_mul(2).max(MIN_WAIT).min(timeout);
        self.doubt.late_at = Some(now.saturating_add(wait));
    }

    /// Does what is due: an answer is late, or packets have been sent both ways for long enough.
    pub(super) fn use_doubt(&mut self, now: Duration) {
        self.doubt.until.take_if(|until| *until <= now);
        if self.doubt.late_at.take_if(|at| *at <= now).is_none() || !self.awaits_check() {
            return;
        }
        self.failing_since = Some(now);
        if self.may_send_both_ways() {
            self.doubt = Doubt { until: Some(now.saturating_add(LONGEST)), ..Doubt::default() };
        }
        // Even if the last round was the peer's: it must hear of this one.
        self.is_joined = false;
        self.try_relay(now);
    }

    /// The peer has asked over the relay: it may not hear this node over a path that loses packets in one direction only.
    pub(super) fn check_for_peer(&mut self, now: Duration) {
        if self.session.is_up && self.may_send_both_ways() {
            self.plan_check(now);
            self.check_soon(now);
        }
    }

    fn may_send_both_ways(&self) -> bool {
        let is_other = |path: &Path| !path.is_relay() || path.is_relay_port();
        self.loopback_port().is_some() && self.current_path().is_some_and(is_other)
    }

    fn loopback_port(&self) -> Option<SocketAddr> {
        let relay = self.paths.iter().find(|path| path.is_relay() && !path.is_relay_port())?;
        Some(relay.candidate.address)
    }
}

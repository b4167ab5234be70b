//! Sending both ways: between the first answer that is late and the moment when the path in use has failed and was left, packets go
//! over the relay as well, so that what the path loses arrives all the same.
//!
//! Both nodes have to do it, and one of them may notice nothing: its own packets are lost. So a node whose path is in doubt sends a
//! request over the relay, and the peer then checks its own path at once.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;
use super::path::Path;

impl Prober {
    /// Address for packets to the peer besides the path in use: the relay's loopback port, which shares the fate of no path over UDP.
    pub(crate) fn also(&self, now: Duration) -> Option<SocketAddr> {
        let is_doubtful = self.doubt.lasts(now) && self.traffic.session.is_up;
        self.paths.loopback_port().filter(|_| is_doubtful)
    }

    /// Does what is due: an answer is late, or packets have been sent both ways for long enough.
    pub(super) fn use_doubt(&mut self, now: Duration) {
        if !self.doubt.expire(now) || !self.checks.awaits_answer() {
            return;
        }
        self.checks.failing_since = Some(now);
        if self.may_send_both_ways() {
            self.doubt.begin(now);
        }
        // Even if the last round was the peer's: it must hear of this one.
        self.rounds.is_joined = false;
        self.paths.ask_relay(now);
    }

    /// The peer has asked over the relay: it may not hear this node over a path that loses packets in one direction only.
    pub(super) fn check_for_peer(&mut self, now: Duration) {
        if self.traffic.session.is_up && self.may_send_both_ways() {
            self.plan_check(now);
            self.check_soon(now);
        }
    }

    fn may_send_both_ways(&self) -> bool {
        let is_other = |path: &Path| !path.is_relay() || path.is_relay_port();
        self.paths.loopback_port().is_some() && self.paths.in_use().is_some_and(is_other)
    }
}

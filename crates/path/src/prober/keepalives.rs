//! Keepalives that have to come more often than they usually do, as tests of the idle path show.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::is_private;

use super::Prober;
use super::idle_test::IdleTests;
use super::path::Path;

impl Prober {
    /// Whether keepalives have to come more often than they usually do.
    pub(crate) fn needs_keepalives(&self) -> bool {
        let needs = |tests: &IdleTests| tests.has_failed() || tests.is_asked;
        self.network.relay.is_none() && self.idle_tests.as_deref().is_some_and(needs)
    }

    /// Whether the peer is to send them more often.
    pub(crate) fn wants_keepalives(&self) -> bool {
        self.network.relay.is_none() && self.idle_tests.as_deref().is_some_and(IdleTests::has_failed)
    }

    /// Takes from an authenticated request of the peer whether it asks for more keepalives.
    pub(crate) fn peer_wants_keepalives(&mut self, is_asked: bool) {
        if is_asked || self.idle_tests.is_some() {
            self.idle_tests.get_or_insert_default().is_asked = is_asked;
        }
    }

    /// Other NATs are between the nodes now.
    pub(super) fn forget_idle_tests(&mut self) {
        self.idle_tests.iter_mut().for_each(|tests| tests.forget());
    }

    /// The device was read; `is_heard` if the peer has sent something since it was read before.
    pub(super) fn observe_idle(&mut self, now: Duration, is_heard: bool) {
        let may_test = self.may_test_idle(now);
        if !may_test && self.idle_tests.is_none() {
            return;
        }
        let at = self.traffic.session.endpoint.map(|endpoint| endpoint.ip());
        let tests = self.idle_tests.get_or_insert_default();
        if tests.observe(now, at, is_heard, may_test, self.is_controlling) {
            self.paths.ask_in_use(now);
        }
    }

    /// A request of the peer has come: its NAT is open for another reason than that its mapping has lasted.
    pub(super) fn yield_idle_test(&mut self, now: Duration) {
        let has_answered = |since| self.paths.in_use_has_answered_since(since);
        if let Some(tests) = self.idle_tests.as_deref_mut() {
            tests.give_way(now, self.is_controlling, has_answered);
        }
    }

    /// Begins and ends tests.
    pub(super) fn run_idle_test(&mut self, now: Duration) {
        let can_test = self.can_test_idle(now);
        let Some(tests) = self.idle_tests.as_deref_mut() else { return };
        if !can_test {
            tests.stop();
            return;
        }
        if tests.run(now, |since| self.paths.in_use_has_answered_since(since)) {
            self.paths.ask_in_use(now);
        }
    }

    /// Only while nothing else keeps the NATs open, and only where there may be any.
    fn may_test_idle(&self, now: Duration) -> bool {
        let is_outside = |endpoint: SocketAddr| !endpoint.ip().is_loopback() && !is_private(endpoint.ip());
        let session = self.traffic.session;
        let is_idle = session.is_up && !self.traffic.is_active(now);
        self.network.relay.is_none() && is_idle && session.endpoint.is_some_and(is_outside)
    }

    /// Only over what answers requests.
    fn can_test_idle(&self, now: Duration) -> bool {
        let speaks = |path: &Path| path.answered.is_some() && !path.has_failed;
        self.may_test_idle(now) && self.paths.in_use().is_some_and(speaks)
    }
}

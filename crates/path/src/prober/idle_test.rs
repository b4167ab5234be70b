//! Whether what NATs and firewalls between two nodes keep of an idle session lasts from one keepalive to the next. Where it does not,
//! and no relay helps, packets after a pause are lost until the other node's next keepalive.
//!
//! What a peer sends opens its NAT for this node. So an idle peer gets a request shortly before its next keepalive. If that is not
//! answered, and the peer is heard again afterwards, its NAT was closed. After two such tests this node sends keepalives more often, and asks
//! the peer in its requests to do so: the peer's NAT stays open only for what the peer sends.
//!
//! A test opens the NAT of the node that makes it, so the other one would learn nothing in that time: they take turns.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_address::is_private;

use super::path::LAST_REQUEST;
use super::{Path, Prober};

/// From when a packet of the peer was noticed to the request, in one test after the other. A packet is noticed up to 5 s late, and the next
/// keepalive comes 25 s after it: one of these is shortly before.
const WAITS: [Duration; 3] = [Duration::from_secs(18), Duration::from_secs(20), Duration::from_secs(22)];
/// After so long its keepalive is missing, and the peer gets a request all the same: the controlling node's, then the other one's. After a
/// minute the session would count as lost.
const MAX_QUIET: [Duration; 2] = [Duration::from_secs(32), Duration::from_secs(45)];
/// How long an answer to the last request of a test is waited for.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Unanswered tests that show that keepalives come too seldom.
const MAX_FAILED: u8 = 2;
/// Answered tests that show that they come often enough.
const ENOUGH_PASSED: u8 = 6;
/// When that is tested again.
const PAUSE: Duration = Duration::from_secs(6 * 3600);
/// A peer that is heard after an unanswered test, within this time, was there during the test.
const HEARD_AGAIN: Duration = Duration::from_secs(60);

/// What tests of the idle path have shown, in this network and with the peer at this address.
#[derive(Debug, Default)]
pub(super) struct IdleTests {
    /// Where the peer is.
    of: Option<IpAddr>,
    /// When the next test begins.
    due: Option<Duration>,
    /// When the test that runs began.
    began: Option<Duration>,
    /// When a test ended without an answer, until the peer is heard.
    unanswered: Option<Duration>,
    failed: u8,
    passed: u8,
    /// Tests that were begun.
    begun: usize,
    /// The next packet of the peer begins no test: it is the peer's turn.
    yields: bool,
    /// When the peer was heard last, or a test ended.
    quiet_since: Duration,
    not_before: Duration,
    /// The peer asks for more keepalives.
    is_asked: bool,
}

impl IdleTests {
    fn ends(&self) -> Option<Duration> {
        let (last_request, _) = LAST_REQUEST;
        self.began.map(|began| began.saturating_add(last_request).saturating_add(LAST_ANSWER))
    }

    /// When something is due.
    pub(super) fn next(&self) -> Option<Duration> {
        self.due.into_iter().chain(self.ends()).min()
    }

    fn stop(&mut self) {
        (self.due, self.began) = (None, None);
    }

    /// Whether the peer was silent for too long; its keepalives may end at this node's closed NAT.
    fn is_quiet(&self, now: Duration, is_controlling: bool) -> bool {
        let [first, second] = MAX_QUIET;
        let longest = if is_controlling { first } else { second };
        let is_waiting = self.next().is_some() || self.unanswered.is_some();
        !is_waiting && now.saturating_sub(self.quiet_since) >= longest
    }

    /// Another network, or another address of the peer.
    fn forget(&mut self) {
        *self = Self { of: self.of, is_asked: self.is_asked, ..Self::default() };
    }

    /// The test that runs is over.
    fn conclude(&mut self, now: Duration, is_answered: bool) {
        (self.began, self.yields, self.quiet_since) = (None, true, now);
        if is_answered {
            self.pass(now);
        } else {
            self.unanswered = Some(now);
        }
    }

    /// The peer was heard.
    fn plan(&mut self, now: Duration) {
        self.quiet_since = now;
        let wait =
            self.begun.checked_rem(WAITS.len()).and_then(|turn| WAITS.get(turn)).copied().unwrap_or_default();
        let is_own_turn = !std::mem::take(&mut self.yields);
        self.due = is_own_turn.then(|| now.saturating_add(wait));
    }

    fn pass(&mut self, now: Duration) {
        self.passed = self.passed.saturating_add(1);
        if self.passed >= ENOUGH_PASSED {
            (self.passed, self.failed) = (0, 0);
            self.not_before = now.saturating_add(PAUSE);
        }
    }

    fn has_failed(&self) -> bool {
        self.failed >= MAX_FAILED
    }
}

impl Prober {
    /// Whether keepalives have to come more often than they usually do.
    pub(crate) fn needs_keepalives(&self) -> bool {
        let needs = |tests: &IdleTests| tests.has_failed() || tests.is_asked;
        self.relay.is_none() && self.idle_tests.as_deref().is_some_and(needs)
    }

    /// Whether the peer is to send them more often.
    pub(crate) fn wants_keepalives(&self) -> bool {
        self.relay.is_none() && self.idle_tests.as_deref().is_some_and(IdleTests::has_failed)
    }

    /// What an authenticated request of the peer says of keepalives.
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
        let (at, is_controlling) = (self.session.endpoint.map(|endpoint| endpoint.ip()), self.is_controlling);
        let tests = self.idle_tests.get_or_insert_default();
        if at.is_some() && tests.of != at {
            tests.of = at;
            tests.forget();
            tests.quiet_since = now;
        }
        // Whatever the session was doing since: a path that was closed both ways ends it.
        tests.unanswered.take_if(|ended| now.saturating_sub(*ended) > HEARD_AGAIN);
        if is_heard && tests.unanswered.take().is_some() {
            tests.failed = tests.failed.saturating_add(1);
            if tests.has_failed() {
                tests.stop();
                // The peer's NAT is open now.
                self.ask_current(now);
                return;
            }
        }
        if !may_test || tests.has_failed() || now < tests.not_before {
            tests.stop();
            tests.quiet_since = now;
        } else if is_heard && tests.began.is_none() {
            tests.plan(now);
        } else if tests.is_quiet(now, is_controlling) {
            tests.due = Some(now);
        }
    }

    /// A request of the peer has come: its NAT is open for another reason than that its mapping has lasted.
    pub(super) fn yield_idle_test(&mut self, now: Duration) {
        let (current, is_controlling) = (self.current, self.is_controlling);
        let Some(tests) = self.idle_tests.as_deref_mut() else { return };
        tests.due = None;
        let Some(began) = tests.began else { return };
        let mut in_use = self.paths.iter().filter(|path| Some(path.candidate.address) == current);
        if in_use.any(|path| path.has_answered_since(began)) {
            tests.conclude(now, true);
        } else {
            // Both have begun at the same time.
            (tests.began, tests.yields, tests.quiet_since) = (None, !is_controlling, now);
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
        if tests.ends().is_some_and(|at| at <= now)
            && let Some(began) = tests.began
        {
            let current = self.current;
            let mut in_use = self.paths.iter().filter(|path| Some(path.candidate.address) == current);
            tests.conclude(now, in_use.any(|path| path.has_answered_since(began)));
        }
        if tests.due.take_if(|due| *due <= now).is_some() {
            tests.began = Some(now);
            tests.begun = tests.begun.wrapping_add(1);
            self.ask_current(now);
        }
    }

    /// Only while nothing else keeps the NATs open, and only where there may be any.
    fn may_test_idle(&self, now: Duration) -> bool {
        let is_outside = |endpoint: SocketAddr| !endpoint.ip().is_loopback() && !is_private(endpoint.ip());
        let is_idle = self.session.is_up && !self.is_active(now);
        self.relay.is_none() && is_idle && self.session.endpoint.is_some_and(is_outside)
    }

    /// Only over what answers requests.
    fn can_test_idle(&self, now: Duration) -> bool {
        let speaks = |path: &Path| path.answered.is_some() && !path.has_failed;
        self.may_test_idle(now) && self.current_path().is_some_and(speaks)
    }

    fn ask_current(&mut self, now: Duration) {
        let current = self.current;
        let in_use = self.paths.iter_mut().filter(|path| Some(path.candidate.address) == current);
        in_use.for_each(|path| path.attempt = Some((now, 0)));
    }
}

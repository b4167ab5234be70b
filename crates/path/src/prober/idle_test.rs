//! Whether what NATs and firewalls between two nodes keep of an idle session lasts from one keepalive to the next. Where it does not,
//! and no relay helps, packets after a pause are lost until the other node's next keepalive.
//!
//! A packet of a peer opens the peer's NAT for this node. So an idle peer gets a request shortly before its next keepalive. If that is not
//! answered, and the peer is heard again afterwards, its NAT was closed. After two such tests this node sends keepalives more often, and
//! asks the peer in its requests to do so: the peer's NAT stays open only for what the peer sends.
//!
//! A test opens the NAT of the node that makes it, so the other one would learn nothing in that time: they take turns.

use std::net::IpAddr;
use std::time::Duration;

use super::attempt::LAST_REQUEST;

/// From when a packet of the peer was noticed to the request, in one test after the other. A packet is noticed up to 5 s late, and the next
/// keepalive comes 25 s after it: one of these is shortly before.
const WAITS: [Duration; 3] = [Duration::from_secs(18), Duration::from_secs(20), Duration::from_secs(22)];
/// After so long its keepalive is missing, and the peer gets a request all the same: the controlling node's, then the other one's. After a
/// minute the session would count as lost.
const MAX_QUIET: [Duration; 2] = [Duration::from_secs(32), Duration::from_secs(45)];
/// Time to wait for an answer to the last request of a test.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Unanswered tests that show that keepalives come too seldom.
const MAX_FAILED: u8 = 2;
/// Answered tests that show that they come often enough.
const ENOUGH_PASSED: u8 = 6;
/// Time after which that is tested again.
const PAUSE: Duration = Duration::from_secs(6 * 3600);
/// A peer that is heard after an unanswered test, within this time, was there during the test.
const HEARD_AGAIN: Duration = Duration::from_secs(60);

/// Tests of the idle path, and what they have shown in this network and with the peer at this address.
#[derive(Debug, Default)]
pub(super) struct IdleTests {
    /// Address of the peer, to which the results belong.
    of: Option<IpAddr>,
    /// Time at which the next test begins.
    due: Option<Duration>,
    /// Time at which the test that runs began.
    began: Option<Duration>,
    /// Time at which a test ended without an answer, until the peer is heard.
    unanswered: Option<Duration>,
    failed: u8,
    passed: u8,
    /// Tests that were begun.
    begun: usize,
    /// The next packet of the peer begins no test: it is the peer's turn.
    yields: bool,
    /// Time at which the peer was heard last, or a test ended.
    quiet_since: Duration,
    not_before: Duration,
    /// The peer asks for more keepalives.
    pub(super) is_asked: bool,
}

impl IdleTests {
    fn ends(&self) -> Option<Duration> {
        let (last_request, _) = LAST_REQUEST;
        self.began.map(|began| began.saturating_add(last_request).saturating_add(LAST_ANSWER))
    }

    /// Time at which something is due.
    pub(super) fn next(&self) -> Option<Duration> {
        self.due.into_iter().chain(self.ends()).min()
    }

    pub(super) fn stop(&mut self) {
        self.due = None;
        self.began = None;
    }

    /// Whether the peer was silent for too long; its keepalives may end at this node's closed NAT.
    fn is_quiet(&self, now: Duration, is_controlling: bool) -> bool {
        let [first, second] = MAX_QUIET;
        let longest = if is_controlling { first } else { second };
        let is_waiting = self.next().is_some() || self.unanswered.is_some();
        !is_waiting && now.saturating_sub(self.quiet_since) >= longest
    }

    /// Another network, or another address of the peer.
    pub(super) fn forget(&mut self) {
        *self = Self { of: self.of, is_asked: self.is_asked, ..Self::default() };
    }

    /// The test that runs is over.
    fn conclude(&mut self, now: Duration, is_answered: bool) {
        self.began = None;
        self.yields = true;
        self.quiet_since = now;
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
            self.passed = 0;
            self.failed = 0;
            self.not_before = now.saturating_add(PAUSE);
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed >= MAX_FAILED
    }

    /// The device was read: the peer is `at` this address, and `is_heard` if it has sent something since the device was read before. Whether
    /// the path in use is to be asked.
    pub(super) fn observe(
        &mut self,
        now: Duration,
        at: Option<IpAddr>,
        is_heard: bool,
        may_test: bool,
        is_controlling: bool,
    ) -> bool {
        if at.is_some() && self.of != at {
            self.of = at;
            self.forget();
            self.quiet_since = now;
        }
        // Whatever the session was doing since: a path that was closed both ways ends it.
        self.unanswered.take_if(|ended| now.saturating_sub(*ended) > HEARD_AGAIN);
        if is_heard && self.unanswered.take().is_some() {
            self.failed = self.failed.saturating_add(1);
            if self.has_failed() {
                self.stop();
                // The peer's NAT is open now.
                return true;
            }
        }
        if !may_test || self.has_failed() || now < self.not_before {
            self.stop();
            self.quiet_since = now;
        } else if is_heard && self.began.is_none() {
            self.plan(now);
        } else if self.is_quiet(now, is_controlling) {
            self.due = Some(now);
        }
        false
    }

    /// A request of the peer has come: its NAT is open for another reason than that its mapping has lasted. `has_answered` says whether the path
    /// in use has answered since a time.
    pub(super) fn give_way(
        &mut self,
        now: Duration,
        is_controlling: bool,
        has_answered: impl Fn(Duration) -> bool,
    ) {
        self.due = None;
        let Some(began) = self.began else { return };
        if has_answered(began) {
            self.conclude(now, true);
        } else {
            // Both have begun at the same time.
            self.began = None;
            self.yields = !is_controlling;
            self.quiet_since = now;
        }
    }

    /// Begins and ends tests. Whether the path in use is to be asked.
    pub(super) fn run(&mut self, now: Duration, has_answered: impl Fn(Duration) -> bool) -> bool {
        if self.ends().is_some_and(|at| at <= now)
            && let Some(began) = self.began
        {
            self.conclude(now, has_answered(began));
        }
        let is_due = self.due.take_if(|due| *due <= now).is_some();
        if is_due {
            self.began = Some(now);
            self.begun = self.begun.wrapping_add(1);
        }
        is_due
    }
}

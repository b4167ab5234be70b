//! MTU of the path in use, where it loses the longest packets of the tunnel and no other path passes those: routes to the peer get that
//! MTU, so that the kernel answers longer packets with "packet too big" (RFC 1191, RFC 8201).
//!
//! It is searched for as in RFC 8899: by padded requests. Each goes with a short one. A length counts as lost only if none of its requests
//! was answered and all of the short ones were, so that a busy host or a network that loses packets finds nothing. A search
//! changes nothing of what else is known of the path: its requests are not among those whose answers the path owes.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_limits::doubled;
use fairlead_wire::probe::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use super::full_size::{MAX_DELAY, OVERHEAD};
use super::probe::Probe;

/// WireGuard pads packets to a multiple of this (WireGuard paper, section 5.4.6): so is each MTU.
const UNIT: u32 = 16;
/// The least MTU: what a tunnel over IPv6 has where that has its own least MTU of 1280 (RFC 8200, section 5).
const MIN_MTU: u32 = 1200;
/// Times at which the requests of one length are sent, each with a short one.
const STEP: [Duration; 3] = [Duration::ZERO, Duration::from_millis(150), Duration::from_millis(400)];
/// Time to wait for the last answer.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Time to wait after a test has found the path too narrow: by then the other paths have been asked, and used if they are better.
const SETTLING: Duration = Duration::from_secs(2);
/// The longest time that a search takes: a host that is too busy to ask and to hear in time finds nothing.
const LONGEST: Duration = Duration::from_secs(30);
/// Time between searches that find nothing. It doubles with each.
const PAUSE: Duration = Duration::from_secs(60);
const MAX_PAUSE: Duration = Duration::from_secs(3600);

/// Result of the last search, and the one that runs.
#[derive(Debug, Default)]
pub(super) struct PathMtu {
    /// The last result, of whatever path. It counts for another one that loses the longest packets until that was searched: a session that
    /// moves between two narrow paths would lose packets meanwhile.
    pub(super) found: Option<u32>,
    /// Boxed: hardly any peer has one.
    search: Option<Box<Search>>,
    /// Time at which the last search began.
    began: Option<Duration>,
    /// Searches in a row that found nothing, and when the next one may begin.
    failures: u32,
    not_before: Duration,
}

#[derive(Debug)]
struct Search {
    address: SocketAddr,
    /// MTU of the tunnel.
    full: u32,
    /// MTU that was found the last time.
    known: Option<u32>,
    /// The greatest that passes, and the least that does not, in units.
    passes: Option<u32>,
    fails: Option<u32>,
    /// The MTU that is asked for now.
    asks: u32,
    step: Step,
    is_repeated: bool,
}

/// The requests of one length.
#[derive(Debug, Default)]
struct Step {
    began: Duration,
    sent: usize,
    /// Requests that were not answered yet, each with whether it is a long one.
    pending: Vec<(TransactionId, bool)>,
    short: usize,
}

/// Answer as a search takes it.
enum Answer {
    /// The search goes on.
    Expected,
    /// The answer is to no request of the search.
    Foreign,
    /// The answer ends the search.
    Last(Outcome),
}

/// Outcome of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// This passes.
    Found(u32),
    /// The longest packets pass.
    Full,
    /// Nothing was found.
    None,
}

impl Search {
    fn new(now: Duration, address: SocketAddr, full: u32, known: Option<u32>) -> Self {
        let step = Step { began: now, ..Step::default() };
        // First that the longest are lost.
        let known = known.filter(|known| *known < full);
        Self { address, full, known, passes: None, fails: None, asks: full, step, is_repeated: false }
    }

    fn next(&self) -> Duration {
        let Step { began, sent, .. } = self.step;
        let last = STEP.last().copied().unwrap_or_default();
        began.saturating_add(STEP.get(sent).copied().unwrap_or(last.saturating_add(LAST_ANSWER)))
    }

    fn ask(&mut self, now: Duration, mtu: u32, is_repeated: bool) {
        self.asks = mtu;
        self.is_repeated = is_repeated;
        self.step = Step { began: now, ..Step::default() };
    }

    /// Takes an answer to one of its requests.
    fn handle_answer(&mut self, now: Duration, transaction: TransactionId) -> Answer {
        let mut pending = self.step.pending.iter();
        let Some(at) = pending.position(|(pending, _)| *pending == transaction) else {
            return Answer::Foreign;
        };
        let (_, is_long) = self.step.pending.swap_remove(at);
        if is_long {
            return self.passed(now).map_or(Answer::Expected, Answer::Last);
        }
        self.step.short = self.step.short.saturating_add(1);
        Answer::Expected
    }

    /// The length that was asked for passes.
    fn passed(&mut self, now: Duration) -> Option<Outcome> {
        if self.asks == self.full {
            return Some(Outcome::Full);
        }
        if self.known == Some(self.asks) {
            return Some(Outcome::Found(self.asks));
        }
        self.passes = Some(self.asks / UNIT);
        self.go_on(now)
    }

    /// Takes the end of a step that has come.
    fn ended(&mut self, now: Duration) -> Option<Outcome> {
        if self.step.short < STEP.len() {
            // It says nothing. Once more.
            if self.is_repeated {
                return Some(Outcome::None);
            }
            self.ask(now, self.asks, true);
            return None;
        }
        self.fails = Some(self.asks.div_ceil(UNIT));
        if self.known == Some(self.asks) {
            self.known = None;
        }
        self.go_on(now)
    }

    /// Asks for what was found the last time, then for the least, then for what is between.
    fn go_on(&mut self, now: Duration) -> Option<Outcome> {
        let least = MIN_MTU / UNIT;
        let fails = self.fails.unwrap_or(least);
        let next = match (self.passes, self.known) {
            (Some(passes), _) if passes.saturating_add(1) >= fails => {
                return Some(Outcome::Found(passes.saturating_mul(UNIT)));
            }
            (Some(passes), _) => passes.midpoint(fails),
            (None, Some(known)) => known / UNIT,
            (None, None) if least < fails => least,
            (None, None) => return Some(Outcome::None),
        };
        self.ask(now, next.saturating_mul(UNIT), false);
        None
    }

    /// Whether the last answer of the step has been waited for.
    fn is_ended(&mut self, now: Duration) -> bool {
        if now.saturating_sub(self.next()) > MAX_DELAY {
            // This host was suspended, or too busy to ask and to hear in time.
            self.ask(now, self.asks, self.is_repeated);
        }
        self.step.sent >= STEP.len() && self.next() <= now
    }

    /// Whether requests are due.
    fn is_due(&mut self, now: Duration) -> bool {
        let is_due = self.step.sent < STEP.len() && self.next() <= now;
        self.step.sent = self.step.sent.saturating_add(usize::from(is_due));
        is_due
    }
}

impl PathMtu {
    /// Time at which something is due next.
    pub(super) fn next(&self) -> Option<Duration> {
        self.search.as_deref().map(Search::next)
    }

    /// Whether a search runs.
    pub(super) fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// Whether a search may begin: at `lost_at` a test has found that the path in use loses the longest packets, after the last search began and
    /// long enough ago.
    pub(super) fn may_search(&self, now: Duration, lost_at: Option<Duration>) -> bool {
        let is_new = lost_at.is_some_and(|at| {
            self.began.is_none_or(|began| began < at) && now >= at.saturating_add(SETTLING)
        });
        is_new && now >= self.not_before && !self.is_searching()
    }

    /// Begins a search; `full` is the MTU of the tunnel.
    pub(super) fn start(&mut self, now: Duration, address: SocketAddr, full: u32) {
        self.began = Some(now);
        self.search = Some(Box::new(Search::new(now, address, full, self.found)));
    }

    /// Goes on with the search, if `is_narrow` says of its address that the path is still in use, works and loses the longest packets.
    pub(super) fn go_on(
        &mut self,
        now: Duration,
        is_narrow: impl FnOnce(SocketAddr) -> bool,
        random: &mut StdRng,
        probes: &mut Vec<Probe>,
    ) {
        let Some(address) = self.search.as_ref().map(|search| search.address) else { return };
        let is_over = self.began.is_some_and(|at| now.saturating_sub(at) > LONGEST);
        if is_over || !is_narrow(address) {
            self.conclude(now, Outcome::None);
            return;
        }
        let Some(search) = &mut self.search else { return };
        if search.is_ended(now)
            && let Some(outcome) = search.ended(now)
        {
            self.conclude(now, outcome);
            return;
        }
        if search.is_due(now) {
            for is_long in [false, true] {
                let transaction = TransactionId(random.random());
                search.step.pending.push((transaction, is_long));
                let length = if is_long { search.asks.saturating_add(OVERHEAD) } else { 0 };
                probes.push(Probe {
                    to: address,
                    transaction,
                    starts_round: false,
                    wants_handshake: false,
                    is_proven: true,
                    signals: false,
                    length: usize::try_from(length).unwrap_or_default(),
                });
            }
        }
    }

    /// Takes the answer to a request of the search. `None` if it was none; otherwise whether it shows that the path passes the longest packets.
    pub(super) fn handle_answer(
        &mut self,
        now: Duration,
        from: SocketAddr,
        transaction: TransactionId,
    ) -> Option<bool> {
        let search = self.search.as_mut().filter(|search| search.address == from)?;
        match search.handle_answer(now, transaction) {
            Answer::Expected => Some(false),
            Answer::Foreign => None,
            Answer::Last(outcome) => {
                self.conclude(now, outcome);
                Some(outcome == Outcome::Full)
            }
        }
    }

    fn conclude(&mut self, now: Duration, outcome: Outcome) {
        if self.search.take().is_none() {
            return;
        }
        match outcome {
            Outcome::Found(mtu) => {
                self.found = Some(mtu);
                self.failures = 0;
            }
            Outcome::Full => self.found = None,
            Outcome::None => {
                self.not_before = now.saturating_add(doubled(PAUSE, self.failures, MAX_PAUSE));
                self.failures = self.failures.saturating_add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const AT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 7);

    /// Runs a search over a path that passes MTUs up to `limit`; `lost` says of each request whether it is lost anyway.
    fn run(full: u32, limit: u32, known: Option<u32>, mut lost: impl FnMut() -> bool) -> (Outcome, u32) {
        let mut search = Search::new(Duration::ZERO, AT, full, known);
        let (mut now, mut requests) = (Duration::ZERO, 0_u32);
        loop {
            now = now.max(search.next());
            if search.is_ended(now) {
                if let Some(outcome) = search.ended(now) {
                    return (outcome, requests);
                }
            } else if search.is_due(now) {
                for is_long in [false, true] {
                    requests += 1;
                    let mut id = [0; 12];
                    id[..4].copy_from_slice(&requests.to_be_bytes());
                    let transaction = TransactionId(id);
                    search.step.pending.push((transaction, is_long));
                    if lost() || is_long && search.asks > limit {
                        continue;
                    }
                    if let Answer::Last(outcome) = search.handle_answer(now, transaction) {
                        return (outcome, requests);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_a_path_passes_is_found_with_few_requests(full in 1280_u32..1441, limit in 1100_u32..1500) {
            let (outcome, requests) = run(full, limit, None, || false);
            let expected = match limit {
                _ if limit >= full => Outcome::Full,
                _ if limit < MIN_MTU => Outcome::None,
                _ => Outcome::Found(limit / UNIT * UNIT),
            };
            prop_assert_eq!(outcome, expected);
            prop_assert!(requests <= 6 * 6, "{}", requests);
            if let Outcome::Found(mtu) = outcome {
                let again = run(full, limit, Some(mtu), || false);
                prop_assert_eq!(again.0, outcome);
                prop_assert!(again.1 <= 8, "it is only asked whether it still passes: {}", again.1);
            }
        }
    }

    #[test]
    fn a_path_that_loses_packets_of_any_length_is_hardly_ever_found_narrow() {
        let mut random = SmallRng::seed_from_u64(1);
        for (loss, most) in [(5, 5), (20, 20), (50, 50)] {
            let mut search = || run(1420, 1500, None, || random.random_range(0..100) < loss).0;
            let found = (0..1000).filter(|_| matches!(search(), Outcome::Found(_))).count();
            // Each comes after a test that has lost five long ones and no short one, and is taken back by the next.
            assert!(found <= most, "{loss} of a hundred packets are lost: {found} of 1000 searches");
        }
    }

    #[test]
    fn a_narrower_path_than_before_is_searched_anew() {
        assert_eq!(run(1420, 1300, Some(1392), || false).0, Outcome::Found(1296));
        assert_eq!(run(1420, 1420, Some(1392), || false).0, Outcome::Full);
    }
}

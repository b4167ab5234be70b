//! Whether a path carries datagrams as long as those of WireGuard: a path may lose them, or their fragments, and pass short ones,
//! and no router need say so (RFC 2923, section 2.1). They are asked for as in RFC 8899: a request is padded, and so is its answer.

use std::time::Duration;

use fairlead_wire::probe::TransactionId;

use super::attempt::{ATTEMPT, LAST_REQUEST};

/// Bytes of a WireGuard data message beside the packet in it: 16 of its header and 16 of its tag (WireGuard paper, section 5.4.6).
pub(super) const OVERHEAD: u32 = 32;
/// Index of the request of a test that goes with a short one. The length is the cause only if the short one is answered, and no long one.
const CONTROL: usize = 3;
/// Time to wait for the last answer of a test.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// A test in which something is done later than this begins anew.
pub(super) const MAX_DELAY: Duration = Duration::from_millis(500);
/// Time between tests of a path that passed the last one, and of one that did not.
const INTERVAL: Duration = Duration::from_secs(15);
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// The same while packets stay unanswered.
const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// Tests of one path, and what the last one has shown.
#[derive(Debug, Clone, Default)]
pub(super) struct FullSize {
    /// Start of the test that runs, and how many of its requests were due.
    test: Option<(Duration, usize)>,
    pending: Vec<TransactionId>,
    /// Time at which the last test began.
    tested: Option<Duration>,
    /// The last test found that only short datagrams pass.
    pub(super) is_lost: bool,
    /// Time at which a test last found that.
    pub(super) lost_at: Option<Duration>,
}

/// The requests of a test that are due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Due {
    pub(super) long: bool,
    pub(super) short: bool,
}

impl FullSize {
    fn is_due(&self, now: Duration, interval: Duration) -> bool {
        let is_old = self.tested.is_none_or(|at| now.saturating_sub(at) >= interval);
        self.test.is_none() && is_old
    }

    /// A request over the path was answered: it is time for a test if the last one is long ago.
    pub(super) fn plan(&mut self, now: Duration) {
        let interval = if self.is_lost { RETRY_INTERVAL } else { INTERVAL };
        self.start_after(now, interval);
    }

    /// Packets of the session stay unanswered: they may be the long ones.
    pub(super) fn doubt(&mut self, now: Duration) {
        self.start_after(now, MIN_INTERVAL);
    }

    fn start_after(&mut self, now: Duration, interval: Duration) {
        if self.is_due(now, interval) {
            self.start(now);
        }
    }

    fn start(&mut self, now: Duration) {
        let Self { is_lost, lost_at, .. } = *self;
        *self = Self { test: Some((now, 0)), tested: Some(now), is_lost, lost_at, ..Self::default() };
    }

    /// Time at which something is due next.
    pub(super) fn next(&self) -> Option<Duration> {
        let (began, sent) = self.test?;
        Some(ATTEMPT.get(sent).map_or_else(|| end(began), |after| began.saturating_add(*after)))
    }

    pub(super) fn add_pending(&mut self, transaction: TransactionId) {
        self.pending.push(transaction);
    }

    /// Takes the answer to any request over this path.
    pub(super) fn handle_answer(&mut self, transaction: TransactionId) {
        if self.pending.contains(&transaction) {
            self.pass();
        }
    }

    /// The path passes the longest datagrams.
    pub(super) fn pass(&mut self) {
        *self = Self { tested: self.tested, ..Self::default() };
    }

    /// Takes what is due of the test; `answered` is when the path last answered. Whether only short datagrams pass is known at its end.
    pub(super) fn take_due(&mut self, now: Duration, answered: Option<Duration>) -> Due {
        if self.next().is_some_and(|at| now.saturating_sub(at) > MAX_DELAY) {
            // This host was suspended, or too busy to ask and to hear in time.
            self.start(now);
        }
        let Some((began, sent)) = self.test else { return Due::default() };
        let due = ATTEMPT.iter().filter(|after| now >= began.saturating_add(**after)).count();
        self.test = Some((began, due));
        if now >= end(began) {
            let control = ATTEMPT.get(CONTROL).copied().unwrap_or_default();
            let tested = answered.is_some_and(|at| at >= began.saturating_add(control));
            *self = Self {
                // Without an answer to the short request this was no test.
                tested: self.tested.filter(|_| tested),
                is_lost: tested || self.is_lost,
                lost_at: if tested { Some(now) } else { self.lost_at },
                ..Self::default()
            };
            return Due::default();
        }
        Due { long: due > sent, short: sent <= CONTROL && due > CONTROL }
    }
}

fn end(began: Duration) -> Duration {
    let (last_request, _) = LAST_REQUEST;
    began.saturating_add(last_request).saturating_add(LAST_ANSWER)
}

//! Whether a path carries datagrams as long as those of WireGuard: a path may lose them, or their fragments, and pass short ones,
//! and no router need say so (RFC 2923, section 2.1). They are asked for as in RFC 8899: a request is padded, and so is its answer.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_wire::probe::TransactionId;

use super::Prober;
use super::path::{ATTEMPT, LAST_REQUEST, Path};
use super::path_mtu::PathMtu;

/// Bytes of a WireGuard data message beside the packet in it: 16 of its header and 16 of its tag (WireGuard paper, section 5.4.6).
pub(super) const OVERHEAD: u32 = 32;
/// The longest packets that are tested for: what Ethernet's 1500 bytes leave in a tunnel over IPv4. A node with jumbo frames has peers
/// without them, to which TCP sends shorter segments than to others.
const MAX_MTU: u32 = 1440;
/// Which request of a test goes with a short one. Only if that is answered, and no long one is, the length is why.
const CONTROL: usize = 3;
/// How long the last answer of a test is waited for.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// A test in which something is done later than this begins anew.
pub(super) const MAX_DELAY: Duration = Duration::from_millis(500);
/// Time between tests of a path that passed the last one, and of one that did not.
const INTERVAL: Duration = Duration::from_secs(15);
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// The same while packets stay unanswered.
const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// What is known of one path.
#[derive(Debug, Clone, Default)]
pub(super) struct FullSize {
    /// Start of the test that runs, and how many of its requests were due.
    test: Option<(Duration, usize)>,
    pending: Vec<TransactionId>,
    /// When the last test began.
    tested: Option<Duration>,
    /// The last test found that only short datagrams pass.
    pub(super) is_lost: bool,
    /// When a test last found that.
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

    fn start(&mut self, now: Duration) {
        let Self { is_lost, lost_at, .. } = *self;
        *self = Self { test: Some((now, 0)), tested: Some(now), is_lost, lost_at, ..Self::default() };
    }

    /// When something is due next.
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
            *self = Self { tested: self.tested, ..Self::default() };
        }
    }
}

fn end(began: Duration) -> Duration {
    let (last_request, _) = LAST_REQUEST;
    began.saturating_add(last_request).saturating_add(LAST_ANSWER)
}

impl Path {
    /// What goes over TCP has no length of its own.
    fn has_full_size(&self) -> bool {
        !self.is_relay() || self.is_relay_port()
    }

    /// A request over this path was answered: it is time for a test if the last one is long ago.
    pub(super) fn plan_full_size(&mut self, now: Duration) {
        let interval = if self.full_size.is_lost { RETRY_INTERVAL } else { INTERVAL };
        if self.has_full_size() && self.full_size.is_due(now, interval) {
            self.full_size.start(now);
        }
    }

    /// Takes what is due of the test. Whether only short datagrams pass is known at its end.
    pub(super) fn full_size_due(&mut self, now: Duration) -> Due {
        if self.full_size.next().is_some_and(|at| now.saturating_sub(at) > MAX_DELAY) {
            // This host was suspended, or too busy to ask and to hear in time.
            self.full_size.start(now);
        }
        let Some((began, sent)) = self.full_size.test else { return Due::default() };
        let due = ATTEMPT.iter().filter(|after| now >= began.saturating_add(**after)).count();
        self.full_size.test = Some((began, due));
        if now >= end(began) {
            let control = ATTEMPT.get(CONTROL).copied().unwrap_or_default();
            let tested = self.has_answered_since(began.saturating_add(control));
            self.full_size = FullSize {
                // Without an answer to the short request this was no test.
                tested: self.full_size.tested.filter(|_| tested),
                is_lost: tested || self.full_size.is_lost,
                lost_at: if tested { Some(now) } else { self.full_size.lost_at },
                ..FullSize::default()
            };
            return Due::default();
        }
        Due { long: due > sent, short: sent <= CONTROL && due > CONTROL }
    }
}

impl Prober {
    /// Sets the MTU of the tunnel; `None` until it is known. Tests of another length are void.
    pub(crate) fn set_mtu(&mut self, mtu: Option<u32>) {
        let length = mtu.and_then(|mtu| usize::try_from(mtu.min(MAX_MTU).saturating_add(OVERHEAD)).ok());
        if std::mem::replace(&mut self.full_length, length) != length {
            self.forget_full_size();
        }
    }

    /// The longest packets that are tested for.
    pub(super) fn full_mtu(&self) -> Option<u32> {
        u32::try_from(self.full_length?).ok()?.checked_sub(OVERHEAD)
    }

    /// A path passes the longest packets after all.
    pub(super) fn full_size_passes(&mut self, address: SocketAddr) {
        for path in self.paths.iter_mut().filter(|path| path.candidate.address == address) {
            path.full_size = FullSize { tested: path.full_size.tested, ..FullSize::default() };
        }
    }

    pub(super) fn forget_full_size(&mut self) {
        self.path_mtu = PathMtu::default();
        self.paths.iter_mut().for_each(|path| path.full_size = FullSize::default());
    }

    /// Packets of the session stay unanswered: they may be the long ones.
    pub(super) fn doubt_full_size(&mut self, now: Duration) {
        let (current, is_known) = (self.current, self.full_length.is_some());
        let mut in_use = self.paths.iter_mut().filter(|path| Some(path.candidate.address) == current);
        if let Some(path) = in_use.next().filter(|path| is_known && path.has_full_size())
            && path.full_size.is_due(now, MIN_INTERVAL)
        {
            path.full_size.start(now);
        }
    }

    /// Whether the path in use passes short datagrams only. That of an idle session is not tested, so it may have changed.
    pub(crate) fn loses_long(&self, now: Duration) -> bool {
        self.is_active(now) && self.current_path().is_some_and(|path| path.full_size.is_lost)
    }

    /// The requests of tests that are due, as addresses and lengths.
    pub(super) fn full_size_requests(&mut self, now: Duration) -> Vec<(SocketAddr, usize)> {
        let Some(length) = self.full_length else { return Vec::new() };
        let (mut requests, mut has_failed) = (Vec::new(), false);
        for path in &mut self.paths {
            let was_lost = path.full_size.is_lost;
            let due = path.full_size_due(now);
            has_failed |= path.full_size.is_lost && !was_lost && Some(path.candidate.address) == self.current;
            let lengths = [due.long.then_some(length), due.short.then_some(0)];
            requests.extend(lengths.into_iter().flatten().map(|length| (path.candidate.address, length)));
        }
        if has_failed {
            // What else works must be known before the session moves there.
            self.rounds = 0;
            self.start_round(now);
        }
        requests
    }
}

//! Roles of a node in birthday attempts, outcomes of earlier ones, and the time of the next one.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_limits::doubled;
use rand::RngExt;
use rand::rngs::StdRng;

use crate::nat::NatType;

/// Pairs of NATs between which attempts may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BirthdayPolicy {
    /// None.
    Disabled,
    /// A port-restricted NAT with a symmetric one.
    #[default]
    PortRestricted,
    /// The same, and two symmetric NATs.
    Symmetric,
}

/// Role of a node in an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BirthdaySide {
    /// Behind a symmetric NAT, as the peer is behind another one: it tries ports of the peer's NAT, and either begins.
    BothSymmetric,
    /// Behind a port-restricted NAT: it tries many ports of the peer's NAT.
    PortRestricted,
    /// Behind a symmetric NAT: it opens many ports, and begins.
    Symmetric,
}

/// The part of a node behind `own` NAT with a peer behind another one; `None` for a pair without attempts.
pub fn birthday_side(policy: BirthdayPolicy, own: NatType, peer: NatType) -> Option<BirthdaySide> {
    match (policy, own, peer) {
        (BirthdayPolicy::Disabled, ..) => None,
        (_, NatType::PortRestrictedCone, NatType::Symmetric) => Some(BirthdaySide::PortRestricted),
        (_, NatType::Symmetric, NatType::PortRestrictedCone) => Some(BirthdaySide::Symmetric),
        (BirthdayPolicy::Symmetric, NatType::Symmetric, NatType::Symmetric) => {
            Some(BirthdaySide::BothSymmetric)
        }
        _ => None,
    }
}

/// Outcome of an attempt. [`Self::name`] is the word for metrics; `Display` is for users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BirthdayOutcome {
    /// A port was found and confirmed.
    Found,
    /// All ports were tried.
    NoPortFound,
    /// This node could not open the sockets.
    NoSockets,
    /// The peer did not take part, or stopped to: it may be busy with another attempt.
    PeerSilent,
}

impl BirthdayOutcome {
    /// All of them, for metrics that name each.
    pub const ALL: [Self; 4] = [Self::Found, Self::NoPortFound, Self::NoSockets, Self::PeerSilent];

    /// The outcome as one CamelCase word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Found => "Found",
            Self::NoPortFound => "NoPortFound",
            Self::NoSockets => "NoSockets",
            Self::PeerSilent => "PeerSilent",
        }
    }
}

impl fmt::Display for BirthdayOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Found => "found a port",
            Self::NoPortFound => "found no port",
            Self::NoSockets => "could not open sockets",
            Self::PeerSilent => "the peer did not take part",
        })
    }
}

/// The attempts with one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BirthdayStatus {
    /// Outcome of the last attempt.
    pub last: BirthdayOutcome,
    /// Number of attempts in a row that found no port.
    pub attempts: u32,
    /// One runs now.
    pub is_running: bool,
    /// Time until the next one may begin; `None` if it may at any time.
    pub next: Option<Duration>,
}

/// Time to the next attempt after one that found no port, which grows four times with each; the peer is asked again sooner if
/// it did not take part.
const RETRY: Duration = Duration::from_secs(20);
const MAX_RETRY: Duration = Duration::from_secs(3600);
const SILENT_RETRY: Duration = Duration::from_secs(1);
const MAX_SILENT_RETRY: Duration = Duration::from_secs(600);
/// The same after a path was found: it was lost since.
const FOUND_RETRY: Duration = Duration::from_secs(5);
/// Time between attempts of two symmetric NATs that found no port: what failed for want of a sequence fails again.
const BOTH_SYMMETRIC_RETRY: Duration = Duration::from_secs(6 * 3600);
/// The two nodes count from different moments, at most this far apart.
const CLOCK_MARGIN: Duration = Duration::from_secs(30);

/// The attempts with one peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    pub(super) side: BirthdaySide,
    /// Between two symmetric NATs: this node chooses the port.
    pub(super) leads: bool,
    pub(super) last: Option<BirthdayOutcome>,
    /// Number of attempts in a row that found no port, and of those in which the peer did not take part.
    pub(super) attempts: u32,
    silences: u32,
    /// Endpoint of the peer that the last successful attempt found.
    pub(super) found: Option<SocketAddr>,
    /// Time at which this node may begin the next one, and from which on it takes part in one that the peer begins.
    pub(super) next: Duration,
    pub(super) accepts: Duration,
}

impl Record {
    pub(super) fn new(side: BirthdaySide, leads: bool) -> Self {
        let next = Duration::ZERO;
        let accepts = Duration::ZERO;
        Self { side, leads, last: None, attempts: 0, silences: 0, found: None, next, accepts }
    }

    /// Forgets what failed; but two symmetric NATs are never tried more often than every six hours.
    pub(super) fn network_changed(&mut self) {
        if self.side != BirthdaySide::BothSymmetric || self.last != Some(BirthdayOutcome::NoPortFound) {
            *self = Self::new(self.side, self.leads);
        }
    }

    pub(super) fn conclude(&mut self, now: Duration, outcome: BirthdayOutcome, random: &mut StdRng) {
        let pause = match outcome {
            BirthdayOutcome::Found => {
                self.attempts = 0;
                self.silences = 0;
                FOUND_RETRY
            }
            BirthdayOutcome::NoPortFound | BirthdayOutcome::NoSockets => {
                self.attempts = self.attempts.saturating_add(1);
                self.silences = 0;
                let is_both = self.side == BirthdaySide::BothSymmetric;
                if is_both {
                    BOTH_SYMMETRIC_RETRY
                } else {
                    doubled(RETRY, self.attempts.saturating_sub(1).saturating_mul(2), MAX_RETRY)
                }
            }
            BirthdayOutcome::PeerSilent => {
                self.silences = self.silences.saturating_add(1);
                doubled(SILENT_RETRY, self.silences.saturating_sub(1), MAX_SILENT_RETRY)
            }
        };
        // The node that is asked may be asked somewhat earlier: its peer counts from another moment.
        let (begins, accepts) = match self.side {
            BirthdaySide::BothSymmetric => {
                (jittered(pause, random), pause.saturating_sub(CLOCK_MARGIN).max(pause / 2))
            }
            BirthdaySide::PortRestricted => (pause / 2, pause / 2),
            BirthdaySide::Symmetric => {
                let pause = jittered(pause, random);
                (pause, pause)
            }
        };
        self.last = Some(outcome);
        self.next = now.saturating_add(begins);
        self.accepts = now.saturating_add(accepts);
    }
}

fn jittered(pause: Duration, random: &mut StdRng) -> Duration {
    pause.saturating_add(pause.mul_f64(random.random_range(0.0..0.5)))
}

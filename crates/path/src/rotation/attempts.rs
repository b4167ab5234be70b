//! Attempts at candidates since the rotation began.

use std::net::SocketAddr;
use std::time::Duration;

use crate::candidates::Candidate;

/// Reason why an endpoint is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointReason {
    /// A live session moves there: it answers probes faster, or is configured or inside this site.
    BetterPath,
    /// A birthday attempt has found it.
    BirthdayAttack,
    /// The last live session used it.
    LastGood,
    /// The candidate has just appeared, or risen above the candidate being tried.
    NewCandidate,
    /// The rotation has reached it.
    NextCandidate,
    /// The candidate answers probes, and the path of the live session stopped to.
    PathFailed,
    /// The candidate answers probes, and there is no live session.
    ProbeAnswered,
}

impl EndpointReason {
    /// All of them, for metrics that name each.
    pub const ALL: [Self; 7] = [
        Self::BetterPath,
        Self::BirthdayAttack,
        Self::LastGood,
        Self::NewCandidate,
        Self::NextCandidate,
        Self::PathFailed,
        Self::ProbeAnswered,
    ];

    /// The reason as one CamelCase word.
    pub fn name(self) -> &'static str {
        match self {
            Self::BetterPath => "BetterPath",
            Self::BirthdayAttack => "BirthdayAttack",
            Self::LastGood => "LastGood",
            Self::NewCandidate => "NewCandidate",
            Self::NextCandidate => "NextCandidate",
            Self::PathFailed => "PathFailed",
            Self::ProbeAnswered => "ProbeAnswered",
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) candidate: Candidate,
    pub(crate) reason: EndpointReason,
    pub(super) since: Duration,
    /// By way of the relay, before the first round.
    pub(super) is_before: bool,
}

/// Attempts since the rotation began.
#[derive(Debug, Clone, Default)]
pub(super) struct Attempts {
    /// The candidate being tried.
    pub(super) current: Option<Attempt>,
    /// Time at which the first attempt began.
    pub(super) began: Option<Duration>,
    /// Address to try before all others: it has just appeared.
    pub(super) urgent: Option<SocketAddr>,
    pub(super) round: u32,
    /// Addresses that were tried, with the round of the last attempt. A list: there are few, for each of thousands of peers.
    tried: Vec<(SocketAddr, u32)>,
}

impl Attempts {
    /// Notes that an address is tried in this round.
    pub(super) fn record(&mut self, address: SocketAddr) {
        match self.tried.iter_mut().find(|(tried, _)| *tried == address) {
            Some((_, round)) => *round = self.round,
            None => self.tried.push((address, self.round)),
        }
    }

    pub(super) fn contain(&self, address: SocketAddr) -> bool {
        self.tried.iter().any(|(tried, _)| *tried == address)
    }

    pub(super) fn contain_in_this_round(&self, address: SocketAddr) -> bool {
        self.tried.contains(&(address, self.round))
    }

    /// Number of addresses that were tried.
    pub(super) fn count(&self) -> usize {
        self.tried.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_counts_once_and_in_the_round_of_its_last_attempt() {
        let (mut attempts, address) = (Attempts::default(), SocketAddr::from(([192, 0, 2, 1], 7)));
        assert!(!attempts.contain(address));
        attempts.record(address);
        assert!(attempts.contain_in_this_round(address));
        attempts.round = 1;
        assert!(attempts.contain(address) && !attempts.contain_in_this_round(address));
        attempts.record(address);
        assert!(attempts.contain_in_this_round(address));
        assert_eq!(attempts.count(), 1);
    }
}

//! Why packets to a peer go by way of the relay. Pure.

use std::fmt;

use fairlead_path::{CandidateStatus, NatType, Source, StunAnswer};

use super::desired::StunAnswers;

/// Why there is no direct path to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayReason {
    /// Both nodes are behind a symmetric NAT.
    BothSymmetric,
    /// A direct path answers probes: one of the two nodes is about to move there.
    DirectAnswers,
    /// Direct paths answer probes, and lose those that are as long as packets of the tunnel.
    LongPacketsLost,
    /// None of the addresses of the peer has lately answered a probe.
    NoAnswer {
        /// How many there are.
        addresses: usize,
    },
    /// The peer has none that this node could reach.
    NoCandidates,
    /// The mesh resource asks for it.
    RelayOnly,
    /// Nothing this node sends by UDP is answered.
    UdpBlocked,
}

/// What the reason follows from.
#[derive(Clone, Copy)]
pub(super) struct Situation<'a> {
    /// `spec.relay.mode` is `always`.
    pub(super) is_relay_only: bool,
    /// Direct endpoints of the peer that are known.
    pub(super) addresses: usize,
    /// What they have answered; empty where no probes can be sent.
    pub(super) candidates: &'a [CandidateStatus],
    /// The NAT in front of this node.
    pub(super) nat: NatType,
    /// The peer publishes that its NAT is symmetric.
    pub(super) is_peer_symmetric: bool,
    /// Whether any peer is up without the relay.
    pub(super) has_direct_peer: bool,
    /// What STUN servers say.
    pub(super) stun: &'a StunAnswers,
}

impl RelayReason {
    pub(super) fn of(situation: &Situation<'_>) -> Self {
        let Situation { is_relay_only, addresses, candidates, nat, is_peer_symmetric, has_direct_peer, stun } =
            *situation;
        let is_direct = |status: &&CandidateStatus| status.candidate.source != Source::Relay;
        let direct = || candidates.iter().filter(is_direct);
        let addresses = addresses.max(direct().count());
        if is_relay_only {
            Self::RelayOnly
        } else if direct().any(|status| status.works && !status.loses_long) {
            Self::DirectAnswers
        } else if direct().any(|status| status.works) {
            Self::LongPacketsLost
        } else if !has_direct_peer && is_udp_blocked(stun) {
            Self::UdpBlocked
        } else if addresses == 0 {
            Self::NoCandidates
        } else if nat == NatType::Symmetric && is_peer_symmetric {
            Self::BothSymmetric
        } else {
            Self::NoAnswer { addresses }
        }
    }
}

/// Whether STUN servers were asked and none of them answers.
pub(super) fn is_udp_blocked(stun: &StunAnswers) -> bool {
    let mut answers = stun.iter().flatten().map(|(_, answer)| *answer).peekable();
    answers.peek().is_some() && answers.all(|answer| answer == StunAnswer::Missing)
}

impl fmt::Display for RelayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BothSymmetric => "both symmetric NAT",
            Self::DirectAnswers => "a direct path answers and is about to be used",
            Self::LongPacketsLost => "direct paths lose long packets",
            Self::NoAnswer { addresses: 1 } => "no answer from its only address",
            Self::NoAnswer { addresses } => return write!(f, "no answer from any of {addresses} addresses"),
            Self::NoCandidates => "the peer has no address that this node could reach",
            Self::RelayOnly => "spec.relay.mode is always",
            Self::UdpBlocked => "UDP blocked: no STUN server and no peer answers",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use fairlead_path::Candidate;

    use super::*;

    fn candidate(source: Source, works: bool) -> CandidateStatus {
        let address = SocketAddr::from(([203, 0, 113, 1], 51820));
        let candidate = Candidate { address, source };
        CandidateStatus { candidate, is_in_use: false, works, loses_long: false, ping: None }
    }

    fn stun(answers: &[StunAnswer]) -> StunAnswers {
        let server = |number: usize| SocketAddr::from(([192, 0, 2, number as u8], 3478));
        Some(answers.iter().enumerate().map(|(number, answer)| (server(number), *answer)).collect())
    }

    #[test]
    fn the_reason_is_the_first_that_explains_it() {
        let mapped = StunAnswer::Mapped(SocketAddr::from(([203, 0, 113, 7], 40000)));
        let (none, blocked, partly) =
            (None, stun(&[StunAnswer::Missing; 2]), stun(&[StunAnswer::Missing, mapped]));
        let silent = [candidate(Source::Host, false), candidate(Source::Relay, true)];
        let answering = [candidate(Source::Observed, true), candidate(Source::Relay, true)];
        let long_lost = answering.map(|status| CandidateStatus { loses_long: true, ..status });
        let base = Situation {
            is_relay_only: false,
            addresses: 3,
            candidates: &silent,
            nat: NatType::Symmetric,
            is_peer_symmetric: true,
            has_direct_peer: false,
            stun: &blocked,
        };
        for (situation, words) in [
            (Situation { is_relay_only: true, ..base }, "spec.relay.mode is always"),
            (Situation { candidates: &answering, ..base }, "a direct path answers and is about to be used"),
            (Situation { candidates: &long_lost, ..base }, "direct paths lose long packets"),
            (Situation { ..base }, "UDP blocked: no STUN server and no peer answers"),
            (Situation { has_direct_peer: true, ..base }, "both symmetric NAT"),
            (Situation { stun: &partly, ..base }, "both symmetric NAT"),
            (Situation { stun: &none, nat: NatType::Cone, ..base }, "no answer from any of 3 addresses"),
            (
                Situation { stun: &none, is_peer_symmetric: false, addresses: 0, ..base },
                "no answer from its only address",
            ),
            (
                Situation { stun: &none, addresses: 0, candidates: &silent[1..], ..base },
                "the peer has no address that this node could reach",
            ),
        ] {
            assert_eq!(RelayReason::of(&situation).to_string(), words);
        }
    }

    #[test]
    fn without_stun_servers_nothing_is_known_of_udp() {
        assert!(!is_udp_blocked(&None) && !is_udp_blocked(&stun(&[])));
        assert!(is_udp_blocked(&stun(&[StunAnswer::Missing])));
    }
}

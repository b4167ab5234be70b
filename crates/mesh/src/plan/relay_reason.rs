//! Reasons why packets to a peer go by way of the relay. Pure.

use std::fmt;

use fairlead_path::{
    BirthdayPolicy, BirthdaySide, BirthdayStatus, CandidateStatus, NatType, Source, StunAnswer, birthday_side,
};

use super::desired::StunAnswers;

/// Pairs of NATs that birthday attempts are for.
const BOTH_SYMMETRIC: &str = "both symmetric NAT";
const ONE_SYMMETRIC: &str = "symmetric and port-restricted NAT";

/// Reason why there is no direct path to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayReason {
    /// One node is behind a symmetric NAT and the other one behind a port-restricted NAT: result of trying many ports.
    Birthday(BirthdayStatus),
    /// One symmetric and one port-restricted NAT; the mesh resource or an annotation says that no ports are to be tried.
    BirthdayDisabled,
    /// One symmetric and one port-restricted NAT; there was no attempt yet.
    BirthdayPending,
    /// Both nodes are behind a symmetric NAT, and no ports are to be tried.
    BothSymmetric,
    /// Both nodes are behind a symmetric NAT: result of trying ports.
    BothSymmetricBirthday(BirthdayStatus),
    /// Both nodes are behind a symmetric NAT; there was no attempt yet.
    BothSymmetricPending,
    /// A direct path answers probes: one of the two nodes is about to move there.
    DirectAnswers,
    /// Direct paths answer probes, and lose those that are as long as packets of the tunnel.
    LongPacketsLost,
    /// None of the addresses of the peer has lately answered a probe.
    NoAnswer {
        /// Number of these addresses.
        addresses: usize,
    },
    /// No address of the peer is one that this node could reach.
    NoCandidates,
    /// The mesh resource asks for the relay.
    RelayOnly,
    /// Nothing this node sends by UDP is answered.
    UdpBlocked,
}

/// State of this node and a peer from which the reason follows.
#[derive(Clone, Copy)]
pub(crate) struct Situation<'a> {
    /// `spec.relay.mode` is `always`.
    pub(crate) is_relay_only: bool,
    /// Direct endpoints of the peer that are known.
    pub(crate) addresses: usize,
    /// Answers of the peer's candidates to probes; empty where no probes can be sent.
    pub(crate) candidates: &'a [CandidateStatus],
    /// The NAT in front of this node.
    pub(crate) nat: NatType,
    /// The NAT that the peer publishes.
    pub(crate) peer_nat: NatType,
    /// The part of this node in birthday attempts with the peer.
    pub(crate) birthday: Option<BirthdaySide>,
    /// Result of the birthday attempts with the peer; `None` if there was none.
    pub(crate) attempts: Option<BirthdayStatus>,
    /// Whether any peer is up without the relay.
    pub(crate) has_direct_peer: bool,
    /// Answers of STUN servers.
    pub(crate) stun: &'a StunAnswers,
}

impl RelayReason {
    pub(crate) fn of(situation: &Situation<'_>) -> Self {
        let Situation { is_relay_only, addresses, candidates, nat, peer_nat, has_direct_peer, stun, .. } =
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
        } else if nat == NatType::Symmetric && peer_nat == NatType::Symmetric {
            situation.both_symmetric_reason()
        } else if let Some(reason) = situation.birthday_reason() {
            reason
        } else {
            Self::NoAnswer { addresses }
        }
    }

    /// The reason without what changes all the time: times, counts, and whether an attempt is under way. `None` where the path
    /// is about to change.
    pub fn lasting(&self) -> Option<String> {
        match self {
            Self::DirectAnswers => None,
            Self::Birthday(BirthdayStatus { last, .. }) => {
                Some(format!("{ONE_SYMMETRIC}: the last birthday attempt: {last}"))
            }
            Self::BothSymmetricBirthday(BirthdayStatus { last, .. }) => {
                Some(format!("{BOTH_SYMMETRIC}: the last birthday attempt: {last}"))
            }
            Self::NoAnswer { .. } => Some("no answer from any of its addresses".to_owned()),
            lasting => Some(lasting.to_string()),
        }
    }
}

impl Situation<'_> {
    fn both_symmetric_reason(&self) -> RelayReason {
        match (self.birthday, self.attempts) {
            (None, _) => RelayReason::BothSymmetric,
            (Some(_), Some(attempts)) => RelayReason::BothSymmetricBirthday(attempts),
            (Some(_), None) => RelayReason::BothSymmetricPending,
        }
    }

    /// Reason why a pair with one symmetric and one port-restricted NAT has no path; `None` for another pair.
    fn birthday_reason(&self) -> Option<RelayReason> {
        birthday_side(BirthdayPolicy::default(), self.nat, self.peer_nat)?;
        Some(match (self.birthday, self.attempts) {
            (None, _) => RelayReason::BirthdayDisabled,
            (Some(_), Some(attempts)) => RelayReason::Birthday(attempts),
            (Some(_), None) => RelayReason::BirthdayPending,
        })
    }
}

/// Whether STUN servers were asked and none of them answers.
pub(crate) fn is_udp_blocked(stun: &StunAnswers) -> bool {
    let mut answers = stun.iter().flatten().map(|(_, answer)| *answer).peekable();
    answers.peek().is_some() && answers.all(|answer| answer == StunAnswer::Missing)
}

impl fmt::Display for RelayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Birthday(status) => {
                write!(f, "{ONE_SYMMETRIC}: ")?;
                return write_attempts(f, status);
            }
            Self::BirthdayDisabled => "symmetric and port-restricted NAT, and birthdayAttack is disabled",
            Self::BirthdayPending => "symmetric and port-restricted NAT: no birthday attempt without traffic",
            Self::BothSymmetric => BOTH_SYMMETRIC,
            Self::BothSymmetricBirthday(status) => {
                write!(f, "{BOTH_SYMMETRIC}: ")?;
                return write_attempts(f, status);
            }
            Self::BothSymmetricPending => "both symmetric NAT: no birthday attempt without traffic",
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

fn write_attempts(f: &mut fmt::Formatter<'_>, status: &BirthdayStatus) -> fmt::Result {
    let BirthdayStatus { last, attempts, is_running, next } = status;
    match (is_running, attempts) {
        (true, _) => return f.write_str("a birthday attempt is under way"),
        (false, 0 | 1) => write!(f, "the last birthday attempt: {last}")?,
        (false, _) => write!(f, "the last birthday attempt: {last}, {attempts} without a port in a row")?,
    }
    match next {
        Some(next) => write!(f, "; another in {} s at the earliest", next.as_secs()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use fairlead_path::{BirthdayOutcome, Candidate};

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
            peer_nat: NatType::Symmetric,
            birthday: None,
            attempts: None,
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
                Situation { stun: &none, peer_nat: NatType::Unknown, addresses: 0, ..base },
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
    fn a_pair_that_needs_a_birthday_attempt_says_what_became_of_it() {
        let (side, none) = (Some(BirthdaySide::Symmetric), None);
        let pair = Situation {
            is_relay_only: false,
            addresses: 1,
            candidates: &[],
            nat: NatType::Symmetric,
            peer_nat: NatType::PortRestrictedCone,
            birthday: side,
            attempts: None,
            has_direct_peer: true,
            stun: &none,
        };
        let status = |last, attempts, is_running, next: Option<u64>| {
            Some(BirthdayStatus { last, attempts, is_running, next: next.map(Duration::from_secs) })
        };
        let (not_found, silent) = (BirthdayOutcome::NoPortFound, BirthdayOutcome::PeerSilent);
        for (situation, words) in [
            (pair, "no birthday attempt without traffic"),
            (Situation { birthday: None, ..pair }, "birthdayAttack is disabled"),
            (Situation { attempts: status(not_found, 0, true, None), ..pair }, "attempt is under way"),
            (
                Situation { attempts: status(not_found, 2, false, Some(70)), ..pair },
                "found no port, 2 without a port in a row; another in 70 s at the earliest",
            ),
            (Situation { attempts: status(silent, 0, false, None), ..pair }, ": the peer did not take part"),
        ] {
            let said = RelayReason::of(&situation).to_string();
            assert!(said.contains(words), "{said}");
        }
    }

    /// Each other text is a write that all nodes read.
    #[test]
    fn what_lasts_of_a_reason_has_no_times_and_counts_and_fits_the_schema() {
        let birthday = |last, attempts, is_running, next: Option<u64>| {
            RelayReason::Birthday(BirthdayStatus {
                last,
                attempts,
                is_running,
                next: next.map(Duration::from_secs),
            })
        };
        let outcome = BirthdayOutcome::NoPortFound;
        let attempts = [birthday(outcome, 0, true, None), birthday(outcome, 2, false, Some(70))];
        let texts = attempts.map(|reason| reason.lasting().unwrap());
        assert_eq!(texts[0], texts[1]);
        assert!(texts[0].ends_with("the last birthday attempt: found no port"), "{}", texts[0]);
        let [one, many] = [1, 7].map(|addresses| RelayReason::NoAnswer { addresses }.lasting());
        assert_eq!(one, many);
        assert_eq!(RelayReason::DirectAnswers.lasting(), None);
        assert_eq!(RelayReason::BothSymmetric.lasting().as_deref(), Some("both symmetric NAT"));
        assert!(texts.iter().all(|text| text.len() <= 256));
    }

    #[test]
    fn two_symmetric_nats_say_what_became_of_their_attempts_where_these_are_enabled() {
        let none = None;
        let pair = Situation {
            is_relay_only: false,
            addresses: 1,
            candidates: &[],
            nat: NatType::Symmetric,
            peer_nat: NatType::Symmetric,
            birthday: Some(BirthdaySide::BothSymmetric),
            attempts: None,
            has_direct_peer: true,
            stun: &none,
        };
        let last = BirthdayOutcome::NoPortFound;
        let next = Some(Duration::from_secs(21_000));
        let failed = BirthdayStatus { last, attempts: 1, is_running: false, next };
        for (situation, words) in [
            (Situation { birthday: None, ..pair }, "both symmetric NAT"),
            (pair, "both symmetric NAT: no birthday attempt without traffic"),
            (
                Situation { attempts: Some(failed), ..pair },
                "both symmetric NAT: the last birthday attempt: found no port; another in 21000 s at the earliest",
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

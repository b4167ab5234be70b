//! Asks the relay where it sees the WireGuard port, as a STUN server (RFC 8489), and whether the NAT lets in what the relay sends
//! from a port that this node has not sent to: a NAT that does not filters by address and port (RFC 4787, section 5).
//!
//! A round ends with the answers, or after [`ROUND`]. Only a round that the relay answers from its first port says something of the
//! filtering: else the relay is away, or UDP does not pass.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::{canonical, is_reachable};
use fairlead_limits::doubled;
use fairlead_wire::stun::server::AuthenticatedRequest;
use fairlead_wire::stun::{TransactionId, binding_request, parse_response};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::datagram::Transmit;
use crate::relay_path::RelayPortRange;
use crate::stun::{ATTEMPTS, INTERVAL, MAX_DOUBLINGS, MAX_MISSED, MIN_INTERVAL, ROUND};

/// Time for which the result of a filtering test is taken for true.
const TEST_INTERVAL: Duration = Duration::from_secs(600);

/// STUN addresses of a relay, and the credentials for them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RelayStun {
    /// Address that answers every request.
    pub server: SocketAddr,
    /// Another port of the same host, from which requests with credentials are answered.
    pub other: SocketAddr,
    /// The user name.
    pub user: [u8; 8],
    /// The key of the user.
    pub key: [u8; 32],
    /// First and last of the UDP ports that it may allocate; zeros for none.
    pub relay_ports: (u16, u16),
}

impl RelayStun {
    /// The UDP ports that it may allocate.
    pub fn ports(&self) -> Option<RelayPortRange> {
        let (first, last) = self.relay_ports;
        (first > 0).then_some(RelayPortRange { ip: self.server.ip().to_canonical(), first, last })
    }
}

impl fmt::Debug for RelayStun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RelayStun");
        shown.field("server", &self.server).field("other", &self.other).finish_non_exhaustive()
    }
}

/// From whom a NAT lets packets in (RFC 4787, section 5), as far as two ports of one host can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Filtering {
    /// From addresses and ports that were sent to.
    AddressAndPortDependent,
    /// From every port of an address that was sent to, if not from all.
    PortIndependent,
}

#[derive(Debug)]
struct Round {
    began: Duration,
    /// Number of attempts so far: entries of `ATTEMPTS` that were due.
    sent: usize,
    /// The request to the first port, while its answer is missing.
    first: Option<TransactionId>,
    /// The same for an answer from the other port; `None` also where nothing is tested.
    other: Option<TransactionId>,
    is_test: bool,
}

#[derive(Debug, Default)]
pub(crate) struct FilteringTest {
    relay: Option<RelayStun>,
    round: Option<Round>,
    next_round: Duration,
    not_before: Duration,
    /// Rounds in a row without an answer.
    missed: u8,
    mapped: Option<SocketAddr>,
    filtering: Option<Filtering>,
    next_test: Duration,
    transmits: VecDeque<Transmit>,
    changed: bool,
}

impl FilteringTest {
    /// Replaces the relay. What another one said of the NAT stays true. Whether it is another one.
    pub(crate) fn set_relay(&mut self, now: Duration, relay: Option<RelayStun>) -> bool {
        if self.relay == relay {
            return false;
        }
        let is_same_host = self.relay.map(|relay| relay.server) == relay.map(|relay| relay.server);
        self.relay = relay;
        if !is_same_host {
            self.changed |= self.mapped.take().is_some();
        }
        self.restart(now);
        true
    }

    /// Links, addresses or routes changed: this may be another NAT.
    pub(crate) fn network_changed(&mut self, now: Duration) {
        self.next_test = now;
        // An answer that is missing now is that of another network.
        self.missed = MAX_MISSED;
        self.restart(now);
    }

    fn restart(&mut self, now: Duration) {
        self.round = None;
        self.next_round = now.max(self.not_before);
    }

    /// Whether the datagram was an answer to a request of this test.
    pub(crate) fn handle_datagram(&mut self, remote: SocketAddr, bytes: &[u8]) -> bool {
        let (Some(relay), Some(round)) = (self.relay, &mut self.round) else { return false };
        let Ok(response) = parse_response(bytes) else { return false };
        let remote = canonical(remote);
        let transaction = Some(response.transaction);
        if remote == relay.other && round.other == transaction {
            round.other = None;
            return true;
        }
        if remote != relay.server || round.first != transaction {
            return false;
        }
        round.first = None;
        let usable = |address: &SocketAddr| address.port() != 0 && is_reachable(address.ip());
        let mapped = response.mapped.ok().map(canonical).filter(usable);
        self.changed |= mapped != self.mapped;
        self.mapped = mapped;
        true
    }

    pub(crate) fn handle_timeout(&mut self, now: Duration, random: &mut StdRng) {
        let Some(relay) = self.relay else { return };
        if self.round.as_ref().is_some_and(|round| round.is_answered() || now >= round.end()) {
            self.conclude(now, random);
        }
        if self.round.is_none() && now >= self.next_round {
            self.not_before = now.saturating_add(MIN_INTERVAL);
            let is_test = self.filtering.is_none() || now >= self.next_test;
            let other = is_test.then(|| TransactionId(random.random()));
            let first = Some(TransactionId(random.random()));
            self.round = Some(Round { began: now, sent: 0, first, other, is_test });
        }
        self.send_due(now, &relay);
    }

    fn send_due(&mut self, now: Duration, relay: &RelayStun) {
        let Some(round) = &mut self.round else { return };
        let due = ATTEMPTS.iter().filter(|after| now >= round.began.saturating_add(**after)).count();
        if due <= round.sent {
            return;
        }
        round.sent = due;
        let first = round.first.map(|transaction| binding_request(transaction).to_vec());
        let other = round.other.map(|transaction| {
            let user = Some(relay.user);
            AuthenticatedRequest { transaction, change_port: true, user, nonce: None }.encode(&relay.key)
        });
        let transmit = |payload| Transmit { local: None, socket: None, remote: relay.server, payload };
        self.transmits.extend(first.into_iter().chain(other).map(transmit));
    }

    fn conclude(&mut self, now: Duration, random: &mut StdRng) {
        let Some(round) = self.round.take() else { return };
        if round.first.is_some() {
            self.missed = self.missed.saturating_add(1);
            if self.missed >= MAX_MISSED {
                self.changed |= self.mapped.take().is_some();
            }
        } else {
            self.missed = 0;
            if round.is_test {
                let filtering = match round.other {
                    Some(_) => Filtering::AddressAndPortDependent,
                    None => Filtering::PortIndependent,
                };
                self.changed |= self.filtering != Some(filtering);
                self.filtering = Some(filtering);
                self.next_test = now.saturating_add(TEST_INTERVAL);
            }
        }
        let doublings = u32::from(self.missed.saturating_sub(MAX_MISSED)).min(MAX_DOUBLINGS);
        let interval = doubled(random.random_range(INTERVAL), doublings, Duration::MAX);
        self.next_round = now.saturating_add(interval);
    }

    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        self.relay?;
        Some(self.round.as_ref().map_or(self.next_round, Round::next))
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// Whether an answer changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The server, and where it sees the WireGuard port.
    pub(crate) fn mapped(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.relay.map(|relay| relay.server).zip(self.mapped)
    }

    /// Result of the last test that could tell; `None` if there was none.
    pub(crate) fn filtering(&self) -> Option<Filtering> {
        self.filtering
    }
}

impl Round {
    fn is_answered(&self) -> bool {
        self.first.is_none() && self.other.is_none()
    }

    fn end(&self) -> Duration {
        self.began.saturating_add(ROUND)
    }

    fn next(&self) -> Duration {
        if self.is_answered() {
            return self.began;
        }
        self.began.saturating_add(ATTEMPTS.get(self.sent).copied().unwrap_or(ROUND))
    }
}

#[cfg(test)]
mod tests {
    use fairlead_wire::stun::server::{parse_request, success};

    use super::*;
    use crate::{Config, Event, PathAgent, StunAnswer};

    const SECOND: Duration = Duration::from_secs(1);

    fn relay() -> RelayStun {
        let address = |text: &str| text.parse().unwrap();
        RelayStun {
            server: address("203.0.113.1:3478"),
            other: address("203.0.113.1:3479"),
            user: [1; 8],
            key: [2; 32],
            relay_ports: (20_000, 20_999),
        }
    }

    /// A NAT in front of the agent: what arrives of the relay's answers.
    #[derive(Clone, Copy)]
    struct NatFilter {
        first: bool,
        other: bool,
    }

    struct Bed {
        agent: PathAgent,
        now: Duration,
        requests: usize,
        tests: usize,
    }

    impl Bed {
        fn new() -> Self {
            let mut agent = PathAgent::new(Config::default(), 7);
            agent.set_relay_stun(SECOND, Some(relay()));
            Self { agent, now: SECOND, requests: 0, tests: 0 }
        }

        fn run(&mut self, seconds: u32, filter: NatFilter) {
            let end = self.now + seconds * SECOND;
            while let Some(at) = self.agent.poll_timeout().filter(|at| *at <= end) {
                assert!(at >= self.now || self.agent.poll_timeout() == Some(at));
                self.now = self.now.max(at);
                self.agent.handle_timeout(self.now);
                while let Some(sent) = self.agent.poll_transmit() {
                    assert_eq!(sent.remote, relay().server);
                    let parsed = parse_request(&sent.payload).unwrap();
                    let mapped = success(parsed.request.transaction, "198.51.100.7:40000".parse().unwrap());
                    self.requests += 1;
                    if parsed.request.change_port {
                        assert!(parsed.is_authentic(&relay().key) && parsed.request.user == Some([1; 8]));
                        self.tests += 1;
                        if filter.other {
                            self.agent.handle_datagram(self.now, None, relay().other, &mapped);
                        }
                    } else if filter.first {
                        self.agent.handle_datagram(self.now, None, relay().server, &mapped);
                    }
                }
            }
            self.now = end;
        }

        fn has_news(&mut self) -> bool {
            std::iter::from_fn(|| self.agent.poll_event()).any(|event| event == Event::StunAnswersChanged)
        }
    }

    #[test]
    fn a_relay_is_a_stun_server_and_shows_how_the_nat_filters() {
        for (other, expected) in
            [(true, Filtering::PortIndependent), (false, Filtering::AddressAndPortDependent)]
        {
            let mut bed = Bed::new();
            bed.run(4, NatFilter { first: true, other });
            assert!(bed.has_news());
            assert_eq!(bed.agent.filtering(), Some(expected));
            let mapped = StunAnswer::Mapped("198.51.100.7:40000".parse().unwrap());
            assert_eq!(bed.agent.stun_answers(), [(relay().server, mapped)].into());
            assert_eq!(bed.tests, if other { 1 } else { 3 });
            bed.run(500, NatFilter { first: true, other });
            assert!(!bed.has_news() && bed.tests <= 3, "the same is no news, and not tested again soon");
            assert!((20..=32).contains(&bed.requests), "about every 23 s: {}", bed.requests);
        }
    }

    #[test]
    fn what_is_unknown_replaces_nothing_that_is_known() {
        let mut bed = Bed::new();
        bed.run(60, NatFilter { first: false, other: false });
        assert_eq!((bed.agent.filtering(), bed.agent.stun_answers().len()), (None, 0));
        bed.run(600, NatFilter { first: true, other: false });
        assert_eq!(bed.agent.filtering(), Some(Filtering::AddressAndPortDependent));
        bed.run(1200, NatFilter { first: false, other: false });
        assert_eq!(bed.agent.filtering(), Some(Filtering::AddressAndPortDependent));
        assert_eq!(bed.agent.stun_answers().len(), 0, "the mapping may be gone");
        bed.agent.set_relay_stun(bed.now, None);
        assert_eq!(bed.agent.filtering(), Some(Filtering::AddressAndPortDependent));
        assert_eq!(bed.agent.poll_timeout(), None);
    }

    #[test]
    fn another_network_is_tested_at_once() {
        let mut bed = Bed::new();
        bed.run(60, NatFilter { first: true, other: true });
        bed.agent.network_changed(bed.now);
        bed.run(4, NatFilter { first: true, other: false });
        assert_eq!(bed.agent.filtering(), Some(Filtering::AddressAndPortDependent));
        assert!(bed.has_news());
        // No more often than once a second, whatever the network does.
        let before = bed.requests;
        for _ in 0..10 {
            bed.agent.network_changed(bed.now);
            bed.run(0, NatFilter { first: true, other: true });
        }
        assert!(bed.requests - before <= 2, "{}", bed.requests - before);
    }

    #[test]
    fn answers_of_others_count_for_nothing() {
        let mut bed = Bed::new();
        bed.agent.handle_timeout(bed.now);
        let sent = bed.agent.poll_transmit().unwrap();
        let transaction = parse_request(&sent.payload).unwrap().request.transaction;
        let wrong = success(TransactionId([9; 12]), "198.51.100.7:1".parse().unwrap());
        let right = success(transaction, "198.51.100.7:1".parse().unwrap());
        bed.agent.handle_datagram(bed.now, None, relay().server, &wrong);
        bed.agent.handle_datagram(bed.now, None, "203.0.113.9:3478".parse().unwrap(), &right);
        bed.agent.handle_datagram(bed.now, None, relay().other, &right);
        assert_eq!((bed.agent.unknown_datagrams(), bed.agent.stun_answers().len()), (3, 0));
    }
}

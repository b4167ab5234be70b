//! One prober; its peer and the device are these tests. Two of them with a network between are in `testbed/simulation`.

use rand::SeedableRng;

use super::paths::MAX_REFLEXIVE;
use super::*;
use crate::candidates::Source;

mod birthday;
mod doubt;
mod full_size;
mod handshake;
mod idle_test;
mod ping;
mod refusals;
mod relay_port;
mod rounds;
mod signalled;

const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);

fn public(number: u8) -> SocketAddr {
    SocketAddr::from(([203, 0, 113, number], 51820))
}

fn private(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, number], 51820))
}

fn candidates(addresses: &[SocketAddr]) -> Vec<Candidate> {
    addresses.iter().map(|address| Candidate { address: *address, source: Source::Host }).collect()
}

struct Bed {
    prober: Prober,
    random: StdRng,
    now: Duration,
    traffic: u64,
}

impl Bed {
    fn new(is_controlling: bool, addresses: &[SocketAddr]) -> Self {
        let mut prober = Prober::new(is_controlling);
        prober.set_candidates(SECOND, &candidates(addresses));
        Self { prober, random: StdRng::seed_from_u64(1), now: SECOND, traffic: 0 }
    }

    fn requests(&mut self) -> Vec<(SocketAddr, TransactionId)> {
        let probes = self.prober.handle_timeout(self.now, &mut self.random);
        probes.into_iter().map(|probe| (probe.to, probe.transaction)).collect()
    }

    /// For `time`, `peer` answers what is sent to these addresses after `round_trip`; traffic flows if a session is up.
    fn run(
        &mut self,
        time: Duration,
        answering: &[SocketAddr],
        round_trip: Duration,
    ) -> Vec<(SocketAddr, EndpointReason)> {
        let mut under_way: Vec<(Duration, SocketAddr, TransactionId)> = Vec::new();
        let mut selected = Vec::new();
        let end = self.now + time;
        while self.now < end {
            let (arrived, later) = under_way.into_iter().partition(|(at, ..)| *at <= self.now);
            under_way = later;
            for (_, address, transaction) in arrived {
                assert!(self.prober.handle_answer(self.now, address, transaction));
            }
            let sent = self.requests();
            let answered = sent.into_iter().filter(|(address, _)| answering.contains(address));
            under_way.extend(answered.map(|(address, id)| (self.now + round_trip, address, id)));
            selected
                .extend(self.prober.select(self.now).map(|(candidate, reason)| (candidate.address, reason)));
            self.now += MILLISECOND;
        }
        selected
    }

    fn session(&mut self, endpoint: SocketAddr) {
        self.traffic += 10_000;
        let session =
            Session { is_up: true, endpoint: Some(endpoint), rx_bytes: self.traffic, tx_bytes: self.traffic };
        self.prober.observe(self.now, session);
    }
}

#[test]
fn a_candidate_is_asked_five_times_and_then_rests() {
    let mut bed = Bed::new(true, &[public(1)]);
    let mut times = Vec::new();
    for _ in 0..4000 {
        times.extend(bed.requests().iter().map(|_| bed.now - SECOND));
        bed.now += MILLISECOND;
    }
    assert_eq!(times, [0, 100, 200, 400, 800].map(Duration::from_millis));
    assert_eq!(bed.prober.poll_timeout(), Some(6 * SECOND));
}

#[test]
fn only_what_answers_is_selected() {
    let mut bed = Bed::new(true, &[public(1), public(2)]);
    let selected = bed.run(SECOND, &[public(2)], 20 * MILLISECOND);
    assert_eq!(selected, [(public(2), EndpointReason::ProbeAnswered)]);
}

/// An attacker who sees the request answers it from elsewhere, or spoofs its source address.
#[test]
fn an_answer_from_another_address_or_too_late_proves_nothing() {
    let mut bed = Bed::new(true, &[public(1), public(2)]);
    let requests = bed.requests();
    let of = |address| requests.iter().find(|(to, _)| *to == address).unwrap().1;
    assert!(!bed.prober.handle_answer(bed.now, public(2), of(public(1))));
    assert!(!bed.prober.handle_answer(bed.now, public(3), of(public(1))));
    assert!(!bed.prober.handle_answer(bed.now + 6 * SECOND, public(1), of(public(1))));
    assert!(bed.prober.handle_answer(bed.now, public(2), of(public(2))));
    assert!(!bed.prober.handle_answer(bed.now, public(2), of(public(2))), "an answer counts once");
}

#[test]
fn the_source_of_a_request_is_asked_but_not_used_before_it_answers() {
    let mut bed = Bed::new(true, &[public(1)]);
    bed.run(2 * SECOND, &[], MILLISECOND);
    bed.prober.handle_request(bed.now, public(9), false);
    assert_eq!(bed.prober.select(bed.now), None);
    assert_eq!(bed.requests().iter().map(|(to, _)| *to).collect::<Vec<_>>(), [public(9)]);
    let selected = bed.run(SECOND, &[public(9)], MILLISECOND);
    assert_eq!(selected, [(public(9), EndpointReason::ProbeAnswered)]);
}

#[test]
fn a_source_that_is_no_address_of_a_peer_is_not_asked() {
    let mut bed = Bed::new(true, &[public(1)]);
    for source in ["127.0.0.1:53", "169.254.169.254:80", "224.0.0.251:5353", "[fe80::1]:51820", "[::1]:51820"]
    {
        bed.prober.handle_request(bed.now, source.parse().unwrap(), false);
    }
    assert_eq!(bed.prober.paths.all.len(), 1);
}

#[test]
fn sources_of_requests_take_bounded_room() {
    let mut bed = Bed::new(true, &[public(1)]);
    for number in 2..200 {
        bed.prober.handle_request(bed.now, public(number), false);
    }
    assert_eq!(bed.prober.paths.all.len(), 1 + MAX_REFLEXIVE);
}

#[test]
fn only_the_controlling_node_moves_a_live_session() {
    for (is_controlling, expected) in
        [(true, vec![(private(1), EndpointReason::BetterPath)]), (false, vec![])]
    {
        let mut bed = Bed::new(is_controlling, &[public(1)]);
        bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
        bed.session(public(1));
        bed.prober.set_candidates(bed.now, &candidates(&[public(1), private(1)]));
        assert_eq!(bed.run(SECOND, &[public(1), private(1)], 20 * MILLISECOND), expected);
    }
}

#[test]
fn a_path_that_is_hardly_faster_is_no_reason_to_move() {
    let mut bed = Bed::new(true, &[public(1), public(2)]);
    bed.run(SECOND, &[public(1)], 30 * MILLISECOND);
    bed.session(public(1));
    bed.prober.network_changed(bed.now);
    assert_eq!(bed.run(2 * SECOND, &[public(1), public(2)], 25 * MILLISECOND), []);
    let mut selected = Vec::new();
    for _ in 0..20 {
        bed.prober.network_changed(bed.now);
        selected.extend(bed.run(100 * MILLISECOND, &[public(2)], 5 * MILLISECOND));
    }
    assert_eq!(selected, [(public(2), EndpointReason::BetterPath)]);
}

#[test]
fn a_path_that_stops_answering_is_left_within_three_seconds() {
    let mut bed = Bed::new(false, &[public(1), public(2)]);
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.session(public(1));
    assert_eq!(bed.run(10 * SECOND, &[public(1)], 20 * MILLISECOND), []);
    bed.session(public(1));
    let stopped = bed.now;
    let selected = bed.run(4 * SECOND, &[public(2)], 20 * MILLISECOND);
    assert_eq!(selected, [(public(2), EndpointReason::PathFailed)]);
    assert!(bed.prober.moves.last.unwrap() - stopped <= 3 * SECOND);
}

#[test]
fn one_lost_answer_changes_nothing() {
    let mut bed = Bed::new(true, &[public(1), public(2)]);
    bed.run(SECOND, &[public(1), public(2)], 20 * MILLISECOND);
    bed.session(public(1));
    // Checks are two seconds apart; one and its first repetition fall into this gap.
    bed.run(1200 * MILLISECOND, &[public(1)], 20 * MILLISECOND);
    bed.run(300 * MILLISECOND, &[], MILLISECOND);
    let selected = bed.run(5 * SECOND, &[public(1)], 20 * MILLISECOND);
    assert!(!selected.iter().any(|(_, reason)| *reason == EndpointReason::PathFailed), "{selected:?}");
}

#[test]
fn a_peer_that_never_answers_is_not_checked() {
    let mut bed = Bed::new(true, &[public(1)]);
    bed.run(SECOND, &[], MILLISECOND);
    bed.session(public(1));
    assert_eq!(bed.prober.checks.due, None);
    assert_eq!(bed.run(30 * SECOND, &[], MILLISECOND), []);
}

#[test]
fn of_two_families_ipv4_is_selected_and_kept() {
    let ipv6 = SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 51820));
    let mut bed = Bed::new(true, &[ipv6, public(1)]);
    let requests = bed.requests();
    for (address, id) in requests {
        let late = if address == ipv6 { 10 } else { 12 };
        assert!(bed.prober.handle_answer(bed.now + late * MILLISECOND, address, id));
    }
    let selected = bed.prober.select(bed.now + 12 * MILLISECOND).map(|(candidate, _)| candidate.address);
    assert_eq!(selected, Some(public(1)));
    bed.session(public(1));
    bed.prober.network_changed(bed.now);
    assert_eq!(bed.run(SECOND, &[ipv6, public(1)], 3 * MILLISECOND), []);
    bed.session(ipv6);
    bed.prober.network_changed(bed.now);
    let selected = bed.run(SECOND, &[ipv6, public(1)], 3 * MILLISECOND);
    assert_eq!(selected, [(public(1), EndpointReason::BetterPath)]);
}

#[test]
fn one_slow_answer_is_no_reason_to_move() {
    let mut bed = Bed::new(true, &[public(1), public(2)]);
    bed.run(SECOND, &[public(1), public(2)], 10 * MILLISECOND);
    bed.session(public(1));
    bed.run(20 * SECOND, &[public(1)], 10 * MILLISECOND);
    bed.session(public(1));
    bed.run(2 * SECOND, &[public(1)], 45 * MILLISECOND);
    bed.prober.network_changed(bed.now);
    assert_eq!(bed.run(SECOND, &[public(1), public(2)], 10 * MILLISECOND), []);
}

const RELAY: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(127, 64, 0, 1)), 40_000);

fn with_relay(addresses: &[SocketAddr], is_only: bool) -> (Option<RelayPath>, Vec<Candidate>) {
    let relay =
        RelayPath { endpoint: RELAY, is_only, handshake_timeout: 30 * SECOND, direct_retry: 120 * SECOND };
    let relayed = Candidate { address: RELAY, source: Source::Relay };
    (Some(relay), candidates(addresses).into_iter().chain([relayed]).collect())
}

fn relayed(is_controlling: bool, addresses: &[SocketAddr]) -> Bed {
    let mut bed = Bed::new(is_controlling, &[]);
    let (relay, candidates) = with_relay(addresses, false);
    bed.prober.set_relay(relay);
    bed.prober.set_candidates(bed.now, &candidates);
    bed
}

#[test]
fn the_relay_is_used_until_a_direct_path_answers_and_then_left() {
    let mut bed = relayed(true, &[public(1)]);
    let selected = bed.run(SECOND, &[RELAY], 40 * MILLISECOND);
    assert_eq!(selected, [(RELAY, EndpointReason::ProbeAnswered)]);
    bed.session(RELAY);
    assert_eq!(bed.run(20 * SECOND, &[RELAY], 40 * MILLISECOND), []);
    bed.session(RELAY);
    // The direct path is slower and better all the same: it costs the relay nothing.
    let selected = bed.run(40 * SECOND, &[RELAY, public(1)], 60 * MILLISECOND);
    assert_eq!(selected, [(public(1), EndpointReason::BetterPath)]);
}

#[test]
fn a_direct_path_that_fails_is_replaced_by_the_relay_within_three_seconds() {
    let mut bed = relayed(false, &[public(1)]);
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.session(public(1));
    bed.run(15 * SECOND, &[public(1), RELAY], 20 * MILLISECOND);
    bed.session(public(1));
    let stopped = bed.now;
    let selected = bed.run(4 * SECOND, &[RELAY], 300 * MILLISECOND);
    assert_eq!(selected, [(RELAY, EndpointReason::PathFailed)]);
    assert!(bed.prober.moves.last.unwrap() - stopped <= 3 * SECOND);
}

#[test]
fn a_request_that_comes_directly_is_returned_although_the_relay_works() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.prober.handle_request(bed.now, public(1), false);
    let selected = bed.run(SECOND, &[RELAY, public(1)], 20 * MILLISECOND);
    assert_eq!(selected, [(public(1), EndpointReason::BetterPath)]);
}

/// The peer joined the network of this node: its address was known and never answered.
#[test]
fn a_request_over_a_better_kind_of_path_is_returned_although_a_direct_one_works() {
    let mut bed = Bed::new(true, &[public(1), private(2), public(3)]);
    bed.session(public(1));
    bed.run(8 * SECOND, &[public(1)], MILLISECOND);
    for address in [private(2), public(3)] {
        bed.prober.handle_request(bed.now, address, false);
    }
    let answering = [public(1), private(2)];
    let selected = bed.run(100 * MILLISECOND, &answering, MILLISECOND);
    assert_eq!(selected, [(private(2), EndpointReason::BetterPath)]);
    assert!(bed.prober.paths.to(public(3)).unwrap().attempt.is_none());
}

#[test]
fn where_only_the_relay_may_be_used_a_direct_session_moves_to_it_and_stays() {
    let mut bed = relayed(false, &[public(1)]);
    bed.run(SECOND, &[public(1), RELAY], 20 * MILLISECOND);
    bed.session(public(1));
    let (relay, _) = with_relay(&[], true);
    bed.prober.set_relay(relay);
    bed.prober.set_candidates(bed.now, &[Candidate { address: RELAY, source: Source::Relay }]);
    bed.prober.handle_request(bed.now, public(1), false);
    let selected = bed.run(SECOND, &[public(1), RELAY], 20 * MILLISECOND);
    assert_eq!(selected.first().map(|(endpoint, _)| *endpoint), Some(RELAY));
    bed.session(RELAY);
    assert_eq!(bed.run(10 * SECOND, &[public(1), RELAY], 20 * MILLISECOND), []);
}

#[test]
fn unanswered_packets_bring_the_next_check_forward() {
    let mut bed = relayed(false, &[public(1)]);
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.session(public(1));
    bed.run(15 * SECOND, &[public(1), RELAY], 20 * MILLISECOND);
    bed.session(public(1));
    // As soon after a check as can be.
    while bed.requests().is_empty() {
        bed.now += MILLISECOND;
    }
    let selected = bed.run(2100 * MILLISECOND, &[public(1)], 20 * MILLISECOND);
    assert_eq!(selected, []);
    let stopped = bed.now;
    assert_eq!(bed.run(500 * MILLISECOND, &[RELAY], 20 * MILLISECOND), []);
    bed.prober.packets_unanswered(bed.now);
    let selected = bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    assert_eq!(selected, [(RELAY, EndpointReason::PathFailed)]);
    assert!(bed.prober.moves.last.unwrap() - stopped <= 1200 * MILLISECOND);
}

/// A stream in one direction has no answers, and nothing is wrong with its path.
#[test]
fn packets_that_need_no_answer_cost_two_checks_a_second() {
    let mut bed = Bed::new(false, &[public(1)]);
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.session(public(1));
    let (mut checks, mut selected) = (0, Vec::new());
    for _ in 0..20 {
        bed.prober.packets_unanswered(bed.now);
        let requests = bed.requests();
        checks += requests.len();
        for (to, transaction) in requests {
            bed.prober.handle_answer(bed.now + 20 * MILLISECOND, to, transaction);
        }
        selected.extend(bed.run(500 * MILLISECOND, &[public(1)], 20 * MILLISECOND));
    }
    assert!((10..=21).contains(&checks), "{checks}");
    assert_eq!(selected, []);
}

#[test]
fn a_candidate_that_comes_while_the_session_is_idle_waits_for_traffic() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.run(90 * SECOND, &[RELAY], 20 * MILLISECOND);
    let idle = bed.prober.traffic.session;
    let (_, more) = with_relay(&[public(1), public(2)], false);
    bed.prober.set_candidates(bed.now, &more);
    bed.prober.observe(bed.now, idle);
    assert_eq!(bed.requests(), []);
    bed.session(RELAY);
    let selected = bed.run(SECOND, &[RELAY, public(2)], 20 * MILLISECOND);
    assert_eq!(selected, [(public(2), EndpointReason::BetterPath)]);
}

#[test]
fn a_relay_that_comes_back_is_asked_only_where_it_is_needed() {
    for (in_use, expected) in [(RELAY, 1), (public(1), 0)] {
        let mut bed = relayed(true, &[public(1)]);
        bed.run(SECOND, &[in_use], 20 * MILLISECOND);
        bed.session(in_use);
        bed.run(SECOND, &[in_use], 20 * MILLISECOND);
        bed.prober.relay_changed(bed.now, true);
        let asked = bed.requests().into_iter().filter(|(to, _)| *to == RELAY).count();
        assert_eq!(asked, expected, "{in_use}");
    }
}

#[test]
fn each_better_kind_of_path_is_taken_at_once() {
    let mut bed = relayed(true, &[public(1), private(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    for (better, answering) in
        [(public(1), vec![RELAY, public(1)]), (private(1), vec![public(1), private(1)])]
    {
        bed.session(bed.prober.paths.current.unwrap());
        bed.prober.network_changed(bed.now);
        let selected = bed.run(SECOND, &answering, 20 * MILLISECOND);
        assert_eq!(selected, [(better, EndpointReason::BetterPath)]);
    }
}

#[test]
fn a_path_that_failed_is_replaced_by_one_that_has_answered_since() {
    let mut bed = relayed(false, &[public(1), public(2)]);
    bed.run(SECOND, &[public(1)], 20 * MILLISECOND);
    bed.session(public(1));
    bed.prober.network_changed(bed.now);
    bed.run(SECOND, &[public(1), public(2)], 20 * MILLISECOND);
    bed.session(public(1));
    // Both direct paths end; the second answered a moment ago.
    let selected = bed.run(5 * SECOND, &[RELAY], 20 * MILLISECOND);
    assert_eq!(selected, [(RELAY, EndpointReason::PathFailed)]);
}

//! When a round is tried, and when the peer is asked for one.

use super::*;

#[test]
fn a_round_of_the_peer_starts_one_here_unless_a_direct_path_works() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.prober.handle_request(bed.now, RELAY, true);
    let asked: Vec<SocketAddr> = bed.requests().into_iter().map(|(to, _)| to).collect();
    assert_eq!(asked, [public(1), RELAY]);
    bed.run(900 * MILLISECOND, &[RELAY], 20 * MILLISECOND);
    bed.prober.handle_request(bed.now, RELAY, true);
    assert_eq!(bed.requests(), [], "rounds are at least a second apart");
    // From elsewhere it is an ordinary request.
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.prober.handle_request(bed.now, public(9), true);
    assert_eq!(bed.requests().iter().map(|(to, _)| *to).collect::<Vec<_>>(), [public(9)]);
}

#[test]
fn a_round_that_the_peer_asks_for_too_early_is_put_off_not_dropped() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.prober.handle_request(bed.now, RELAY, true);
    let began = bed.now;
    let answers_to_peer = bed.prober.handle_timeout(bed.now, &mut bed.random);
    assert!(!answers_to_peer.is_empty() && answers_to_peer.iter().all(|probe| !probe.starts_round));
    // Other requests of the same attempt of the peer are not another round.
    bed.run(SECOND / 2, &[RELAY], 20 * MILLISECOND);
    bed.prober.handle_request(bed.now, RELAY, true);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    assert_eq!(bed.prober.rounds.began, Some(began));
    bed.prober.handle_request(bed.now, RELAY, true);
    let again = bed.now;
    bed.run(900 * MILLISECOND, &[RELAY], 20 * MILLISECOND);
    bed.prober.handle_request(bed.now, RELAY, true);
    let selected = bed.run(4 * SECOND, &[RELAY, public(1)], 20 * MILLISECOND);
    assert_eq!(bed.prober.rounds.began, Some(again + SECOND));
    assert_eq!(selected, [(public(1), EndpointReason::BetterPath)]);
}

/// The controlling node moves the session, and only to what has answered it.
#[test]
fn while_packets_are_relayed_a_direct_path_that_works_here_is_asked_again_for_the_peer() {
    let mut bed = relayed(false, &[public(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.prober.network_changed(bed.now);
    assert_eq!(bed.run(2 * SECOND, &[RELAY, public(1)], 20 * MILLISECOND), []);
    bed.prober.handle_request(bed.now, RELAY, true);
    assert_eq!(bed.requests().iter().map(|(to, _)| *to).collect::<Vec<_>>(), [public(1), RELAY]);
}

#[test]
fn a_round_of_the_peer_does_not_keep_this_node_from_asking_for_its_own_reason() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.prober.set_candidates(bed.now, &with_relay(&[public(2)], false).1);
    bed.prober.handle_request(bed.now, RELAY, true);
    let probes = bed.prober.handle_timeout(bed.now, &mut bed.random);
    assert!(probes.iter().any(|probe| probe.to == RELAY && probe.starts_round), "{probes:?}");
}

#[test]
fn only_requests_of_a_round_by_way_of_the_relay_ask_the_peer_for_one() {
    let mut bed = relayed(true, &[public(1)]);
    let probes = bed.prober.handle_timeout(bed.now, &mut bed.random);
    let asking: Vec<SocketAddr> =
        probes.iter().filter(|probe| probe.starts_round).map(|probe| probe.to).collect();
    assert_eq!(asking, [RELAY]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.now += 2 * SECOND;
    let checks = bed.prober.handle_timeout(bed.now, &mut bed.random);
    assert!(!checks.is_empty() && checks.iter().all(|probe| !probe.starts_round), "{checks:?}");
}

#[test]
fn a_new_candidate_asks_the_peer_to_try_its_paths_at_the_same_time() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(6 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    let (_, more) = with_relay(&[public(1), public(2)], false);
    bed.prober.set_candidates(bed.now, &more);
    let probes = bed.prober.handle_timeout(bed.now, &mut bed.random);
    assert!(probes.iter().any(|probe| probe.to == public(2)));
    assert!(probes.iter().any(|probe| probe.to == RELAY && probe.starts_round), "{probes:?}");
}

#[test]
fn a_peer_that_stays_away_gets_one_request_for_each_path() {
    let mut bed = Bed::new(true, &[public(1)]);
    let mut requests = 0;
    let mut rounds = Vec::new();
    for _ in 0..60_000 {
        let sent = bed.requests().len();
        if sent > 0 && (requests % 5 == 0 || requests >= 10) {
            rounds.push((bed.now - SECOND).as_secs());
        }
        requests += sent;
        bed.now += MILLISECOND;
    }
    // Two whole attempts, then one request a round.
    assert_eq!((requests, rounds), (13, vec![0, 5, 10, 20, 40]));
}

/// A node that was too busy for the first round has a direct path seconds later, not after half a minute.
#[test]
fn while_packets_are_relayed_rounds_begin_again_after_seconds_and_then_ever_more_rarely() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    let begin = bed.now;
    let mut rounds = Vec::new();
    for _ in 0..180 {
        bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
        bed.session(RELAY);
        let began = bed.prober.rounds.began.filter(|at| *at > begin).map(|at| (at - begin).as_secs());
        rounds.extend(began.filter(|at| rounds.last() != Some(at)));
    }
    assert_eq!(rounds, [5, 10, 20, 40, 80, 160]);
}

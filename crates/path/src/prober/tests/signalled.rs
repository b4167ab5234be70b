//! Candidates that the peer names itself.

use super::*;

fn named(numbers: &[u8]) -> Vec<Candidate> {
    let candidate = |number: &u8| Candidate { address: public(*number), source: Source::Observed };
    numbers.iter().map(candidate).collect()
}

fn paths(bed: &Bed) -> Vec<SocketAddr> {
    bed.prober.paths.iter().map(|path| path.candidate.address).collect()
}

#[test]
fn what_the_peer_names_is_asked_at_once_and_used_when_it_answers() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.prober.set_signalled(bed.now, &named(&[2]));
    let selected = bed.run(SECOND, &[RELAY, public(2)], 30 * MILLISECOND);
    assert_eq!(selected, [(public(2), EndpointReason::BetterPath)]);
    bed.session(public(2));
    // What is published names it now, and then no more: the session stays there.
    for addresses in [&[public(1), public(2)][..], &[public(1)]] {
        bed.prober.set_candidates(bed.now, &with_relay(addresses, false).1);
        bed.prober.set_signalled(bed.now, &[]);
        assert_eq!(bed.run(SECOND, &[public(2)], 30 * MILLISECOND), []);
    }
    assert!(paths(&bed).contains(&public(2)));
}

#[test]
fn only_the_last_of_what_a_peer_names_is_kept_and_not_for_long() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    bed.prober.set_signalled(bed.now, &named(&[1, 2, 3]));
    bed.prober.set_signalled(bed.now, &named(&[3, 4]));
    assert_eq!(paths(&bed), [public(1), RELAY, public(3), public(4)]);
    // Neither what is published nor how it is known changes.
    bed.prober.set_candidates(bed.now, &with_relay(&[public(1)], false).1);
    assert_eq!(paths(&bed).len(), 4);
    assert_eq!(bed.prober.paths.to(public(1)).unwrap().candidate.source, Source::Host);
    bed.now += 121 * SECOND;
    bed.session(RELAY);
    assert_eq!(paths(&bed), [public(1), RELAY]);
}

#[test]
fn a_peer_that_names_ever_other_addresses_has_eight_of_them_asked() {
    let mut bed = relayed(true, &[public(1)]);
    for round in 0..20 {
        let numbers: Vec<u8> = (0..10).map(|number| 10 + round * 10 + number).collect();
        bed.prober.set_signalled(bed.now, &named(&numbers));
        assert_eq!(paths(&bed).len(), 10, "its published one, the relay, and eight");
        assert_eq!(bed.requests().len(), if round == 0 { 10 } else { 8 });
    }
}

#[test]
fn where_only_the_relay_is_used_nothing_that_a_peer_names_is() {
    let mut bed = Bed::new(true, &[]);
    let (relay, candidates) = with_relay(&[], true);
    bed.prober.set_relay(relay);
    bed.prober.set_candidates(bed.now, &candidates);
    bed.prober.set_signalled(bed.now, &named(&[2]));
    assert_eq!(paths(&bed), [RELAY]);
}

#[test]
fn an_idle_session_waits_with_what_a_peer_names_until_there_is_traffic() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    bed.session(RELAY);
    bed.run(100 * SECOND, &[RELAY], 20 * MILLISECOND);
    bed.prober.set_signalled(bed.now, &named(&[2]));
    assert_eq!(bed.requests(), []);
    bed.session(RELAY);
    assert!(bed.requests().iter().any(|(to, _)| *to == public(2)));
}

#[test]
fn a_node_that_is_seen_elsewhere_tries_its_paths_and_tells_peers_that_the_relay_reaches() {
    let mut bed = relayed(true, &[public(1)]);
    bed.run(SECOND, &[RELAY], 20 * MILLISECOND);
    assert!(bed.prober.own_candidates_changed(bed.now));
    let probes = bed.prober.handle_timeout(bed.now, &mut bed.random);
    let signals: Vec<_> = probes.iter().map(|probe| (probe.to, probe.starts_round, probe.signals)).collect();
    assert_eq!(signals, [(public(1), false, false), (RELAY, true, true)]);
    // A direct path needs none of that, and one that stays away does not hear it.
    bed.run(SECOND, &[RELAY, public(1)], 20 * MILLISECOND);
    assert!(!bed.prober.own_candidates_changed(bed.now));
    let mut away = relayed(true, &[public(1)]);
    away.run(2 * SECOND, &[], 20 * MILLISECOND);
    assert!(!away.prober.own_candidates_changed(away.now));
}

//! When packets go over the relay as well.

use super::relay_port::{port, ports};
use super::*;

const ROUND_TRIP: Duration = Duration::from_millis(20);

/// A session over a direct path that is in use and answers, and a relay.
fn in_use(is_controlling: bool) -> Bed {
    let mut bed = relayed(is_controlling, &[public(1)]);
    bed.run(SECOND, &[RELAY, public(1)], ROUND_TRIP);
    bed.session(public(1));
    bed.run(6 * SECOND, &[RELAY, public(1)], ROUND_TRIP);
    bed.session(public(1));
    bed.run(SECOND, &[RELAY, public(1)], ROUND_TRIP);
    assert_eq!(bed.prober.also(bed.now), None);
    bed
}

/// Runs on for `time`, with answers at once, and returns in which of its milliseconds packets went both ways, first and last.
fn both_ways(bed: &mut Bed, time: Duration, answering: &[SocketAddr]) -> Option<(u128, u128)> {
    let began = bed.now;
    let mut seen: Option<(u128, u128)> = None;
    while bed.now < began + time {
        for (to, transaction) in bed.requests() {
            if answering.contains(&to) {
                bed.prober.handle_answer(bed.now, to, transaction);
            }
        }
        bed.prober.select(bed.now);
        if let Some(also) = bed.prober.also(bed.now) {
            assert_eq!(also, RELAY);
            let at = (bed.now - began).as_millis();
            seen = Some((seen.map_or(at, |(first, _)| first), at));
        }
        bed.now += MILLISECOND;
    }
    seen
}

#[test]
fn packets_go_both_ways_from_the_first_late_answer_until_the_path_was_left() {
    let mut bed = in_use(true);
    bed.prober.packets_unanswered(bed.now);
    // Late after 50 ms, missed after 200, 400 and 600, and half a second until the device goes the other way.
    let (first, last) = both_ways(&mut bed, 5 * SECOND, &[RELAY]).unwrap();
    assert_eq!((first, last), (50, 1099));
    assert_eq!(bed.prober.paths.current, Some(RELAY));
}

#[test]
fn where_the_relay_does_not_answer_either_that_ends_after_two_seconds() {
    let mut bed = in_use(true);
    // What has answered lately would be tried.
    bed.run(12 * SECOND, &[public(1)], ROUND_TRIP);
    bed.prober.packets_unanswered(bed.now);
    assert_eq!(both_ways(&mut bed, 20 * SECOND, &[]), Some((50, 2049)));
}

#[test]
fn an_answer_ends_it_at_once_and_one_in_time_prevents_it() {
    let mut bed = in_use(true);
    bed.prober.packets_unanswered(bed.now);
    assert_eq!(both_ways(&mut bed, 150 * MILLISECOND, &[]), Some((50, 149)));
    // The check is repeated after 200 ms.
    assert_eq!(both_ways(&mut bed, 10 * SECOND, &[public(1)]), Some((0, 49)));
    for _ in 0..5 {
        bed.session(public(1));
        bed.prober.packets_unanswered(bed.now);
        assert_eq!(both_ways(&mut bed, SECOND, &[public(1)]), None);
    }
}

/// A path that loses packets in one direction: this node hears its peer, which hears nothing.
#[test]
fn the_peer_that_asks_over_the_relay_makes_this_node_check_its_path_and_no_more() {
    let mut bed = in_use(false);
    bed.prober.handle_request(bed.now, RELAY, true);
    assert_eq!(bed.requests().iter().map(|(to, _)| *to).collect::<Vec<_>>(), [public(1)]);
    assert_eq!(bed.prober.also(bed.now), None);
    let (first, _) = both_ways(&mut bed, 100 * MILLISECOND, &[RELAY]).unwrap();
    assert_eq!(first, 50);
}

#[test]
fn a_path_that_has_just_answered_is_checked_for_the_peer_a_little_later() {
    let mut bed = in_use(false);
    bed.prober.packets_unanswered(bed.now);
    assert_eq!(both_ways(&mut bed, 100 * MILLISECOND, &[public(1)]), None);
    // From now on the path loses everything. It has answered 100 ms ago.
    bed.prober.handle_request(bed.now, RELAY, true);
    let (first, _) = both_ways(&mut bed, SECOND, &[RELAY]).unwrap();
    assert_eq!(first, 300 + 50);
}

#[test]
fn the_peer_is_asked_also_after_a_round_of_its_own() {
    let mut bed = in_use(true);
    bed.prober.start_joined_round(bed.now);
    bed.run(2 * SECOND, &[RELAY, public(1)], ROUND_TRIP);
    bed.session(public(1));
    bed.prober.packets_unanswered(bed.now);
    let mut asked = Vec::new();
    for _ in 0..100 {
        let probes = bed.prober.handle_timeout(bed.now, &mut bed.random);
        asked.extend(probes.into_iter().filter(|probe| probe.to == RELAY).map(|probe| probe.starts_round));
        bed.now += MILLISECOND;
    }
    assert_eq!(asked, [true]);
}

#[test]
fn a_udp_port_of_the_relay_is_doubted_as_direct_paths_are_and_its_link_is_not() {
    let mut bed = relayed(true, &[public(1)]);
    bed.prober.set_relay_ports(Some(ports()));
    bed.prober.set_relay_port(bed.now, Some(port(20_001)));
    for path in [port(20_001), RELAY] {
        bed.run(SECOND, &[RELAY, path], ROUND_TRIP);
        bed.session(path);
        bed.run(6 * SECOND, &[RELAY, path], ROUND_TRIP);
        bed.session(path);
        bed.run(SECOND, &[RELAY, path], ROUND_TRIP);
        bed.prober.packets_unanswered(bed.now);
        bed.run(100 * MILLISECOND, &[], ROUND_TRIP);
        assert_eq!(bed.prober.also(bed.now), Some(RELAY).filter(|relay| *relay != path), "{path}");
        bed.run(5 * SECOND, &[RELAY], ROUND_TRIP);
        bed.prober.set_relay_port(bed.now, None);
    }
}

#[test]
fn without_a_relay_nothing_goes_both_ways() {
    let mut bed = Bed::new(true, &[public(1)]);
    bed.run(SECOND, &[public(1)], ROUND_TRIP);
    bed.session(public(1));
    bed.run(6 * SECOND, &[public(1)], ROUND_TRIP);
    bed.session(public(1));
    bed.prober.packets_unanswered(bed.now);
    assert_eq!(both_ways(&mut bed, 5 * SECOND, &[]), None);
}

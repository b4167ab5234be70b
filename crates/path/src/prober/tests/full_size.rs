//! Paths that pass short datagrams only.

use super::*;

const LONG: usize = 1452;

/// For `time`, each of these addresses answers requests that are at most so long, at once. What was selected, and how many long
/// requests were sent.
fn run(bed: &mut Bed, time: Duration, answering: &[(SocketAddr, usize)]) -> (Vec<SocketAddr>, usize) {
    let (mut selected, mut long) = (Vec::new(), 0);
    let end = bed.now + time;
    while bed.now < end {
        for probe in bed.prober.handle_timeout(bed.now, &mut bed.random) {
            long += usize::from(probe.length == LONG);
            assert!([0, LONG].contains(&probe.length));
            if answering.iter().any(|(address, longest)| *address == probe.to && probe.length <= *longest) {
                assert!(bed.prober.handle_answer(bed.now, probe.to, probe.transaction));
            }
        }
        selected.extend(bed.prober.select(bed.now).map(|(candidate, _)| candidate.address));
        bed.now += MILLISECOND;
        if bed.prober.paths.current.is_some() && bed.now.subsec_millis() == 0 {
            bed.session(bed.prober.paths.current.unwrap());
        }
    }
    (selected, long)
}

fn with_mtu(mut bed: Bed) -> Bed {
    bed.prober.set_mtu(Some(1420));
    bed
}

#[test]
fn a_path_that_passes_long_datagrams_is_asked_for_four_a_minute() {
    let mut bed = with_mtu(relayed(true, &[public(1)]));
    let answering = [(public(1), LONG), (RELAY, LONG)];
    let (selected, long) = run(&mut bed, SECOND, &answering);
    assert_eq!((selected, long), (vec![public(1)], 1));
    assert_eq!(run(&mut bed, 13 * SECOND, &answering), (vec![], 0));
    assert_eq!(run(&mut bed, 60 * SECOND, &answering), (vec![], 4));
}

#[test]
fn a_path_that_loses_long_datagrams_is_left_for_the_relay_and_used_again_once_it_passes_them() {
    let mut bed = with_mtu(relayed(true, &[public(1)]));
    let (selected, _) = run(&mut bed, 3 * SECOND, &[(public(1), 1400), (RELAY, LONG)]);
    assert_eq!(selected, [public(1), RELAY]);
    assert!(bed.prober.candidates(bed.now)[0].loses_long);
    let (selected, _) = run(&mut bed, 300 * SECOND, &[(public(1), 1400), (RELAY, LONG)]);
    assert_eq!(selected, []);
    let (selected, _) = run(&mut bed, 300 * SECOND, &[(public(1), LONG), (RELAY, LONG)]);
    assert_eq!(selected, [public(1)]);
}

#[test]
fn of_two_direct_paths_the_one_that_passes_long_datagrams_is_used() {
    let mut bed = with_mtu(Bed::new(true, &[private(1), public(1)]));
    let (selected, _) = run(&mut bed, 10 * SECOND, &[(private(1), 1400), (public(1), LONG)]);
    assert_eq!(selected, [private(1), public(1)]);
}

/// The other path has not been asked since the session is up.
#[test]
fn other_paths_are_asked_when_long_datagrams_begin_to_be_lost() {
    let mut bed = with_mtu(Bed::new(true, &[private(1), public(1)]));
    let (selected, _) = run(&mut bed, 28 * SECOND, &[(private(1), LONG), (public(1), LONG)]);
    assert_eq!(selected, [private(1)]);
    let (selected, _) = run(&mut bed, 20 * SECOND, &[(private(1), 1400), (public(1), LONG)]);
    assert_eq!(selected, [public(1)]);
    assert!(!bed.prober.loses_long(bed.now));
}

#[test]
fn of_an_idle_session_nothing_is_said() {
    let mut bed = with_mtu(Bed::new(true, &[public(1)]));
    run(&mut bed, 10 * SECOND, &[(public(1), 1400)]);
    assert!(bed.prober.loses_long(bed.now) && !bed.prober.loses_long(bed.now + 100 * SECOND));
}

#[test]
fn without_another_path_one_that_loses_long_datagrams_stays_in_use() {
    let mut bed = with_mtu(Bed::new(true, &[public(1)]));
    assert_eq!(run(&mut bed, 100 * SECOND, &[(public(1), 1400)]).0, [public(1)]);
}

/// The path ends during the test: nothing is known of its length.
#[test]
fn a_path_that_answers_nothing_does_not_lose_long_datagrams_only() {
    let mut bed = with_mtu(relayed(true, &[public(1)]));
    let (selected, _) = run(&mut bed, 10 * MILLISECOND, &[(public(1), 1400), (RELAY, LONG)]);
    assert_eq!(selected, [public(1)]);
    let (selected, _) = run(&mut bed, 5 * SECOND, &[(RELAY, LONG)]);
    assert_eq!(selected, [RELAY]);
    assert!(!bed.prober.candidates(bed.now).iter().any(|status| status.loses_long));
}

/// A route changes: what is sent in long packets is not answered any more, and short ones are.
#[test]
fn unanswered_packets_bring_the_next_test_forward() {
    let mut bed = with_mtu(relayed(true, &[public(1)]));
    run(&mut bed, 10 * SECOND, &[(public(1), LONG), (RELAY, LONG)]);
    bed.prober.packets_unanswered(bed.now);
    let (selected, _) = run(&mut bed, 3 * SECOND, &[(public(1), 1400), (RELAY, LONG)]);
    assert_eq!(selected, [RELAY]);
}

#[test]
fn another_network_or_another_mtu_is_tested_anew() {
    let mut bed = with_mtu(relayed(true, &[public(1)]));
    run(&mut bed, 10 * SECOND, &[(public(1), 1400), (RELAY, LONG)]);
    bed.prober.network_changed(bed.now);
    let (selected, _) = run(&mut bed, SECOND, &[(public(1), LONG), (RELAY, LONG)]);
    assert_eq!(selected, [public(1)]);
    bed.prober.set_mtu(Some(1380));
    assert!(bed.prober.paths.iter().all(|path| path.full_size.next().is_none()));
    assert_eq!(bed.prober.full_length, Some(1412));
    bed.prober.set_mtu(Some(8921));
    assert_eq!(bed.prober.full_length, Some(1472), "peers may have no jumbo frames");
}

/// Requests of the test were not sent, or answers wait in the socket.
#[test]
fn a_host_that_was_suspended_during_a_test_begins_it_anew() {
    for after in [50, 1500] {
        let mut bed = with_mtu(relayed(true, &[public(1)]));
        run(&mut bed, after * MILLISECOND, &[(public(1), 1400), (RELAY, LONG)]);
        bed.now += 60 * SECOND;
        let (selected, long) = run(&mut bed, SECOND, &[(public(1), LONG), (RELAY, LONG)]);
        assert_eq!((selected, long), (vec![], 1), "{after} ms");
        assert!(!bed.prober.candidates(bed.now)[0].loses_long);
    }
}

#[test]
fn a_session_that_moves_between_narrow_paths_keeps_the_mtu_that_was_found() {
    let mut bed = with_mtu(Bed::new(true, &[public(1), public(2)]));
    let (selected, _) = run(&mut bed, 10 * SECOND, &[(public(1), 1400), (public(2), 1400)]);
    let other = if selected == [public(1)] { public(2) } else { public(1) };
    assert_eq!((selected.len(), bed.prober.route_mtu()), (1, None));
    bed.prober.path_mtu.found = Some(1360);
    assert_eq!(bed.prober.route_mtu(), Some(1360));
    let (selected, _) = run(&mut bed, 10 * SECOND, &[(other, 1400)]);
    assert_eq!((selected, bed.prober.route_mtu()), (vec![other], Some(1360)));
    // It is no longer so narrow: the next test of the path says so.
    run(&mut bed, 40 * SECOND, &[(other, LONG)]);
    assert_eq!(bed.prober.route_mtu(), None);
}

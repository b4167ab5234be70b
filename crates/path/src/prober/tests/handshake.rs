use super::*;

/// The times at which a peer at `address`, with which there is no session, was asked for a handshake; the device goes on sending
/// initiations.
fn without_session(bed: &mut Bed, address: SocketAddr, seconds: u32, answers: bool) -> Vec<Duration> {
    let mut asked = Vec::new();
    for _ in 0..seconds * 4 {
        bed.traffic += 148;
        let session = Session { endpoint: Some(address), tx_bytes: bed.traffic, ..Session::default() };
        bed.prober.observe(bed.now, session);
        bed.prober.observe_handshake(bed.now, false, bed.traffic);
        for probe in bed.prober.handle_timeout(bed.now, &mut bed.random) {
            if probe.wants_handshake {
                assert_eq!((probe.to, probe.starts_round), (address, false));
                asked.push(bed.now);
            }
            if answers && probe.to == address {
                assert!(bed.prober.handle_answer(bed.now, address, probe.transaction));
            }
        }
        bed.now += 250 * MILLISECOND;
    }
    asked
}

#[test]
fn a_peer_that_answers_requests_but_no_handshakes_is_asked_for_one_now_and_then() {
    let mut bed = Bed::new(true, &[public(1)]);
    let asked = without_session(&mut bed, public(1), 600, true);
    let (first, last) = (asked[0] - SECOND, asked[asked.len() - 1]);
    assert!(first >= 2 * SECOND && first < 3 * SECOND, "{first:?}");
    assert!((5..=15).contains(&asked.len()) && last > 300 * SECOND, "{asked:?}");
    // A handshake of the peer succeeds, and the session expires again.
    bed.prober.observe_handshake(bed.now, true, bed.traffic);
    let again = bed.now;
    let asked = without_session(&mut bed, public(1), 1000, true);
    assert!(asked.iter().filter(|at| **at - again < 320 * SECOND).count() >= 5, "{asked:?}");
}

#[test]
fn without_an_answer_or_an_initiation_of_its_own_no_node_asks_for_a_handshake() {
    let mut bed = Bed::new(true, &[public(1)]);
    assert!(without_session(&mut bed, public(1), 60, false).is_empty(), "no answer");
    let mut bed = Bed::new(true, &[public(1)]);
    bed.run(SECOND, &[public(1)], MILLISECOND);
    for _ in 0..60 {
        // A peer without keepalives to which nothing is sent.
        bed.prober.observe(bed.now, Session { endpoint: Some(public(1)), ..Session::default() });
        bed.prober.observe_handshake(bed.now, false, 0);
        assert!(
            bed.prober.handle_timeout(bed.now, &mut bed.random).iter().all(|probe| !probe.wants_handshake)
        );
        bed.run(SECOND, &[public(1)], MILLISECOND);
    }
}

#[test]
fn a_handshake_is_started_for_a_peer_that_is_there_once_in_five_seconds() {
    let mut bed = Bed::new(true, &[public(1)]);
    bed.run(SECOND, &[public(1)], MILLISECOND);
    bed.session(public(1));
    let started = (0..200).filter(|_| {
        bed.run(100 * MILLISECOND, &[public(1)], MILLISECOND);
        bed.prober.handle_handshake_request(bed.now, public(1), true)
    });
    assert_eq!(started.count(), 4, "in 20 s");
}

/// The recorder sends the request again, from the address of the peer: the peer is asked, and no more.
#[test]
fn a_recorded_request_starts_no_handshake_and_costs_two_requests_a_second() {
    let mut bed = Bed::new(true, &[public(1)]);
    bed.run(SECOND, &[public(1)], MILLISECOND);
    bed.session(public(1));
    bed.now += 100 * SECOND;
    bed.requests();
    let mut requests = 0;
    for _ in 0..100 {
        assert!(!bed.prober.handle_handshake_request(bed.now, public(1), false));
        requests += bed.requests().len();
        bed.now += 10 * MILLISECOND;
    }
    assert!(requests <= 2, "{requests}");
    assert_eq!(bed.prober.select(bed.now), None, "the session stays where it is");
}

#[test]
fn an_idle_session_with_a_peer_that_has_moved_follows_it_before_the_handshake() {
    let mut bed = Bed::new(true, &[public(1), public(2)]);
    bed.run(SECOND, &[public(1)], MILLISECOND);
    bed.session(public(1));
    bed.now += 100 * SECOND;
    let moves = [(public(2), EndpointReason::PathFailed)];
    let mut selected = Vec::new();
    let mut asked = 0;
    while !bed.prober.handle_handshake_request(bed.now, public(2), true) {
        selected.extend(bed.prober.select(bed.now).map(|(candidate, reason)| (candidate.address, reason)));
        selected.extend(bed.run(SECOND, &[public(2)], MILLISECOND));
        asked += 1;
    }
    assert_eq!((&selected[..], asked), (&moves[..], 2));
}

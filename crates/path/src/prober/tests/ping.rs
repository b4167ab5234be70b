use super::*;

fn outcomes(bed: &Bed) -> Vec<(SocketAddr, bool, Option<PingOutcome>)> {
    let all = bed.prober.candidates(bed.now);
    all.iter().map(|status| (status.candidate.address, status.is_in_use, status.ping)).collect()
}

#[test]
fn a_ping_asks_every_path_at_once_and_says_which_answered() {
    let mut bed = Bed::new(true, &[public(1), public(2), public(3)]);
    bed.run(3 * SECOND, &[public(2), public(3)], 20 * MILLISECOND);
    bed.session(public(2));
    bed.run(2 * SECOND, &[public(2), public(3)], 20 * MILLISECOND);
    assert_eq!(outcomes(&bed)[0], (public(1), false, None));

    bed.prober.ping(bed.now);
    assert_eq!(bed.prober.poll_timeout(), Some(bed.now));
    bed.run(SECOND, &[public(2)], 30 * MILLISECOND);
    let answered = Some(PingOutcome::Answered(30 * MILLISECOND));
    let expected = [
        (public(1), false, Some(PingOutcome::Unanswered)),
        (public(2), true, answered),
        (public(3), false, Some(PingOutcome::Unanswered)),
    ];
    assert_eq!(outcomes(&bed), expected);
    let works: Vec<bool> = bed.prober.candidates(bed.now).iter().map(|status| status.works).collect();
    assert_eq!(works, [false, true, true], "an earlier answer still counts");
}

#[test]
fn an_answer_to_an_earlier_request_is_none_to_the_ping() {
    let mut bed = Bed::new(true, &[public(1)]);
    let earlier = bed.requests();
    bed.now += 50 * MILLISECOND;
    bed.prober.ping(bed.now);
    assert_eq!(bed.requests().len(), 1);
    assert!(bed.prober.handle_answer(bed.now, public(1), earlier[0].1));
    assert_eq!(outcomes(&bed), [(public(1), false, Some(PingOutcome::Unanswered))]);
}

#[test]
fn what_was_never_sent_is_not_said_to_be_unanswered() {
    let mut bed = Bed::new(true, &[public(1)]);
    bed.prober.ping(bed.now);
    let requests = bed.requests();
    bed.prober.held_back(public(1));
    assert_eq!(outcomes(&bed), [(public(1), false, Some(PingOutcome::HeldBack))]);
    bed.now += 100 * MILLISECOND;
    assert_eq!(bed.requests().len(), 1);
    assert_eq!(outcomes(&bed)[0].2, Some(PingOutcome::Unanswered), "one of two was sent");
    assert!(bed.prober.handle_answer(bed.now, public(1), requests[0].1));
    assert_eq!(outcomes(&bed)[0].2, Some(PingOutcome::Answered(100 * MILLISECOND)));
}

/// The NAT of the peer may let in only what the peer has sent to.
#[test]
fn a_ping_by_way_of_the_relay_asks_the_peer_to_try_its_paths() {
    let mut bed = Bed::new(true, &[]);
    let relay = Candidate { address: private(9), source: Source::Relay };
    bed.prober.set_candidates(bed.now, &[relay]);
    bed.run(2 * SECOND, &[private(9)], MILLISECOND);
    bed.prober.rounds.is_joined = true;
    bed.prober.ping(bed.now);
    let probes = bed.prober.handle_timeout(bed.now, &mut bed.random);
    assert_eq!(
        probes.iter().map(|probe| (probe.to, probe.starts_round)).collect::<Vec<_>>(),
        [(private(9), true)]
    );
}

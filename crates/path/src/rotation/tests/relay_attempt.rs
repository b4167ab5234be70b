use super::*;

#[test]
fn a_peer_is_tried_by_way_of_its_relay_first_where_handshakes_cannot_be_forced() {
    const RELAY: &str = "127.64.0.1:7";
    let items = [(A, Source::Host), (B, Source::Observed), (RELAY, Source::Relay)];
    let config = Config { relay_attempt: Duration::from_secs(1), ..Config::default() };
    let relay = Some((end(RELAY), Duration::from_secs(10)));
    let mut bench = Bench::with(config, None, &items);
    bench.rotation.set_relay(relay);
    assert_eq!(bench.poll().as_deref(), Some(RELAY));
    bench.rotation.set_candidates(bench.now, list(&[&[(C, Source::Host)], &items[..]].concat()));
    assert_eq!(bench.poll(), None, "what is new waits, too");
    let set = bench.run(40);
    // Each candidate has the time for a handshake, and the relay its turn when its time has come.
    let expected = [(1, C), (7, A), (10, RELAY), (16, B)];
    let expected: Vec<_> = expected.into_iter().map(|(at, address)| (at, address.to_owned())).collect();
    assert_eq!(set[..4], expected);
    bench.complete_handshake();
    bench.device.endpoint = Some(end(B));
    bench.run(2);
    assert_eq!(bench.state(), State::Up);
    bench.now += Duration::from_secs(300);
    assert_eq!(bench.poll().as_deref(), Some(B), "it has worked before");

    let mut without = Bench::with(config, None, &items);
    assert_eq!(without.poll().as_deref(), Some(A), "it has no relay");
    let mut forced = Bench::with(Config::default(), None, &items);
    forced.rotation.set_relay(relay);
    assert_eq!(forced.poll().as_deref(), Some(A));
}

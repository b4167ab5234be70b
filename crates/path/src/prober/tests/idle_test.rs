use super::*;

/// A peer that sends a keepalive every 25 s, while its NAT is open for `lifetime` after all that it sends. `None` is a peer that is gone.
fn be_idle(bed: &mut Bed, time: Duration, at: SocketAddr, lifetime: Option<Duration>) -> usize {
    let (start, mut requests, mut sent) = (bed.now, 0, bed.now);
    while bed.now < start + time {
        let since = bed.now - start;
        let is_at = |interval: u64| since.as_millis().is_multiple_of(u128::from(interval) * 1000);
        if lifetime.is_some() && is_at(25) {
            bed.traffic += 32;
            sent = bed.now;
        }
        if is_at(5) {
            let (rx_bytes, tx_bytes) = (bed.traffic, bed.traffic);
            bed.prober.observe(bed.now, Session { is_up: true, endpoint: Some(at), rx_bytes, tx_bytes });
        }
        for (to, id) in bed.requests() {
            requests += 1;
            if to == at && lifetime.is_some_and(|lifetime| bed.now - sent < lifetime) {
                sent = bed.now;
                assert!(bed.prober.handle_answer(bed.now, to, id));
            }
        }
        assert_eq!(bed.prober.select(bed.now), None);
        bed.now += 100 * MILLISECOND;
    }
    requests
}

/// A session over a path that has answered and was used a minute ago.
fn unused(at: SocketAddr) -> Bed {
    let mut bed = Bed::new(true, &[at]);
    bed.run(SECOND, &[at], 20 * MILLISECOND);
    bed.session(at);
    be_idle(&mut bed, 65 * SECOND, at, Some(1000 * SECOND));
    bed
}

#[test]
fn a_nat_that_forgets_sooner_than_keepalives_come_is_found_out_in_a_few_minutes() {
    for lifetime in [5, 12, 18] {
        let mut bed = unused(public(1));
        assert!(!bed.prober.needs_keepalives());
        be_idle(&mut bed, 240 * SECOND, public(1), Some(lifetime * SECOND));
        assert!(bed.prober.needs_keepalives() && bed.prober.wants_keepalives(), "{lifetime}");
        let later = be_idle(&mut bed, 3600 * SECOND, public(1), Some(lifetime * SECOND));
        assert_eq!(later, 0, "nothing more is to be found out");
        bed.prober.network_changed(bed.now);
        assert!(!bed.prober.needs_keepalives());
    }
}

#[test]
fn a_nat_that_remembers_longer_gets_six_requests_and_rest() {
    let mut bed = unused(public(1));
    assert_eq!(be_idle(&mut bed, 900 * SECOND, public(1), Some(30 * SECOND)), 6);
    assert_eq!(be_idle(&mut bed, 3600 * SECOND, public(1), Some(30 * SECOND)), 0);
    assert!(!bed.prober.needs_keepalives());
}

#[test]
fn a_peer_that_is_gone_and_paths_inside_a_site_say_nothing() {
    let mut bed = unused(public(1));
    be_idle(&mut bed, 900 * SECOND, public(1), None);
    assert!(!bed.prober.needs_keepalives());
    let mut bed = unused(private(1));
    assert_eq!(be_idle(&mut bed, 900 * SECOND, private(1), Some(5 * SECOND)), 0);
    assert!(!bed.prober.needs_keepalives());
}

#[test]
fn the_peer_s_wish_holds_until_it_says_otherwise_and_with_a_relay_there_is_none() {
    let mut bed = unused(public(1));
    bed.prober.peer_wants_keepalives(true);
    assert!(bed.prober.needs_keepalives() && !bed.prober.wants_keepalives());
    bed.prober.network_changed(bed.now);
    assert!(bed.prober.needs_keepalives(), "the NAT of the peer's side may be the one");
    bed.prober.peer_wants_keepalives(false);
    assert!(!bed.prober.needs_keepalives());
    bed.prober.peer_wants_keepalives(true);
    let endpoint = SocketAddr::from(([127, 64, 0, 1], 20_000));
    let (handshake_timeout, direct_retry) = (30 * SECOND, 120 * SECOND);
    let relay = RelayPath { endpoint, is_only: false, handshake_timeout, direct_retry };
    bed.prober.set_relay(Some(relay));
    assert!(!bed.prober.needs_keepalives());
}

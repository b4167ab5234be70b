//! Detection of the end of a session.

use super::*;

#[test]
fn silence_is_noticed_after_a_minute() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    bench.poll();
    bench.complete_handshake();
    bench.run(1);
    let mut quiet = Bench { rotation: bench.rotation.clone(), ..bench };
    assert_eq!(quiet.run(60), []);
    assert_eq!(quiet.run(2), [(1, A.to_owned())]);
    quiet.run(10);
    assert_eq!(
        quiet.status().message,
        format!("no packet for 72 s; tried 1 endpoint, no handshake yet; trying {B} (host)")
    );
}

#[test]
fn a_peer_without_keepalives_is_up_until_an_answer_is_missing() {
    let mut phone = Bench::new(&[(A, Source::Host)]);
    phone.rotation.set_silence(None);
    phone.poll();
    phone.complete_handshake();
    assert_eq!((phone.run(86_400), phone.state()), (vec![], State::Up));
    phone.device.tx_bytes += 1000;
    assert_eq!(phone.run(14), [(14, A.to_owned())]);
    assert_eq!((phone.state(), phone.status().reason), (State::Connecting, Reason::PeerSilent));
}

#[test]
fn the_limit_of_silence_follows_the_keepalive() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.rotation.set_silence(Some(Duration::from_secs(190)));
    bench.poll();
    bench.complete_handshake();
    bench.run(1);
    assert_eq!(bench.run(189), []);
    assert_eq!(bench.run(2), [(2, A.to_owned())]);
}

#[test]
fn a_session_without_an_answer_ends_after_twelve_seconds() {
    let mut bench = Bench::new(&[(A, Source::Observed), (B, Source::Observed)]);
    bench.poll();
    bench.complete_handshake();
    bench.run(1);
    bench.device.tx_bytes += 1000;
    assert_eq!(bench.run(13), []);
    assert_eq!(
        bench.run(7),
        [(1, A.to_owned()), (7, B.to_owned())],
        "first the endpoint in use, then the next"
    );
    bench.device.rx_bytes += 92;
    bench.run(1);
    assert_eq!(bench.state(), State::Up, "one answer is enough");
}

#[test]
fn an_answer_in_time_and_our_own_keepalives_end_no_session() {
    let mut bench = Bench::new(&[(A, Source::Observed), (B, Source::Observed)]);
    bench.poll();
    bench.complete_handshake();
    bench.run(1);
    for _ in 0..10 {
        bench.device.tx_bytes += 1000;
        assert_eq!(bench.run(11), [], "a passive keepalive comes after 10 s");
        bench.device.rx_bytes += 32;
        bench.run(1);
    }
    bench.device.tx_bytes += 32;
    bench.run(25);
    bench.device.tx_bytes += 32;
    assert_eq!(bench.run(25), [], "keepalives are not answered");
    assert_eq!(bench.state(), State::Up);
}

#[test]
fn a_recreated_device_awaits_no_old_answer() {
    let mut bench = Bench::new(&[(A, Source::Observed)]);
    bench.device.tx_bytes = 9000;
    bench.poll();
    bench.complete_handshake();
    bench.run(1);
    bench.device.tx_bytes = 20_000;
    bench.run(10);
    bench.device.tx_bytes = 0;
    assert_eq!(bench.run(30), []);
    assert_eq!(bench.state(), State::Up);
}

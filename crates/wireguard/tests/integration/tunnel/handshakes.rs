//! The rules of WireGuard paper section 5, and of the kernel's `noise.c`, between two [`Tunnel`]s.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_wireguard::{Error, HandshakeLimiter, Tunnel, Verdict};

use crate::tunnel::support::{
    MILLISECOND, SECOND, Side, established, identity, public, send, shake, strangers,
};

#[test]
fn a_handshake_makes_a_session_for_both() {
    let (mut a, mut b, mut clock) = strangers();
    assert!(a.tunnel.is_empty() && b.tunnel.is_empty());
    assert!(a.seal(b"", clock.now()).is_none());

    let initiation = a.initiate(false, clock.now()).unwrap();
    let response = b.respond(&initiation, clock.advance(MILLISECOND)).unwrap();
    let finished = clock.advance(MILLISECOND);
    a.tunnel.finish(&response, finished).unwrap();
    assert!(a.tunnel.is_established(finished.instant));
    assert_eq!(a.tunnel.last_handshake(), Some(finished.wall));

    let confirmed = clock.advance(MILLISECOND);
    let opened = send(&mut a, &mut b, b"first", confirmed);
    assert_eq!((opened.inner, opened.counter, opened.is_first), (16..21, 0, true));
    assert_eq!(b.tunnel.indexes().collect::<Vec<_>>(), [opened.index]);
    assert_eq!(b.tunnel.last_handshake(), Some(confirmed.wall));
    let opened = send(&mut a, &mut b, b"second", clock.now());
    assert_eq!((opened.counter, opened.is_first), (1, false));
    let opened = send(&mut b, &mut a, b"answer", clock.now());
    assert_eq!((opened.counter, opened.is_first), (0, false));
    assert!(!a.tunnel.is_empty() && !b.tunnel.is_empty());
}

/// WireGuard paper 5.4.6: otherwise a replayed initiation would make it send.
#[test]
fn the_responder_sends_nothing_before_the_initiator_has() {
    let (mut a, mut b, mut clock) = strangers();
    shake(&mut a, &mut b, clock.now());
    assert!(b.tunnel.awaits_confirmation(clock.now().instant));
    assert!(!b.tunnel.is_established(clock.now().instant));
    assert!(b.seal(b"", clock.now()).is_none());
    assert_eq!(b.tunnel.last_handshake(), None);

    let keepalive = a.seal(b"", clock.now()).unwrap();
    let mut forged = keepalive.clone();
    forged[20] ^= 1;
    assert_eq!(b.open(&forged, clock.now()), Err(Error::Authentication));
    assert!(b.seal(b"", clock.now()).is_none());
    assert!(b.open(&keepalive, clock.advance(SECOND)).unwrap().1.is_first);
    assert!(b.seal(b"", clock.now()).is_some());
    assert!(!b.tunnel.awaits_confirmation(clock.now().instant));
}

#[test]
fn a_response_that_is_never_confirmed_leaves_the_old_session_in_use() {
    let (mut a, mut b, mut clock) = established();
    let now = clock.advance(SECOND);
    let initiation = a.initiate(true, now).unwrap();
    b.respond(&initiation, now).unwrap();
    send(&mut b, &mut a, b"old session", now);
    send(&mut a, &mut b, b"old session", now);
    assert!(!b.tunnel.awaits_confirmation(clock.advance(180 * SECOND).instant));
}

#[test]
fn an_initiation_is_answered_once() {
    let (mut a, mut b, mut clock) = strangers();
    let initiation = a.initiate(false, clock.now()).unwrap();
    b.respond(&initiation, clock.now()).unwrap();
    let indexes = b.tunnel.indexes().collect::<Vec<_>>();
    assert_eq!(b.respond(&initiation, clock.advance(SECOND)), Err(Error::OldTimestamp));
    assert_eq!(b.tunnel.indexes().collect::<Vec<_>>(), indexes);
}

/// WireGuard paper 5.1.
#[test]
fn the_greatest_time_stamp_outlives_the_sessions() {
    let (mut a, mut b, mut clock) = strangers();
    let older = a.initiate(true, clock.now()).unwrap();
    let newer = a.initiate(true, clock.advance(SECOND)).unwrap();
    b.respond(&newer, clock.now()).unwrap();
    b.tunnel.forget_sessions();
    assert_eq!(b.tunnel.indexes().count(), 0);
    assert!(!b.tunnel.is_empty());
    for replayed in [older, newer] {
        assert_eq!(b.respond(&replayed, clock.advance(SECOND)), Err(Error::OldTimestamp));
    }
    // A clock that is set back is no excuse.
    clock.start.wall -= Duration::from_secs(3_600);
    let late = a.initiate(true, clock.now()).unwrap();
    assert_eq!(b.respond(&late, clock.now()), Err(Error::OldTimestamp));
}

/// `INITIATIONS_PER_SECOND` of the kernel.
#[test]
fn fifty_initiations_of_a_peer_are_taken_per_second() {
    let (mut a, mut b, mut clock) = strangers();
    let mut taken = 0;
    for _ in 0..200 {
        let initiation = a.initiate(true, clock.now()).unwrap();
        match b.respond(&initiation, clock.now()) {
            Ok(_) => taken += 1,
            Err(error) => assert!(matches!(error, Error::TooFrequent | Error::OldTimestamp)),
        }
        clock.advance(5 * MILLISECOND);
    }
    assert!((45..=50).contains(&taken), "{taken}");
}

#[test]
fn an_initiation_of_another_peer_is_refused() {
    let (_, mut b, clock) = strangers();
    let mut other = Side::new(3, &identity(2), None);
    let initiation = other.initiate(false, clock.now()).unwrap();
    assert_eq!(b.respond(&initiation, clock.now()), Err(Error::Authentication));
    assert!(b.tunnel.is_empty());
}

#[test]
fn the_true_response_is_taken_after_forged_ones() {
    let (mut a, mut b, clock) = strangers();
    let initiation = a.initiate(false, clock.now()).unwrap();
    let response = b.respond(&initiation, clock.now()).unwrap();
    // The sender's index, bytes 4 to 7, is only covered by mac1, which is the limiter's to check.
    for position in (0..4).chain(8..60) {
        let mut forged = response;
        forged[position] ^= 1;
        assert!(a.tunnel.finish(&forged, clock.now()).is_err(), "byte {position}");
        assert!(!a.tunnel.is_established(clock.now().instant));
    }
    a.tunnel.finish(&response, clock.now()).unwrap();
    assert_eq!(a.tunnel.finish(&response, clock.now()), Err(Error::UnknownIndex), "only once");
    send(&mut a, &mut b, b"data", clock.now());
}

#[test]
fn the_answer_to_either_of_two_initiations_is_taken() {
    for answered in 0..2 {
        let (mut a, mut b, mut clock) = strangers();
        let initiations = [0; 2].map(|_| a.initiate(true, clock.advance(SECOND)).unwrap());
        assert_eq!(a.tunnel.indexes().count(), 2);
        let response = b.respond(&initiations[answered], clock.now()).unwrap();
        a.tunnel.finish(&response, clock.now()).unwrap();
        send(&mut a, &mut b, b"data", clock.now());
        send(&mut b, &mut a, b"data", clock.now());
        assert_eq!(a.tunnel.indexes().count(), 1);
    }
}

#[test]
fn of_three_initiations_the_first_is_forgotten() {
    let (mut a, mut b, mut clock) = strangers();
    let first = a.initiate(true, clock.now()).unwrap();
    let _two = [0; 2].map(|_| a.initiate(true, clock.advance(SECOND)).unwrap());
    let response = b.respond(&first, clock.now()).unwrap();
    assert_eq!(a.tunnel.finish(&response, clock.now()), Err(Error::UnknownIndex));
    assert_eq!(a.tunnel.indexes().count(), 2);
}

/// With its second answer, the responder has forgotten the session of the first.
#[test]
fn when_both_initiations_are_answered_the_second_session_wins() {
    let (mut a, mut b, mut clock) = strangers();
    let initiations = [0; 2].map(|_| a.initiate(true, clock.advance(SECOND)).unwrap());
    let responses = initiations.map(|initiation| b.respond(&initiation, clock.advance(SECOND)).unwrap());
    a.tunnel.finish(&responses[0], clock.now()).unwrap();
    let lost = a.seal(b"", clock.now()).unwrap();
    assert_eq!(b.open(&lost, clock.now()), Err(Error::UnknownIndex));
    a.tunnel.finish(&responses[1], clock.now()).unwrap();
    send(&mut a, &mut b, b"data", clock.now());
    send(&mut b, &mut a, b"data", clock.now());
}

#[test]
fn the_second_answer_may_come_after_messages_of_an_older_session() {
    let (mut a, mut b, mut clock) = established();
    let under_way = b.seal(b"old session", clock.now()).unwrap();
    let initiations = [0; 2].map(|_| a.initiate(true, clock.advance(SECOND)).unwrap());
    let responses = initiations.map(|initiation| b.respond(&initiation, clock.advance(SECOND)).unwrap());
    a.tunnel.finish(&responses[0], clock.now()).unwrap();
    a.open(&under_way, clock.now()).unwrap();
    a.tunnel.finish(&responses[1], clock.now()).unwrap();
    assert!(send(&mut a, &mut b, b"data", clock.now()).is_first);
}

/// By using the session, the peer says that it has not answered the second initiation before.
#[test]
fn a_second_initiation_is_forgotten_when_the_peer_uses_the_session_of_the_first() {
    let (mut a, mut b, mut clock) = strangers();
    let initiations = [0; 2].map(|_| a.initiate(true, clock.advance(SECOND)).unwrap());
    let response = b.respond(&initiations[0], clock.now()).unwrap();
    a.tunnel.finish(&response, clock.now()).unwrap();
    send(&mut a, &mut b, b"data", clock.now());
    assert_eq!(a.tunnel.indexes().count(), 2);
    send(&mut b, &mut a, b"data", clock.now());
    assert_eq!(a.tunnel.indexes().count(), 1);
}

#[test]
fn an_answer_to_the_first_initiation_is_late_after_one_to_the_second() {
    let (mut a, mut b, mut clock) = strangers();
    let initiations = [0; 2].map(|_| a.initiate(true, clock.advance(SECOND)).unwrap());
    let responses = initiations.map(|initiation| b.respond(&initiation, clock.advance(SECOND)).unwrap());
    a.tunnel.finish(&responses[1], clock.now()).unwrap();
    assert_eq!(a.tunnel.finish(&responses[0], clock.now()), Err(Error::UnknownIndex));
    send(&mut a, &mut b, b"data", clock.now());
}

#[test]
fn preshared_keys_have_to_be_the_same() {
    let now = crate::tunnel::support::clock();
    let (mut a, mut b) =
        (Side::new(1, &identity(2), Some([5; 32])), Side::new(2, &identity(1), Some([6; 32])));
    let initiation = a.initiate(true, now.now()).unwrap();
    let response = b.respond(&initiation, now.now()).unwrap();
    assert_eq!(a.tunnel.finish(&response, now.now()), Err(Error::Authentication));
}

#[test]
fn a_new_preshared_key_is_for_new_handshakes() {
    let (mut a, mut b, mut clock) = established();
    a.tunnel.set_preshared_key(Some([5; 32]));
    send(&mut a, &mut b, b"old session", clock.now());
    let initiation = a.initiate(true, clock.advance(SECOND)).unwrap();
    let response = b.respond(&initiation, clock.now()).unwrap();
    assert_eq!(a.tunnel.finish(&response, clock.now()), Err(Error::Authentication));
    b.tunnel.set_preshared_key(Some([5; 32]));
    shake(&mut a, &mut b, clock.advance(SECOND));
    assert!(send(&mut a, &mut b, b"new session", clock.now()).is_first);
    send(&mut b, &mut a, b"new session", clock.now());
}

#[test]
fn both_may_begin_at_once() {
    for order in 0..4 {
        let (mut a, mut b, clock) = strangers();
        let now = clock.now();
        let (of_a, of_b) = (a.initiate(true, now).unwrap(), b.initiate(true, now).unwrap());
        let to_a = b.respond(&of_a, now).unwrap();
        let to_b = a.respond(&of_b, now).unwrap();
        if order & 1 == 0 {
            a.tunnel.finish(&to_a, now).unwrap();
        }
        b.tunnel.finish(&to_b, now).unwrap();
        if order & 2 == 0 {
            send(&mut b, &mut a, b"data", now);
        }
        if order & 1 == 1 {
            // It is late, if a message of the other handshake has confirmed that one.
            assert_eq!(a.tunnel.finish(&to_a, now).is_ok(), order & 2 != 0);
        }
        for _ in 0..3 {
            send(&mut a, &mut b, b"data", now);
            send(&mut b, &mut a, b"data", now);
        }
    }
}

/// `add_new_keypair` of the kernel: the peer may send in the session of this node's response, which it got before.
#[test]
fn an_unconfirmed_session_is_kept_instead_of_the_current_one() {
    let (mut a, mut b, mut clock) = established();
    let now = clock.advance(SECOND);
    let (of_a, of_b) = (a.initiate(true, now).unwrap(), b.initiate(true, now).unwrap());
    let to_a = b.respond(&of_a, now).unwrap();
    let to_b = a.respond(&of_b, now).unwrap();
    b.tunnel.finish(&to_b, now).unwrap();
    let under_way = b.seal(b"data", now).unwrap();
    a.tunnel.finish(&to_a, now).unwrap();
    assert!(!a.tunnel.awaits_confirmation(now.instant));
    assert!(!a.open(&under_way, now).unwrap().1.is_first);
    assert_eq!(a.tunnel.indexes().count(), 2);
}

#[test]
fn messages_under_way_are_received_in_the_previous_session() {
    for swapped in [false, true] {
        let (mut a, mut b, mut clock) = established();
        if swapped {
            std::mem::swap(&mut a, &mut b);
        }
        let under_way = [a.seal(b"to b", clock.now()).unwrap(), b.seal(b"to a", clock.now()).unwrap()];
        shake(&mut a, &mut b, clock.advance(SECOND));
        assert_eq!(a.open(&under_way[1], clock.now()).unwrap().0, b"to a");
        assert!(send(&mut a, &mut b, b"", clock.now()).is_first);
        assert_eq!(b.open(&under_way[0], clock.now()).unwrap().0, b"to b");
        assert_eq!(b.open(&under_way[0], clock.now()), Err(Error::Replayed));
        send(&mut b, &mut a, b"", clock.now());
        assert_eq!((a.tunnel.indexes().count(), b.tunnel.indexes().count()), (2, 2));

        shake(&mut a, &mut b, clock.advance(SECOND));
        assert!(send(&mut a, &mut b, b"", clock.now()).is_first);
        assert_eq!(a.open(&under_way[1], clock.now()), Err(Error::UnknownIndex), "the last but one is gone");
        assert_eq!((a.tunnel.indexes().count(), b.tunnel.indexes().count()), (2, 2));
    }
}

/// The peer goes on in the session that it has, when nothing in the new one has reached it.
#[test]
fn a_session_that_the_peer_has_not_used_does_not_end_the_one_before() {
    let (mut a, mut b, mut clock) = established();
    for _ in 0..2 {
        shake(&mut a, &mut b, clock.advance(SECOND));
        a.seal(b"lost", clock.now()).unwrap();
        send(&mut b, &mut a, b"old session", clock.now());
    }
    b.initiate(true, clock.advance(SECOND))
        .map(|initiation| a.respond(&initiation, clock.now()))
        .unwrap()
        .unwrap();
    send(&mut b, &mut a, b"old session", clock.now());
}

/// The peer has confirmed the first session, so it has no use for the answer to its second initiation.
#[test]
fn a_late_second_answer_does_not_displace_the_session_in_use() {
    let (mut a, mut b, mut clock) = strangers();
    let initiations = [0; 2].map(|_| a.initiate(true, clock.advance(SECOND)).unwrap());
    let response = b.respond(&initiations[0], clock.now()).unwrap();
    a.tunnel.finish(&response, clock.now()).unwrap();
    send(&mut a, &mut b, b"data", clock.now());
    send(&mut b, &mut a, b"data", clock.now());
    b.respond(&initiations[1], clock.advance(SECOND)).unwrap();
    // The peer sends in the first session while this node begins another one.
    let initiation = b.initiate(true, clock.advance(SECOND)).unwrap();
    let response = a.respond(&initiation, clock.now()).unwrap();
    b.tunnel.finish(&response, clock.now()).unwrap();
    send(&mut a, &mut b, b"first session", clock.now());
    assert!(send(&mut b, &mut a, b"new session", clock.now()).is_first);
    send(&mut a, &mut b, b"new session", clock.now());
    assert_eq!(b.tunnel.indexes().count(), 2);
}

#[test]
fn a_session_that_is_not_confirmed_ends_when_the_peer_goes_on_without() {
    let (mut a, mut b, mut clock) = established();
    let initiation = a.initiate(true, clock.advance(SECOND)).unwrap();
    b.respond(&initiation, clock.now()).unwrap();
    send(&mut a, &mut b, b"data", clock.advance(4 * SECOND));
    assert!(b.tunnel.awaits_confirmation(clock.now().instant));
    send(&mut a, &mut b, b"data", clock.advance(SECOND));
    assert!(!b.tunnel.awaits_confirmation(clock.now().instant));
    assert_eq!(b.tunnel.indexes().count(), 1);
}

#[test]
fn a_message_is_opened_once_and_in_any_order() {
    let (mut a, mut b, clock) = established();
    let mut messages =
        (0..300_u32).map(|number| a.seal(&number.to_le_bytes(), clock.now()).unwrap()).collect::<Vec<_>>();
    messages.reverse();
    messages.swap(3, 77);
    for message in &messages {
        b.open(message, clock.now()).unwrap();
    }
    for message in &messages {
        assert_eq!(b.open(message, clock.now()), Err(Error::Replayed));
    }
}

#[test]
fn a_forged_counter_does_not_move_the_window() {
    let (mut a, mut b, clock) = established();
    let message = a.seal(b"data", clock.now()).unwrap();
    let mut forged = message.clone();
    forged[8..16].copy_from_slice(&1_000_000_u64.to_le_bytes());
    assert_eq!(b.open(&forged, clock.now()), Err(Error::Authentication));
    b.open(&message, clock.now()).unwrap();
}

#[test]
fn messages_for_other_indexes_are_refused() {
    let (mut a, mut b, clock) = established();
    let mut message = a.seal(b"data", clock.now()).unwrap();
    message[4] ^= 1;
    assert_eq!(b.open(&message, clock.now()), Err(Error::UnknownIndex));
    assert_eq!(b.open(&[], clock.now()), Err(Error::Malformed));
    assert_eq!(b.open(&message[..15], clock.now()), Err(Error::Malformed));
    assert_eq!(b.tunnel.finish(&message, clock.now()), Err(Error::UnknownIndex));
    assert_eq!(b.tunnel.finish(&[], clock.now()), Err(Error::Malformed));
}

/// WireGuard paper 5.4.7: the MACs of initiations and responses, with the limiter that checks them.
#[test]
fn a_peer_under_load_gets_its_cookie_back() {
    let (mut a, mut b, mut clock) = strangers();
    let address: SocketAddr = "192.0.2.1:51820".parse().unwrap();
    let mut limiter = HandshakeLimiter::new(&public(&b), clock.now().instant);
    let initiation = a.initiate(true, clock.now()).unwrap();
    let reply = (0..10_000)
        .find_map(|_| match limiter.check(address, &initiation, clock.now().instant, &mut b.random) {
            Verdict::Cookie(reply) => Some(reply),
            Verdict::Accept => None,
            Verdict::Refuse => panic!("mac1 is right"),
        })
        .expect("there is a limit");
    let mut forged = reply;
    forged[40] ^= 1;
    assert!(a.tunnel.receive_cookie(&forged, clock.now().instant).is_err());
    a.tunnel.receive_cookie(&reply, clock.now().instant).unwrap();
    a.tunnel.forget_sessions();
    assert!(!a.tunnel.is_empty(), "it has a cookie");

    let now = clock.advance(20 * MILLISECOND);
    let initiation = a.initiate(true, now).unwrap();
    assert!(matches!(limiter.check(address, &initiation, now.instant, &mut b.random), Verdict::Accept));
    let response = b.respond(&initiation, now).unwrap();
    let mut limiter = HandshakeLimiter::new(&public(&a), now.instant);
    assert!(matches!(limiter.check(address, &response, now.instant, &mut a.random), Verdict::Accept));
}

#[test]
fn a_peer_of_low_order_is_not_called() {
    let peer = fairlead_keys::PublicKey([0; 32]);
    let (a, _, clock) = strangers();
    let mut tunnel = Tunnel::new(a.identity, peer, None);
    assert!(tunnel.initiate(true, 1, clock.now(), &mut crate::tunnel::support::Seeded(1)).is_none());
    assert_eq!(tunnel.poll_timeout(), None);
    assert!(tunnel.is_empty());
}

#[test]
fn a_tunnel_can_go_to_another_thread_and_shows_no_key() {
    fn is_shareable<T: Send + Sync>(_: &T) {}
    let (a, _, _) = established();
    is_shareable(&a.tunnel);
    let shown = format!("{:?}", Tunnel::new(a.identity, identity(9).public(), Some([0xab; 32])));
    assert!(!shown.contains("171"), "{shown}");
}

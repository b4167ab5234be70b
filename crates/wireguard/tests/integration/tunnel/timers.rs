//! The rules of WireGuard paper section 6, and of the kernel's `timers.c`, with a clock that only tests move.

use std::time::Duration;

use fairlead_wireguard::{Due, Error};

use crate::tunnel::support::{MILLISECOND, SECOND, established, send, shake, strangers};

/// `REKEY_TIMEOUT_JITTER_MAX_JIFFIES`.
const MAX_JITTER: Duration = Duration::from_millis(333);

fn is_about(duration: Duration, expected: Duration) -> bool {
    (expected..=expected + MAX_JITTER).contains(&duration)
}

#[test]
fn an_initiation_is_repeated_every_five_seconds_for_ninety() {
    let (mut a, _, mut clock) = strangers();
    a.initiate(false, clock.now()).unwrap();
    let mut gaps = Vec::new();
    let gave_up = loop {
        let before = clock.elapsed;
        match a.wait(&mut clock) {
            (at, due) if due == [Due::Handshake] => {
                gaps.push(at - before);
                a.initiate(true, clock.now()).unwrap();
            }
            (at, due) => {
                assert_eq!(due, [Due::GaveUp]);
                break at;
            }
        }
    };
    assert_eq!(gave_up, 90 * SECOND);
    assert!(gaps.iter().all(|gap| is_about(*gap, 5 * SECOND)), "{gaps:?}");
    assert!((16..=17).contains(&gaps.len()), "{gaps:?}");
    assert!(gaps.windows(2).any(|gaps| gaps[0] != gaps[1]), "jitter differs: {gaps:?}");

    // Only the erasing of what is left remains.
    assert_eq!(a.wait(&mut clock), (90 * SECOND + 540 * SECOND, vec![Due::Expired]));
    assert_eq!(a.tunnel.poll_timeout(), None);
    assert!(a.tunnel.is_empty());
}

#[test]
fn an_answer_is_still_taken_after_giving_up() {
    let (mut a, mut b, mut clock) = strangers();
    let initiation = a.initiate(false, clock.now()).unwrap();
    assert!(a.due(clock.set(90 * SECOND)).contains(&Due::GaveUp));
    let response = b.respond(&initiation, clock.now()).unwrap();
    a.tunnel.finish(&response, clock.now()).unwrap();
    send(&mut a, &mut b, b"data", clock.now());
}

#[test]
fn there_is_one_initiation_in_five_seconds_unless_another_is_demanded() {
    let (mut a, _, mut clock) = strangers();
    assert!(a.initiate(false, clock.now()).is_some());
    assert!(a.initiate(false, clock.set(5 * SECOND - MILLISECOND)).is_none());
    assert!(a.initiate(true, clock.now()).is_some());
    assert!(a.initiate(false, clock.advance(5 * SECOND - MILLISECOND)).is_none());
    assert!(a.initiate(false, clock.advance(MILLISECOND)).is_some());
}

/// WireGuard paper 6.4: "if a packet is explicitly queued up to be sent, then this timer is reset".
#[test]
fn a_packet_begins_the_ninety_seconds_anew() {
    let (mut a, _, mut clock) = strangers();
    a.initiate(false, clock.now());
    assert_eq!(a.due(clock.set(60 * SECOND)), [Due::Handshake]);
    a.initiate(true, clock.now());
    assert!(a.initiate(false, clock.set(61 * SECOND)).is_none(), "the packet waits");
    loop {
        let (at, due) = a.wait(&mut clock);
        if due == [Due::GaveUp] {
            assert_eq!(at, 61 * SECOND + 90 * SECOND);
            break;
        }
        assert_eq!(due, [Due::Handshake]);
        a.initiate(true, clock.now());
    }
}

#[test]
fn a_handshake_that_could_not_be_sent_is_asked_for_again() {
    let (mut a, _, mut clock) = strangers();
    a.initiate(false, clock.now());
    let first = a.wait(&mut clock);
    assert_eq!(first.1, [Due::Handshake]);
    let second = a.wait(&mut clock);
    assert_eq!(second.1, [Due::Handshake]);
    assert!(is_about(second.0 - first.0, 5 * SECOND));
}

#[test]
fn a_response_ends_the_repetitions_and_asks_for_a_confirmation() {
    let (mut a, mut b, clock) = strangers();
    shake(&mut a, &mut b, clock.now());
    assert_eq!(a.tunnel.poll_timeout(), Some(clock.now().instant));
    assert_eq!(a.due(clock.now()), [Due::Keepalive]);

    let (mut a, mut b, mut clock) = strangers();
    shake(&mut a, &mut b, clock.now());
    a.seal(b"a packet that waited", clock.now());
    assert_eq!(a.due(clock.now()), [], "it confirms the session, too");
    assert_eq!(a.due(clock.advance(14 * SECOND)), []);
}

#[test]
fn the_session_of_the_peer_ends_the_repetitions_as_well() {
    let (mut a, mut b, mut clock) = strangers();
    a.initiate(false, clock.now()).unwrap();
    shake(&mut b, &mut a, clock.advance(SECOND));
    send(&mut b, &mut a, b"", clock.now());
    assert_eq!(a.wait(&mut clock), (541 * SECOND, vec![Due::Expired]));
}

/// WireGuard paper 6.5.
#[test]
fn data_is_answered_with_a_keepalive_after_ten_seconds() {
    let (mut a, mut b, mut clock) = established();
    send(&mut a, &mut b, b"data", clock.set(SECOND));
    send(&mut a, &mut b, b"more data does not delay it", clock.set(8 * SECOND));
    assert_eq!(b.due(clock.set(11 * SECOND - MILLISECOND)), []);
    assert_eq!(b.wait(&mut clock), (11 * SECOND, vec![Due::Keepalive]));
    send(&mut b, &mut a, b"", clock.now());
    // A keepalive is not answered.
    for side in [&mut a, &mut b] {
        assert_eq!(side.wait(&mut clock), (540 * SECOND, vec![Due::Expired]));
    }
}

#[test]
fn whatever_is_sent_saves_the_keepalive() {
    for sent in [&b"data"[..], b"", b"initiation", b"response"] {
        let (mut a, mut b, mut clock) = established();
        send(&mut a, &mut b, b"data", clock.set(SECOND));
        let now = clock.set(6 * SECOND);
        match sent {
            b"initiation" => drop(b.initiate(false, now)),
            b"response" => {
                let initiation = a.initiate(true, now).unwrap();
                b.respond(&initiation, now).unwrap();
            }
            _ => drop(b.seal(sent, now)),
        }
        assert!(!b.due(clock.set(11 * SECOND)).contains(&Due::Keepalive), "{}", sent.escape_ascii());
        // The next data begins it anew.
        let message = a.seal(b"data", clock.set(12 * SECOND)).unwrap();
        b.open(&message, clock.now()).unwrap();
        assert!(b.due(clock.set(22 * SECOND)).contains(&Due::Keepalive), "{}", sent.escape_ascii());
    }
}

/// WireGuard paper 6.5: `KEEPALIVE_TIMEOUT + REKEY_TIMEOUT`.
#[test]
fn data_without_answer_for_fifteen_seconds_leads_to_a_handshake() {
    let (mut a, _, mut clock) = established();
    a.seal(b"data", clock.set(SECOND));
    a.seal(b"more data does not delay it", clock.set(9 * SECOND));
    let (at, due) = a.wait(&mut clock);
    assert_eq!(due, [Due::Handshake]);
    assert!(is_about(at - SECOND, 15 * SECOND), "{at:?}");
    a.initiate(true, clock.now()).unwrap();
    // Packets go on in the old session, and ask no more often.
    assert!(a.seal(b"data", clock.advance(SECOND)).is_some());
    let (next, due) = a.wait(&mut clock);
    assert_eq!(due, [Due::Handshake], "the repetition");
    assert!(is_about(next - at, 5 * SECOND));
}

#[test]
fn whatever_is_received_counts_as_an_answer() {
    for received in [&b"data"[..], b"", b"initiation", b"response"] {
        let (mut a, mut b, mut clock) = established();
        a.seal(b"data", clock.set(SECOND));
        // Not so late that the response alone would put a handshake off.
        let now = clock.set(10 * SECOND);
        match received {
            b"initiation" => {
                let initiation = b.initiate(true, now).unwrap();
                a.respond(&initiation, now).unwrap();
            }
            b"response" => shake(&mut a, &mut b, now),
            _ => drop(send(&mut b, &mut a, received, now)),
        }
        let due = a.due(clock.set(17 * SECOND));
        assert!(!due.contains(&Due::Handshake), "{}: {due:?}", received.escape_ascii());
    }
}

#[test]
fn a_keepalive_needs_no_answer() {
    let (mut a, _, mut clock) = established();
    a.seal(b"", clock.set(SECOND));
    assert_eq!(a.due(clock.set(100 * SECOND)), []);
}

#[test]
fn a_forged_message_changes_no_timer() {
    let (mut a, mut b, mut clock) = established();
    a.seal(b"data", clock.set(SECOND));
    let before = a.tunnel.poll_timeout();
    let mut forged = b.seal(b"data", clock.now()).unwrap();
    forged[20] ^= 1;
    assert_eq!(a.open(&forged, clock.now()), Err(Error::Authentication));
    assert_eq!(a.tunnel.poll_timeout(), before);
}

/// WireGuard paper 6.2: `REKEY_AFTER_TIME`, and only the initiator of the session does it, so that the two peers do not both begin a handshake.
#[test]
fn the_initiator_renews_an_old_session_when_it_sends() {
    for initiates in [true, false] {
        let (mut a, mut b, mut clock) = established();
        if !initiates {
            std::mem::swap(&mut a, &mut b);
        }
        send(&mut a, &mut b, b"data", clock.set(120 * SECOND - MILLISECOND));
        assert_eq!(a.due(clock.now()), []);
        send(&mut a, &mut b, b"data", clock.set(120 * SECOND));
        let expected = if initiates { &[Due::Handshake][..] } else { &[] };
        assert_eq!(a.due(clock.now()), expected);
    }
}

#[test]
fn a_keepalive_renews_an_old_session_as_well() {
    let (mut a, _, mut clock) = established();
    a.seal(b"", clock.set(130 * SECOND));
    assert_eq!(a.due(clock.now()), [Due::Handshake]);
}

#[test]
fn an_old_session_asks_for_one_handshake_in_five_seconds() {
    let (mut a, mut b, mut clock) = established();
    let mut handshakes = 0;
    for millisecond in (120_000..140_000).step_by(10) {
        send(&mut a, &mut b, b"data", clock.set(millisecond * MILLISECOND));
        for due in a.due(clock.now()) {
            assert_eq!(due, Due::Handshake);
            handshakes += 1;
            a.initiate(true, clock.now());
        }
    }
    assert_eq!(handshakes, 4);
    shake(&mut a, &mut b, clock.advance(SECOND));
    assert_eq!(a.due(clock.now()), [Due::Keepalive]);
    send(&mut a, &mut b, b"data", clock.now());
    assert_eq!(a.due(clock.advance(10 * SECOND)), [], "the new session is young");
}

#[test]
fn packets_in_an_old_session_begin_the_ninety_seconds_anew() {
    let (mut a, _, mut clock) = established();
    a.initiate(false, clock.set(100 * SECOND)).unwrap();
    a.seal(b"", clock.set(150 * SECOND));
    loop {
        match a.wait(&mut clock) {
            (_, due) if due == [Due::Handshake] => drop(a.initiate(true, clock.now())),
            last => {
                assert_eq!(last, (240 * SECOND, vec![Due::GaveUp]));
                break;
            }
        }
    }
}

#[test]
fn a_handshake_that_was_wanted_is_not_once_it_has_begun_or_ended() {
    let (mut a, _, mut clock) = established();
    a.seal(b"", clock.set(120 * SECOND));
    a.initiate(true, clock.now()).unwrap();
    assert_eq!(a.due(clock.now()), []);

    let (mut a, mut b, mut clock) = established();
    let initiation = a.initiate(true, clock.set(115 * SECOND)).unwrap();
    a.seal(b"", clock.set(120 * SECOND));
    let response = b.respond(&initiation, clock.now()).unwrap();
    a.tunnel.finish(&response, clock.now()).unwrap();
    assert_eq!(a.due(clock.now()), [Due::Keepalive]);
}

#[test]
fn every_session_is_renewed_once_at_its_end() {
    let (mut a, mut b, mut clock) = established();
    for _ in 0..3 {
        clock.advance(165 * SECOND);
        a.due(clock.now());
        send(&mut b, &mut a, b"", clock.now());
        assert_eq!(a.due(clock.now()), [Due::Handshake]);
        shake(&mut a, &mut b, clock.advance(SECOND));
        send(&mut a, &mut b, b"", clock.now());
    }
}

/// WireGuard paper 6.2: `REJECT_AFTER_TIME - KEEPALIVE_TIMEOUT - REKEY_TIMEOUT`.
#[test]
fn the_initiator_renews_a_session_at_its_end_when_it_receives() {
    for initiates in [true, false] {
        let (mut a, mut b, mut clock) = established();
        if !initiates {
            std::mem::swap(&mut a, &mut b);
        }
        send(&mut b, &mut a, b"", clock.set(165 * SECOND - MILLISECOND));
        assert_eq!(a.due(clock.now()), []);
        send(&mut b, &mut a, b"", clock.set(165 * SECOND));
        let expected = if initiates { &[Due::Handshake][..] } else { &[] };
        assert_eq!(a.due(clock.now()), expected);
        send(&mut b, &mut a, b"", clock.set(171 * SECOND));
        assert_eq!(a.due(clock.now()), [], "once");
    }
}

/// WireGuard paper 6.1: `REJECT_AFTER_TIME`.
#[test]
fn a_session_is_of_no_use_after_three_minutes() {
    let (mut a, mut b, mut clock) = established();
    let under_way = a.seal(b"data", clock.set(180 * SECOND - MILLISECOND)).unwrap();
    send(&mut b, &mut a, b"data", clock.now());
    assert!(a.tunnel.is_established(clock.now().instant));
    let now = clock.set(180 * SECOND);
    for side in [&mut a, &mut b] {
        assert!(!side.tunnel.is_established(now.instant));
        assert!(side.seal(b"data", now).is_none());
    }
    assert_eq!(b.open(&under_way, now), Err(Error::Expired));
}

#[test]
fn an_unconfirmed_session_cannot_be_confirmed_after_three_minutes() {
    let (mut a, mut b, mut clock) = strangers();
    let initiation = a.initiate(true, clock.now()).unwrap();
    let response = b.respond(&initiation, clock.now()).unwrap();
    a.tunnel.finish(&response, clock.set(100 * SECOND)).unwrap();
    let message = a.seal(b"data", clock.set(180 * SECOND)).unwrap();
    assert_eq!(b.open(&message, clock.now()), Err(Error::Expired));
}

/// As in the kernel: the empty packet waits for a session.
#[test]
fn a_keepalive_without_a_session_leads_to_a_handshake() {
    let (mut a, mut b, mut clock) = established();
    send(&mut a, &mut b, b"data", clock.set(175 * SECOND));
    assert_eq!(b.wait(&mut clock), (185 * SECOND, vec![Due::Handshake]));
}

/// As in the kernel (`wg_expired_retransmit_handshake`).
#[test]
fn who_gives_up_sends_no_keepalive() {
    let (mut a, mut b, mut clock) = established();
    b.initiate(false, clock.set(95 * SECOND));
    send(&mut a, &mut b, b"data", clock.set(179 * SECOND));
    assert_eq!(b.due(clock.now()), [Due::Handshake]);
    assert_eq!(b.wait(&mut clock).1, [Due::Handshake]);
    assert_eq!(b.wait(&mut clock), (185 * SECOND, vec![Due::GaveUp]));
    assert_eq!(b.wait(&mut clock), (540 * SECOND, vec![Due::Expired]));
}

/// WireGuard paper 6.3: `REJECT_AFTER_TIME * 3`.
#[test]
fn keys_are_erased_after_nine_minutes() {
    for responds in [false, true] {
        let (mut a, mut b, mut clock) = established();
        shake(&mut a, &mut b, clock.set(20 * SECOND));
        send(&mut a, &mut b, b"", clock.now());
        let side = if responds { &mut b } else { &mut a };
        assert_eq!(side.tunnel.indexes().count(), 2);
        assert_eq!(side.wait(&mut clock), (560 * SECOND, vec![Due::Expired]));
        assert_eq!(side.tunnel.indexes().count(), 0);
        assert_eq!(side.tunnel.poll_timeout(), None);
        assert_eq!(side.tunnel.is_empty(), !responds, "the time stamp of an initiation is kept");
    }
}

#[test]
fn a_session_that_was_never_confirmed_is_erased_too() {
    let (mut a, mut b, mut clock) = strangers();
    let initiation = a.initiate(true, clock.now()).unwrap();
    b.respond(&initiation, clock.set(SECOND)).unwrap();
    assert_eq!(b.wait(&mut clock), (541 * SECOND, vec![Due::Expired]));
    assert_eq!(b.tunnel.indexes().count(), 0);
}

#[test]
fn a_handshake_under_way_outlives_the_keys() {
    let (mut a, mut b, mut clock) = established();
    let initiation = a.initiate(false, clock.set(538 * SECOND)).unwrap();
    assert_eq!(a.due(clock.set(540 * SECOND)), [Due::Expired]);
    let response = b.respond(&initiation, clock.now()).unwrap();
    a.tunnel.finish(&response, clock.now()).unwrap();
    send(&mut a, &mut b, b"data", clock.now());
}

#[test]
fn an_idle_peer_has_no_timer_but_the_erasing_of_its_keys() {
    let (mut a, mut b, mut clock) = established();
    for side in [&mut a, &mut b] {
        assert_eq!(side.tunnel.poll_timeout(), Some(clock.start.instant + 540 * SECOND));
    }
    send(&mut a, &mut b, b"data", clock.set(SECOND));
    send(&mut b, &mut a, b"answer", clock.set(2 * SECOND));
    send(&mut a, &mut b, b"", clock.set(3 * SECOND));
    for side in [&mut a, &mut b] {
        assert_eq!(side.tunnel.poll_timeout(), Some(clock.start.instant + 540 * SECOND));
    }
}

/// Both begin at once, and the peer is a moment quicker: its handshake is given time.
#[test]
fn an_answered_initiation_of_the_peer_puts_off_the_repetition() {
    let (mut a, mut b, mut clock) = strangers();
    a.initiate(false, clock.now());
    let initiation = b.initiate(true, clock.set(4 * SECOND)).unwrap();
    a.respond(&initiation, clock.now()).unwrap();
    let (at, due) = a.wait(&mut clock);
    assert_eq!(due, [Due::Handshake]);
    assert!(is_about(at - 4 * SECOND, 5 * SECOND), "{at:?}");
}

#[test]
fn nothing_is_due_after_everything_was_forgotten() {
    let (mut a, _, mut clock) = established();
    a.seal(b"data", clock.now());
    a.initiate(true, clock.now());
    a.tunnel.forget_sessions();
    assert_eq!(a.tunnel.poll_timeout(), None);
    assert_eq!(a.due(clock.set(1_000 * SECOND)), []);
    assert!(a.tunnel.is_empty());
    assert!(a.initiate(false, clock.now()).is_some());
}

//! Tests that need the inside: counters that no test can reach by sending. The other rules are in `tests/tunnel`.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_keys::PrivateKey;

use super::{Now, Tunnel};
use crate::error::Error;
use crate::handshake::read_initiation;
use crate::identity::Identity;
use crate::keys::REJECT_AFTER_MESSAGES;
use crate::random::tests::Seeded;
use crate::session::Session;
use crate::timers::{Due, REKEY_AFTER_MESSAGES, REKEY_TIMEOUT};

fn pair() -> ([Tunnel; 2], [Arc<Identity>; 2]) {
    let identities = [1, 2].map(|private| Arc::new(Identity::new(&PrivateKey([private; 32]))));
    let tunnel =
        |side: usize| Tunnel::new(Arc::clone(&identities[side]), identities[1 - side].public(), None);
    ([tunnel(0), tunnel(1)], identities)
}

/// A handshake that the first begins, and a keepalive that confirms it.
fn shake(tunnels: &mut [Tunnel; 2], identities: &[Arc<Identity>; 2], index: u32, now: Now) {
    let [a, b] = tunnels;
    let mut random = Seeded(index.into());
    let initiation = a.initiate(true, index, now, &mut random).unwrap();
    let received = read_initiation(&identities[1], &initiation).unwrap();
    let response = b.respond(received, index, now, &mut random).unwrap();
    a.finish(&response, now).unwrap();
    let mut keepalive = [0; 32];
    seal(a, &mut keepalive, now.instant).unwrap();
    open(b, &mut keepalive, now);
}

/// Makes a message that is sent.
fn seal(from: &mut Tunnel, datagram: &mut [u8], now: Instant) -> Result<(), Error> {
    let mut sealer = from.sealer(now).unwrap();
    sealer.assign_counter(datagram)?;
    sealer.key().encrypt(datagram)
}

/// Takes a message that arrives; returns its counter.
fn open(to: &mut Tunnel, datagram: &mut [u8], now: Now) -> u64 {
    let index = crate::receiver_index(datagram).unwrap();
    let decrypted = to.receive_key(index, now.instant).unwrap().decrypt(datagram).unwrap();
    to.receive(&decrypted, now).unwrap();
    decrypted.counter()
}

fn clock() -> Now {
    Now { instant: Instant::now(), wall: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000) }
}

fn after(now: Now, duration: Duration) -> Now {
    Now { instant: now.instant + duration, wall: now.wall + duration }
}

/// WireGuard paper 6.2: `REKEY_AFTER_MESSAGES`, on both sides.
#[test]
fn a_session_with_many_messages_is_renewed() {
    for side in 0..2 {
        let (mut tunnels, identities) = pair();
        let start = clock();
        shake(&mut tunnels, &identities, 1, start);
        let tunnel = &mut tunnels[side];
        // A node that has just sent a handshake message sends no other.
        let now = after(start, REKEY_TIMEOUT).instant;
        tunnel.sealer(now).unwrap().key().set_messages(REKEY_AFTER_MESSAGES - 1);
        let mut due = Vec::new();
        for _ in 0..2 {
            seal(tunnel, &mut [0; 48], now).unwrap();
            due.push(tunnel.take_due(now, &mut Seeded(1)));
        }
        assert_eq!(due, [None, Some(Due::Handshake)]);
    }
}

/// WireGuard paper 6.1: `REJECT_AFTER_MESSAGES`.
#[test]
fn a_session_with_all_its_messages_is_over() {
    let (mut tunnels, identities) = pair();
    let now = clock();
    shake(&mut tunnels, &identities, 1, now);
    let [a, b] = &mut tunnels;
    a.sealer(now.instant).unwrap().key().set_messages(REJECT_AFTER_MESSAGES - 1);
    let mut last = [0; 48];
    let mut sealer = a.sealer(now.instant).unwrap();
    sealer.assign_counter(&mut last).unwrap();
    sealer.key().encrypt(&mut last).unwrap();
    assert!(sealer.assign_counter(&mut [0; 48]).is_err());
    assert!(!a.is_established(now.instant));
    assert!(a.sealer(now.instant).is_none());
    assert_eq!(open(b, &mut last, now), REJECT_AFTER_MESSAGES - 1);
    // It needs a new session, and gets one.
    shake(&mut tunnels, &identities, 2, after(now, REKEY_TIMEOUT));
    assert!(tunnels[0].is_established(now.instant));
}

#[test]
fn only_the_current_session_has_a_key_to_send_with() {
    let (mut tunnels, identities) = pair();
    let now = clock();
    shake(&mut tunnels, &identities, 1, now);
    shake(&mut tunnels, &identities, 2, after(now, Duration::from_secs(1)));
    let can_send = |session: &Option<Box<Session>>| {
        session.as_ref().map(|session| session.send_key(now.instant).is_some())
    };
    for tunnel in &tunnels {
        assert_eq!(can_send(&tunnel.current), Some(true));
        assert_eq!(can_send(&tunnel.previous), Some(false));
        assert!(tunnel.next.is_none());
    }
    // Nor has one that is not confirmed.
    let now = after(now, Duration::from_secs(2));
    let [a, b] = &mut tunnels;
    let initiation = a.initiate(true, 3, now, &mut Seeded(3)).unwrap();
    let received = read_initiation(&identities[1], &initiation).unwrap();
    b.respond(received, 3, now, &mut Seeded(3)).unwrap();
    assert_eq!((can_send(&b.current), can_send(&b.next)), (Some(true), Some(false)));
    assert!(b.previous.is_none(), "there are never three sessions");
}

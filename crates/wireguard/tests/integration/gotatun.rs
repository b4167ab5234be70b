//! Handshakes and cookies with gotatun, an independent implementation of the protocol.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use chacha20poly1305::aead::AeadInPlace as _;
use chacha20poly1305::{ChaCha20Poly1305, KeyInit as _};
use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_wireguard::{
    Error, HandshakeLimiter, Identity, Initiation, Initiator, MacSender, SessionKeys, SystemRandom, Tai64n,
    Verdict, initiate, read_initiation,
};
use gotatun::noise::index_table::IndexTable;
use gotatun::noise::rate_limiter::RateLimiter;
use gotatun::noise::{Tunn, TunnResult};
use gotatun::packet::{Packet, WgKind};
use gotatun::x25519;

const OURS: PrivateKey = PrivateKey([1; 32]);
const THEIRS: PrivateKey = PrivateKey([2; 32]);
const OUR_INDEX: u32 = 0x0102_0304;
/// A whole inner packet: gotatun checks header and length of what it decrypts.
const PACKET: [u8; 32] = [
    0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, 1, 2, 3, 4, 0, 12, 0, 0, 9, 9, 9, 9,
];

/// gotatun with [`THEIRS`], and with a limiter that demands cookies after so many messages in a second.
fn gotatun(psk: Option<[u8; 32]>, limit: u64) -> (Tunn, RateLimiter) {
    let public = x25519::PublicKey::from(their_public().0);
    let peer = x25519::PublicKey::from(OURS.public_key().0);
    let limiter = Arc::new(RateLimiter::new(&public, limit));
    let tunnel = Tunn::new(THEIRS.0.into(), peer, psk, None, IndexTable::from_os_rng(), limiter);
    (tunnel, RateLimiter::new(&public, limit))
}

fn their_public() -> PublicKey {
    THEIRS.public_key()
}

fn source() -> SocketAddr {
    "192.0.2.1:51820".parse().unwrap()
}

fn bytes(message: impl Into<WgKind>) -> Vec<u8> {
    Packet::from(message.into()).to_vec()
}

/// Hands a datagram to gotatun, and returns what it sends in answer.
fn exchange(tunnel: &mut Tunn, limiter: &RateLimiter, datagram: &[u8]) -> TunnResult {
    match limiter.verify_packet(source(), Packet::copy_from(datagram)) {
        Ok(message) => tunnel.handle_incoming_packet(message),
        Err(refused) => refused,
    }
}

fn answer(result: TunnResult) -> Vec<u8> {
    match result {
        TunnResult::WriteToNetwork(message) => bytes(message),
        other => panic!("no answer: {other:?}"),
    }
}

fn our_initiation(macs: &mut MacSender) -> (Initiator, Initiation) {
    let (identity, now) = (Identity::new(&OURS), Tai64n::from(SystemTime::now()));
    let (initiator, mut initiation) =
        initiate(&identity, &their_public(), OUR_INDEX, now, &mut SystemRandom).unwrap();
    macs.sign(&mut initiation, Instant::now());
    (initiator, initiation)
}

/// A data message of ours, made without this crate's sessions.
fn seal(keys: &SessionKeys, counter: u64) -> Vec<u8> {
    let (mut nonce, mut inner) = ([0; 12], PACKET);
    nonce[4..].copy_from_slice(&counter.to_le_bytes());
    let tag = ChaCha20Poly1305::new(&keys.send.into())
        .encrypt_in_place_detached(&nonce.into(), &[], &mut inner)
        .unwrap();
    [&[4, 0, 0, 0][..], &keys.remote_index.to_le_bytes(), &counter.to_le_bytes(), &inner, &tag].concat()
}

/// The inner packet of a data message of gotatun.
fn open(keys: &SessionKeys, datagram: &[u8]) -> Vec<u8> {
    assert_eq!(datagram[..4], [4, 0, 0, 0]);
    assert_eq!(datagram[4..8], keys.local_index.to_le_bytes());
    let (mut nonce, (inner, tag)) = ([0; 12], datagram[16..].split_at(datagram.len() - 32));
    nonce[4..].copy_from_slice(&datagram[8..16]);
    let mut inner = inner.to_vec();
    ChaCha20Poly1305::new(&keys.receive.into())
        .decrypt_in_place_detached(&nonce.into(), &[], &mut inner, tag.into())
        .unwrap();
    inner
}

/// Packets go both ways with these keys.
fn assert_session(tunnel: &mut Tunn, limiter: &RateLimiter, keys: &SessionKeys) {
    match exchange(tunnel, limiter, &seal(keys, 0)) {
        TunnResult::WriteToTunnel(packet) => assert_eq!(packet[..], PACKET),
        other => panic!("{other:?}"),
    }
    let data = tunnel.handle_outgoing_packet(Packet::copy_from(&PACKET[..]), None).unwrap();
    assert_eq!(open(keys, &bytes(data)), PACKET);
}

#[test]
fn we_initiate_and_gotatun_responds() {
    for psk in [None, Some([7; 32])] {
        let (mut tunnel, limiter) = gotatun(psk, 100);
        let (initiator, initiation) = our_initiation(&mut MacSender::new(&their_public()));
        let response = answer(exchange(&mut tunnel, &limiter, &initiation));
        let mut ours = HandshakeLimiter::new(&OURS.public_key(), Instant::now());
        assert_eq!(ours.check(source(), &response, Instant::now(), &mut SystemRandom), Verdict::Accept);
        assert_eq!(initiator.finish(&response, Some(&[8; 32])).unwrap_err(), Error::Authentication);
        let keys = initiator.finish(&response, psk.as_ref()).unwrap();
        assert_session(&mut tunnel, &limiter, &keys);
    }
}

#[test]
fn gotatun_initiates_and_we_respond() {
    for psk in [None, Some([7; 32])] {
        let (mut tunnel, limiter) = gotatun(psk, 100);
        let initiation = bytes(tunnel.format_handshake_initiation(false).unwrap());
        let mut ours = HandshakeLimiter::new(&OURS.public_key(), Instant::now());
        assert_eq!(ours.check(source(), &initiation, Instant::now(), &mut SystemRandom), Verdict::Accept);
        let received = read_initiation(&Identity::new(&OURS), &initiation).unwrap();
        assert_eq!(received.peer, their_public());
        let (mut response, keys) = received.respond(psk.as_ref(), OUR_INDEX, &mut SystemRandom).unwrap();
        MacSender::new(&their_public()).sign(&mut response, Instant::now());
        // gotatun confirms the keys at once.
        let keepalive = answer(exchange(&mut tunnel, &limiter, &response));
        assert_eq!(open(&keys, &keepalive), [0_u8; 0]);
        assert_session(&mut tunnel, &limiter, &keys);
    }
}

#[test]
fn gotatun_demands_a_cookie_and_takes_it() {
    let (mut tunnel, limiter) = gotatun(None, 0);
    let mut macs = MacSender::new(&their_public());
    let (_, initiation) = our_initiation(&mut macs);
    let cookie = answer(exchange(&mut tunnel, &limiter, &initiation));
    macs.receive_cookie(&cookie, Instant::now()).unwrap();
    let (initiator, initiation) = our_initiation(&mut macs);
    let response = answer(exchange(&mut tunnel, &limiter, &initiation));
    assert!(initiator.finish(&response, None).is_ok());
}

#[test]
fn we_demand_a_cookie_and_gotatun_sends_it() {
    let (mut tunnel, limiter) = gotatun(None, 100);
    let mut ours = HandshakeLimiter::new(&OURS.public_key(), Instant::now());
    let now = Instant::now();
    let first = bytes(tunnel.format_handshake_initiation(true).unwrap());
    let mut verdict = Verdict::Accept;
    for _ in 0..=100 {
        verdict = ours.check(source(), &first, now, &mut SystemRandom);
    }
    let Verdict::Cookie(cookie) = verdict else { panic!("{verdict:?}") };
    assert!(matches!(exchange(&mut tunnel, &limiter, &cookie), TunnResult::Done));
    let second = bytes(tunnel.format_handshake_initiation(true).unwrap());
    assert_eq!(ours.check(source(), &second, now, &mut SystemRandom), Verdict::Accept);
    assert!(matches!(ours.check(source(), &first, now, &mut SystemRandom), Verdict::Cookie(_)));
}

use x25519_dalek::{PublicKey, StaticSecret};

use super::Kept;
use crate::probe::{
    Candidate, CandidateKind, Epoch, Header, Message, PortSequence, ProbeKeys, SenderTag, TransactionId,
};
use crate::relay::replica::{ReplicaFrame, ReplicaHello, ReplicaRegistration, parse_replica_frame};
use crate::relay::{
    AllocatedPort, ErrorReason, Frame, Hello, MAX_BODY, Notice, Register, Registered, StunServer, parse,
};

const PEER: [u8; 32] = [7; 32];

#[test]
fn frames_of_relays_are_as_they_were() {
    let hello = |channel_binding, standby_links| {
        let (replica, relay_key, challenge) = ([1; 16], [2; 32], [3; 32]);
        let (min_version, max_version) = (1, 1);
        Frame::Hello(Hello {
            min_version,
            max_version,
            channel_binding,
            standby_links,
            replica,
            relay_key,
            challenge,
        })
    };
    let register = |token, is_standby| {
        let (proof, version, instance, key) = ([4; 32], 1, [5; 8], [6; 32]);
        Frame::Register(Register { proof, version, instance, key, name: "relay", token, is_standby })
    };
    let allocated = AllocatedPort { peer: PEER, port: 20_000, token: [8; 32] };
    let stun = StunServer {
        port: 3478,
        other_port: 3479,
        user: [1; 8],
        key: [2; 32],
        relay_ports: (20_000, 29_999),
    };
    let frames = [
        ("activate", Frame::Activate),
        ("allocate", Frame::Allocate(PEER)),
        ("allocated", Frame::Allocated(allocated)),
        ("datagram", Frame::Datagram { peer: PEER, payload: b"payload" }),
        ("draining", Frame::Draining { reconnect_after: 1500, close_after: 70_000 }),
        ("error", Frame::Error { reason: ErrorReason::WrongName, message: "größer" }),
        ("hello", hello(true, true)),
        ("hello minimal", hello(false, false)),
        ("notice", Frame::Notice(Notice::RateLimited)),
        ("peer gone", Frame::PeerGone(PEER)),
        ("ping", Frame::Ping([9; 8])),
        ("pong", Frame::Pong([9; 8])),
        ("probe", Frame::Probe { peer: PEER, payload: b"probe" }),
        ("register", register(b"token", true)),
        ("register minimal", register(b"", false)),
        ("registered", Frame::Registered(Registered { idle_timeout: 300 })),
        ("replicas", Frame::Replicas(2)),
        ("stun server", Frame::StunServer(stun)),
    ];
    let mut kept = Kept::of("relay.txt");
    for (name, frame) in frames {
        let mut written = Vec::new();
        frame.encode(&mut written).unwrap();
        let bytes = kept.same(name, written);
        let parsed = parse(&bytes, MAX_BODY).unwrap().unwrap();
        assert_eq!((parsed.frame, parsed.length), (frame, bytes.len()), "{name}");
    }
}

#[test]
fn frames_between_replicas_of_a_relay_are_as_they_were() {
    let hello = |standby_links| {
        let (min_version, max_version, replica) = (1, 1, [1; 16]);
        ReplicaFrame::Hello(ReplicaHello { min_version, max_version, replica, standby_links })
    };
    let registered = |is_standby| {
        let (key, instance, stamp) = (PEER, [5; 8], 1 << 40);
        ReplicaFrame::Registered(ReplicaRegistration { key, instance, stamp, is_standby })
    };
    let (from, to) = ([6; 32], PEER);
    let frames = [
        ("datagram", ReplicaFrame::Datagram { from, to, payload: b"payload" }),
        ("gone", ReplicaFrame::Gone(PEER)),
        ("hello", hello(true)),
        ("hello minimal", hello(false)),
        ("ping", ReplicaFrame::Ping),
        ("probe", ReplicaFrame::Probe { from, to, payload: b"probe" }),
        ("registered", registered(true)),
        ("registered minimal", registered(false)),
    ];
    let mut kept = Kept::of("relay_replica.txt");
    for (name, frame) in frames {
        let mut written = Vec::new();
        frame.encode(&mut written).unwrap();
        let bytes = kept.same(name, written);
        assert_eq!(parse_replica_frame(&bytes), Ok(Some((frame, bytes.len()))), "{name}");
    }
}

#[test]
fn path_probes_are_as_they_were() {
    let transaction = TransactionId([9; 12]);
    let candidates = [
        (CandidateKind::Host, "10.0.0.1:51820"),
        (CandidateKind::PeerReflexive, "198.51.100.1:7"),
        (CandidateKind::ServerReflexive, "[2001:db8::1]:8"),
    ];
    let candidates = candidates.map(|(kind, address)| Candidate { kind, address: address.parse().unwrap() });
    let request = Message::Request {
        transaction,
        starts_round: true,
        wants_handshake: true,
        is_birthday: true,
        wants_keepalives: true,
        ports: Some(PortSequence { next: 40_000, step: -2 }),
        candidates: candidates.into(),
    };
    let messages = [
        ("request", request),
        ("answer IPv4", Message::Answer { transaction, observed: "192.0.2.1:9".parse().unwrap() }),
        ("answer IPv6", Message::Answer { transaction, observed: "[2001:db8::2]:9".parse().unwrap() }),
    ];
    let public = |private: [u8; 32]| PublicKey::from(&StaticSecret::from(private)).to_bytes();
    let (alice, bob) = ([1; 32], [2; 32]);
    let keys = |own: [u8; 32], other| ProbeKeys::derive(&own, &public(other), Some(&[5; 32])).unwrap();
    let (epoch, counter) = (Epoch([7; 16]), 1 << 33);
    let sender = SenderTag::new(&public(alice), &public(bob));
    let mut kept = Kept::of("probe.txt");
    for (name, message) in messages {
        let bytes = kept.same(name, keys(alice, bob).seal(epoch, counter, &message, 0));
        assert_eq!(Header::parse(&bytes), Ok(Header { sender, epoch, counter }), "{name}");
        assert_eq!(keys(bob, alice).open(&bytes), Ok(message), "{name}");
    }
}

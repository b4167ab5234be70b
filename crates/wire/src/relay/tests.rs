use proptest::prelude::*;

use super::*;

fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    frame.encode(&mut out).unwrap();
    out
}

fn hello() -> Hello {
    Hello {
        min_version: 1,
        max_version: 2,
        channel_binding: true,
        standby_links: false,
        replica: [1; 16],
        relay_key: [2; 32],
        challenge: [3; 32],
    }
}

fn register<'a>(name: &'a str, token: &'a [u8]) -> Register<'a> {
    Register { proof: [4; 32], version: 1, instance: [5; 8], key: [6; 32], name, token, is_standby: false }
}

#[test]
fn the_bytes_of_a_datagram_are_those_of_the_specification() {
    let bytes = encoded(&Frame::Datagram { peer: [7; 32], payload: b"abc" });
    assert_eq!(bytes, [&[0x10, 0, 0, 35][..], &[7; 32], b"abc"].concat());
    assert_eq!(encoded(&Frame::Notice(Notice::DuplicateKey)), [0x24, 0, 0, 1, 1]);
    let relay_ports = (0x4e20, 0x752f);
    let server = StunServer { port: 0x0d96, other_port: 0x0d97, user: [1; 8], key: [2; 32], relay_ports };
    let bytes = encoded(&Frame::StunServer(server));
    let expected: [&[u8]; 4] =
        [&[0x25, 0, 0, 48, 0x0d, 0x96, 0x0d, 0x97], &[1; 8], &[2; 32], &[0x4e, 0x20, 0x75, 0x2f]];
    assert_eq!(bytes, expected.concat());
    assert_eq!(encoded(&Frame::Replicas(2)), [0x26, 0, 0, 1, 2]);
    assert_eq!(encoded(&Frame::Activate), [0x14, 0, 0, 0]);
    let flagged = Hello { standby_links: true, ..hello() };
    assert_eq!((encoded(&Frame::Hello(hello()))[14], encoded(&Frame::Hello(flagged))[14]), (1, 3));
    let (active, standby) =
        (register("relay", b"t"), Register { is_standby: true, ..register("relay", b"t") });
    let (active, standby) = (encoded(&Frame::Register(active)), encoded(&Frame::Register(standby)));
    assert_eq!((active.len() + 1, standby.last()), (standby.len(), Some(&1)), "one byte behind the token");
    let allocated = AllocatedPort { peer: [3; 32], port: 0x4e20, token: [4; 32] };
    let bytes = encoded(&Frame::Allocated(allocated));
    assert_eq!(bytes, [&[0x13, 0, 0, 66][..], &[3; 32], &[0x4e, 0x20], &[4; 32]].concat());
}

#[test]
fn a_frame_is_taken_when_it_is_complete_and_not_before() {
    let mut bytes = encoded(&Frame::Hello(hello()));
    let length = bytes.len();
    for end in 0..length {
        assert_eq!(parse(&bytes[..end], MAX_BODY), Ok(None), "{end} bytes");
    }
    bytes.extend(encoded(&Frame::Ping([8; 8])));
    let parsed = parse(&bytes, MAX_BODY).unwrap().unwrap();
    assert_eq!((parsed.frame, parsed.length), (Frame::Hello(hello()), length));
    let next = parse(&bytes[length..], MAX_BODY).unwrap().unwrap();
    assert_eq!(next.frame, Frame::Ping([8; 8]));
}

#[test]
fn a_frame_above_the_limit_is_refused_before_its_body_arrives() {
    let error = parse(&[0x10, 0xff, 0xff, 0xff], MAX_BODY).unwrap_err();
    assert_eq!(error, InvalidFrame::TooLong { kind: 0x10, length: 0xff_ffff, limit: MAX_BODY });
    let longest = encoded(&Frame::Datagram { peer: [1; 32], payload: &[0; MAX_DATAGRAM] });
    assert!(parse(&longest, MAX_BODY).unwrap().is_some());
    assert!(parse(&longest, MAX_HANDSHAKE_BODY).is_err());
}

#[test]
fn what_is_too_long_is_not_written() {
    let mut out = b"before".to_vec();
    let frame = Frame::Probe { peer: [1; 32], payload: &[0; MAX_DATAGRAM + 1] };
    assert!(frame.encode(&mut out).unwrap_err().to_string().contains("65507"));
    let token = [0; MAX_TOKEN + 1];
    let name = "n".repeat(256);
    for register in [register("relay", &token), register(&name, b"")] {
        assert!(Frame::Register(register).encode(&mut out).is_err());
    }
    assert_eq!(out, b"before");
}

#[test]
fn a_long_message_is_cut_between_characters() {
    let message = "ä".repeat(200);
    let bytes = encoded(&Frame::Error { reason: ErrorReason::Full, message: &message });
    let Frame::Error { message: read, .. } = parse(&bytes, MAX_BODY).unwrap().unwrap().frame else {
        panic!()
    };
    assert_eq!(read, "ä".repeat(127));
}

#[test]
fn later_versions_may_append_fields_and_types() {
    for frame in [Frame::Hello(hello()), Frame::Registered(Registered { idle_timeout: 60 })] {
        let mut bytes = encoded(&frame);
        bytes.extend([0; 9]);
        let length = u8::try_from(bytes.len() - HEADER_LENGTH).unwrap();
        bytes[3] = length;
        assert_eq!(parse(&bytes, MAX_BODY).unwrap().unwrap().frame, frame);
    }
    assert_eq!(parse(&[0x77, 0, 0, 1, 0], MAX_BODY).unwrap().unwrap().frame, Frame::Unknown(0x77));
}

#[test]
fn the_proof_covers_everything_but_itself() {
    let bytes = encoded(&Frame::Register(register("relay", b"token")));
    let body = parse(&bytes, MAX_BODY).unwrap().unwrap().body;
    assert_eq!(signed(body), &bytes[HEADER_LENGTH + 32..]);
    assert_eq!(signed(&[0; 31]), b"");
}

#[test]
fn what_is_no_frame_is_refused_with_the_reason() {
    let mut stranger = encoded(&Frame::Hello(hello()));
    stranger[4] = b'H';
    assert_eq!(parse(&stranger, MAX_BODY), Err(InvalidFrame::Magic));
    assert_eq!(parse(&[0x20, 0, 0, 7, 1, 2, 3, 4, 5, 6, 7], MAX_BODY), Err(InvalidFrame::TooShort(0x20)));
    assert_eq!(parse(&[0x2f, 0, 0, 3, 1, 1, 0xff], MAX_BODY), Err(InvalidFrame::Text(0x2f)));
    // HTTP, which a client may meet at a wrong port.
    assert!(parse(b"HTTP/1.1 400 Bad Request", MAX_BODY).is_err());
}

fn frames() -> impl Strategy<Value = (u8, [u8; 32], Vec<u8>, String)> {
    (any::<u8>(), any::<[u8; 32]>(), proptest::collection::vec(any::<u8>(), 0..300), "[a-z.äß]{0,40}")
}

proptest! {
    #[test]
    fn what_is_written_is_read_back((number, key, bytes, text) in frames()) {
        let data = *key.first_chunk().unwrap();
        let id = *key.first_chunk().unwrap();
        let hello = Hello { min_version: number, relay_key: key, replica: id, channel_binding: number > 9, standby_links: number % 2 > 0, ..hello() };
        let register = Register { key, proof: key, instance: data, name: &text, token: &bytes, version: number, is_standby: number > 99 };
        let all = [
            Frame::Datagram { peer: key, payload: &bytes },
            Frame::Draining { reconnect_after: number.into(), close_after: u32::MAX },
            Frame::Error { reason: number.into(), message: &text },
            Frame::Hello(hello),
            Frame::Notice(number.into()),
            Frame::PeerGone(key),
            Frame::Ping(data),
            Frame::Pong(data),
            Frame::Probe { peer: key, payload: &bytes },
            Frame::Register(register),
            Frame::Registered(Registered { idle_timeout: number.into() }),
            Frame::Replicas(number),
            Frame::StunServer(StunServer {
                port: number.into(), other_port: u16::MAX, user: data, key, relay_ports: (1, u16::MAX),
            }),
            Frame::Activate,
            Frame::Allocate(key),
            Frame::Allocated(AllocatedPort { peer: key, port: number.into(), token: key }),
        ];
        let mut stream = Vec::new();
        for frame in &all {
            frame.encode(&mut stream).unwrap();
        }
        let mut rest = stream.as_slice();
        for frame in all {
            let parsed = parse(rest, MAX_BODY).unwrap().unwrap();
            prop_assert_eq!(parsed.frame, frame);
            rest = &rest[parsed.length..];
        }
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_u8..0x40) {
        let _ = parse(&bytes, MAX_BODY);
        let body = &bytes[..bytes.len().min(255)];
        let framed = [&[kind, 0, 0, u8::try_from(body.len()).unwrap()], body].concat();
        if let Ok(parsed) = parse(&framed, MAX_HANDSHAKE_BODY) {
            prop_assert_eq!(parsed.unwrap().length, framed.len());
        }
    }
}

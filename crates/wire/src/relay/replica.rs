//! Frames between two replicas of one relay: `docs/relay-protocol.md`, "Replicas".
//!
//! The layout of a frame is that of clients: its type (one byte), the length of its body (three bytes, big-endian) and the body.
//! Both ends send the same frames; each begins with [`ReplicaFrame::Hello`].

use super::{Fields, HEADER_LENGTH, InvalidFrame, KEY_LENGTH, MAX_DATAGRAM, Oversized, body, check, finish};

/// The version of the protocol that this module speaks.
pub const REPLICA_VERSION: u8 = 1;
/// The oldest version it understands.
pub const MIN_REPLICA_VERSION: u8 = 1;
/// The ALPN protocol (RFC 7301).
pub const REPLICA_ALPN: &[u8] = b"fairlead-relay-replica/1";
/// The longest body of a frame.
pub const MAX_REPLICA_BODY: usize = 2 * KEY_LENGTH + MAX_DATAGRAM;

const HELLO: u8 = 0x01;
const REGISTERED: u8 = 0x02;
const GONE: u8 = 0x03;
const DATAGRAM: u8 = 0x10;
const PROBE: u8 = 0x11;
const PING: u8 = 0x20;

/// Flag of a hello and of a registration.
const STANDBY: u8 = 0x01;

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaFrame<'a> {
    /// A datagram for a client of the receiver.
    Datagram {
        /// Key of the client that sent it.
        from: [u8; 32],
        /// Key of the client that it is for.
        to: [u8; 32],
        /// Bytes of the datagram, at most [`MAX_DATAGRAM`].
        payload: &'a [u8],
    },
    /// No client of the sender has this key any more.
    Gone([u8; 32]),
    /// The first frame of each direction.
    Hello(ReplicaHello),
    /// Shows that the sender is there; no answer.
    Ping,
    /// Path probe: as [`ReplicaFrame::Datagram`], but sent before datagrams that wait.
    Probe {
        /// Key of the sender, as in [`ReplicaFrame::Datagram`].
        from: [u8; 32],
        /// Key of the receiver, as in [`ReplicaFrame::Datagram`].
        to: [u8; 32],
        /// Bytes of the probe, as in [`ReplicaFrame::Datagram`].
        payload: &'a [u8],
    },
    /// A client of the sender has this key.
    Registered(ReplicaRegistration),
    /// A type that this version does not know. Receivers ignore it.
    Unknown(u8),
}

/// Versions and properties of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaHello {
    /// The oldest version it understands.
    pub min_version: u8,
    /// The newest version it understands.
    pub max_version: u8,
    /// The running program, as in the hello to clients.
    pub replica: [u8; 16],
    /// Whether it accepts stand-by links, and is to be told of those of others.
    pub standby_links: bool,
}

/// A registration at a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaRegistration {
    /// The client's key.
    pub key: [u8; 32],
    /// The run of the client.
    pub instance: [u8; 8],
    /// Orders the registrations of one key at all replicas: the highest is the newest.
    pub stamp: u64,
    /// Whether the link receives only while the key has no other one.
    pub is_standby: bool,
}

/// Parses the first frame of `bytes`; `None` if it is not complete yet. The second value is its length in bytes.
///
/// # Errors
/// The bytes are not a frame.
pub fn parse_replica_frame(bytes: &[u8]) -> Result<Option<(ReplicaFrame<'_>, usize)>, InvalidFrame> {
    let Some((kind, body)) = body(bytes, MAX_REPLICA_BODY)? else { return Ok(None) };
    Ok(Some((parse_body(kind, body)?, HEADER_LENGTH.saturating_add(body.len()))))
}

fn parse_body(kind: u8, body: &[u8]) -> Result<ReplicaFrame<'_>, InvalidFrame> {
    let mut fields = Fields { kind, rest: body };
    Ok(match kind {
        DATAGRAM => {
            ReplicaFrame::Datagram { from: fields.array()?, to: fields.array()?, payload: fields.rest }
        }
        GONE => ReplicaFrame::Gone(fields.array()?),
        HELLO => {
            let [min_version, max_version] = fields.array()?;
            let replica = fields.array()?;
            let standby_links = fields.flags() & STANDBY != 0;
            ReplicaFrame::Hello(ReplicaHello { min_version, max_version, replica, standby_links })
        }
        PING => ReplicaFrame::Ping,
        PROBE => ReplicaFrame::Probe { from: fields.array()?, to: fields.array()?, payload: fields.rest },
        REGISTERED => ReplicaFrame::Registered(ReplicaRegistration {
            key: fields.array()?,
            instance: fields.array()?,
            stamp: u64::from_be_bytes(fields.array()?),
            is_standby: fields.flags() & STANDBY != 0,
        }),
        unknown => ReplicaFrame::Unknown(unknown),
    })
}

impl ReplicaFrame<'_> {
    /// Appends the frame to `out`.
    ///
    /// # Errors
    /// The datagram is too long; `out` is as before.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), Oversized> {
        let start = out.len();
        match self {
            Self::Datagram { from, to, payload } | Self::Probe { from, to, payload } => {
                check("a datagram", payload.len(), MAX_DATAGRAM)?;
                let keys = const { HEADER_LENGTH + 2 * KEY_LENGTH };
                out.reserve(keys.saturating_add(payload.len()));
                out.extend([self.kind(), 0, 0, 0]);
                out.extend(from);
                out.extend(to);
                out.extend_from_slice(payload);
            }
            Self::Gone(key) => {
                out.extend([self.kind(), 0, 0, 0]);
                out.extend(key);
            }
            Self::Hello(hello) => {
                out.extend([self.kind(), 0, 0, 0, hello.min_version, hello.max_version]);
                out.extend(hello.replica);
                out.extend(hello.standby_links.then_some(STANDBY));
            }
            Self::Ping | Self::Unknown(_) => out.extend([self.kind(), 0, 0, 0]),
            Self::Registered(registration) => {
                out.extend([self.kind(), 0, 0, 0]);
                out.extend(registration.key);
                out.extend(registration.instance);
                out.extend(registration.stamp.to_be_bytes());
                out.extend(registration.is_standby.then_some(STANDBY));
            }
        }
        finish(start, out);
        Ok(())
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Datagram { .. } => DATAGRAM,
            Self::Gone(_) => GONE,
            Self::Hello(_) => HELLO,
            Self::Ping => PING,
            Self::Probe { .. } => PROBE,
            Self::Registered(_) => REGISTERED,
            Self::Unknown(kind) => *kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(frame: &ReplicaFrame<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        frame.encode(&mut out).unwrap();
        out
    }

    #[test]
    fn the_bytes_are_those_of_the_specification() {
        let hello = ReplicaHello { min_version: 1, max_version: 2, replica: [3; 16], standby_links: false };
        let expected = [&[0x01, 0, 0, 18, 1, 2][..], &[3; 16]].concat();
        assert_eq!(encoded(&ReplicaFrame::Hello(hello)), expected);
        let flagged = ReplicaHello { standby_links: true, ..hello };
        assert_eq!(encoded(&ReplicaFrame::Hello(flagged))[3..], [&[19, 1, 2][..], &[3; 16], &[1]].concat());
        let registration =
            ReplicaRegistration { key: [4; 32], instance: [5; 8], stamp: 6, is_standby: false };
        let expected = [&[0x02, 0, 0, 48][..], &[4; 32], &[5; 8], &[0, 0, 0, 0, 0, 0, 0, 6]].concat();
        assert_eq!(encoded(&ReplicaFrame::Registered(registration)), expected);
        let standby =
            encoded(&ReplicaFrame::Registered(ReplicaRegistration { is_standby: true, ..registration }));
        assert_eq!(standby[3..], [&[49][..], &expected[4..], &[1]].concat());
        let datagram = ReplicaFrame::Datagram { from: [7; 32], to: [8; 32], payload: b"abc" };
        assert_eq!(encoded(&datagram), [&[0x10, 0, 0, 67][..], &[7; 32], &[8; 32], b"abc"].concat());
        assert_eq!(encoded(&ReplicaFrame::Ping), [0x20, 0, 0, 0]);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        assert!(parse_replica_frame(&[0x10, 0xff, 0xff, 0xff]).is_err());
        for kind in [HELLO, REGISTERED, GONE, DATAGRAM, PROBE] {
            assert_eq!(parse_replica_frame(&[kind, 0, 0, 1, 0]), Err(InvalidFrame::TooShort(kind)));
        }
        let mut out = b"before".to_vec();
        let long = ReplicaFrame::Probe { from: [1; 32], to: [2; 32], payload: &[0; MAX_DATAGRAM + 1] };
        assert!(long.encode(&mut out).is_err() && out == b"before");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(key: [u8; 32], stamp: u64, payload: Vec<u8>, end: proptest::sample::Index) {
            let (instance, replica) = (*key.first_chunk().unwrap(), *key.first_chunk().unwrap());
            for frame in [
                ReplicaFrame::Datagram { from: key, to: [1; 32], payload: &payload },
                ReplicaFrame::Gone(key),
                ReplicaFrame::Hello(ReplicaHello { min_version: key[0], max_version: key[1], replica, standby_links: key[2] > 9 }),
                ReplicaFrame::Ping,
                ReplicaFrame::Probe { from: key, to: key, payload: &payload },
                ReplicaFrame::Registered(ReplicaRegistration { key, instance, stamp, is_standby: key[3] > 9 }),
                ReplicaFrame::Unknown(0x77),
            ] {
                let bytes = encoded(&frame);
                prop_assert_eq!(parse_replica_frame(&bytes), Ok(Some((frame, bytes.len()))));
                prop_assert_eq!(parse_replica_frame(&bytes[..end.index(bytes.len())]), Ok(None));
            }
        }

        #[test]
        fn hostile_bytes_never_panic(bytes: Vec<u8>) {
            let _ = parse_replica_frame(&bytes);
        }
    }
}

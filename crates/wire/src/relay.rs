//! Frames between a relay and its clients: `docs/relay-protocol.md` is the specification.
//!
//! Both directions are streams of bytes, whatever carries them. A frame is its type (one byte), the length of its body (three
//! bytes, big-endian) and the body. [`parse`] takes frames from the beginning of a buffer and copies nothing; what is in a
//! frame points into that buffer. Keys are WireGuard public keys.

mod codes;
mod errors;
pub mod replica;

use std::fmt;

pub use codes::{ErrorReason, Notice};
pub use errors::{InvalidFrame, Oversized};

/// The version of the protocol that this module speaks.
pub const VERSION: u8 = 1;
/// The oldest version it understands.
pub const MIN_VERSION: u8 = 1;
/// The ALPN protocol (RFC 7301) of frames directly over TLS.
pub const ALPN: &[u8] = b"fairlead-relay/1";
/// The subprotocol of frames over WebSocket (RFC 6455, section 1.9).
pub const SUBPROTOCOL: &str = "fairlead-relay.v1";
/// The path of the WebSocket.
pub const PATH: &str = "/relay";
/// Length of a frame's type and length.
pub const HEADER_LENGTH: usize = 4;
/// The longest datagram: what fits into one of UDP over IPv4.
pub const MAX_DATAGRAM: usize = 65_507;
/// The longest body of a frame between registered parties.
pub const MAX_BODY: usize = KEY_LENGTH + MAX_DATAGRAM;
/// The longest body before the registration has succeeded.
pub const MAX_HANDSHAKE_BODY: usize = 8 << 10;
/// The longest token in a registration.
pub const MAX_TOKEN: usize = 4 << 10;
/// The longest message of an error; the rest is cut off.
pub const MAX_MESSAGE: usize = 255;

const KEY_LENGTH: usize = 32;
const PROOF_LENGTH: usize = 32;
const MAGIC: [u8; 8] = *b"fl-relay";
const CHANNEL_BINDING: u8 = 0x01;
const STANDBY_LINKS: u8 = 0x02;
/// Flag of a registration.
const STANDBY: u8 = 0x01;

const HELLO: u8 = 0x01;
const REGISTER: u8 = 0x02;
const REGISTERED: u8 = 0x03;
const DATAGRAM: u8 = 0x10;
const PROBE: u8 = 0x11;
const ALLOCATE: u8 = 0x12;
const ALLOCATED: u8 = 0x13;
const ACTIVATE: u8 = 0x14;
const PING: u8 = 0x20;
const PONG: u8 = 0x21;
const PEER_GONE: u8 = 0x22;
const DRAINING: u8 = 0x23;
const NOTICE: u8 = 0x24;
const STUN_SERVER: u8 = 0x25;
const REPLICAS: u8 = 0x26;
const ERROR: u8 = 0x2f;

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame<'a> {
    /// The client asks that its stand-by link receives from now on, as the newest of its key.
    Activate,
    /// The client asks for a UDP port through which the relay passes datagrams between it and this peer.
    Allocate([u8; 32]),
    /// The port that the client asked for.
    Allocated(AllocatedPort),
    /// A datagram for `peer`, or to the client from `peer`.
    Datagram {
        /// Key of the destination on the way to the relay, of the source on the way from it.
        peer: [u8; 32],
        /// Bytes of the datagram, which the relay does not look at.
        payload: &'a [u8],
    },
    /// The relay ends soon.
    Draining {
        /// Milliseconds until the client should connect again.
        reconnect_after: u32,
        /// Milliseconds until the relay closes this connection.
        close_after: u32,
    },
    /// Error for which the sender closes the connection. The last frame.
    Error {
        /// Code of the reason, for programs.
        reason: ErrorReason,
        /// Text of the reason, for people.
        message: &'a str,
    },
    /// The relay's first frame.
    Hello(Hello),
    /// Notice to a client that the relay keeps serving.
    Notice(Notice),
    /// The peer of a datagram has no connection to this relay; the datagram was dropped.
    PeerGone([u8; 32]),
    /// Asks for a [`Frame::Pong`] with the same bytes.
    Ping([u8; 8]),
    /// The answer to a [`Frame::Ping`].
    Pong([u8; 8]),
    /// A datagram that is queued apart from others, and sent before them: a path probe.
    Probe {
        /// Key of the other client, as in [`Frame::Datagram`].
        peer: [u8; 32],
        /// Bytes of the datagram, as in [`Frame::Datagram`].
        payload: &'a [u8],
    },
    /// The client's first frame.
    Register(Register<'a>),
    /// The relay's answer to a registration it accepts.
    Registered(Registered),
    /// Number of other replicas that the relay is connected to and that accept stand-by links.
    Replicas(u8),
    /// Ports at which the relay answers STUN requests, and the client's credentials.
    StunServer(StunServer),
    /// A type that this version does not know. Receivers ignore it.
    Unknown(u8),
}

/// Versions and properties of a relay, and the challenge for a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The oldest version the relay understands.
    pub min_version: u8,
    /// The newest version it understands.
    pub max_version: u8,
    /// Whether proofs include the TLS exporter: the relay terminates TLS itself.
    pub channel_binding: bool,
    /// Whether the relay accepts stand-by links.
    pub standby_links: bool,
    /// The running program: differs among replicas, and after a restart.
    pub replica: [u8; 16],
    /// The relay's X25519 public key for registrations.
    pub relay_key: [u8; 32],
    /// Random bytes for this connection.
    pub challenge: [u8; 32],
}

/// The registration of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register<'a> {
    /// Proves that the client has the private key of `key`; see [`signed`].
    pub proof: [u8; 32],
    /// The version the client has chosen.
    pub version: u8,
    /// The running client: random bytes that it keeps across connections and loses when it restarts.
    pub instance: [u8; 8],
    /// The client's WireGuard public key.
    pub key: [u8; 32],
    /// The name by which the client knows the relay.
    pub name: &'a str,
    /// A secret the operator of the relay gave to its users; may be empty.
    pub token: &'a [u8],
    /// Whether the link receives only while its key has no other one; see [`Frame::Activate`].
    pub is_standby: bool,
}

/// Settings of the relay for a registered client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    /// Seconds without a frame after which the relay closes the connection.
    pub idle_timeout: u16,
}

/// A UDP port of a relay for a client and a peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AllocatedPort {
    /// The peer.
    pub peer: [u8; 32],
    /// The port.
    pub port: u16,
    /// The key for MESSAGE-INTEGRITY-SHA256 of the requests that bind the client's address.
    pub token: [u8; 32],
}

impl fmt::Debug for AllocatedPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllocatedPort").field("port", &self.port).finish_non_exhaustive()
    }
}

/// Ports at which a relay answers STUN requests (RFC 8489), and the credentials for its second port.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct StunServer {
    /// UDP port for all binding requests.
    pub port: u16,
    /// The port that answers authenticated requests with CHANGE-REQUEST (RFC 5780, section 7.2).
    pub other_port: u16,
    /// The client's user name.
    pub user: [u8; 8],
    /// The client's key for MESSAGE-INTEGRITY-SHA256.
    pub key: [u8; 32],
    /// First and last of the ports that the relay may allocate to pairs of peers; both zero if it allocates none.
    pub relay_ports: (u16, u16),
}

impl fmt::Debug for StunServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("StunServer");
        shown.field("port", &self.port).field("other_port", &self.other_port).finish_non_exhaustive()
    }
}

/// A frame at the beginning of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parsed<'a> {
    /// The frame.
    pub frame: Frame<'a>,
    /// Body of the frame, as it was received.
    pub body: &'a [u8],
    /// The bytes it occupies.
    pub length: usize,
}

/// The bytes of a registration that its proof covers, from the body of the frame.
pub fn signed(register_body: &[u8]) -> &[u8] {
    register_body.get(PROOF_LENGTH..).unwrap_or_default()
}

/// Parses the first frame of `bytes`, whose body has at most `limit` bytes; `None` if it is not complete yet. A frame that is
/// too long is refused as soon as its length is known.
///
/// # Errors
/// The bytes are not a frame.
pub fn parse(bytes: &[u8], limit: usize) -> Result<Option<Parsed<'_>>, InvalidFrame> {
    let Some((kind, body)) = body(bytes, limit)? else { return Ok(None) };
    let frame = parse_body(kind, body)?;
    Ok(Some(Parsed { frame, body, length: HEADER_LENGTH.saturating_add(body.len()) }))
}

/// Type and body of the first frame of `bytes`.
fn body(bytes: &[u8], limit: usize) -> Result<Option<(u8, &[u8])>, InvalidFrame> {
    let Some(([kind, high, middle, low], rest)) = bytes.split_first_chunk() else { return Ok(None) };
    let length = usize::try_from(u32::from_be_bytes([0, *high, *middle, *low])).unwrap_or(usize::MAX);
    if length > limit {
        return Err(InvalidFrame::TooLong { kind: *kind, length, limit });
    }
    Ok(rest.get(..length).map(|body| (*kind, body)))
}

fn parse_body(kind: u8, body: &[u8]) -> Result<Frame<'_>, InvalidFrame> {
    let mut fields = Fields { kind, rest: body };
    Ok(match kind {
        ACTIVATE => Frame::Activate,
        HELLO => Frame::Hello(parse_hello(&mut fields)?),
        REGISTER => Frame::Register(parse_register(&mut fields)?),
        REGISTERED => Frame::Registered(Registered { idle_timeout: u16::from_be_bytes(fields.array()?) }),
        DATAGRAM => Frame::Datagram { peer: fields.array()?, payload: fields.rest },
        PROBE => Frame::Probe { peer: fields.array()?, payload: fields.rest },
        ALLOCATE => Frame::Allocate(fields.array()?),
        ALLOCATED => Frame::Allocated(AllocatedPort {
            peer: fields.array()?,
            port: u16::from_be_bytes(fields.array()?),
            token: fields.array()?,
        }),
        PING => Frame::Ping(fields.array()?),
        PONG => Frame::Pong(fields.array()?),
        PEER_GONE => Frame::PeerGone(fields.array()?),
        DRAINING => {
            let reconnect_after = u32::from_be_bytes(fields.array()?);
            Frame::Draining { reconnect_after, close_after: u32::from_be_bytes(fields.array()?) }
        }
        NOTICE => {
            let [code] = fields.array()?;
            Frame::Notice(code.into())
        }
        ERROR => {
            let [code] = fields.array()?;
            Frame::Error { reason: code.into(), message: fields.text()? }
        }
        REPLICAS => {
            let [count] = fields.array()?;
            Frame::Replicas(count)
        }
        STUN_SERVER => Frame::StunServer(StunServer {
            port: u16::from_be_bytes(fields.array()?),
            other_port: u16::from_be_bytes(fields.array()?),
            user: fields.array()?,
            key: fields.array()?,
            relay_ports: (u16::from_be_bytes(fields.array()?), u16::from_be_bytes(fields.array()?)),
        }),
        unknown => Frame::Unknown(unknown),
    })
}

fn parse_hello(fields: &mut Fields<'_>) -> Result<Hello, InvalidFrame> {
    if fields.array()? != MAGIC {
        return Err(InvalidFrame::Magic);
    }
    let [min_version, max_version, flags] = fields.array()?;
    Ok(Hello {
        min_version,
        max_version,
        channel_binding: flags & CHANNEL_BINDING != 0,
        standby_links: flags & STANDBY_LINKS != 0,
        replica: fields.array()?,
        relay_key: fields.array()?,
        challenge: fields.array()?,
    })
}

fn parse_register<'a>(fields: &mut Fields<'a>) -> Result<Register<'a>, InvalidFrame> {
    let proof = fields.array()?;
    let [version] = fields.array()?;
    let instance = fields.array()?;
    let key = fields.array()?;
    let name = fields.text()?;
    let length = u16::from_be_bytes(fields.array()?);
    let token = fields.take(length.into())?;
    Ok(Register { proof, version, instance, key, name, token, is_standby: fields.flags() & STANDBY != 0 })
}

/// Rest of a body that is being parsed.
struct Fields<'a> {
    kind: u8,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], InvalidFrame> {
        let (array, rest) = self.rest.split_first_chunk().ok_or(InvalidFrame::TooShort(self.kind))?;
        self.rest = rest;
        Ok(*array)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], InvalidFrame> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(InvalidFrame::TooShort(self.kind))?;
        self.rest = rest;
        Ok(taken)
    }

    /// Flags behind the other fields; earlier builds have none.
    fn flags(&self) -> u8 {
        self.rest.first().copied().unwrap_or_default()
    }

    /// A text after its length in one byte.
    fn text(&mut self) -> Result<&'a str, InvalidFrame> {
        let [length] = self.array()?;
        std::str::from_utf8(self.take(length.into())?).map_err(|_| InvalidFrame::Text(self.kind))
    }
}

impl Frame<'_> {
    /// Appends the frame to `out`.
    ///
    /// # Errors
    /// A part is too long; `out` is as before.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), Oversized> {
        let start = out.len();
        out.extend([self.kind(), 0, 0, 0]);
        self.encode_body(out).inspect_err(|_| out.truncate(start))?;
        finish(start, out);
        Ok(())
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Activate => ACTIVATE,
            Self::Allocate(_) => ALLOCATE,
            Self::Allocated(_) => ALLOCATED,
            Self::Datagram { .. } => DATAGRAM,
            Self::Draining { .. } => DRAINING,
            Self::Error { .. } => ERROR,
            Self::Hello(_) => HELLO,
            Self::Notice(_) => NOTICE,
            Self::PeerGone(_) => PEER_GONE,
            Self::Ping(_) => PING,
            Self::Pong(_) => PONG,
            Self::Probe { .. } => PROBE,
            Self::Register(_) => REGISTER,
            Self::Registered(_) => REGISTERED,
            Self::Replicas(_) => REPLICAS,
            Self::StunServer(_) => STUN_SERVER,
            Self::Unknown(kind) => *kind,
        }
    }

    fn encode_body(&self, out: &mut Vec<u8>) -> Result<(), Oversized> {
        match self {
            Self::Allocate(peer) | Self::PeerGone(peer) => out.extend(peer),
            Self::Allocated(allocated) => {
                out.extend(allocated.peer);
                out.extend(allocated.port.to_be_bytes());
                out.extend(allocated.token);
            }
            Self::Datagram { peer, payload } | Self::Probe { peer, payload } => {
                check("a datagram", payload.len(), MAX_DATAGRAM)?;
                out.reserve(KEY_LENGTH.saturating_add(payload.len()));
                out.extend(peer);
                out.extend_from_slice(payload);
            }
            Self::Draining { reconnect_after, close_after } => {
                out.extend(reconnect_after.to_be_bytes());
                out.extend(close_after.to_be_bytes());
            }
            Self::Error { reason, message } => {
                out.push((*reason).into());
                encode_text("a message", &message[..message.floor_char_boundary(MAX_MESSAGE)], out)?;
            }
            Self::Hello(hello) => hello.encode_body(out),
            Self::Notice(notice) => out.push((*notice).into()),
            Self::Ping(data) | Self::Pong(data) => out.extend(data),
            Self::Register(register) => register.encode_body(out)?,
            Self::Registered(registered) => out.extend(registered.idle_timeout.to_be_bytes()),
            Self::StunServer(server) => {
                out.extend(server.port.to_be_bytes());
                out.extend(server.other_port.to_be_bytes());
                out.extend(server.user);
                out.extend(server.key);
                out.extend(server.relay_ports.0.to_be_bytes());
                out.extend(server.relay_ports.1.to_be_bytes());
            }
            Self::Replicas(count) => out.push(*count),
            Self::Activate | Self::Unknown(_) => {}
        }
        Ok(())
    }
}

impl Hello {
    fn encode_body(&self, out: &mut Vec<u8>) {
        let flags = [(self.channel_binding, CHANNEL_BINDING), (self.standby_links, STANDBY_LINKS)];
        let flags = flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag);
        out.extend(MAGIC);
        out.extend([self.min_version, self.max_version, flags]);
        out.extend(self.replica);
        out.extend(self.relay_key);
        out.extend(self.challenge);
    }
}

impl Register<'_> {
    fn encode_body(&self, out: &mut Vec<u8>) -> Result<(), Oversized> {
        out.extend(self.proof);
        out.push(self.version);
        out.extend(self.instance);
        out.extend(self.key);
        encode_text("the relay's name", self.name, out)?;
        check("a token", self.token.len(), MAX_TOKEN)?;
        // The limit is below 2^16.
        out.extend(u16::try_from(self.token.len()).unwrap_or(u16::MAX).to_be_bytes());
        out.extend_from_slice(self.token);
        out.extend(self.is_standby.then_some(STANDBY));
        Ok(())
    }
}

/// Writes the length of the body behind the header that begins at `start`.
fn finish(start: usize, out: &mut [u8]) {
    // Below 2^24, since every part is limited.
    let length = out.len().saturating_sub(start).saturating_sub(HEADER_LENGTH);
    let [_, length @ ..] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    if let Some(header) = out.get_mut(start..).and_then(|frame| frame.first_chunk_mut::<HEADER_LENGTH>()) {
        header[1..].copy_from_slice(&length);
    }
}

fn encode_text(what: &'static str, text: &str, out: &mut Vec<u8>) -> Result<(), Oversized> {
    check(what, text.len(), u8::MAX.into())?;
    out.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

fn check(what: &'static str, length: usize, limit: usize) -> Result<(), Oversized> {
    if length > limit { Err(Oversized { what, length, limit }) } else { Ok(()) }
}

#[cfg(test)]
mod tests;

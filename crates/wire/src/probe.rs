//! Path probes: authenticated requests and answers between the WireGuard ports of two nodes. The format is described in
//! `docs/path-protocol.md`.
//!
//! A codec and its keys, no more: what is sent when, and what an answer means, is decided in `fairlead-path`.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};

use chacha20poly1305::aead::{AeadInPlace, KeyInit};
use chacha20poly1305::{Tag, XChaCha20Poly1305, XNonce};
use hkdf::Hkdf;
use sha2::{Digest, Sha256};
use x25519_dalek::{PublicKey, StaticSecret};

mod candidates;

pub use candidates::{Candidate, CandidateKind, MAX_CANDIDATES, parse_candidates};

/// The first bytes of every probe. No WireGuard message begins with them (its first byte is 1 to 4), and no STUN message
/// (its first two bits are zero).
pub const MAGIC: [u8; 4] = [0xf1, 0x1e, 0xad, 0x50];
/// The version that this implementation writes and the only one it reads.
pub const VERSION: u8 = 1;
/// Length of the shortest probe, in bytes: the one without padding.
pub const MIN_LENGTH: usize = HEADER_LENGTH + MESSAGE_LENGTH + TAG_LENGTH;

/// Magic, version, three zero bytes, the sender's tag, the nonce.
const HEADER_LENGTH: usize = 40;
/// Kind, transaction, address, port, flags.
const MESSAGE_LENGTH: usize = 32;
/// Length of a Poly1305 tag.
const TAG_LENGTH: usize = 16;
const KIND_REQUEST: u8 = 1;
const KIND_ANSWER: u8 = 2;
/// Flags of a request; receivers ignore flags that they do not know.
const FLAG_ROUND: u8 = 0x01;
const FLAG_HANDSHAKE: u8 = 0x02;
const FLAG_BIRTHDAY: u8 = 0x04;
const FLAG_CANDIDATES: u8 = 0x08;
const FLAG_PORTS: u8 = 0x20;
const FLAG_KEEPALIVES: u8 = 0x40;
/// Labels that no other protocol uses with a node's WireGuard key.
const KEY_LABEL: &[u8] = b"fairlead path probe key 1";
const TAG_LABEL: &[u8] = b"fairlead path probe tag 1";

/// Identifier that matches an answer to its request: 96 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransactionId(pub [u8; 12]);

/// Random bytes that a sender draws once, when its program starts. With a counter they make a nonce that is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub [u8; 16]);

/// Tag by which a receiver finds the sender among its peers: the first bytes of a hash of both public keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SenderTag(pub [u8; 8]);

impl SenderTag {
    /// The tag of probes from the node with the public key `sender` to the one with `receiver`.
    pub fn new(sender: &[u8; 32], receiver: &[u8; 32]) -> Self {
        let hash: [u8; 32] = Sha256::new()
            .chain_update(TAG_LABEL)
            .chain_update(sender)
            .chain_update(receiver)
            .finalize()
            .into();
        let [a, b, c, d, e, f, g, h, ..] = hash;
        Self([a, b, c, d, e, f, g, h])
    }
}

/// Order in which a symmetric NAT chooses external ports: each new mapping has a port that is `step` further than the one
/// before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortSequence {
    /// The port of the next mapping.
    pub next: u16,
    /// Distance from one port to the next; negative where ports count down.
    pub step: i16,
}

/// Message in a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Asks for an answer.
    Request {
        /// Repeated by the answer.
        transaction: TransactionId,
        /// The sender tries all its paths now; the receiver should too, so that both open their NATs at the same time.
        starts_round: bool,
        /// The sender has no session, and its handshake initiations are not answered: the receiver should start a handshake.
        wants_handshake: bool,
        /// The sender takes part in a birthday attempt with the receiver: one opens many ports, the other one tries many.
        is_birthday: bool,
        /// A NAT between the two forgets mappings sooner than keepalives come: the receiver should send them more often.
        wants_keepalives: bool,
        /// Ports that the sender's symmetric NAT gives out next, where that can be predicted.
        ports: Option<PortSequence>,
        /// Endpoints at which the sender may be reached, best first; at most [`MAX_CANDIDATES`]. Empty where it says nothing of
        /// that.
        candidates: Vec<Candidate>,
    },
    /// The answer to a request, sent back over the path it came on.
    Answer {
        /// The transaction of the request.
        transaction: TransactionId,
        /// The source address of the request, as its receiver saw it.
        observed: SocketAddr,
    },
}

/// The part of a probe that is not encrypted, and not authenticated before [`ProbeKeys::open`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Tag of the node that claims to have sent it.
    pub sender: SenderTag,
    /// The program run that sent it.
    pub epoch: Epoch,
    /// Grows by each probe of that run.
    pub counter: u64,
}

/// Reason why a datagram is not a probe of this peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProbe {
    /// The datagram does not begin with [`MAGIC`], or is shorter than [`MIN_LENGTH`].
    #[error("not a path probe")]
    NotProbe,
    /// A version that this implementation does not read.
    #[error("path probe of version {0}, where version {VERSION} is known")]
    Version(u8),
    /// The probe was not made with the keys of this peer.
    #[error("path probe that fails authentication")]
    Unauthenticated,
    /// A kind that this version does not have.
    #[error("path probe of the unknown kind {0}")]
    Kind(u8),
}

/// Whether a datagram begins as a probe of any version does.
pub fn is_probe(datagram: &[u8]) -> bool {
    datagram.starts_with(&MAGIC)
}

impl Header {
    /// Reads the header of a probe.
    ///
    /// # Errors
    /// The datagram is no probe, or has another version.
    pub fn parse(datagram: &[u8]) -> Result<Self, InvalidProbe> {
        let Some(header) = datagram.first_chunk::<HEADER_LENGTH>().filter(|_| is_probe(datagram)) else {
            return Err(InvalidProbe::NotProbe);
        };
        let [_, _, _, _, version, _, _, _, rest @ ..] = *header;
        if version != VERSION {
            return Err(InvalidProbe::Version(version));
        }
        if datagram.len() < MIN_LENGTH {
            return Err(InvalidProbe::NotProbe);
        }
        let mut sender = [0; 8];
        let mut epoch = [0; 16];
        let mut counter = [0; 8];
        sender.copy_from_slice(&rest[..8]);
        epoch.copy_from_slice(&rest[8..24]);
        counter.copy_from_slice(&rest[24..]);
        Ok(Self { sender: SenderTag(sender), epoch: Epoch(epoch), counter: u64::from_be_bytes(counter) })
    }

    fn to_bytes(self) -> [u8; HEADER_LENGTH] {
        let mut bytes = [0; HEADER_LENGTH];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[8..16].copy_from_slice(&self.sender.0);
        bytes[16..32].copy_from_slice(&self.epoch.0);
        bytes[32..].copy_from_slice(&self.counter.to_be_bytes());
        bytes
    }
}

/// The keys of the probes between this node and one peer, one for each direction.
#[derive(Clone)]
pub struct ProbeKeys {
    tag: SenderTag,
    sending: XChaCha20Poly1305,
    receiving: XChaCha20Poly1305,
}

impl fmt::Debug for ProbeKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeKeys").field("tag", &self.tag).finish_non_exhaustive()
    }
}

impl ProbeKeys {
    /// Derives the keys from the WireGuard keys of both nodes, and their pre-shared key if they have one. `None` for a public
    /// key that contributes nothing to a shared secret (RFC 7748, section 6.1).
    pub fn derive(private: &[u8; 32], peer: &[u8; 32], preshared: Option<&[u8; 32]>) -> Option<Self> {
        let private = StaticSecret::from(*private);
        let own = PublicKey::from(&private).to_bytes();
        let shared = private.diffie_hellman(&PublicKey::from(*peer));
        if !shared.was_contributory() {
            return None;
        }
        let secret = Hkdf::<Sha256>::new(Some(preshared.unwrap_or(&[0; 32])), shared.as_bytes());
        Some(Self {
            tag: SenderTag::new(&own, peer),
            sending: cipher(&secret, &own, peer)?,
            receiving: cipher(&secret, peer, &own)?,
        })
    }

    /// Encrypts a message into a datagram of `length` bytes, or as many as it needs if that is more. A pair of epoch and counter
    /// must never be used twice.
    pub fn seal(&self, epoch: Epoch, counter: u64, message: &Message, length: usize) -> Vec<u8> {
        let header = Header { sender: self.tag, epoch, counter }.to_bytes();
        let mut body = message.to_bytes();
        body.resize(body.len().max(length.saturating_sub(HEADER_LENGTH + TAG_LENGTH)), 0);
        // It only fails for messages of 256 GiB.
        let tag = self.sending.encrypt_in_place_detached(nonce(&header), associated(&header), &mut body);
        [&header[..], &body, &tag.unwrap_or_default()].concat()
    }

    /// Decrypts a datagram that the peer has sent.
    ///
    /// # Errors
    /// The peer did not send this datagram, or it is of another version.
    pub fn open(&self, datagram: &[u8]) -> Result<Message, InvalidProbe> {
        Header::parse(datagram)?;
        let (header, rest) = datagram.split_first_chunk::<HEADER_LENGTH>().ok_or(InvalidProbe::NotProbe)?;
        let (body, tag) = rest.split_last_chunk::<TAG_LENGTH>().ok_or(InvalidProbe::NotProbe)?;
        let mut body = body.to_vec();
        self.receiving
            .decrypt_in_place_detached(nonce(header), associated(header), &mut body, Tag::from_slice(tag))
            .map_err(|_| InvalidProbe::Unauthenticated)?;
        Message::parse(&body)
    }
}

/// Magic, version and tag: what is authenticated with the message, beside the nonce.
fn associated(header: &[u8; HEADER_LENGTH]) -> &[u8] {
    &header[..16]
}

/// Epoch and counter.
fn nonce(header: &[u8; HEADER_LENGTH]) -> &XNonce {
    XNonce::from_slice(&header[16..])
}

fn cipher(secret: &Hkdf<Sha256>, sender: &[u8; 32], receiver: &[u8; 32]) -> Option<XChaCha20Poly1305> {
    let mut key = [0; 32];
    secret.expand_multi_info(&[KEY_LABEL, sender, receiver], &mut key).ok()?;
    Some(XChaCha20Poly1305::new(&key.into()))
}

impl Message {
    /// Without padding.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [0; MESSAGE_LENGTH];
        let (transaction, list) = match self {
            Self::Answer { transaction, observed } => {
                bytes[0] = KIND_ANSWER;
                bytes[13..29].copy_from_slice(&candidates::mapped(observed.ip()));
                bytes[29..31].copy_from_slice(&observed.port().to_be_bytes());
                (transaction, Vec::new())
            }
            Self::Request {
                transaction,
                starts_round,
                wants_handshake,
                is_birthday,
                wants_keepalives,
                ports,
                candidates,
            } => {
                bytes[0] = KIND_REQUEST;
                if let Some(PortSequence { next, step }) = ports {
                    bytes[13..15].copy_from_slice(&next.to_be_bytes());
                    bytes[15..17].copy_from_slice(&step.to_be_bytes());
                }
                let flags = [
                    (FLAG_ROUND, *starts_round),
                    (FLAG_HANDSHAKE, *wants_handshake),
                    (FLAG_BIRTHDAY, *is_birthday),
                    (FLAG_CANDIDATES, !candidates.is_empty()),
                    (FLAG_PORTS, ports.is_some()),
                    (FLAG_KEEPALIVES, *wants_keepalives),
                ];
                let set = flags.into_iter().filter(|(_, is_set)| *is_set);
                bytes[31] = set.fold(0, |flags, (flag, _)| flags | flag);
                (transaction, candidates::to_bytes(candidates))
            }
        };
        bytes[1..13].copy_from_slice(&transaction.0);
        [&bytes[..], &list].concat()
    }

    /// Parses a message. In a request without candidates the bytes behind it are padding.
    fn parse(body: &[u8]) -> Result<Self, InvalidProbe> {
        let (bytes, rest) = body.split_first_chunk::<MESSAGE_LENGTH>().ok_or(InvalidProbe::NotProbe)?;
        let mut transaction = [0; 12];
        let mut ip = [0; 16];
        transaction.copy_from_slice(&bytes[1..13]);
        ip.copy_from_slice(&bytes[13..29]);
        let transaction = TransactionId(transaction);
        let has = |flag| bytes[31] & flag != 0;
        match bytes[0] {
            KIND_ANSWER => {
                let ip = Ipv6Addr::from(ip).to_canonical();
                let observed = SocketAddr::new(ip, u16::from_be_bytes([bytes[29], bytes[30]]));
                Ok(Self::Answer { transaction, observed })
            }
            KIND_REQUEST => Ok(Self::Request {
                transaction,
                starts_round: has(FLAG_ROUND),
                wants_handshake: has(FLAG_HANDSHAKE),
                is_birthday: has(FLAG_BIRTHDAY),
                wants_keepalives: has(FLAG_KEEPALIVES),
                ports: has(FLAG_PORTS).then(|| PortSequence {
                    next: u16::from_be_bytes([bytes[13], bytes[14]]),
                    step: i16::from_be_bytes([bytes[15], bytes[16]]),
                }),
                candidates: if has(FLAG_CANDIDATES) { parse_candidates(rest) } else { Vec::new() },
            }),
            other => Err(InvalidProbe::Kind(other)),
        }
    }
}

#[cfg(test)]
mod tests;

//! The two keys of a session, and what they do to data messages (WireGuard paper 5.4.6).
//!
//! Every packet goes through here: messages are encrypted and decrypted where they lie, without allocation, lock or copy.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use aws_lc_rs::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::error::Error;
use crate::message::{DATA_HEADER_LENGTH, TAG_LENGTH};

/// Counters of a session are below this (WireGuard paper 6.1): 2^64 - 2^13 - 1, lower than the greatest integer by more than the
/// window, so that no sum overflows. The kernel's differs by 64 (`enum limits` in its `messages.h`), which no session lives to see.
pub(crate) const REJECT_AFTER_MESSAGES: u64 = u64::MAX - (1 << 13);

/// The type of a data message and its three reserved bytes (WireGuard paper 5.4.6).
const DATA: u32 = 4;
/// Message type until the message is encrypted: no type of the paper, and nothing that an empty buffer holds.
const NOT_ENCRYPTED: u32 = u32::MAX;
/// Bytes that `LessSafeKey` has on the heap: `EVP_AEAD_CTX` of AWS-LC and the length in front of it.
const CONTEXT_LENGTH: usize = 592;

/// Encrypts what is sent in a session, on several threads at once: first a message gets its counter, then it is encrypted.
pub struct SendKey {
    key: LessSafeKey,
    remote_index: u32,
    counter: AtomicU64,
}

impl SendKey {
    /// The key of a new session, whose messages carry the peer's `remote_index`.
    pub fn new(key: &[u8; 32], remote_index: u32) -> Self {
        Self { key: cipher(key), remote_index, counter: AtomicU64::new(0) }
    }

    /// Gives the next counter, which is returned, to `datagram`: 16 bytes for the header, which is written, the inner packet, which is
    /// padded already, and 16 bytes for the tag. [`Self::encrypt`] makes a data message of it.
    ///
    /// # Errors
    /// [`Error::CounterExhausted`], and [`Error::Malformed`] if `datagram` has no room for header and tag.
    #[inline]
    pub fn assign_counter(&self, datagram: &mut [u8]) -> Result<u64, Error> {
        let (header, rest) =
            datagram.split_first_chunk_mut::<DATA_HEADER_LENGTH>().ok_or(Error::Malformed)?;
        if rest.len() < TAG_LENGTH {
            return Err(Error::Malformed);
        }
        let counter = self.next_counter()?;
        *header = Header { index: self.remote_index, counter }.to_bytes(NOT_ENCRYPTED);
        Ok(counter)
    }

    /// Makes a data message of a `datagram` that has a counter: encrypts it in place, on any thread and in any order. Only the first
    /// call does: one more with the same counter would show what is inside.
    ///
    /// # Errors
    /// [`Error::Malformed`] if this key's [`Self::assign_counter`] was not called for it, or it is encrypted already; then it must not
    /// be sent.
    #[inline]
    pub fn encrypt(&self, datagram: &mut [u8]) -> Result<(), Error> {
        let Header { index, counter } = Header::of_kind(NOT_ENCRYPTED, datagram)?;
        if index != self.remote_index || counter >= self.messages() {
            return Err(Error::Malformed);
        }
        let (header, rest) =
            datagram.split_first_chunk_mut::<DATA_HEADER_LENGTH>().ok_or(Error::Malformed)?;
        let (packet, tag) = rest.split_last_chunk_mut::<TAG_LENGTH>().ok_or(Error::Malformed)?;
        self.key
            .seal_in_place_scatter(nonce(counter), Aad::empty(), packet, &[], tag)
            .map_err(|_| Error::Malformed)?;
        *header = Header { index: self.remote_index, counter }.to_bytes(DATA);
        Ok(())
    }

    /// Number of counters that have been used.
    #[inline]
    pub fn messages(&self) -> u64 {
        self.counter.load(Ordering::Relaxed)
    }

    /// Whether it has used `REJECT_AFTER_MESSAGES` counters (WireGuard paper 6.1), so that no more can be sent.
    #[inline]
    pub fn is_exhausted(&self) -> bool {
        self.messages() >= REJECT_AFTER_MESSAGES
    }

    /// The counter is looked at before it is raised: however often callers try, it never wraps around to a nonce that was used.
    #[inline]
    fn next_counter(&self) -> Result<u64, Error> {
        if self.is_exhausted() {
            return Err(Error::CounterExhausted);
        }
        let counter = self.counter.fetch_add(1, Ordering::Relaxed);
        if counter < REJECT_AFTER_MESSAGES { Ok(counter) } else { Err(Error::CounterExhausted) }
    }

    /// Pretends that `messages` were sent.
    #[cfg(test)]
    pub(crate) fn set_messages(&self, messages: u64) {
        self.counter.store(messages, Ordering::Relaxed);
    }
}

impl fmt::Debug for SendKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendKey")
            .field("remote_index", &self.remote_index)
            .field("messages", &self.messages())
            .finish_non_exhaustive()
    }
}

/// Decrypts what is received in a session, on several threads at once. Which counters may still come,
/// [`ReplayWindow`](fairlead_limits::ReplayWindow) knows.
pub struct ReceiveKey {
    key: LessSafeKey,
    local_index: u32,
}

/// A data message that was decrypted: its sender has the key of the session. Nothing says whether it came before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decrypted {
    pub(crate) index: u32,
    pub(crate) counter: u64,
    pub(crate) inner: Range<usize>,
}

impl Decrypted {
    /// This node's index of the session.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Number of the message within the session.
    pub fn counter(&self) -> u64 {
        self.counter
    }

    /// Range of the inner packet in the datagram, with its padding. Empty for a keepalive (WireGuard paper 6.5).
    pub fn inner(&self) -> Range<usize> {
        self.inner.clone()
    }
}

impl ReceiveKey {
    /// The key of a new session, whose messages carry this node's `local_index`.
    pub fn new(key: &[u8; 32], local_index: u32) -> Self {
        Self { key: cipher(key), local_index }
    }

    /// Decrypts the data message `datagram` in place.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::UnknownIndex`] and [`Error::Authentication`]; what `datagram` holds is then undefined.
    #[inline]
    pub fn decrypt(&self, datagram: &mut [u8]) -> Result<Decrypted, Error> {
        let Header { index, counter } = Header::of_kind(DATA, datagram)?;
        if index != self.local_index {
            return Err(Error::UnknownIndex);
        }
        let rest = datagram.get_mut(DATA_HEADER_LENGTH..).ok_or(Error::Malformed)?;
        let (packet, tag) = rest.split_last_chunk_mut::<TAG_LENGTH>().ok_or(Error::Malformed)?;
        // With its tag apart, the packet stays where it is: `open_in_place` would move it, if only by nothing.
        self.key
            .open_in_place_separate_tag(nonce(counter), Aad::empty(), tag, packet)
            .map_err(|_| Error::Authentication)?;
        let inner = DATA_HEADER_LENGTH..DATA_HEADER_LENGTH.saturating_add(packet.len());
        Ok(Decrypted { index, counter, inner })
    }
}

impl fmt::Debug for ReceiveKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveKey").field("local_index", &self.local_index).finish_non_exhaustive()
    }
}

/// The first 16 bytes of a data message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    /// The receiver's index of the session.
    index: u32,
    /// Number of the message within the session.
    counter: u64,
}

impl Header {
    /// # Errors
    /// [`Error::Malformed`] if `datagram` has no header with this type.
    #[inline]
    fn of_kind(expected: u32, datagram: &[u8]) -> Result<Self, Error> {
        let (kind, rest) = datagram.split_first_chunk().ok_or(Error::Malformed)?;
        let (index, rest) = rest.split_first_chunk().ok_or(Error::Malformed)?;
        let (counter, _) = rest.split_first_chunk().ok_or(Error::Malformed)?;
        if u32::from_le_bytes(*kind) != expected {
            return Err(Error::Malformed);
        }
        Ok(Self { index: u32::from_le_bytes(*index), counter: u64::from_le_bytes(*counter) })
    }

    #[inline]
    fn to_bytes(self, kind: u32) -> [u8; DATA_HEADER_LENGTH] {
        // One number, written once: type, index and counter from the lowest byte up.
        let number = u128::from(kind) | u128::from(self.index) << 32 | u128::from(self.counter) << 64;
        number.to_le_bytes()
    }
}

/// Four zero bytes and the counter, as Noise has it for ChaChaPoly.
#[inline]
fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    if let Some(last) = bytes.last_chunk_mut() {
        *last = counter.to_le_bytes();
    }
    Nonce::assume_unique_for_key(bytes)
}

fn cipher(key: &[u8; 32]) -> LessSafeKey {
    match UnboundKey::new(&CHACHA20_POLY1305, key) {
        Ok(key) => LessSafeKey::new(key),
        // The length is right, so only memory can be missing. Rust's own allocations end the process then, too.
        Err(_) => handle_alloc_error(Layout::new::<[u8; CONTEXT_LENGTH]>()),
    }
}

#[cfg(test)]
mod tests;

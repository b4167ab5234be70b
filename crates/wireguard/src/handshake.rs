//! The handshake: initiation and response (WireGuard paper 5.4.2 and 5.4.3; `drivers/net/wireguard/noise.c`).
//!
//! `mac1` and `mac2` of the messages are zero here; see [`crate::MacSender`] and [`crate::HandshakeLimiter`].

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use fairlead_keys::PublicKey;
use snow::HandshakeState;
use zeroize::Zeroize;

use crate::error::Error;
use crate::handshake::noise::{Keys, Responder};
use crate::identity::{Identity, KeyPair};
use crate::message::{self, Initiation, Kind, Response};
use crate::random::Random;

mod noise;
#[cfg(test)]
mod tests;

/// Ephemeral key, encrypted static key and encrypted time stamp of an initiation.
type InitiationBody = [u8; 32 + 48 + 28];
/// Ephemeral key and authentication tag of a response.
type ResponseBody = [u8; 32 + 16];

/// The time of an initiation in the external TAI64N format, big-endian (WireGuard paper 5.1). A receiver only compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tai64n(pub [u8; 12]);

impl From<SystemTime> for Tai64n {
    /// In steps of 2^24 ns (16.8 ms), as `tai64n_now` of the kernel, so that it tells little about the sender's clock. A time before
    /// 1970 counts as 1970.
    fn from(time: SystemTime) -> Self {
        // TAI is 37 s ahead of UTC since 2017. The kernel adds 10 s, `gotatun` 37 s: with fewer than it, peers would refuse the first
        // initiations of a node that used it before.
        const EPOCH: u64 = 0x4000_0000_0000_0025;
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let seconds = EPOCH.saturating_add(since.as_secs()).to_be_bytes();
        let nanoseconds = (since.subsec_nanos() & !0xff_ffff).to_be_bytes();
        let mut stamp = [0; 12];
        stamp.iter_mut().zip(seconds.iter().chain(&nanoseconds)).for_each(|(to, from)| *to = *from);
        Self(stamp)
    }
}

/// A handshake that we have started, until it is finished or dropped. Some 200 bytes.
pub struct Initiator {
    index: u32,
    timestamp: Tai64n,
    keys: Arc<Keys>,
}

/// Starts a handshake with `peer`. `index` is what the peer will call us by. The message has no MACs yet.
///
/// # Errors
///
/// [`Error::LowOrderKey`] if the peer's key is no key.
pub fn initiate(
    identity: &Identity,
    peer: &PublicKey,
    index: u32,
    timestamp: Tai64n,
    random: &mut dyn Random,
) -> Result<(Initiator, Initiation), Error> {
    let local = Arc::clone(identity.pair());
    let ephemeral = KeyPair::draw(random);
    let responder = Responder::new(peer.0, &local, &ephemeral)?;
    let keys = Keys { local, ephemeral: OnceLock::from(ephemeral), responder: Some(responder) };
    let initiator = Initiator { index, timestamp, keys: Arc::new(keys) };
    let (_, body) = initiator.write()?;
    Ok((initiator, message::assemble(Kind::Initiation, &[&index.to_le_bytes(), &body])))
}

impl Initiator {
    /// Our index, which the response names as its receiver.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The keys that the peer's response leads to. A response that is refused changes nothing: the true one may still come.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`]; [`Error::UnknownIndex`] if it answers another initiation; [`Error::Authentication`] if it is not the
    /// peer's, or the peer has another preshared key; [`Error::LowOrderKey`].
    pub fn finish(&self, response: &[u8], psk: Option<&[u8; 32]>) -> Result<SessionKeys, Error> {
        let remote_index = message::sender_index(response).ok_or(Error::Malformed)?;
        let local_index = message::receiver_index(response).ok_or(Error::Malformed)?;
        let body: ResponseBody = message::field(response, 12).ok_or(Error::Malformed)?;
        if local_index != self.index {
            return Err(Error::UnknownIndex);
        }
        // The library's state cannot be copied. Writing the initiation again costs hashes, and no Diffie-Hellman computation.
        let (mut state, _) = self.write()?;
        noise::set_psk(&mut state, psk)?;
        state.read_message(&body, &mut []).map_err(noise::refused)?;
        let (mut send, mut receive) = state.dangerously_get_raw_split();
        let keys = SessionKeys { send, receive, local_index, remote_index, is_initiator: true };
        send.zeroize();
        receive.zeroize();
        Ok(keys)
    }

    /// The initiation, the same at every call, and the state after it.
    fn write(&self) -> Result<(HandshakeState, InitiationBody), Error> {
        let mut state = noise::start(&self.keys)?;
        let mut body = [0; _];
        state.write_message(&self.timestamp.0, &mut body).map_err(noise::refused)?;
        Ok((state, body))
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator").field("index", &self.index).finish_non_exhaustive()
    }
}

/// An initiation of a peer that holds the private key of `peer`. It may be a replay: the caller has to compare `timestamp` with
/// the greatest one of this peer (WireGuard paper 5.1).
pub struct ReceivedInitiation {
    /// The initiator.
    pub peer: PublicKey,
    /// Time at which the initiation was made, by the initiator's clock.
    pub timestamp: Tai64n,
    /// Index by which the initiator wants to be called.
    pub sender_index: u32,
    keys: Arc<Keys>,
    state: Box<HandshakeState>,
}

/// Decrypts an initiation to us. Its MACs are [`crate::HandshakeLimiter`]'s to check, before.
///
/// # Errors
///
/// [`Error::Malformed`]; [`Error::Authentication`] if it is forged or meant for another key; [`Error::LowOrderKey`].
pub fn read_initiation(identity: &Identity, initiation: &[u8]) -> Result<ReceivedInitiation, Error> {
    if message::kind_of(initiation) != Some(Kind::Initiation) {
        return Err(Error::Malformed);
    }
    let sender_index = message::sender_index(initiation).ok_or(Error::Malformed)?;
    let body: InitiationBody = message::field(initiation, 8).ok_or(Error::Malformed)?;
    let local = Arc::clone(identity.pair());
    let keys = Arc::new(Keys { local, ephemeral: OnceLock::new(), responder: None });
    let mut state = Box::new(noise::start(&keys)?);
    let mut timestamp = [0; 12];
    state.read_message(&body, &mut timestamp).map_err(noise::refused)?;
    let peer = state.get_remote_static().and_then(|key| key.try_into().ok()).ok_or(Error::Noise)?;
    Ok(ReceivedInitiation { peer: PublicKey(peer), timestamp: Tai64n(timestamp), sender_index, keys, state })
}

impl ReceivedInitiation {
    /// Answers. `index` is what the initiator will call us by. The message has no MACs yet, and the keys must not be used for
    /// sending before the initiator has used them (WireGuard paper 5.4.6).
    ///
    /// # Errors
    ///
    /// [`Error::LowOrderKey`].
    pub fn respond(
        mut self,
        psk: Option<&[u8; 32]>,
        index: u32,
        random: &mut dyn Random,
    ) -> Result<(Response, SessionKeys), Error> {
        self.keys.ephemeral.get_or_init(|| KeyPair::draw(random));
        noise::set_psk(&mut self.state, psk)?;
        let mut body: ResponseBody = [0; _];
        self.state.write_message(&[], &mut body).map_err(noise::refused)?;
        let response = message::assemble(
            Kind::Response,
            &[&index.to_le_bytes(), &self.sender_index.to_le_bytes(), &body],
        );
        let (mut receive, mut send) = self.state.dangerously_get_raw_split();
        let remote_index = self.sender_index;
        let keys = SessionKeys { send, receive, local_index: index, remote_index, is_initiator: false };
        send.zeroize();
        receive.zeroize();
        Ok((response, keys))
    }
}

impl fmt::Debug for ReceivedInitiation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedInitiation")
            .field("peer", &self.peer)
            .field("timestamp", &self.timestamp)
            .field("sender_index", &self.sender_index)
            .finish_non_exhaustive()
    }
}

/// Keys and indexes that a handshake leads to (WireGuard paper 5.4.5). The keys are erased on drop, and `Debug` does not show them.
pub struct SessionKeys {
    /// Key of what we send.
    pub send: [u8; 32],
    /// Key of what we receive.
    pub receive: [u8; 32],
    /// Receiver index of what we receive.
    pub local_index: u32,
    /// Receiver index of what we send.
    pub remote_index: u32,
    /// Whether we started the handshake.
    pub is_initiator: bool,
}

impl Drop for SessionKeys {
    fn drop(&mut self) {
        self.send.zeroize();
        self.receive.zeroize();
    }
}

impl fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionKeys")
            .field("local_index", &self.local_index)
            .field("remote_index", &self.remote_index)
            .field("is_initiator", &self.is_initiator)
            .finish_non_exhaustive()
    }
}

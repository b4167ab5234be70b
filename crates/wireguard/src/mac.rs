//! The two MACs of a handshake message, and cookies as their receiver uses them (WireGuard paper 5.4.4 and 5.4.7;
//! `drivers/net/wireguard/cookie.c`).

use std::fmt;
use std::time::{Duration, Instant};

use blake2::digest::consts::U16;
use blake2::digest::{FixedOutput as _, KeyInit as _, Update as _};
use blake2::{Blake2s256, Blake2sMac, Digest as _};
use chacha20poly1305::XChaCha20Poly1305;
use chacha20poly1305::aead::AeadInPlace as _;
use fairlead_keys::PublicKey;

use crate::error::Error;
use crate::message::{self, Kind, MAC_LENGTH};

/// Lifetime of a cookie, and of the secret that it is made with (`COOKIE_SECRET_MAX_AGE` of the kernel's `messages.h`).
pub(crate) const COOKIE_LIFETIME: Duration = Duration::from_secs(120);
const MAC1_LABEL: &[u8] = b"mac1----";
const COOKIE_LABEL: &[u8] = b"cookie--";

/// A `mac1`, a `mac2` or a cookie.
pub(crate) type Mac = [u8; MAC_LENGTH];

/// Signs the handshake messages to one peer.
pub struct MacSender {
    mac1_key: [u8; 32],
    cookie_key: [u8; 32],
    /// The last cookie of the peer, and when it came.
    cookie: Option<(Mac, Instant)>,
    /// `mac1` of the last message, until a cookie has answered it.
    last_mac1: Option<Mac>,
}

impl MacSender {
    /// For messages to the peer with this public key.
    pub fn new(peer: &PublicKey) -> Self {
        let mac1_key = mac1_key(peer);
        let cookie_key = cookie_key(peer);
        Self { mac1_key, cookie_key, cookie: None, last_mac1: None }
    }

    /// Writes `mac1` into the end of an initiation or a response, and `mac2` if the peer has sent a cookie in the last 120 s.
    pub fn sign(&mut self, message: &mut [u8], now: Instant) {
        let Some((signed, mac2)) = message.split_last_chunk_mut::<MAC_LENGTH>() else { return };
        let Some((body, mac1)) = signed.split_last_chunk_mut::<MAC_LENGTH>() else { return };
        *mac1 = mac(&self.mac1_key, &[body]);
        self.last_mac1 = Some(*mac1);
        self.cookie = self.cookie.filter(|(_, at)| now.saturating_duration_since(*at) < COOKIE_LIFETIME);
        *mac2 = self.cookie.map_or([0; MAC_LENGTH], |(cookie, _)| mac(&cookie, &[signed]));
    }

    /// Keeps the cookie of a reply to the last message that was signed. A wrong reply changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`], [`Error::NoCookieAwaited`], or [`Error::Authentication`] if the reply answers another message.
    pub fn receive_cookie(&mut self, reply: &[u8], now: Instant) -> Result<(), Error> {
        if message::kind_of(reply) != Some(Kind::CookieReply) {
            return Err(Error::Malformed);
        }
        let nonce: [u8; 24] = message::field(reply, 8).ok_or(Error::Malformed)?;
        let mut cookie: Mac = message::field(reply, 32).ok_or(Error::Malformed)?;
        let tag: [u8; 16] = message::field(reply, 48).ok_or(Error::Malformed)?;
        let mac1 = self.last_mac1.ok_or(Error::NoCookieAwaited)?;
        XChaCha20Poly1305::new(&self.cookie_key.into())
            .decrypt_in_place_detached(&nonce.into(), &mac1, &mut cookie, &tag.into())
            .map_err(|_| Error::Authentication)?;
        self.cookie = Some((cookie, now));
        self.last_mac1 = None;
        Ok(())
    }

    /// Whether it holds a cookie of the peer. One that has become too old is dropped when the next message is signed.
    pub fn has_cookie(&self) -> bool {
        self.cookie.is_some()
    }
}

impl fmt::Debug for MacSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MacSender").field("has_cookie", &self.has_cookie()).finish_non_exhaustive()
    }
}

/// Key of `mac1` of messages to `receiver`.
pub(crate) fn mac1_key(receiver: &PublicKey) -> [u8; 32] {
    labelled(MAC1_LABEL, receiver)
}

/// Key that the cookies of `receiver` are encrypted with.
pub(crate) fn cookie_key(receiver: &PublicKey) -> [u8; 32] {
    labelled(COOKIE_LABEL, receiver)
}

fn labelled(label: &[u8], receiver: &PublicKey) -> [u8; 32] {
    Blake2s256::new().chain_update(label).chain_update(receiver.0).finalize().into()
}

/// Keyed BLAKE2s with an output of 16 bytes (`MAC` of WireGuard paper 5.4) over the parts, one after the other. The key is a
/// cookie, or a key of 32 bytes.
#[expect(
    clippy::expect_used,
    reason = "BLAKE2s takes keys of 1 to 32 bytes (RFC 7693, 2.1), and callers have 16 or 32"
)]
pub(crate) fn mac(key: &[u8], parts: &[&[u8]]) -> Mac {
    let mac = Blake2sMac::<U16>::new_from_slice(key).expect("the key has at most 32 bytes");
    parts.iter().fold(mac, |mac, part| mac.chain(part)).finalize_fixed().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::{INITIATION_LENGTH, RESPONSE_LENGTH};

    const PEER: PublicKey = PublicKey([9; 32]);

    fn message(length: usize) -> Vec<u8> {
        let mut message = vec![0x5a; length];
        message[..4].copy_from_slice(&[if length == INITIATION_LENGTH { 1 } else { 2 }, 0, 0, 0]);
        message
    }

    /// A reply as the peer makes it for a message.
    fn reply(cookie: Mac, message: &[u8]) -> [u8; 64] {
        let (nonce, mut encrypted) = ([3; 24], cookie);
        let tag = XChaCha20Poly1305::new(&cookie_key(&PEER).into())
            .encrypt_in_place_detached(&nonce.into(), &message[message.len() - 32..][..16], &mut encrypted)
            .unwrap();
        message::assemble(Kind::CookieReply, &[&[0x5a; 4], &nonce, &encrypted, &tag])
    }

    /// RFC 7693, appendix B.
    #[test]
    fn hashes_are_those_of_blake2s() {
        let hash: [u8; 32] = Blake2s256::digest(b"abc").into();
        assert_eq!(hash[..8], [0x50, 0x8c, 0x5e, 0x8c, 0x32, 0x7c, 0x14, 0xe2]);
        let parts = mac(&[1; 32], &[b"hand", b"", b"shake"]);
        assert_eq!(parts, mac(&[1; 32], &[b"handshake"]));
        assert_ne!(parts, mac(&[1; 16], &[b"handshake"]));
    }

    #[test]
    fn macs_stand_at_the_end_and_cover_all_before_them() {
        for length in [INITIATION_LENGTH, RESPONSE_LENGTH] {
            let (mut bytes, now) = (message(length), Instant::now());
            MacSender::new(&PEER).sign(&mut bytes, now);
            let (body, macs) = bytes.split_at(length - 32);
            assert_eq!(body, &message(length)[..length - 32]);
            assert_eq!(macs[..16], mac(&mac1_key(&PEER), &[body]));
            assert_eq!(macs[16..], [0; 16]);
        }
    }

    #[test]
    fn a_cookie_signs_messages_of_120_seconds() {
        let (mut sender, mut bytes, now) =
            (MacSender::new(&PEER), message(INITIATION_LENGTH), Instant::now());
        sender.sign(&mut bytes, now);
        sender.receive_cookie(&reply([7; 16], &bytes), now).unwrap();
        assert!(sender.has_cookie());
        for length in [INITIATION_LENGTH, RESPONSE_LENGTH] {
            let mut bytes = message(length);
            sender.sign(&mut bytes, now + Duration::from_secs(119));
            assert_eq!(bytes[length - 16..], mac(&[7; 16], &[&bytes[..length - 16]]));
        }
        sender.sign(&mut bytes, now + Duration::from_secs(120));
        assert_eq!(bytes[INITIATION_LENGTH - 16..], [0; 16]);
        assert!(!sender.has_cookie());
    }

    #[test]
    fn only_a_reply_to_the_last_message_brings_a_cookie() {
        let (mut sender, now) = (MacSender::new(&PEER), Instant::now());
        let (mut first, mut last) = (message(INITIATION_LENGTH), message(RESPONSE_LENGTH));
        assert_eq!(sender.receive_cookie(&reply([7; 16], &first), now), Err(Error::NoCookieAwaited));
        sender.sign(&mut first, now);
        sender.sign(&mut last, now);
        assert_eq!(sender.receive_cookie(&reply([7; 16], &first), now), Err(Error::Authentication));
        assert_eq!(sender.receive_cookie(&last, now), Err(Error::Malformed));
        assert!(!sender.has_cookie());
        let true_reply = reply([7; 16], &last);
        for byte in 8..64 {
            let mut forged = true_reply;
            forged[byte] ^= 1;
            assert_eq!(sender.receive_cookie(&forged, now), Err(Error::Authentication));
        }
        assert_eq!(sender.receive_cookie(&true_reply, now), Ok(()));
        assert_eq!(sender.receive_cookie(&true_reply, now), Err(Error::NoCookieAwaited));
        assert!(sender.has_cookie());
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_signed_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..160)) {
            let mut sender = MacSender::new(&PEER);
            sender.sign(&mut bytes, Instant::now());
            prop_assert!(sender.receive_cookie(&bytes, Instant::now()).is_err());
        }
    }
}

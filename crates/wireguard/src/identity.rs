//! Our static key pair, and Diffie-Hellman with it (RFC 7748).

use std::fmt;
use std::sync::Arc;

use fairlead_keys::{PrivateKey, PublicKey};
use x25519_dalek::StaticSecret;
use zeroize::Zeroizing;

use crate::error::Error;
use crate::random::Random;

/// Our static key pair. The private key is erased when the last handshake that needs it is dropped.
pub struct Identity {
    pair: Arc<KeyPair>,
}

impl Identity {
    /// Computes the public key once for all handshakes.
    pub fn new(private: &PrivateKey) -> Self {
        Self { pair: Arc::new(KeyPair::new(private.0)) }
    }

    /// The key that peers know us by.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.pair.public)
    }

    #[cfg(test)]
    pub(crate) fn of(pair: KeyPair) -> Self {
        Self { pair: Arc::new(pair) }
    }

    pub(crate) fn pair(&self) -> &Arc<KeyPair> {
        &self.pair
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("public", &self.public()).finish_non_exhaustive()
    }
}

/// A static or an ephemeral key pair. The private key is erased on drop.
#[derive(Clone)]
pub(crate) struct KeyPair {
    private: StaticSecret,
    /// The public key of `private`.
    pub(crate) public: [u8; 32],
}

impl KeyPair {
    pub(crate) fn new(private: [u8; 32]) -> Self {
        let private = StaticSecret::from(private);
        let public = x25519_dalek::PublicKey::from(&private).to_bytes();
        Self { private, public }
    }

    /// A pair that was never used before.
    pub(crate) fn draw(random: &mut dyn Random) -> Self {
        let mut private = Zeroizing::new([0; 32]);
        random.fill(&mut *private);
        Self::new(*private)
    }

    pub(crate) fn private(&self) -> &[u8; 32] {
        self.private.as_bytes()
    }

    /// The shared secret with a public key. A key of low order, with which the secret would be all zeros for every private key,
    /// is an error (RFC 7748, 6.1; `mix_dh` of `drivers/net/wireguard/noise.c`).
    pub(crate) fn agree(&self, public: [u8; 32]) -> Result<Zeroizing<[u8; 32]>, Error> {
        let shared = self.private.diffie_hellman(&x25519_dalek::PublicKey::from(public));
        if !shared.was_contributory() {
            return Err(Error::LowOrderKey);
        }
        Ok(Zeroizing::new(shared.to_bytes()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn bytes(hex: &str) -> [u8; 32] {
        std::array::from_fn(|byte| u8::from_str_radix(&hex[byte * 2..byte * 2 + 2], 16).unwrap())
    }

    /// The points of low order (RFC 7748, 6.1, refers to <https://cr.yp.to/ecdh.html#validate>), and the same with the bit that
    /// X25519 ignores.
    pub(crate) fn low_order_points() -> Vec<[u8; 32]> {
        let near_prime = |low: u8| {
            let mut point = [0xff; 32];
            point[0] = low;
            point[31] = 0x7f;
            point
        };
        let mut one = [0; 32];
        one[0] = 1;
        let hex = [
            "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
            "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        ];
        let points = [[0; 32], one, near_prime(0xec), near_prime(0xed), near_prime(0xee)];
        let mut points: Vec<[u8; 32]> = points.into_iter().chain(hex.map(bytes)).collect();
        for mut point in points.clone() {
            point[31] |= 0x80;
            points.push(point);
        }
        points
    }

    /// Bob of RFC 7748, 6.1.
    #[test]
    fn keys_and_secrets_are_those_of_the_rfc() {
        let private = PrivateKey(bytes("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"));
        let public = bytes("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f");
        let alice = bytes("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a");
        let shared = bytes("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742");
        assert_eq!(private.public_key(), PublicKey(public));
        let identity = Identity::new(&private);
        assert_eq!(identity.public(), PublicKey(public));
        assert_eq!(*identity.pair().agree(alice).unwrap(), shared);
    }

    #[test]
    fn points_of_low_order_are_refused() {
        let pair = KeyPair::new([7; 32]);
        for point in low_order_points() {
            assert_eq!(pair.agree(point).unwrap_err(), Error::LowOrderKey, "{point:x?}");
        }
    }

    #[test]
    fn debug_shows_no_secret() {
        let text = format!("{:?}", Identity::new(&PrivateKey([77; 32])));
        assert!(text.contains("PublicKey(") && !text.contains("77"), "{text}");
    }
}

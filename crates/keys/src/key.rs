//! Keys of nodes and peers, in the form of `wg(8)`.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use x25519_dalek::StaticSecret;

/// A key did not parse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a WireGuard key: expected 44 characters of base64 that hold 32 bytes (see `wg genkey`)")]
pub struct InvalidKey;

fn decode(text: &str) -> Result<[u8; 32], InvalidKey> {
    STANDARD.decode(text.trim()).ok().and_then(|bytes| bytes.try_into().ok()).ok_or(InvalidKey)
}

/// A Curve25519 public key: the identity of a node in the mesh.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; 32]);

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        decode(text).map(Self)
    }
}

/// A Curve25519 private key. `Debug` never shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKey(pub [u8; 32]);

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(hidden)")
    }
}

impl FromStr for PrivateKey {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        decode(text).map(Self)
    }
}

impl PrivateKey {
    /// The public key of this key, as `wg pubkey` computes it (RFC 7748, section 6.1).
    pub fn public_key(&self) -> PublicKey {
        PublicKey(x25519_dalek::PublicKey::from(&StaticSecret::from(self.0)).to_bytes())
    }

    /// The key as `wg(8)` writes it. For key files only.
    pub fn to_base64(&self) -> String {
        STANDARD.encode(self.0)
    }
}

/// A symmetric key that two peers mix into their handshakes (WireGuard paper, section 5.2). `Debug` never shows it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PresharedKey(pub [u8; 32]);

impl fmt::Debug for PresharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PresharedKey(hidden)")
    }
}

impl FromStr for PresharedKey {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        decode(text).map(Self)
    }
}

impl PresharedKey {
    /// The key as `wg(8)` writes it. For files that only their owner may read.
    pub fn to_base64(&self) -> String {
        STANDARD.encode(self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn secret_keys_are_not_shown() {
        assert_eq!(format!("{:?}", PresharedKey([77; 32])), "PresharedKey(hidden)");
        assert_eq!(format!("{:?}", PrivateKey([8; 32])), "PrivateKey(hidden)");
    }

    #[test]
    fn public_keys_are_those_of_the_rfc() {
        // Bob of RFC 7748, section 6.1.
        let private: PrivateKey = "XasIfmJKikt54X+Lg4AO5m87sSkmGLb9HC+LJ/+I4Os=".parse().unwrap();
        assert_eq!(private.public_key().to_string(), "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=");
    }

    proptest! {
        #[test]
        fn any_text_is_a_key_or_an_error(text in ".{0,64}") {
            if let Ok(key) = text.parse::<PublicKey>() {
                prop_assert_eq!(key.to_string(), text.trim());
            }
        }
    }
}

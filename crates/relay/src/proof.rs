//! Proof that a client has the private key of a WireGuard key, which can only agree on secrets and sign nothing: a MAC under a
//! secret that only the holders of the client's and of the relay's private key can compute (`docs/relay-protocol.md`).

use aws_lc_rs::agreement::{PrivateKey as AgreementKey, UnparsedPublicKey, X25519, agree};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use aws_lc_rs::hmac::{self, HMAC_SHA256};
use fairlead_keys::PrivateKey;

const INFO: &[u8] = b"fairlead relay v1 registration";

/// Subject of a proof: the messages and values that it covers.
#[derive(Debug, Clone, Copy)]
pub struct Transcript<'a> {
    /// The challenge in the relay's hello.
    pub challenge: [u8; 32],
    /// The body of the relay's hello.
    pub hello: &'a [u8],
    /// Part of the registration that `fairlead_wire::relay::signed` returns.
    pub register: &'a [u8],
    /// The TLS exporter, if TLS ends at the relay.
    pub exporter: Option<[u8; 32]>,
}

/// No proof can be made: the key of the other side is of small order, or the cryptography library fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no secret can be agreed on with the other side's key")]
pub struct NoSecret;

impl From<Unspecified> for NoSecret {
    fn from(_: Unspecified) -> Self {
        Self
    }
}

/// The relay's key for registrations, the same while the program runs.
#[derive(Debug)]
pub struct RelayKey {
    private: AgreementKey,
    public: [u8; 32],
}

impl RelayKey {
    /// A new key.
    ///
    /// # Errors
    /// The cryptography library fails.
    pub fn generate() -> Result<Self, NoSecret> {
        let private = AgreementKey::generate(&X25519)?;
        let public = private.compute_public_key()?.as_ref().try_into().map_err(|_| NoSecret)?;
        Ok(Self { private, public })
    }

    /// Public half of the key.
    pub fn public(&self) -> [u8; 32] {
        self.public
    }

    /// Whether `proof` was made with the private key of `client`. Takes the same time for every wrong proof.
    pub fn verify(&self, client: [u8; 32], transcript: &Transcript<'_>, proof: &[u8; 32]) -> bool {
        let verified = mac_key(&self.private, client, &transcript.challenge)
            .and_then(|key| Ok(hmac::verify(&key, &transcript.bytes(), proof)?));
        verified.is_ok()
    }
}

/// Proves to the relay with this key that the client has `private`.
///
/// # Errors
/// The relay's key is of small order.
pub fn prove(
    private: &PrivateKey,
    relay: [u8; 32],
    transcript: &Transcript<'_>,
) -> Result<[u8; 32], NoSecret> {
    let private = AgreementKey::from_private_key(&X25519, &private.0).map_err(|_| NoSecret)?;
    let key = mac_key(&private, relay, &transcript.challenge)?;
    hmac::sign(&key, &transcript.bytes()).as_ref().try_into().map_err(|_| NoSecret)
}

fn mac_key(private: &AgreementKey, public: [u8; 32], challenge: &[u8; 32]) -> Result<hmac::Key, NoSecret> {
    agree(private, UnparsedPublicKey::new(&X25519, public), NoSecret, |secret| {
        let prk = Salt::new(HKDF_SHA256, challenge).extract(secret);
        Ok(hmac::Key::from(prk.expand(&[INFO], HMAC_SHA256)?))
    })
}

impl Transcript<'_> {
    /// Each part after its length: bytes cannot pass from one to another.
    fn bytes(&self) -> Vec<u8> {
        let exporter = self.exporter.as_ref().map_or(&[][..], |exporter| exporter);
        let mut bytes = Vec::new();
        for part in [self.hello, self.register, exporter] {
            bytes.extend(u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(part);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use fairlead_keys::PublicKey;

    use super::*;

    const TRANSCRIPT: Transcript<'_> =
        Transcript { challenge: [1; 32], hello: b"hello", register: b"register", exporter: Some([2; 32]) };

    fn client() -> (PrivateKey, [u8; 32]) {
        let private = PrivateKey([7; 32]);
        let public = private.public_key().0;
        (private, public)
    }

    #[test]
    fn public_keys_are_those_of_wg() {
        // What `wg pubkey` makes of it.
        let (_, public) = client();
        assert_eq!(PublicKey(public).to_string(), "E75P6uryBMf9M1j8nAByGIHRdCeBKCJ+xnTzf3/pe20=");
    }

    #[test]
    fn the_holder_of_the_key_is_believed() {
        let (relay, (private, public)) = (RelayKey::generate().unwrap(), client());
        let proof = prove(&private, relay.public(), &TRANSCRIPT).unwrap();
        assert!(relay.verify(public, &TRANSCRIPT, &proof));
    }

    #[test]
    fn a_proof_counts_only_for_what_it_is_about() {
        let (relay, (private, public)) = (RelayKey::generate().unwrap(), client());
        let proof = prove(&private, relay.public(), &TRANSCRIPT).unwrap();
        let others = [
            Transcript { challenge: [9; 32], ..TRANSCRIPT },
            Transcript { hello: b"hellO", ..TRANSCRIPT },
            Transcript { hello: b"hellor", register: b"egister", ..TRANSCRIPT },
            Transcript { register: b"registeR", ..TRANSCRIPT },
            Transcript { exporter: Some([3; 32]), ..TRANSCRIPT },
            Transcript { exporter: None, ..TRANSCRIPT },
        ];
        for other in others {
            assert!(!relay.verify(public, &other, &proof), "{other:?}");
        }
        assert!(!relay.verify([8; 32], &TRANSCRIPT, &proof), "another key");
        assert!(!RelayKey::generate().unwrap().verify(public, &TRANSCRIPT, &proof), "another relay");
    }

    #[test]
    fn keys_of_small_order_prove_nothing() {
        let (relay, (private, _)) = (RelayKey::generate().unwrap(), client());
        assert_eq!(prove(&private, [0; 32], &TRANSCRIPT), Err(NoSecret));
        // What a MAC under the secret of all zeros would be.
        let key = Salt::new(HKDF_SHA256, &TRANSCRIPT.challenge).extract(&[0; 32]);
        let key = hmac::Key::from(key.expand(&[INFO], HMAC_SHA256).unwrap());
        let forged = hmac::sign(&key, &TRANSCRIPT.bytes());
        assert!(!relay.verify([0; 32], &TRANSCRIPT, forged.as_ref().try_into().unwrap()));
    }
}

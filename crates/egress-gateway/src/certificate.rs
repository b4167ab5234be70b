//! The certificates of this process, by which others know it: nothing else ever has their keys.

use fairlead_egress::registration::PublicKeyHash;
use rcgen::{CertifiedKey, PublicKeyData as _, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use sha2::{Digest as _, Sha256};

/// A self-signed certificate.
pub(crate) struct OwnCertificate {
    pub(crate) certificate: CertificateDer<'static>,
    private: PrivatePkcs8KeyDer<'static>,
    /// SHA-256 hash of the public key.
    pub(crate) hash: PublicKeyHash,
}

impl OwnCertificate {
    /// Makes a key and a certificate.
    ///
    /// # Errors
    /// The cryptography library fails.
    pub(crate) fn generate() -> anyhow::Result<Self> {
        let names = ["fairlead-egress-gateway".to_owned()];
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(names)?;
        Ok(Self {
            certificate: cert.der().clone(),
            private: PrivatePkcs8KeyDer::from(signing_key.serialize_der()),
            hash: key_hash(&signing_key.subject_public_key_info()),
        })
    }

    /// For the configuration of an end.
    pub(crate) fn private(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.private.clone_key())
    }
}

/// Hash by which a key is known (RFC 5280, section 4.1: SubjectPublicKeyInfo, in DER).
pub(crate) fn key_hash(public_key_info: &[u8]) -> PublicKeyHash {
    Sha256::digest(public_key_info).into()
}

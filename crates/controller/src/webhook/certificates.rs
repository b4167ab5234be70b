//! Certificates of the webhook: what the Secret contains, and what to do with it now. Pure.
//!
//! A generation is an authority and one certificate signed by it, issued together; the authority's key is dropped, so no
//! further certificate can be signed. A new generation takes over in three steps, each after every API server and every
//! replica has observed the previous one: its authority is added to the CA bundle; then its certificate is served; then
//! the old authority is removed. At any time the certificate of every replica is trusted by every API server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_api::names::{SYSTEM_NAMESPACE, WEBHOOK_SERVICE};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;

use super::{CERTIFICATE, KEY};

/// Key of the Secret with the CA bundle of the webhook configurations.
const AUTHORITIES: &str = "ca.crt";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";
/// Certificates are valid from this long before they are issued: clocks differ.
pub(super) const SKEW: Duration = Duration::from_secs(3600);

/// Lifetimes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Validity of a generation. The next one is issued after two thirds of it.
    pub lifetime: Duration,
    /// Pause between the steps of a rotation, for the slowest reader of a Secret or a webhook configuration.
    pub propagation: Duration,
}

/// The DNS name by which API servers call the webhook.
pub(super) fn server_name() -> String {
    format!("{WEBHOOK_SERVICE}.{SYSTEM_NAMESPACE}.svc")
}

/// A certificate with its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pair {
    /// PEM.
    certificate: Vec<u8>,
    /// PEM.
    key: Vec<u8>,
    chain: Vec<CertificateDer<'static>>,
    begins: Timestamp,
    /// When it expires.
    pub(super) ends: Timestamp,
}

/// Why a certificate is unusable.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unusable {
    #[error("not PEM: {0}")]
    Pem(#[from] rustls::pki_types::pem::Error),
    #[error("no certificate")]
    Empty,
    #[error("not X.509: {0}")]
    X509(String),
    #[error(transparent)]
    Key(#[from] rustls::Error),
}

impl Pair {
    /// Parses PEM text.
    ///
    /// # Errors
    /// It is unusable.
    pub(super) fn parse(certificate: &[u8], key: &[u8]) -> Result<Self, Unusable> {
        let chain = CertificateDer::pem_slice_iter(certificate).collect::<Result<Vec<_>, _>>()?;
        let first = chain.first().ok_or(Unusable::Empty)?;
        let invalid = |error: &dyn std::fmt::Display| Unusable::X509(error.to_string());
        let (_, parsed) = x509_parser::parse_x509_certificate(first).map_err(|error| invalid(&error))?;
        let time = |seconds| Timestamp::from_second(seconds).map_err(|error| invalid(&error));
        let begins = time(parsed.validity().not_before.timestamp())?;
        let ends = time(parsed.validity().not_after.timestamp())?;
        let pair = Self { certificate: certificate.to_vec(), key: key.to_vec(), chain, begins, ends };
        pair.certified()?;
        Ok(pair)
    }

    /// The form that a TLS server takes.
    ///
    /// # Errors
    /// The key is invalid, or does not belong to the certificate.
    pub(super) fn certified(&self) -> Result<CertifiedKey, Unusable> {
        let key = PrivateKeyDer::from_pem_slice(&self.key)?;
        Ok(CertifiedKey::from_der(self.chain.clone(), key, &provider())?)
    }

    /// When it was issued, if it was issued here.
    fn issued(&self) -> Timestamp {
        later(self.begins, SKEW)
    }

    /// When two thirds of its lifetime have passed.
    fn due(&self) -> Timestamp {
        let lifetime = self.ends.duration_since(self.begins).unsigned_abs();
        later(self.begins, lifetime / 3 * 2)
    }

    /// Whether a client with these authorities accepts it at this time under the webhook's name.
    fn trusted(&self, authorities: &[CertificateDer<'static>], now: Timestamp) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(authorities.iter().cloned());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider())).build();
        let (Ok(verifier), Some((end, between)), Ok(name)) =
            (verifier, self.chain.split_first(), ServerName::try_from(server_name()))
        else {
            return false;
        };
        let seconds = u64::try_from(now.as_second()).unwrap_or_default();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        verifier.verify_server_cert(end, between, &name, &[], now).is_ok()
    }
}

/// The content of the Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Material {
    /// The CA bundle.
    pub(super) authorities: Vec<CertificateDer<'static>>,
    /// The pair that is served.
    pub(super) serving: Pair,
    /// The pair that will be served next.
    pub(super) next: Option<Pair>,
}

impl Material {
    /// Parses the Secret.
    ///
    /// # Errors
    /// It contains no usable pair, and is treated like an absent one.
    pub(super) fn from_secret(data: &BTreeMap<String, ByteString>) -> Result<Self, Unusable> {
        let value = |key: &str| data.get(key).map(|bytes| bytes.0.as_slice()).unwrap_or_default();
        let authorities =
            CertificateDer::pem_slice_iter(value(AUTHORITIES)).collect::<Result<Vec<_>, _>>()?;
        let serving = Pair::parse(value(CERTIFICATE), value(KEY))?;
        // A broken next pair is replaced by another one.
        let next = Pair::parse(value(NEXT_CERTIFICATE), value(NEXT_KEY)).ok();
        Ok(Self { authorities, serving, next })
    }

    /// The Secret's data.
    pub(super) fn to_secret(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::from([
            (AUTHORITIES.to_owned(), self.bundle()),
            (CERTIFICATE.to_owned(), self.serving.certificate.clone()),
            (KEY.to_owned(), self.serving.key.clone()),
        ]);
        if let Some(next) = &self.next {
            data.insert(NEXT_CERTIFICATE.to_owned(), next.certificate.clone());
            data.insert(NEXT_KEY.to_owned(), next.key.clone());
        }
        data.into_iter().map(|(key, bytes)| (key, ByteString(bytes))).collect()
    }

    /// The authorities in PEM, as `caBundle` takes them.
    pub(super) fn bundle(&self) -> Vec<u8> {
        self.authorities.iter().map(|der| pem("CERTIFICATE", der)).collect::<String>().into_bytes()
    }
}

/// What to do with the Secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// Issue the first generation: there is nothing that an API server would accept.
    Create,
    /// Remove authorities that have not signed the served certificate.
    Prune,
    /// Change nothing.
    Keep,
    /// Issue the next generation and publish its authority.
    Prepare,
    /// Serve the next generation.
    Promote,
}

/// What to do now. `published` says whether all webhook configurations carry the Secret's authorities.
pub(super) fn decide(
    material: Option<&Material>,
    published: bool,
    policy: Policy,
    now: Timestamp,
) -> Decision {
    let Some(material) = material else { return Decision::Create };
    let next = material.next.as_ref().filter(|next| next.trusted(&material.authorities, now));
    if !material.serving.trusted(&material.authorities, now) {
        // No API server accepts the served certificate, so there is nothing to wait for.
        return if next.is_some() { Decision::Promote } else { Decision::Create };
    }
    if let Some(next) = next {
        let propagated = published && now >= later(next.issued(), policy.propagation);
        return if propagated { Decision::Promote } else { Decision::Keep };
    }
    if now >= material.serving.due() {
        return Decision::Prepare;
    }
    // Prepare to Promote took one pause, and replicas need another one to serve the new certificate.
    let surplus = material.authorities.len() > 1;
    let propagated =
        published && now >= later(material.serving.issued(), policy.propagation.saturating_mul(2));
    if surplus && propagated { Decision::Prune } else { Decision::Keep }
}

/// Applies a decision; `generate` issues an authority and a pair signed by it.
///
/// # Errors
/// Those of `generate`.
pub(super) fn apply<E>(
    decision: Decision,
    present: Option<Material>,
    now: Timestamp,
    generate: impl FnOnce() -> Result<(CertificateDer<'static>, Pair), E>,
) -> Result<Option<Material>, E> {
    let initial = |(authority, serving)| Material { authorities: vec![authority], serving, next: None };
    let Some(mut material) = present.filter(|_| decision != Decision::Create) else {
        return Ok(Some(initial(generate()?)));
    };
    match decision {
        Decision::Create | Decision::Keep => return Ok(None),
        Decision::Prune => {
            let signed =
                |one: &CertificateDer<'static>| material.serving.trusted(std::slice::from_ref(one), now);
            material.authorities.retain(signed);
        }
        Decision::Prepare => {
            let (authority, next) = generate()?;
            material.authorities.push(authority);
            material.next = Some(next);
        }
        Decision::Promote => {
            if let Some(next) = material.next.take() {
                material.serving = next;
            }
        }
    }
    Ok(Some(material))
}

fn later(time: Timestamp, by: Duration) -> Timestamp {
    time.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// PEM (RFC 7468).
fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// The cryptography provider of the whole program.
pub(super) fn provider() -> CryptoProvider {
    rustls::crypto::aws_lc_rs::default_provider()
}

#[cfg(test)]
#[path = "certificates_tests.rs"]
mod tests;

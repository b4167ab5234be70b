//! Certificates of the webhook: what a Secret holds, and what is to be done with it now. Pure.
//!
//! A generation is an authority and one certificate signed by it, made together; the authority's key is thrown away, so
//! nobody can sign more. A new generation takes over in three steps, far enough apart that every API server and every
//! copy of the controller has seen the step before: its authority is published beside the old one; then its certificate
//! is served; then the old authority is withdrawn. At any time, what any copy serves is trusted by what any API server
//! has read.

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

/// Key of the Secret with the authorities, which is what the webhook configurations carry.
const AUTHORITIES: &str = "ca.crt";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";
/// Certificates are valid from this long before they are made: clocks differ.
pub(super) const SKEW: Duration = Duration::from_secs(3600);

/// How long things last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Validity of a generation. The next one is made when two thirds have passed.
    pub lifetime: Duration,
    /// Pause between the steps of a rotation, for the slowest reader of a Secret or a webhook configuration.
    pub settle: Duration,
}

/// The DNS name by which the API server calls the webhook.
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
    /// When it ends.
    pub(super) ends: Timestamp,
}

/// Why a certificate cannot be served.
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
    /// It cannot be served; see [`Unusable`].
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

    /// What a TLS server needs of it.
    ///
    /// # Errors
    /// The key is not one, or not that of the certificate.
    pub(super) fn certified(&self) -> Result<CertifiedKey, Unusable> {
        let key = PrivateKeyDer::from_pem_slice(&self.key)?;
        Ok(CertifiedKey::from_der(self.chain.clone(), key, &provider())?)
    }

    /// When it was made, if it was made here.
    fn made(&self) -> Timestamp {
        later(self.begins, SKEW)
    }

    /// When two thirds of its life are over.
    fn due(&self) -> Timestamp {
        let life = self.ends.duration_since(self.begins).unsigned_abs();
        later(self.begins, life / 3 * 2)
    }

    /// Whether a client that knows these authorities accepts it at this time under our name.
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

/// What the Secret holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Material {
    /// Whom API servers are to trust.
    pub(super) authorities: Vec<CertificateDer<'static>>,
    /// What is served.
    pub(super) serving: Pair,
    /// What will be served next.
    pub(super) next: Option<Pair>,
}

impl Material {
    /// Reads the Secret.
    ///
    /// # Errors
    /// It has nothing that can be served; what to do then is the same as without a Secret.
    pub(super) fn from_secret(data: &BTreeMap<String, ByteString>) -> Result<Self, Unusable> {
        let of = |key: &str| data.get(key).map(|bytes| bytes.0.as_slice()).unwrap_or_default();
        let authorities = CertificateDer::pem_slice_iter(of(AUTHORITIES)).collect::<Result<Vec<_>, _>>()?;
        let serving = Pair::parse(of(CERTIFICATE), of(KEY))?;
        // Nobody waits for a next one that is broken: another is made.
        let next = Pair::parse(of(NEXT_CERTIFICATE), of(NEXT_KEY)).ok();
        Ok(Self { authorities, serving, next })
    }

    /// Writes the Secret.
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

    /// The authorities as `caBundle` wants them: PEM.
    pub(super) fn bundle(&self) -> Vec<u8> {
        self.authorities.iter().map(|der| pem("CERTIFICATE", der)).collect::<String>().into_bytes()
    }
}

/// What to do with the Secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// Start afresh: there is nothing that an API server would accept.
    Create,
    /// Withdraw the authorities that signed nothing that is served.
    Forget,
    /// Leave it.
    Keep,
    /// Make the next generation and publish its authority.
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
        // Nobody accepts what is served, so there is nothing to wait for.
        return if next.is_some() { Decision::Promote } else { Decision::Create };
    }
    if let Some(next) = next {
        let settled = published && now >= later(next.made(), policy.settle);
        return if settled { Decision::Promote } else { Decision::Keep };
    }
    if now >= material.serving.due() {
        return Decision::Prepare;
    }
    // Prepare and Promote took one pause, and the copies need another one to serve the new certificate.
    let surplus = material.authorities.len() > 1;
    let settled = published && now >= later(material.serving.made(), policy.settle.saturating_mul(2));
    if surplus && settled { Decision::Forget } else { Decision::Keep }
}

/// Carries a decision out; `fresh` makes an authority and a pair signed by it.
///
/// # Errors
/// Those of `fresh`.
pub(super) fn carry_out<E>(
    decision: Decision,
    present: Option<Material>,
    now: Timestamp,
    fresh: impl FnOnce() -> Result<(CertificateDer<'static>, Pair), E>,
) -> Result<Option<Material>, E> {
    let of_fresh = |(authority, serving)| Material { authorities: vec![authority], serving, next: None };
    let Some(mut material) = present.filter(|_| decision != Decision::Create) else {
        return Ok(Some(of_fresh(fresh()?)));
    };
    match decision {
        Decision::Create | Decision::Keep => return Ok(None),
        Decision::Forget => {
            let needed =
                |one: &CertificateDer<'static>| material.serving.trusted(std::slice::from_ref(one), now);
            material.authorities.retain(needed);
        }
        Decision::Prepare => {
            let (authority, next) = fresh()?;
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

/// PEM as RFC 7468 wants it.
fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// The cryptography of the whole program.
pub(super) fn provider() -> CryptoProvider {
    rustls::crypto::aws_lc_rs::default_provider()
}

#[cfg(test)]
#[path = "certificates_tests.rs"]
mod tests;

//! Issues a generation of certificates.

use fairlead_api::names::{SYSTEM_NAMESPACE, WEBHOOK_SERVICE};
use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use time::OffsetDateTime;

use super::certificates::{Pair, Policy, SKEW, Unusable, server_name};

/// Why no certificate could be issued.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot issue a certificate: {0}")]
    Generate(#[from] rcgen::Error),
    #[error("cannot issue a certificate: the time {0} is out of range")]
    Time(Timestamp),
    #[error("the issued certificate is unusable: {0}")]
    Unusable(#[from] Unusable),
}

/// An authority, and a certificate for the webhook's Service that it signed. The authority's key is dropped.
///
/// # Errors
/// The time is out of range, or the cryptography library fails.
pub(super) fn generation(policy: Policy, now: Timestamp) -> Result<(CertificateDer<'static>, Pair), Error> {
    let mut authority = params(policy, now, Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    authority.distinguished_name.push(DnType::CommonName, "coil-ipam-ca");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let names = vec![
        server_name(),
        format!("{WEBHOOK_SERVICE}.{SYSTEM_NAMESPACE}"),
        format!("{WEBHOOK_SERVICE}.{SYSTEM_NAMESPACE}.svc.cluster.local"),
    ];
    let mut serving = params(policy, now, names)?;
    serving.distinguished_name.push(DnType::CommonName, WEBHOOK_SERVICE);
    serving.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    serving.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    serving.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = serving.signed_by(&key, &authority)?;
    let pair = Pair::parse(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())?;
    Ok((authority.der().clone(), pair))
}

fn params(policy: Policy, now: Timestamp, names: Vec<String>) -> Result<CertificateParams, Error> {
    let at = |time: Result<Timestamp, jiff::Error>| {
        let time = time.map_err(|_| Error::Time(now))?;
        OffsetDateTime::from_unix_timestamp(time.as_second()).map_err(|_| Error::Time(now))
    };
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "fairlead");
    params.not_before = at(now.checked_sub(SKEW))?;
    params.not_after = at(now.checked_add(policy.lifetime))?;
    Ok(params)
}

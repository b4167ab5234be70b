//! The authority of the managed relay and the certificate it issues, kept in Secrets and replaced before they expire.
//!
//! An authority serves only this relay. Nodes trust what is published in the status of the mesh: the authority that issues, and
//! the one before it, whose certificate the relay may still present.

use anyhow::{Context as _, Result};
use fairlead_api::names::RELAY_SERVER_NAME;
use jiff::civil::Date;
use jiff::{Span, Timestamp, ToSpan as _, tz::TimeZone};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// Validity of an authority, and the time before its end at which another one takes over. It must outlast every certificate it
/// issues.
const AUTHORITY_YEARS: i32 = 10;
const AUTHORITY_RENEWAL_DAYS: i32 = 365;
/// Validity and renewal of the relay's certificate, in days.
const SERVER_DAYS: i32 = 90;
const SERVER_RENEWAL_DAYS: i32 = 30;
/// Shortest time for which nodes know an authority before the relay uses it.
const AUTHORITY_NOTICE_DAYS: i32 = 30;

/// Keys of the Secrets: those of type `kubernetes.io/tls`, the authorities, and the last day of validity.
pub(super) const CERTIFICATE: &str = "tls.crt";
pub(super) const KEY: &str = "tls.key";
pub(super) const AUTHORITIES: &str = "ca.crt";
pub(super) const LAST_DAY: &str = "last-day";

/// A certificate and its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) certificate: String,
    pub(super) key: String,
    pub(super) last_day: Date,
}

/// Certificates that the Secrets should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Certificates {
    pub(super) authority: Pair,
    pub(super) server: Pair,
    /// The authority that issued `server`, then the one before it.
    pub(super) issuers: Vec<String>,
}

impl Certificates {
    /// Certificates in these Secrets, with everything that is missing, unreadable or about to expire made anew. The certificate of
    /// the relay stays when only the authority is replaced: nodes learn the new one first.
    ///
    /// # Errors
    /// The cryptography library fails.
    pub(super) fn current(
        authority: Option<&Secret>,
        server: Option<&Secret>,
        now: Timestamp,
    ) -> Result<Self> {
        let today = now.to_zoned(TimeZone::UTC).date();
        // Not shortly before the relay gets a certificate of it: nodes have to learn it first.
        let of_server = |renewal_days| stored(server, today, SERVER_DAYS.days(), renewal_days);
        let is_server_new = of_server(SERVER_RENEWAL_DAYS + AUTHORITY_NOTICE_DAYS).is_some();
        let authority_days = if is_server_new { AUTHORITY_RENEWAL_DAYS } else { SERVER_DAYS };
        let authority = match stored(authority, today, AUTHORITY_YEARS.years(), authority_days) {
            Some(pair) => pair,
            None => new_authority(today)?,
        };
        let issuers = server.and_then(|secret| text(secret, AUTHORITIES)).unwrap_or_default();
        let issuers = certificates(&issuers);
        if let Some(server) = of_server(SERVER_RENEWAL_DAYS).filter(|_| !issuers.is_empty()) {
            return Ok(Self { authority, server, issuers });
        }
        let before = issuers.into_iter().next().filter(|issuer| *issuer != authority.certificate);
        let issuers = std::iter::once(authority.certificate.clone()).chain(before).collect();
        Ok(Self { server: new_server(&authority, today)?, authority, issuers })
    }

    /// Authorities that nodes trust, in PEM.
    pub(super) fn bundle(&self) -> String {
        let newer = Some(&self.authority.certificate).filter(|newest| !self.issuers.contains(newest));
        newer.into_iter().chain(&self.issuers).map(String::as_str).collect()
    }
}

/// The pair of a Secret, unless it is to be replaced. One that is valid for longer than such a pair is when it is made comes from a clock that
/// was ahead, and is not valid yet.
fn stored(secret: Option<&Secret>, today: Date, validity: Span, renewal_days: i32) -> Option<Pair> {
    let secret = secret?;
    let last_day: Date = text(secret, LAST_DAY)?.parse().ok()?;
    let certificate = text(secret, CERTIFICATE)?;
    let key = text(secret, KEY)?;
    let is_usable = certificates(&certificate).len() == 1 && KeyPair::from_pem(&key).is_ok();
    let renewal = last_day.checked_sub(renewal_days.days()).ok()?;
    let latest = today.tomorrow().ok()?.checked_add(validity).ok()?;
    (is_usable && today < renewal && last_day <= latest).then_some(Pair { certificate, key, last_day })
}

fn text(secret: &Secret, key: &str) -> Option<String> {
    let ByteString(bytes) = secret.data.as_ref()?.get(key)?;
    String::from_utf8(bytes.clone()).ok()
}

/// The certificates of a PEM text.
fn certificates(pem: &str) -> Vec<String> {
    const END: &str = "-----END CERTIFICATE-----";
    let parts = pem.split_inclusive(END).map(str::trim).filter(|part| part.ends_with(END));
    parts.map(|part| format!("{part}\n")).collect()
}

fn new_authority(today: Date) -> Result<Pair> {
    let key = KeyPair::generate().context("cannot make a key")?;
    let last_day = today.checked_add(AUTHORITY_YEARS.years()).context("no such day")?;
    let mut parameters = authority_parameters();
    valid(&mut parameters, today, last_day)?;
    let certificate = parameters.self_signed(&key).context("cannot issue an authority")?;
    Ok(Pair { certificate: one(&certificate.pem()), key: key.serialize_pem(), last_day })
}

/// Parameters of an authority. An issuer needs the same ones again to match the subject of its certificate.
fn authority_parameters() -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, "fairlead-relay-ca");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    parameters
}

fn new_server(authority: &Pair, today: Date) -> Result<Pair> {
    let authority_key = KeyPair::from_pem(&authority.key).context("cannot read the authority's key")?;
    let issuer = Issuer::new(authority_parameters(), authority_key);
    let key = KeyPair::generate().context("cannot make a key")?;
    let mut parameters = CertificateParams::new([RELAY_SERVER_NAME.to_owned()])?;
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, "fairlead-relay");
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let last_day = today.checked_add(SERVER_DAYS.days()).context("no such day")?;
    valid(&mut parameters, today, last_day)?;
    let certificate = parameters.signed_by(&key, &issuer).context("cannot issue a certificate")?;
    Ok(Pair { certificate: one(&certificate.pem()), key: key.serialize_pem(), last_day })
}

/// From yesterday, since clocks differ.
fn valid(parameters: &mut CertificateParams, today: Date, last_day: Date) -> Result<()> {
    let from = today.yesterday().context("no such day")?;
    let at = |day: Date| -> Result<_> {
        let part = |number: i8| u8::try_from(number).context("no such day");
        Ok(date_time_ymd(i32::from(day.year()), part(day.month())?, part(day.day())?))
    };
    parameters.not_before = at(from)?;
    parameters.not_after = at(last_day)?;
    Ok(())
}

/// As [`certificates`] writes it.
fn one(pem: &str) -> String {
    certificates(pem).concat()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fairlead_relay::client::trust;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

    use super::*;
    use crate::relay::objects::{authority_data, server_data};

    /// The day the test begins, and later ones.
    fn day(number: i64) -> Timestamp {
        Timestamp::from_second((20_000 + number) * 86_400).unwrap()
    }

    /// Secrets as the controller finds them after it has written them.
    fn written(current: &Certificates) -> [Secret; 2] {
        let data = [authority_data(current), server_data(current)];
        data.map(|data| serde_json::from_value(serde_json::json!({ "data": data })).unwrap())
    }

    fn next(before: &Certificates, now: Timestamp) -> Certificates {
        let [authority, server] = written(before);
        Certificates::current(Some(&authority), Some(&server), now).unwrap()
    }

    /// Whether a node that trusts this bundle takes the certificate for the relay's.
    fn is_trusted(bundle: &str, server: &Pair, now: Timestamp) -> bool {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let roots = Arc::new(trust(bundle.as_bytes()).unwrap());
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider).build().unwrap();
        let certificate = CertificateDer::from_pem_slice(server.certificate.as_bytes()).unwrap();
        let name = ServerName::try_from(RELAY_SERVER_NAME).unwrap();
        let now = std::time::Duration::from_secs(now.as_second().try_into().unwrap());
        verifier.verify_server_cert(&certificate, &[], &name, &[], UnixTime::since_unix_epoch(now)).is_ok()
    }

    #[test]
    fn what_is_valid_stays() {
        let first = Certificates::current(None, None, day(0)).unwrap();
        assert!(is_trusted(&first.bundle(), &first.server, day(0)));
        assert_eq!(next(&first, day(59)), first);
        assert_eq!(certificates(&first.bundle()).len(), 1);
    }

    #[test]
    fn the_certificate_is_renewed_a_month_before_it_expires() {
        let first = Certificates::current(None, None, day(0)).unwrap();
        let renewed = next(&first, day(61));
        assert_eq!((&renewed.authority, renewed.bundle()), (&first.authority, first.bundle()));
        assert_ne!(renewed.server, first.server);
        // Nodes that have heard of nothing new take it; the relay may present the old one for a while.
        assert!(is_trusted(&first.bundle(), &renewed.server, day(61)));
        assert!(is_trusted(&renewed.bundle(), &first.server, day(61)));
        assert!(!is_trusted(&first.bundle(), &first.server, day(91)));
    }

    #[test]
    fn nodes_learn_a_new_authority_before_the_relay_uses_it_and_forget_the_old_one_later() {
        let first = Certificates::current(None, None, day(0)).unwrap();
        let (old, mut current, mut phases) = (first.authority.certificate.clone(), first, Vec::new());
        for number in (20..4000).step_by(20) {
            let before = current;
            current = next(&before, day(number));
            let now = day(number);
            // Nodes have the bundle of before or of now, and so has the relay its certificate.
            for (bundle, server) in [(&before, &current), (&current, &before), (&current, &current)] {
                assert!(is_trusted(&bundle.bundle(), &server.server, now), "day {number}");
            }
            let phase = (current.authority.certificate == old, certificates(&current.bundle()).len());
            if phases.last() != Some(&phase) {
                phases.push(phase);
            }
        }
        // One authority, then two, then the new one alone.
        assert_eq!(phases, [(true, 1), (false, 2), (false, 1)]);
    }

    #[test]
    fn what_was_made_while_the_clock_was_ahead_is_made_anew_once_it_is_right() {
        let ahead = Certificates::current(None, None, day(400)).unwrap();
        assert!(!is_trusted(&ahead.bundle(), &ahead.server, day(0)));
        let mended = next(&ahead, day(0));
        assert!(is_trusted(&mended.bundle(), &mended.server, day(0)));
        assert_eq!(next(&mended, day(1)), mended);
        // A day's difference between two machines is none.
        let first = Certificates::current(None, None, day(1)).unwrap();
        assert_eq!(next(&first, day(0)), first);
    }

    #[test]
    fn secrets_that_are_missing_or_broken_are_made_anew() {
        let first = Certificates::current(None, None, day(0)).unwrap();
        let [authority, server] = written(&first);
        let without_server = Certificates::current(Some(&authority), None, day(1)).unwrap();
        assert_eq!(without_server.authority, first.authority);
        assert!(is_trusted(&first.bundle(), &without_server.server, day(1)));
        // The relay goes on, and nodes trust both until it has a certificate of the new authority.
        let without_authority = Certificates::current(None, Some(&server), day(1)).unwrap();
        assert_eq!(without_authority.server, first.server);
        assert_eq!(certificates(&without_authority.bundle()).len(), 2);
        assert!(is_trusted(&without_authority.bundle(), &first.server, day(1)));
        for key in [CERTIFICATE, KEY, LAST_DAY, AUTHORITIES] {
            let mut broken = server.clone();
            broken.data.as_mut().unwrap().insert(key.to_owned(), ByteString(b"rubbish".to_vec()));
            let renewed = Certificates::current(Some(&authority), Some(&broken), day(1)).unwrap();
            assert!(is_trusted(&renewed.bundle(), &renewed.server, day(1)), "{key}");
            assert_ne!(renewed.server, first.server, "{key}");
        }
    }
}

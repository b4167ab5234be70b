//! Connections over TCP and TLS, and runs of UDP datagrams, for Fairlead's servers (relay, discovery, egress gateways, metrics) and their clients.
//!
//! * [`Certificate`] is what a server presents, read again when its files change.
//! * [`system_roots`] and [`trust`] are the authorities that a client trusts.
//! * [`listen`] and [`dial`] make TCP connections; [`accept_all`] serves them, after a [`handshake`] of bounded time.
//! * [`AnyCertificate`] is for servers that are known by their key.
//! * [`proxy`] leads a client through an HTTP proxy.
//! * [`udp_runs`] says which datagrams one call may send.
//!
//! Files come from the operator, answers from the network. Not here: protocols inside TLS, what a name must be, and
//! limits (`fairlead-limits`).

mod any_certificate;
mod certificate;
pub mod proxy;
mod tcp;
pub mod udp_runs;

use std::io;
use std::net::Ipv6Addr;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

pub use any_certificate::{AnyCertificate, public_key_info};
pub use certificate::{Certificate, CertificateError, CertificateFiles};
pub use tcp::{Stream, accept_all, dial, handshake, listen};

/// The authorities that this host trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR`, or the system's).
///
/// # Errors
/// There are none.
pub fn system_roots() -> Result<RootCertStore, io::Error> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let error =
            found.errors.first().map_or_else(|| "no certificates found".to_owned(), ToString::to_string);
        return Err(io::Error::new(io::ErrorKind::NotFound, error));
    }
    Ok(roots)
}

/// The authorities in a bundle of PEM certificates.
///
/// # Errors
/// It has none, or something else.
pub fn trust(bundle: &[u8]) -> Result<RootCertStore, io::Error> {
    let invalid =
        |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle) {
        let certificate = certificate.map_err(|error| invalid(&error))?;
        roots.add(certificate).map_err(|error| invalid(&error))?;
    }
    if roots.is_empty() { Err(invalid(&"no certificate in the bundle")) } else { Ok(roots) }
}

/// Host, and port if there is one; an IPv6 address is in brackets. `None` for what is no host.
pub fn split_authority(authority: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => {
            host.parse::<Ipv6Addr>().ok()?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        None => authority.rsplit_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
    };
    let port = match port {
        Some(port) => Some(port.parse().ok().filter(|port| *port != 0)?),
        None => None,
    };
    let is_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    let is_valid =
        !host.is_empty() && host.chars().all(is_host) && (!host.contains(':') || authority.starts_with('['));
    is_valid.then_some((host, port))
}

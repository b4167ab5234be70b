//! A connection to a member of etcd.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_transport::{Certificate, Stream, split_authority};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::lookup_host;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};

/// A member that does not answer is left for another one.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// The port for clients (etcd, `--listen-client-urls`).
const PORT: u16 = 2379;

/// The client URL of a member of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEndpoint {
    tls: bool,
    host: String,
    port: u16,
}

/// A text is not the URL of a member of etcd.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a client URL of etcd, such as https://etcd.example.com:2379")]
pub struct InvalidEtcdEndpoint(String);

impl EtcdEndpoint {
    fn authority(&self) -> String {
        match self.host.parse() {
            Ok(IpAddr::V6(ip)) => format!("[{ip}]:{}", self.port),
            _ => format!("{}:{}", self.host, self.port),
        }
    }

    /// Whether connections to it have TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.tls
    }
}

impl FromStr for EtcdEndpoint {
    type Err = InvalidEtcdEndpoint;

    fn from_str(text: &str) -> Result<Self, InvalidEtcdEndpoint> {
        let invalid = || InvalidEtcdEndpoint(text.to_owned());
        let (scheme, authority) = text.split_once("://").ok_or_else(invalid)?;
        let tls = match scheme {
            "http" => false,
            "https" => true,
            _ => return Err(invalid()),
        };
        let authority = authority.strip_suffix('/').unwrap_or(authority);
        let (host, port) = split_authority(authority).ok_or_else(invalid)?;
        Ok(Self { tls, host: host.to_owned(), port: port.unwrap_or(PORT) })
    }
}

impl fmt::Display for EtcdEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.tls { "https" } else { "http" }, self.authority())
    }
}

/// Credentials of connections to etcd: the authorities to trust, and the certificate to present.
#[derive(Debug, Clone)]
pub(super) struct Credentials {
    /// PEM certificates of authorities; without it those that this host trusts.
    pub(super) authorities: Option<PathBuf>,
    pub(super) certificate: Option<Arc<Certificate>>,
}

/// The authorities for etcd's certificate cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the authorities of etcd in {place}: {error}")]
pub struct EtcdAuthorityError {
    place: String,
    error: io::Error,
}

impl Credentials {
    /// Read for each connection, so that a replaced file counts.
    pub(super) fn roots(&self) -> Result<RootCertStore, EtcdAuthorityError> {
        let (place, roots) = match &self.authorities {
            Some(path) => {
                let roots = std::fs::read(path).and_then(|bundle| fairlead_transport::trust(&bundle));
                (path.display().to_string(), roots)
            }
            None => ("the system's store".to_owned(), fairlead_transport::system_roots()),
        };
        roots.map_err(|error| EtcdAuthorityError { place, error })
    }
}

#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error(transparent)]
    Authority(#[from] EtcdAuthorityError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0:?} is neither a DNS name nor an address")]
    Name(String),
    #[error("TLS failed: {0}")]
    Tls(io::Error),
    #[error("cannot configure TLS: {0}")]
    TlsConfiguration(#[from] rustls::Error),
}

/// A channel over one connection, which is not made again when it is lost.
pub(super) async fn channel(
    member: &EtcdEndpoint,
    credentials: &Credentials,
) -> Result<Channel, Box<dyn std::error::Error + Send + Sync>> {
    if let Some(certificate) = &credentials.certificate {
        certificate.refresh_and_log();
    }
    let uri: Uri = member.to_string().parse()?;
    let stream = tokio::sync::Mutex::new(Some(connect(member, credentials).await?));
    let stream = Arc::new(stream);
    let connector = tower::service_fn(move |_: Uri| {
        let stream = Arc::clone(&stream);
        async move {
            let once = stream.lock().await.take();
            once.map(TokioIo::new).ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))
        }
    });
    let endpoint = Endpoint::from(uri)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_with_connector(connector).await?)
}

async fn connect(member: &EtcdEndpoint, credentials: &Credentials) -> Result<Box<dyn Stream>, ConnectError> {
    let addresses = lookup_host((member.host.as_str(), member.port)).await?;
    let stream = fairlead_transport::dial(addresses, 0, |_| Ok(())).await?;
    if !member.tls {
        return Ok(Box::new(stream));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(credentials.roots()?);
    let mut config = match &credentials.certificate {
        Some(certificate) => config.with_client_cert_resolver(Arc::<Certificate>::clone(certificate)),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(member.host.clone());
    let name = name.map_err(|_| ConnectError::Name(member.host.clone()))?;
    let secured = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    Ok(Box::new(secured.map_err(ConnectError::Tls)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_urls_with_or_without_a_port() {
        for (text, shown) in [
            ("https://etcd.example.com/", "https://etcd.example.com:2379"),
            ("http://127.0.0.1:12379", "http://127.0.0.1:12379"),
            ("https://[2001:db8::1]", "https://[2001:db8::1]:2379"),
        ] {
            assert_eq!(text.parse::<EtcdEndpoint>().unwrap().to_string(), shown);
        }
        for text in ["127.0.0.1:2379", "unix:///run/etcd", "https://", "https://a:0", "https://a/b"] {
            let error = text.parse::<EtcdEndpoint>().unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

//! A server's certificate, read again when its files change.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::ResolvesClientCert;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ServerConfig, SignatureScheme, SupportedProtocolVersion};

/// Paths of a certificate and its private key, both in PEM.
#[derive(Debug, Clone)]
pub struct CertificateFiles {
    /// The certificate, then those of intermediate authorities.
    pub chain: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

/// Reason why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read {path}: {error}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The contents are not those of a certificate and its key.
    #[error("cannot use the certificate in {chain} with the key in {key}: {reason}", chain = files.chain.display(), key = files.key.display())]
    Invalid {
        /// The files.
        files: CertificateFiles,
        /// Reason, in words.
        reason: String,
    },
}

/// Certificate and key that a TLS server presents; replicas of a server present them to each other as clients, too.
#[derive(Debug)]
pub struct Certificate {
    files: CertificateFiles,
    provider: Arc<CryptoProvider>,
    current: RwLock<Current>,
}

#[derive(Debug)]
struct Current {
    /// Contents of both files.
    pem: [Vec<u8>; 2],
    key: Arc<CertifiedKey>,
}

impl Certificate {
    /// Reads the files.
    ///
    /// # Errors
    /// See [`CertificateError`].
    pub fn read(files: CertificateFiles) -> Result<Arc<Self>, CertificateError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let pem = files.read()?;
        let key = files.parse(&pem, &provider)?;
        Ok(Arc::new(Self { files, provider, current: RwLock::new(Current { pem, key }) }))
    }

    /// Reads the files again; whether they have changed. Until both are good, what was read before stays in use.
    ///
    /// # Errors
    /// See [`CertificateError`].
    pub fn refresh(&self) -> Result<bool, CertificateError> {
        let pem = self.files.read()?;
        if self.current.read().unwrap_or_else(PoisonError::into_inner).pem == pem {
            return Ok(false);
        }
        let key = self.files.parse(&pem, &self.provider)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Current { pem, key };
        Ok(true)
    }

    /// As [`Certificate::refresh`], and logs what became of it.
    pub fn refresh_and_log(&self) {
        match self.refresh() {
            Ok(true) => tracing::info!("the certificate has changed"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "the certificate read before stays in use"),
        }
    }

    fn current(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).key)
    }

    /// For a server without client certificates, which speaks these versions of TLS and these protocols inside.
    ///
    /// # Errors
    /// The TLS library supports none of the versions.
    pub fn server_config(
        self: &Arc<Self>,
        versions: &[&'static SupportedProtocolVersion],
        protocols: &[&[u8]],
    ) -> Result<ServerConfig, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(versions)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(config)
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

/// Between replicas of a server, each of which presents its certificate.
impl ResolvesClientCert for Certificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl CertificateFiles {
    fn read(&self) -> Result<[Vec<u8>; 2], CertificateError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| CertificateError::File { path: path.to_owned(), error })
        };
        Ok([read(&self.chain)?, read(&self.key)?])
    }

    fn parse(
        &self,
        pem: &[Vec<u8>; 2],
        provider: &CryptoProvider,
    ) -> Result<Arc<CertifiedKey>, CertificateError> {
        let invalid = |reason: String| CertificateError::Invalid { files: self.clone(), reason };
        let [chain, key] = pem;
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(|error| invalid(error.to_string()))?;
        if chain.is_empty() {
            return Err(invalid("it has no certificate in PEM".to_owned()));
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| invalid(error.to_string()))?;
        // Checks that they belong together.
        let certified =
            CertifiedKey::from_der(chain, key, provider).map_err(|error| invalid(error.to_string()))?;
        Ok(Arc::new(certified))
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey as Generated, generate_simple_self_signed};

    use super::*;

    fn write(directory: &Path) -> CertificateFiles {
        let Generated { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let files = CertificateFiles { chain: directory.join("tls.crt"), key: directory.join("tls.key") };
        std::fs::write(&files.chain, cert.pem()).unwrap();
        std::fs::write(&files.key, signing_key.serialize_pem()).unwrap();
        files
    }

    fn presented(certificate: &Certificate) -> Vec<u8> {
        certificate.current.read().unwrap().key.cert[0].to_vec()
    }

    #[test]
    fn a_new_certificate_is_presented_once_it_has_its_key() {
        let directory = tempfile::tempdir().unwrap();
        let certificate = Certificate::read(write(directory.path())).unwrap();
        let first = presented(&certificate);
        assert!(!certificate.refresh().unwrap());
        let old_key = std::fs::read(&certificate.files.key).unwrap();
        write(directory.path());
        let new_key = std::fs::read(&certificate.files.key).unwrap();
        // Between the two writes of another program.
        std::fs::write(&certificate.files.key, old_key).unwrap();
        let error = certificate.refresh().unwrap_err().to_string();
        assert!(error.contains("tls.crt") && error.contains("tls.key"), "{error}");
        assert_eq!(presented(&certificate), first);
        std::fs::write(&certificate.files.key, new_key).unwrap();
        assert!(certificate.refresh().unwrap());
        assert_ne!(presented(&certificate), first);
        std::fs::write(&certificate.files.chain, "").unwrap();
        assert!(certificate.refresh().unwrap_err().to_string().contains("no certificate"));
        std::fs::remove_file(&certificate.files.chain).unwrap();
        assert!(certificate.refresh().unwrap_err().to_string().contains("tls.crt"));
    }
}

//! A running server for the tests.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use fairlead_discovery::server::{CertificateFiles, Observer, Server, Settings};
use fairlead_wire::discovery::server::cluster_client::ClusterClient;
use rustls::RootCertStore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

pub(crate) fn settings() -> Settings {
    Settings::new("127.0.0.1:0".parse().unwrap(), (100, 100))
}

/// A server that ends with this.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) observer: Observer,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(settings: Settings) -> Self {
        let server = Server::bind(settings).unwrap();
        let (address, observer) = (server.local_address().unwrap(), server.observer());
        let stop = CancellationToken::new();
        let task = tokio::spawn(server.run(stop.clone().cancelled_owned()));
        Self { address, observer, stop, task }
    }

    pub(crate) async fn client(&self) -> ClusterClient<Channel> {
        ClusterClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    pub(crate) async fn end(self) {
        self.stop.cancel();
        tokio::time::timeout(Duration::from_secs(10), self.task).await.unwrap().unwrap();
    }
}

pub(crate) fn certificate(directory: &Path) -> (CertificateFiles, RootCertStore) {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let files = CertificateFiles { chain: directory.join("tls.crt"), key: directory.join("tls.key") };
    std::fs::write(&files.chain, cert.pem()).unwrap();
    std::fs::write(&files.key, signing_key.serialize_pem()).unwrap();
    (files, fairlead_transport::trust(cert.pem().as_bytes()).unwrap())
}

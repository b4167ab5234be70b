//! A node program, as far as a gateway sees one.

use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlead_egress::EgressName;
use fairlead_egress::registration::audience;
use fairlead_transport::{AnyCertificate, public_key_info};
use fairlead_wire::egress::register_request::Kind;
use fairlead_wire::egress::registration_client::RegistrationClient;
use fairlead_wire::egress::{Change, Client, Clients, Hello, RegisterRequest, RegisterResponse};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use sha2::{Digest as _, Sha256};
use testbed_netns::Namespace;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tonic::{Status, Streaming};

/// A stream to a gateway.
pub(crate) struct Node {
    runtime: Runtime,
    requests: mpsc::Sender<RegisterRequest>,
    answers: Streaming<RegisterResponse>,
    revision: u64,
}

impl Node {
    /// Connects from a namespace and shows the token that `token` makes for the gateway's audience.
    pub(crate) fn connect(
        from: &Namespace,
        gateway: SocketAddr,
        egress: &EgressName,
        token: impl FnOnce(&str) -> String,
    ) -> Result<Self, Status> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let stream = from
            .run(|| TcpStream::connect_timeout(&gateway, Duration::from_secs(2)))
            .map_err(|error| Status::unavailable(error.to_string()))?;
        stream.set_nonblocking(true).unwrap();
        let (requests, receiver) = mpsc::channel(8);
        let answers = runtime.block_on(async {
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
                .with_no_client_auth();
            config.alpn_protocols = vec![b"h2".to_vec()];
            let name = ServerName::try_from("gateway").unwrap();
            let stream = tokio::net::TcpStream::from_std(stream).unwrap();
            let stream = TlsConnector::from(Arc::new(config))
                .connect(name, stream)
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let certificate = stream.get_ref().1.peer_certificates().unwrap()[0].clone();
            let key = public_key_info(&certificate).unwrap();
            let token = token(&audience(egress, &Sha256::digest(key).into()));
            let stream = Mutex::new(Some(TokioIo::new(stream)));
            let connector = tower::service_fn(move |_: tonic::transport::Uri| {
                let stream = stream.lock().unwrap().take();
                async move { stream.ok_or_else(|| std::io::Error::other("connected once")) }
            });
            let channel = Endpoint::from_static("http://gateway")
                .connect_with_connector(connector)
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let mut client = RegistrationClient::new(channel);
            let hello = RegisterRequest { revision: 1, kind: Some(Kind::Hello(Hello { token })) };
            requests.send(hello).await.unwrap();
            let answers = client.register(ReceiverStream::new(receiver)).await?;
            Ok::<_, Status>(answers.into_inner())
        })?;
        let mut node = Self { runtime, requests, answers, revision: 1 };
        node.answer()?;
        Ok(node)
    }

    /// The next answer.
    pub(crate) fn answer(&mut self) -> Result<RegisterResponse, Status> {
        let answers = &mut self.answers;
        self.runtime.block_on(async {
            let answer = tokio::time::timeout(Duration::from_secs(10), answers.message()).await;
            answer.map_err(|_| Status::deadline_exceeded("no answer"))??.ok_or_else(|| Status::ok("the end"))
        })
    }

    /// Sends a message and waits until it is in place; reasons of refusals by UID.
    pub(crate) fn send(&mut self, kind: Kind) -> Result<Vec<(String, String)>, Status> {
        self.revision += 1;
        let request = RegisterRequest { revision: self.revision, kind: Some(kind) };
        let requests = self.requests.clone();
        self.runtime
            .block_on(async move { requests.send(request).await })
            .map_err(|_| Status::aborted("ended"))?;
        loop {
            let answer = self.answer()?;
            if answer.revision >= self.revision {
                return Ok(answer.refused.into_iter().map(|it| (it.uid, it.reason)).collect());
            }
        }
    }

    pub(crate) fn all(&mut self, clients: Vec<Client>) -> Result<Vec<(String, String)>, Status> {
        self.send(Kind::All(Clients { clients }))
    }

    pub(crate) fn change(
        &mut self,
        set: Vec<Client>,
        removed: &[&str],
    ) -> Result<Vec<(String, String)>, Status> {
        let removed = removed.iter().map(|uid| (*uid).to_owned()).collect();
        self.send(Kind::Change(Change { set, removed }))
    }
}

//! The registration server: gRPC over TLS 1.3, with a certificate that is made at the start. Which clients are accepted is decided in
//! [`crate::registry`].

mod changes;
mod clock;
mod connections;
mod session;
mod streams;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use fairlead_egress::registration::PublicKeyHash;
use fairlead_wire::egress::registration_server::{Registration, RegistrationServer};
use fairlead_wire::egress::{RegisterRequest, RegisterResponse};
use futures::{Stream, stream};
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use self::changes::Changes;
pub(crate) use self::clock::ClockError;
use self::connections::Caller;
pub(crate) use self::session::Inputs;
use self::session::{Context, Session};
pub(crate) use self::streams::Streams;
use crate::certificate::OwnCertificate;
use crate::metrics::Metrics;
use crate::review::Reviewer;

/// Longest message: clients of a Node with some 200 bytes each.
const MAX_MESSAGE: usize = 1 << 20;
/// Streams of one connection at a time.
const MAX_STREAMS: u32 = 4;
const MAX_HEADERS: u32 = 16 << 10;
/// A connection whose other end does not answer is closed.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that wait to be served.
const INCOMING: usize = 64;
/// Longest wait for streams to end when the program ends.
const FINISH: Duration = Duration::from_secs(2);

/// The certificate of a gateway, and the hash of its key.
pub(crate) struct Identity {
    tls: TlsAcceptor,
    /// Hash of the public key, by which tokens name this gateway.
    pub(crate) key: PublicKeyHash,
}

impl Identity {
    /// Makes a key and a certificate, which nothing but this process ever has.
    ///
    /// # Errors
    /// The cryptography library fails.
    pub(crate) fn generate() -> anyhow::Result<Self> {
        let own = OwnCertificate::generate()?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_no_client_auth()
            .with_single_cert(vec![own.certificate.clone()], own.private())?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { tls: TlsAcceptor::from(Arc::new(config)), key: own.hash })
    }
}

struct Service(Arc<Context>);

#[tonic::async_trait]
impl Registration for Service {
    type RegisterStream = Pin<Box<dyn Stream<Item = Result<RegisterResponse, Status>> + Send>>;

    async fn register(
        &self,
        request: Request<Streaming<RegisterRequest>>,
    ) -> Result<Response<Self::RegisterStream>, Status> {
        let source = request.extensions().get::<Caller>().cloned();
        let session = Session::new(Arc::clone(&self.0), source, request.into_inner());
        // Dropped with the stream, the session ends at once; there is no task that could outlive it.
        let answers = stream::unfold(Some(session), |session| async move {
            let mut session = session?;
            match session.next().await {
                Ok(Some(answer)) => Some((Ok(answer), Some(session))),
                Ok(None) => None,
                Err(status) => Some((Err(status), None)),
            }
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// Serves node programs until `stopping` is cancelled.
pub(crate) async fn serve(
    listener: TcpListener,
    identity: Identity,
    inputs: Inputs,
    reviewer: Reviewer,
    metrics: Metrics,
    stopping: CancellationToken,
) -> anyhow::Result<()> {
    let context = Arc::new(Context { inputs, reviewer, metrics, changes: Changes::default(), stopping });
    let (ready, incoming) = mpsc::channel(INCOMING);
    let stopping = context.stopping.clone();
    let service = RegistrationServer::new(Service(context)).max_decoding_message_size(MAX_MESSAGE);
    let served = tonic::transport::Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADERS)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .add_service(service)
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stopping.clone().cancelled_owned());
    let mut served = std::pin::pin!(served);
    tokio::select! {
        ended = &mut served => ended?,
        never = connections::accept_all(&listener, &identity.tls, ready) => match never {},
        () = stopping.cancelled() => if let Ok(ended) = tokio::time::timeout(FINISH, served).await {
            ended?;
        },
    }
    Ok(())
}

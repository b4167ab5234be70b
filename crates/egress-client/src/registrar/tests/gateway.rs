//! Servers that speak the protocol, well or badly.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use fairlead_egress::EgressName;
use fairlead_egress::registration::audience;
use fairlead_wire::egress::register_request::Kind;
use fairlead_wire::egress::registration_server::{Registration, RegistrationServer};
use fairlead_wire::egress::{Client, Hold, Refusal, RegisterRequest, RegisterResponse, State};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Behaviour {
    #[default]
    Answers,
    /// With `Unauthenticated`.
    Rejects,
    /// Never answers.
    Silent,
    /// Answers as fast as it can, without end.
    Flood,
    /// Answers what was never sent.
    Future,
    /// Answers with more than can be taken.
    Huge,
    /// Answers the greeting, then refuses whom it was not asked about.
    Strangers,
}

impl Behaviour {
    pub(super) const HOSTILE: [Self; 5] =
        [Self::Silent, Self::Flood, Self::Future, Self::Huge, Self::Strangers];
}

/// Messages that a server has received, and its behaviour.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) behaviour: Behaviour,
    pub(crate) connections: usize,
    pub(crate) messages: usize,
    pub(crate) hellos: Vec<String>,
    pub(crate) all: usize,
    pub(crate) clients: BTreeMap<String, Client>,
    pub(crate) refuses: Vec<String>,
}

/// A gateway.
pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    states: watch::Sender<(State, Vec<Hold>)>,
    key: [u8; 32],
    task: Option<JoinHandle<()>>,
    streams: Arc<Mutex<Vec<tokio::task::AbortHandle>>>,
}

impl Fake {
    pub(crate) async fn start(address: &str) -> Self {
        let mut fake = Self {
            address: address.parse().unwrap(),
            seen: Arc::default(),
            states: watch::Sender::new((State::Ready, Vec::new())),
            key: [0; 32],
            task: None,
            streams: Arc::default(),
        };
        fake.restart().await;
        fake
    }

    /// With another key, and without what it knew.
    pub(crate) async fn restart(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.address = listener.local_addr().unwrap();
        let certified = rcgen::generate_simple_self_signed(["gateway".to_owned()]).unwrap();
        self.key =
            Sha256::digest(rcgen::PublicKeyData::subject_public_key_info(&certified.signing_key)).into();
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let refuses = std::mem::take(&mut *self.state()).refuses;
        self.state().refuses = refuses;
        let service = Service {
            seen: Arc::clone(&self.seen),
            states: self.states.subscribe(),
            streams: Arc::clone(&self.streams),
        };
        let (sender, incoming) = mpsc::channel(16);
        let (acceptor, seen) = (TlsAcceptor::from(Arc::new(config)), Arc::clone(&self.seen));
        let accept = async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (acceptor, sender) = (acceptor.clone(), sender.clone());
                seen.lock().unwrap().connections += 1;
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        let _ = sender.send(Ok::<_, io::Error>(Io(stream))).await;
                    }
                });
            }
        };
        let server = tonic::transport::Server::builder().add_service(RegistrationServer::new(service));
        let serve = server.serve_with_incoming(ReceiverStream::new(incoming));
        self.task = Some(tokio::spawn(async move {
            tokio::select! {
                () = accept => {}
                _ = serve => {}
            }
        }));
    }

    /// Ends it, and all connections.
    pub(crate) async fn stop(&mut self) {
        let task = self.task.take().unwrap();
        task.abort();
        let _ = task.await;
        for stream in self.streams.lock().unwrap().drain(..) {
            stream.abort();
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    pub(super) fn clients(&self) -> Vec<String> {
        self.state().clients.keys().cloned().collect()
    }

    pub(super) fn audience(&self, egress: &EgressName) -> String {
        audience(egress, &self.key)
    }

    /// Tells all nodes its state.
    pub(crate) fn push(&self, state: State) {
        self.states.send_replace((state, Vec::new()));
    }

    /// Tells all nodes that it is ready and holds these.
    pub(crate) fn hold(&self, held: Vec<Hold>) {
        self.hold_as(State::Ready, held);
    }

    /// Tells all nodes this state, and that it holds these.
    pub(crate) fn hold_as(&self, state: State, held: Vec<Hold>) {
        self.states.send_replace((state, held));
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

struct Service {
    seen: Arc<Mutex<Seen>>,
    states: watch::Receiver<(State, Vec<Hold>)>,
    streams: Arc<Mutex<Vec<tokio::task::AbortHandle>>>,
}

type Answers = mpsc::Sender<Result<RegisterResponse, Status>>;

#[tonic::async_trait]
impl Registration for Service {
    type RegisterStream = ReceiverStream<Result<RegisterResponse, Status>>;

    async fn register(
        &self,
        request: Request<Streaming<RegisterRequest>>,
    ) -> Result<Response<Self::RegisterStream>, Status> {
        let (sender, receiver) = mpsc::channel(16);
        let task =
            tokio::spawn(serve(request.into_inner(), sender, Arc::clone(&self.seen), self.states.clone()));
        self.streams.lock().unwrap().push(task.abort_handle());
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

async fn serve(
    mut requests: Streaming<RegisterRequest>,
    answers: Answers,
    seen: Arc<Mutex<Seen>>,
    mut states: watch::Receiver<(State, Vec<Hold>)>,
) {
    let mut revision = 0;
    loop {
        tokio::select! {
            request = requests.message() => {
                let Ok(Some(request)) = request else { return };
                revision = request.revision;
                let answer = seen.lock().unwrap().take(request);
                let answer = RegisterResponse { state: states.borrow().0.into(), ..answer };
                let behaviour = seen.lock().unwrap().behaviour;
                if !misbehave(behaviour, &answers, answer).await {
                    return;
                }
            }
            Ok(()) = states.changed() => {
                let (state, held) = states.borrow_and_update().clone();
                let answer = RegisterResponse { revision, refused: Vec::new(), state: state.into(), held };
                let _ = answers.send(Ok(answer)).await;
            }
        }
    }
}

async fn misbehave(behaviour: Behaviour, answers: &Answers, answer: RegisterResponse) -> bool {
    let stranger = |uid: String| Refusal { uid, reason: "No".to_owned(), message: "x".repeat(1000) };
    let revision = answer.revision;
    match behaviour {
        Behaviour::Answers => answers.send(Ok(answer)).await.is_ok(),
        Behaviour::Rejects => {
            let _ = answers.send(Err(Status::unauthenticated("no such token"))).await;
            false
        }
        Behaviour::Silent => true,
        Behaviour::Flood => loop {
            if answers.send(Ok(answer.clone())).await.is_err() {
                return false;
            }
        },
        Behaviour::Future => {
            answers.send(Ok(RegisterResponse { revision: u64::MAX, ..answer })).await.is_ok()
        }
        Behaviour::Huge => {
            let refused = (0..10_000).map(|number| stranger(format!("x{number}"))).collect();
            answers.send(Ok(RegisterResponse { refused, ..answer })).await.is_ok()
        }
        Behaviour::Strangers => {
            let refused = (0..500).map(|number| stranger(format!("{revision}-{number}"))).collect();
            answers.send(Ok(RegisterResponse { refused, ..answer })).await.is_ok()
        }
    }
}

impl Seen {
    fn take(&mut self, request: RegisterRequest) -> RegisterResponse {
        self.messages += 1;
        let mut set = Vec::new();
        match request.kind.unwrap() {
            Kind::Hello(hello) => self.hellos.push(hello.token),
            Kind::All(all) => {
                self.all += 1;
                self.clients.clear();
                set = all.clients;
            }
            Kind::Change(change) => {
                for uid in change.removed {
                    self.clients.remove(&uid);
                }
                set = change.set;
            }
        }
        let mut refused = Vec::new();
        for client in set {
            if self.refuses.contains(&client.uid) {
                let message = "see allowedNamespaces of the Egress".to_owned();
                refused.push(Refusal { uid: client.uid, reason: "NotAllowed".to_owned(), message });
            } else {
                self.clients.insert(client.uid.clone(), client);
            }
        }
        RegisterResponse { revision: request.revision, refused, state: State::Ready.into(), held: Vec::new() }
    }
}

/// Something that listens.
pub(super) struct Listening {
    pub(super) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listening<F: Future<Output = ()> + Send + 'static>(
    address: &str,
    serve: impl Fn(TcpStream) -> F + Send + Sync + 'static,
) -> Listening {
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream));
        }
    });
    Listening { address, task }
}

/// Sends no TLS, without end.
pub(super) async fn garbage(address: &str) -> Listening {
    listening(address, |mut stream| async move { while stream.write_all(&[0x16; 4096]).await.is_ok() {} })
        .await
}

/// Accepts and says nothing.
pub(super) async fn silent(address: &str) -> Listening {
    listening(address, |stream| async move {
        tokio::time::sleep(Duration::from_secs(60)).await;
        drop(stream);
    })
    .await
}

/// Processor time that this process has used so far, in steps of 10 ms.
pub(super) fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

struct Io(TlsStream<TcpStream>);

impl Connected for Io {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

//! A relay in this process, its certificate authority, and clients good and bad.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_relay::access::FileAuthorizer;
use fairlead_relay::client::{self, Connection, Endpoint, Proxy, Receiver, Sender, connect};
use fairlead_relay::core::{AllocationLimits, Limits};
use fairlead_relay::proof::{Transcript, prove};
use fairlead_relay::server::{CertificateFiles, Observer, Rejection, ReplicaSettings, Server, Settings};
use fairlead_relay::websocket::{Decoder, Role, read_response, request};
use fairlead_wire::relay::{
    ALPN, AllocatedPort, ErrorReason, Frame, HEADER_LENGTH, MAX_BODY, Register, StunServer, parse, signed,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const TOKEN: &str = "token of the test";

pub(crate) fn key(number: u8) -> PrivateKey {
    PrivateKey([number; 32])
}

pub(crate) fn public(number: u8) -> [u8; 32] {
    key(number).public_key().0
}

pub(crate) fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).unwrap();
    bytes
}

pub(crate) async fn closed_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port()
}

/// Files that a relay reads: a certificate, the keys of its clients, their token.
#[derive(Clone)]
struct Files {
    directory: Arc<tempfile::TempDir>,
    ca: Vec<u8>,
}

impl Files {
    fn new() -> Self {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        let path = |name: &str| directory.path().join(name);
        let ca = certificate(&path("tls.crt"), &path("tls.key"));
        std::fs::write(path("ca.crt"), &ca).unwrap();
        std::fs::write(path("tokens"), TOKEN).unwrap();
        allow(&path("keys"), &[1, 2, 3]);
        Self { directory, ca }
    }

    fn serve(&self, tls: bool, replicas: Option<&[SocketAddr]>) -> Bed {
        let path = |name: &str| self.directory.path().join(name);
        let files = CertificateFiles { chain: path("tls.crt"), key: path("tls.key") };
        let settings = Settings {
            listen: "127.0.0.1:0".parse().unwrap(),
            stun: Some("127.0.0.1:0".parse().unwrap()),
            relay_ports: Some((0..=9, AllocationLimits { per_client: 2, client_rate: None })),
            certificate: tls.then_some(files),
            replicas: replicas.map(|peers| ReplicaSettings {
                listen: "127.0.0.1:0".parse().unwrap(),
                peers: peers.iter().map(SocketAddr::to_string).collect(),
                authorities: path("ca.crt"),
                name: "localhost".to_owned(),
            }),
            names: vec!["localhost".to_owned()],
            limits: Limits::default(),
            drain: Duration::from_secs(30),
        };
        let access = FileAuthorizer::read(Some(path("keys")), Some(path("tokens"))).unwrap();
        let server = Server::bind(settings, Arc::new(access)).unwrap();
        let (address, observer) = (server.local_address().unwrap(), server.observer());
        let replica_address = server.replica_address().unwrap();
        let (stop, stopped) = oneshot::channel();
        let run = server.run(async {
            let _ = stopped.await;
        });
        let server = Some(tokio::spawn(run));
        Bed { observer, address, replica_address, files: self.clone(), stop: Some(stop), server }
    }
}

/// A relay with the name `localhost` that lets keys 1 to 3 in.
pub(crate) struct Bed {
    pub(crate) observer: Observer,
    pub(crate) address: SocketAddr,
    /// For other replicas.
    pub(crate) replica_address: Option<SocketAddr>,
    files: Files,
    stop: Option<oneshot::Sender<()>>,
    server: Option<JoinHandle<()>>,
}

impl Bed {
    pub(crate) async fn start() -> Self {
        Files::new().serve(true, None)
    }

    pub(crate) async fn start_plain() -> Self {
        Files::new().serve(false, None)
    }

    /// A relay with replicas, which connects to those at these addresses.
    pub(crate) async fn start_replica(peers: &[SocketAddr]) -> Self {
        Files::new().serve(true, Some(peers))
    }

    /// A further replica of this relay, which connects to those at these addresses.
    pub(crate) async fn another(&self, peers: &[SocketAddr]) -> Self {
        self.files.serve(true, Some(peers))
    }

    /// The authority of its certificate, in PEM.
    pub(crate) fn authority(&self) -> Vec<u8> {
        self.files.ca.clone()
    }

    /// Certificate of the relay and its private key.
    pub(crate) fn certificate(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let path = |name: &str| self.files.directory.path().join(name);
        let certificate = CertificateDer::from_pem_file(path("tls.crt")).unwrap();
        (vec![certificate], PrivateKeyDer::from_pem_file(path("tls.key")).unwrap())
    }

    /// Ends without a word, as a program that is killed.
    pub(crate) async fn kill(mut self) {
        let server = self.server.take().unwrap();
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
    }

    pub(crate) fn allow(&self, numbers: &[u8]) {
        allow(&self.files.directory.path().join("keys"), numbers);
    }

    pub(crate) fn settings(&self, transport: &str, number: u8) -> client::Settings {
        let endpoint: Endpoint = format!("{transport}://localhost:{}", self.address.port()).parse().unwrap();
        client::Settings {
            server_name: None,
            endpoint,
            proxy: None,
            roots: Arc::new(client::trust(&self.files.ca).unwrap()),
            private_key: key(number),
            instance: [number; 8],
            mark: 0,
            nat64: None,
            token: TOKEN.into(),
        }
    }

    pub(crate) async fn client(&self, transport: &str, number: u8) -> Client {
        Client::new(connect(&self.settings(transport, number)).await.unwrap()).await
    }

    pub(crate) fn rejections(&self, reason: Rejection) -> u64 {
        let snapshot = self.observer.snapshot();
        snapshot.rejections.iter().find(|(each, _)| *each == reason).unwrap().1
    }

    pub(crate) fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    pub(crate) async fn stopped(&mut self) {
        self.server.take().unwrap().await.unwrap();
    }

    /// A connection from another address of the loopback interface, which says nothing.
    pub(crate) async fn connect_from(&self, source: Ipv4Addr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((source, 0).into()).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    /// A connection that has got its hello.
    pub(crate) async fn raw(&self) -> Raw {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(client::trust(&self.files.ca).unwrap())
            .with_no_client_auth();
        config.alpn_protocols = vec![ALPN.to_vec()];
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        let mut raw = Raw { stream, hello: Vec::new(), buffer: Vec::new() };
        raw.hello = raw.frame().await;
        raw
    }

    pub(crate) async fn http(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        String::from_utf8(read_to_end(&mut stream).await).unwrap()
    }

    /// Registers over a WebSocket without TLS, sends a ping of the WebSocket and returns the payload of the pong.
    pub(crate) async fn websocket_ping(&self, payload: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(&request("localhost", [1; 16])).await.unwrap();
        let mut bytes = Vec::new();
        let length = loop {
            assert!(stream.read_buf(&mut bytes).await.unwrap() > 0);
            if let Some(length) = read_response(&bytes, [1; 16]).unwrap() {
                break length;
            }
        };
        let (mut decoder, mut hello) = (Decoder::new(Role::Client), Vec::new());
        let mut rest = bytes.split_off(length);
        while parse(&hello, MAX_BODY).unwrap().is_none() {
            decoder.decode(&rest, &mut hello).unwrap();
            rest.clear();
            if parse(&hello, MAX_BODY).unwrap().is_none() {
                assert!(stream.read_buf(&mut rest).await.unwrap() > 0);
            }
        }
        let registration = registration(&hello, &key(1), public(1), None);
        let mask = [1, 2, 3, 4];
        stream.write_all(&fairlead_relay::websocket::encode(&registration, Some(mask))).await.unwrap();
        let mut ping = fairlead_relay::websocket::pong_frame(payload, Some(mask));
        ping[0] = 0x89;
        stream.write_all(&ping).await.unwrap();
        let mut received = Vec::new();
        let pong = fairlead_relay::websocket::pong_frame(payload, None);
        loop {
            if received.windows(pong.len()).any(|part| part == pong) {
                return payload.to_vec();
            }
            assert!(stream.read_buf(&mut received).await.unwrap() > 0, "{received:02x?}");
        }
    }
}

fn allow(path: &std::path::Path, numbers: &[u8]) {
    let lines: Vec<String> = numbers.iter().map(|number| PublicKey(public(*number)).to_string()).collect();
    // Replaced, as a ConfigMap is: never read half-written.
    let new = path.with_extension("new");
    std::fs::write(&new, lines.join("\n")).unwrap();
    std::fs::rename(new, path).unwrap();
}

/// Writes a certificate for `localhost` and returns that of its authority.
fn certificate(chain: &PathBuf, key: &PathBuf) -> Vec<u8> {
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&ca_key).unwrap();
    let issuer = Issuer::new(params, ca_key);
    let own_key = KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let own = CertificateParams::new(names).unwrap().signed_by(&own_key, &issuer).unwrap();
    std::fs::write(chain, own.pem()).unwrap();
    std::fs::write(key, own_key.serialize_pem()).unwrap();
    ca.pem().into_bytes()
}

pub(crate) async fn read_to_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // The relay may reset a connection whose bytes it has not read.
    let _ = stream.read_to_end(&mut bytes).await;
    bytes
}

/// Closes the connections that the relay has closed.
pub(crate) fn keep_open(connections: &mut Vec<TcpStream>) {
    connections.retain(|stream| {
        let waits = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        stream.try_read(&mut [0; 16]).as_ref().is_err_and(waits)
    });
}

/// A registered client.
pub(crate) struct Client {
    pub(crate) replica: [u8; 16],
    pub(crate) stun: StunServer,
    /// Frames that came before that.
    before: VecDeque<String>,
    sender: Sender,
    receiver: Receiver,
}

impl Client {
    pub(crate) async fn new(connection: Connection) -> Self {
        assert_eq!(connection.idle_timeout(), Duration::from_secs(60));
        let replica = connection.replica();
        assert_eq!(connection.address(), Some(Ipv4Addr::LOCALHOST.into()));
        let (sender, mut receiver) = connection.split();
        let mut before = VecDeque::new();
        let stun = loop {
            let first = receiver.receive(|frame| match frame {
                Frame::StunServer(server) => Ok(*server),
                other => Err(format!("{other:?}")),
            });
            match first.await.unwrap() {
                Ok(stun) => break stun,
                Err(other) => before.push_back(other),
            }
        };
        Self { replica, stun, before, sender, receiver }
    }

    pub(crate) async fn send(&mut self, frame: &Frame<'_>) {
        self.write(&encoded(frame)).await;
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        self.sender.send(bytes).await.unwrap();
    }

    /// The next frame, but for the number of replicas, which may come at any time.
    pub(crate) async fn next(&mut self) -> String {
        loop {
            let frame = match self.before.pop_front() {
                Some(frame) => frame,
                None => self.receiver.receive(|frame| format!("{frame:?}")).await.unwrap(),
            };
            if !frame.starts_with("Replicas") {
                return frame;
            }
        }
    }

    pub(crate) async fn datagram(&mut self) -> ([u8; 32], Vec<u8>) {
        loop {
            let received = self.receiver.receive(|frame| match frame {
                Frame::Datagram { peer, payload } | Frame::Probe { peer, payload } => {
                    Some((*peer, payload.to_vec()))
                }
                Frame::Replicas(_) => None,
                other => panic!("{other:?}"),
            });
            if let Some(datagram) = received.await.unwrap() {
                return datagram;
            }
        }
    }

    /// Asks for a UDP port to a peer.
    pub(crate) async fn port(&mut self, peer: u8) -> AllocatedPort {
        self.send(&Frame::Allocate(public(peer))).await;
        let answer = self.receiver.receive(|frame| match frame {
            Frame::Allocated(port) => *port,
            other => panic!("{other:?}"),
        });
        answer.await.unwrap()
    }

    pub(crate) async fn closed(&mut self) {
        while self.receiver.receive(|_| ()).await.is_ok() {}
    }
}

/// A client that follows the protocol as far as a test wants.
pub(crate) struct Raw {
    stream: TlsStream<TcpStream>,
    /// The relay's hello, with its header.
    pub(crate) hello: Vec<u8>,
    buffer: Vec<u8>,
}

impl Raw {
    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    async fn frame(&mut self) -> Vec<u8> {
        loop {
            if let Some(parsed) = parse(&self.buffer, MAX_BODY).unwrap() {
                let length = parsed.length;
                return self.buffer.drain(..length).collect();
            }
            assert!(self.stream.read_buf(&mut self.buffer).await.unwrap() > 0, "closed");
        }
    }

    pub(crate) async fn error(&mut self) -> ErrorReason {
        let frame = self.frame().await;
        match parse(&frame, MAX_BODY).unwrap().unwrap().frame {
            Frame::Error { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn closed(&mut self) {
        let mut rest = Vec::new();
        let _ = self.stream.read_to_end(&mut rest).await;
    }

    pub(crate) fn registration(&self, key: &PrivateKey) -> Vec<u8> {
        self.registration_as(key, key.public_key().0)
    }

    /// A registration of `claimed`, proved with `key`.
    pub(crate) fn registration_as(&self, key: &PrivateKey, claimed: [u8; 32]) -> Vec<u8> {
        let exporter = self
            .stream
            .get_ref()
            .1
            .export_keying_material([0; 32], b"EXPORTER-Channel-Binding", None)
            .unwrap();
        registration(&self.hello, key, claimed, Some(exporter))
    }
}

fn registration(hello: &[u8], key: &PrivateKey, claimed: [u8; 32], exporter: Option<[u8; 32]>) -> Vec<u8> {
    let Frame::Hello(fields) = parse(hello, MAX_BODY).unwrap().unwrap().frame else { panic!("{hello:?}") };
    let mut register = Register {
        proof: [0; 32],
        version: 1,
        instance: [0; 8],
        key: claimed,
        name: "localhost",
        token: TOKEN.as_bytes(),
        is_standby: false,
    };
    let unproved = encoded(&Frame::Register(register));
    let transcript = Transcript {
        challenge: fields.challenge,
        hello: &hello[HEADER_LENGTH..],
        register: signed(&unproved[HEADER_LENGTH..]),
        exporter,
    };
    register.proof = prove(key, fields.relay_key, &transcript).unwrap();
    encoded(&Frame::Register(register))
}

/// An HTTP proxy that knows one user; only CONNECT.
pub(crate) struct HttpProxy {
    port: u16,
    task: AbortHandle,
}

impl HttpProxy {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let serve = async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(Self::serve(stream));
            }
        };
        Self { port, task: tokio::spawn(serve).abort_handle() }
    }

    async fn serve(mut client: TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        // "user:secret"
        if !head.contains("Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=\r\n") {
            let answer = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n";
            client.write_all(answer).await.unwrap();
            return;
        }
        let target = head.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next()).unwrap();
        let mut relay = TcpStream::connect(target).await.unwrap();
        client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut client, &mut relay).await;
    }

    pub(crate) fn as_seen_by(&self, user: &str, password: &str) -> Proxy {
        let credentials = Some((user.to_owned(), password.to_owned()));
        Proxy { host: "127.0.0.1".to_owned(), port: self.port, credentials }
    }
}

impl Drop for HttpProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

//! A connection to a relay as a client: TCP, an HTTP proxy on the way, TLS, WebSocket, registration.

mod endpoint;
mod held;
mod link;
mod links;
mod liveness;
mod loopback;
mod plan;
mod queue;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::Nat64;
use fairlead_keys::PrivateKey;
use fairlead_transport::Stream;
use fairlead_wire::relay::{
    ALPN, ErrorReason, Frame, Hello, InvalidFrame, MAX_BODY, MAX_HANDSHAKE_BODY, MIN_VERSION, Oversized,
    Register, VERSION, signed,
};
use rustls::pki_types::{InvalidDnsNameError, ServerName};
use rustls::{ClientConfig, RootCertStore};
use socket2::SockRef;
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::proof::{NoSecret, Transcript, prove};
use crate::server::EXPORTER_LABEL;
use crate::stream::{self, FrameReader, FrameWriter, StreamError};
use crate::{NOT_SENT, USER_TIMEOUT};

pub use endpoint::{Endpoint, InvalidEndpoint, Transport};
pub use fairlead_limits::Backoff;
pub use fairlead_transport::proxy::{InvalidProxy, Proxy, ProxyError};
pub use fairlead_transport::{system_roots, trust};
pub use held::INITIATION_HELD;
pub use link::Receive;
pub use links::{LinkStatus, keep_connected};
pub use loopback::{HOLD, LoopbackPort, is_relayed};
pub use queue::{LinkCounters, LinkQueue, RelayPort};

/// Time for everything until the client is registered.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of one address of several, after which the next one is tried.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(4);

/// Settings of a client: its relay, the way to it, and its identity.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The relay.
    pub endpoint: Endpoint,
    /// The name in its certificate, if it is not the host of `endpoint`.
    pub server_name: Option<String>,
    /// An HTTP proxy on the way.
    pub proxy: Option<Proxy>,
    /// Authorities that certify relays; see [`trust`].
    pub roots: Arc<RootCertStore>,
    /// The WireGuard key.
    pub private_key: PrivateKey,
    /// The run of this client: the same random bytes for all its connections.
    pub instance: [u8; 8],
    /// The secret that the relay's operator gave; may be empty.
    pub token: Vec<u8>,
    /// `SO_MARK` of the connection; zero for none. On a node it keeps the connection out of the mesh that it carries.
    pub mark: u32,
    /// Translation of IPv4 addresses, read for each connection; `None` where they are reached as they are.
    pub nat64: Option<watch::Receiver<Nat64>>,
}

impl Settings {
    /// The address itself, or what leads to it through a NAT64.
    fn reached_at(&self, address: SocketAddr) -> Vec<SocketAddr> {
        let nat64 = self.nat64.as_ref().map(watch::Receiver::borrow);
        let translated = nat64.map(|nat64| nat64.endpoints(address)).unwrap_or_default();
        if translated.is_empty() { vec![address] } else { translated }
    }
}

/// Reason why a client is not connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The first frames of the relay are not those of a relay.
    #[error("the relay does not follow the protocol: {0}")]
    Frame(#[from] InvalidFrame),
    /// The connection failed.
    #[error("cannot reach {0}: {1}")]
    Io(String, io::Error),
    /// The host in the endpoint cannot be in a certificate.
    #[error("{0:?} is neither a DNS name nor an address")]
    Name(String, #[source] InvalidDnsNameError),
    /// The relay's key or this client's is not usable.
    #[error(transparent)]
    Proof(#[from] NoSecret),
    /// The proxy does not let the connection through.
    #[error(transparent)]
    Proxy(#[from] ProxyError),
    /// The relay refuses the registration.
    #[error("the relay refuses the registration: {reason}")]
    Refused {
        /// Code of the reason.
        reason: ErrorReason,
    },
    /// No stand-by link is possible there.
    #[error("it is the replica of the other link, or one without stand-by links")]
    SameReplica,
    /// The connection ended, or something other than a relay answered.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The relay took too long.
    #[error("the relay did not answer within 10 s")]
    Timeout,
    /// The TLS handshake failed.
    #[error("TLS with the relay failed: {0}")]
    Tls(io::Error),
    /// The TLS library refuses the configuration.
    #[error("cannot configure TLS: {0}")]
    TlsConfiguration(#[from] rustls::Error),
    /// The token or the relay's name is too long.
    #[error(transparent)]
    TooLong(#[from] Oversized),
    /// The relay speaks no version that this client understands.
    #[error("the relay speaks versions {min} to {max}, this client {MIN_VERSION} to {VERSION}")]
    Version {
        /// The oldest of the relay.
        min: u8,
        /// The newest of the relay.
        max: u8,
    },
}

impl ConnectError {
    /// Whether another address of the relay may be better: what a replica decides on the client itself, all of them do.
    fn is_of_address(&self) -> bool {
        !matches!(self, Self::Refused { reason } if *reason != ErrorReason::Full)
    }
}

/// No authority: for a connection without TLS.
pub fn no_roots() -> RootCertStore {
    RootCertStore::empty()
}

/// A registered client.
pub struct Connection {
    hello: Hello,
    address: Option<IpAddr>,
    idle_timeout: Duration,
    sender: Sender,
    receiver: Receiver,
}

/// The sending half of a connection.
pub struct Sender(FrameWriter<Box<dyn Stream>>);

/// The receiving half of a connection.
pub struct Receiver(FrameReader<Box<dyn Stream>>);

/// Connects and registers, at the first address of the relay (or the proxy) that serves this client: another one may be that of a
/// replica with a wrong certificate, or of no relay.
///
/// # Errors
/// See [`ConnectError`]: of the first address that was reached.
pub async fn connect(settings: &Settings) -> Result<Connection, ConnectError> {
    let connected = async { connect_at(settings, addresses(settings, None).await?).await };
    timeout(CONNECT_TIMEOUT, connected).await.unwrap_or(Err(ConnectError::Timeout))
}

/// Connection as that of [`connect`], at addresses that the caller has looked up.
///
/// # Errors
/// See [`connect`].
pub async fn connect_at(settings: &Settings, addresses: Vec<SocketAddr>) -> Result<Connection, ConnectError> {
    let connected = establish(settings, addresses, None);
    timeout(CONNECT_TIMEOUT, connected).await.unwrap_or(Err(ConnectError::Timeout))
}

/// Connects to another replica than `active`, and registers a link that receives only while there is no other one. Of several
/// addresses of the relay, that of the active one comes last.
///
/// # Errors
/// See [`ConnectError`]; often [`ConnectError::SameReplica`].
pub async fn connect_standby(
    settings: &Settings,
    active: [u8; 16],
    address: Option<IpAddr>,
) -> Result<Connection, ConnectError> {
    let connected = async {
        let addresses = addresses(settings, address).await?;
        establish(settings, addresses, Some(active)).await
    };
    timeout(CONNECT_TIMEOUT, connected).await.unwrap_or(Err(ConnectError::Timeout))
}

/// Tries one address after the other; `active` is the replica that a stand-by link must not have.
async fn establish(
    settings: &Settings,
    addresses: Vec<SocketAddr>,
    active: Option<[u8; 16]>,
) -> Result<Connection, ConnectError> {
    let missing = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let mut failure = unreachable(settings, missing);
    let mut addresses = addresses.into_iter().peekable();
    while let Some(address) = addresses.next() {
        let attempt = establish_at(settings, address, active);
        let result = match addresses.peek() {
            Some(_) => timeout(ADDRESS_TIMEOUT, attempt).await.unwrap_or(Err(ConnectError::Timeout)),
            None => attempt.await,
        };
        match result {
            Err(error) if error.is_of_address() => {
                if matches!(failure, ConnectError::Io(..)) {
                    failure = error;
                }
            }
            result => return result,
        }
    }
    Err(failure)
}

async fn establish_at(
    settings: &Settings,
    address: SocketAddr,
    active: Option<[u8; 16]>,
) -> Result<Connection, ConnectError> {
    let endpoint = &settings.endpoint;
    let (stream, address) = reach(settings, address).await?;
    let (stream, exporter) = if endpoint.transport == Transport::Ws {
        (Box::new(stream) as Box<dyn Stream>, None)
    } else {
        let (stream, exporter) = secure(settings, stream).await?;
        (stream, Some(exporter))
    };
    let (reader, writer) = match endpoint.transport {
        Transport::Tcp => stream::direct(stream),
        Transport::Ws | Transport::Wss => {
            let nonce = crate::random::bytes().map_err(StreamError::from)?;
            stream::open_websocket(stream, &endpoint.authority(), nonce).await?
        }
    };
    let connection = register(settings, reader, writer, exporter, active).await?;
    Ok(Connection { address, ..connection })
}

/// Host and port that a client connects to: the relay, or the proxy on the way.
fn target(settings: &Settings) -> (&str, u16) {
    match &settings.proxy {
        Some(proxy) => (proxy.host.as_str(), proxy.port),
        None => (settings.endpoint.host.as_str(), settings.endpoint.port),
    }
}

fn unreachable(settings: &Settings, error: io::Error) -> ConnectError {
    let (host, port) = target(settings);
    ConnectError::Io(format!("{host}:{port}"), error)
}

/// The addresses of that, `last` after all others.
async fn addresses(settings: &Settings, last: Option<IpAddr>) -> Result<Vec<SocketAddr>, ConnectError> {
    let found = lookup_host(target(settings)).await.map_err(|error| unreachable(settings, error))?;
    let mut addresses: Vec<SocketAddr> = found.flat_map(|address| settings.reached_at(address)).collect();
    addresses.sort_by_key(|address| Some(address.ip().to_canonical()) == last);
    Ok(addresses)
}

/// A connection to the relay or to the proxy on the way, and the address of the relay.
async fn reach(
    settings: &Settings,
    address: SocketAddr,
) -> Result<(TcpStream, Option<IpAddr>), ConnectError> {
    let configure = |socket: SockRef<'_>| {
        socket.set_tcp_notsent_lowat(NOT_SENT)?;
        socket.set_tcp_user_timeout(Some(USER_TIMEOUT))
    };
    let dialled = fairlead_transport::dial([address], settings.mark, configure).await;
    let mut stream = dialled.map_err(|error| unreachable(settings, error))?;
    let Some(proxy) = &settings.proxy else {
        return Ok((stream, Some(address.ip().to_canonical())));
    };
    let Endpoint { host, port, .. } = &settings.endpoint;
    let target = format!("{}:{port}", settings.endpoint.bracketed_host());
    proxy.tunnel(&mut stream, &target).await?;
    // The proxy may know names that this host does not.
    let address = lookup_host((host.as_str(), *port)).await.ok().and_then(|mut found| found.next());
    let address = address.and_then(|address| settings.reached_at(address).into_iter().next());
    Ok((stream, address.map(|address| address.ip())))
}

/// TLS 1.3, and the exporter that binds the registration to it.
async fn secure(settings: &Settings, stream: TcpStream) -> Result<(Box<dyn Stream>, [u8; 32]), ConnectError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(Arc::clone(&settings.roots))
        .with_no_client_auth();
    config.alpn_protocols = match settings.endpoint.transport {
        Transport::Tcp => vec![ALPN.to_vec()],
        Transport::Ws | Transport::Wss => vec![b"http/1.1".to_vec()],
    };
    let host = settings.server_name.as_ref().unwrap_or(&settings.endpoint.host).clone();
    let name = ServerName::try_from(host.clone()).map_err(|error| ConnectError::Name(host, error))?;
    let stream =
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(ConnectError::Tls)?;
    let exporter = stream.get_ref().1.export_keying_material([0; 32], EXPORTER_LABEL, None)?;
    Ok((Box::new(stream), exporter))
}

async fn register(
    settings: &Settings,
    mut reader: FrameReader<Box<dyn Stream>>,
    mut writer: FrameWriter<Box<dyn Stream>>,
    exporter: Option<[u8; 32]>,
    active: Option<[u8; 16]>,
) -> Result<Connection, ConnectError> {
    let first = reader.next(MAX_HANDSHAKE_BODY, |parsed| match parsed.frame {
        Frame::Hello(hello) => Some((hello, parsed.body.to_vec())),
        _ => None,
    });
    let (hello, body) = first.await?.ok_or(InvalidFrame::Magic)?;
    let version = hello.max_version.min(VERSION);
    if version < hello.min_version.max(MIN_VERSION) {
        return Err(ConnectError::Version { min: hello.min_version, max: hello.max_version });
    }
    if active.is_some_and(|active| active == hello.replica || !hello.standby_links) {
        return Err(ConnectError::SameReplica);
    }
    // Where a proxy terminates TLS, the relay cannot know the exporter.
    let exporter = exporter.filter(|_| hello.channel_binding);
    writer
        .write(&registration(settings, version, &hello, &body, exporter, active.is_some())?)
        .await
        .map_err(StreamError::from)?;
    let answer = reader.next(MAX_HANDSHAKE_BODY, |parsed| match parsed.frame {
        Frame::Error { reason, .. } => Err(reason),
        Frame::Registered(registered) => Ok(registered),
        _ => Err(ErrorReason::UnexpectedFrame),
    });
    let registered = answer.await?.map_err(|reason| ConnectError::Refused { reason })?;
    Ok(Connection {
        hello,
        address: None,
        idle_timeout: Duration::from_secs(registered.idle_timeout.into()),
        sender: Sender(writer),
        receiver: Receiver(reader),
    })
}

fn registration(
    settings: &Settings,
    version: u8,
    hello: &Hello,
    hello_body: &[u8],
    exporter: Option<[u8; 32]>,
    is_standby: bool,
) -> Result<Vec<u8>, ConnectError> {
    let mut register = Register {
        proof: [0; 32],
        version,
        instance: settings.instance,
        key: settings.private_key.public_key().0,
        name: &settings.endpoint.host,
        token: &settings.token,
        is_standby,
    };
    let mut bytes = Vec::new();
    Frame::Register(register).encode(&mut bytes)?;
    let body = bytes.get(fairlead_wire::relay::HEADER_LENGTH..).unwrap_or_default();
    let transcript =
        Transcript { challenge: hello.challenge, hello: hello_body, register: signed(body), exporter };
    register.proof = prove(&settings.private_key, hello.relay_key, &transcript)?;
    let mut bytes = Vec::new();
    Frame::Register(register).encode(&mut bytes)?;
    Ok(bytes)
}

impl Connection {
    /// Identifies the running relay: connections to the same one have no advantage over one.
    pub fn replica(&self) -> [u8; 16] {
        self.hello.replica
    }

    /// Address of the relay, if that is known. It may have other ports than the one of this connection.
    pub fn address(&self) -> Option<IpAddr> {
        self.address
    }

    /// Time after which the relay closes a silent connection.
    pub fn idle_timeout(&self) -> Duration {
        self.idle_timeout
    }

    /// Both directions.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }
}

impl Sender {
    /// Sends encoded frames. A call that is dropped before it is done leaves the connection unusable.
    ///
    /// # Errors
    /// The connection has failed.
    pub async fn send(&mut self, frames: &[u8]) -> io::Result<()> {
        self.0.write(frames).await
    }

    /// Ends the connection.
    ///
    /// # Errors
    /// The connection has failed.
    pub async fn close(&mut self) -> io::Result<()> {
        self.0.close().await
    }
}

impl Receiver {
    /// Waits for the next frame and gives it to `handle`. Nothing is lost if it is dropped while it waits.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn receive<T>(&mut self, handle: impl FnOnce(&Frame<'_>) -> T) -> Result<T, StreamError> {
        self.0.next(MAX_BODY, |parsed| handle(&parsed.frame)).await
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("hello", &self.hello).finish_non_exhaustive()
    }
}

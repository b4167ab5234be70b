//! From an accepted connection to a link: TLS, WebSocket, hello and registration.

use std::sync::Arc;
use std::time::Instant;

use fairlead_keys::PublicKey;
use fairlead_transport::Stream;
use fairlead_wire::relay::{
    ALPN, ErrorReason, Frame, Hello, MAX_HANDSHAKE_BODY, MIN_VERSION, Parsed, Registered, VERSION, signed,
};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::server::TlsStream;

use super::state::Shared;
use super::statistics::Rejection;
use crate::core::{Admission, LinkId};
use crate::proof::Transcript;
use crate::stream::{self, FrameReader, FrameWriter, StreamError};

/// The label of the TLS exporter (RFC 9266).
pub(crate) const EXPORTER_LABEL: &[u8] = b"EXPORTER-Channel-Binding";

/// A registered connection.
pub(super) struct Established {
    pub(super) id: LinkId,
    pub(super) waker: Arc<Notify>,
    pub(super) reader: FrameReader<Box<dyn Stream>>,
    pub(super) writer: FrameWriter<Box<dyn Stream>>,
}

/// Reason and error of a connection that did not become a link.
pub(super) struct Rejected {
    pub(super) reason: Rejection,
    pub(super) error: String,
}

impl From<StreamError> for Rejected {
    fn from(error: StreamError) -> Self {
        Self { reason: Rejection::Protocol, error: error.to_string() }
    }
}

impl From<std::io::Error> for Rejected {
    fn from(error: std::io::Error) -> Self {
        StreamError::from(error).into()
    }
}

pub(super) async fn establish(shared: &Shared, stream: TcpStream) -> Result<Established, Rejected> {
    let tls_failure = |error: std::io::Error| Rejected { reason: Rejection::Tls, error: error.to_string() };
    let (reader, writer, exporter) = match &shared.tls {
        None => {
            let (reader, writer) = stream::accept_websocket(Box::new(stream) as Box<dyn Stream>).await?;
            (reader, writer, None)
        }
        Some(acceptor) => {
            let stream = acceptor.accept(stream).await.map_err(tls_failure)?;
            let exporter = exporter(&stream).map_err(|error| tls_failure(std::io::Error::other(error)))?;
            let is_direct = stream.get_ref().1.alpn_protocol() == Some(ALPN);
            let stream = Box::new(stream) as Box<dyn Stream>;
            let (reader, writer) =
                if is_direct { stream::direct(stream) } else { stream::accept_websocket(stream).await? };
            (reader, writer, Some(exporter))
        }
    };
    register(shared, reader, writer, exporter).await
}

fn exporter(stream: &TlsStream<TcpStream>) -> Result<[u8; 32], rustls::Error> {
    stream.get_ref().1.export_keying_material([0; 32], EXPORTER_LABEL, None)
}

async fn register(
    shared: &Shared,
    mut reader: FrameReader<Box<dyn Stream>>,
    mut writer: FrameWriter<Box<dyn Stream>>,
    exporter: Option<[u8; 32]>,
) -> Result<Established, Rejected> {
    let hello = Hello {
        min_version: MIN_VERSION,
        max_version: VERSION,
        channel_binding: exporter.is_some(),
        standby_links: true,
        replica: shared.replica,
        relay_key: shared.key.public(),
        challenge: crate::random::bytes()?,
    };
    let greeting = encoded(&Frame::Hello(hello));
    writer.write(&greeting).await?;
    let check = |parsed: &Parsed<'_>| shared.check(&hello, &greeting, parsed, exporter);
    let admitted = reader.next(MAX_HANDSHAKE_BODY, check).await?;
    let waker = Arc::new(Notify::new());
    let id = match admitted.and_then(|(admission, is_standby)| shared.add(admission, is_standby, &waker)) {
        Ok(id) => id,
        Err(reason) => {
            let message = reason.to_string();
            writer.write(&encoded(&Frame::Error { reason, message: &message })).await?;
            writer.close().await?;
            return Err(Rejected { reason: rejection(reason), error: message });
        }
    };
    Ok(Established { id, waker, reader, writer })
}

impl Shared {
    /// Whether the first frame of a client is a registration of one that may use this relay, and whether its link stands by.
    fn check(
        &self,
        hello: &Hello,
        greeting: &[u8],
        parsed: &Parsed<'_>,
        exporter: Option<[u8; 32]>,
    ) -> Result<(Admission, bool), ErrorReason> {
        let Frame::Register(register) = parsed.frame else { return Err(ErrorReason::UnexpectedFrame) };
        if !(MIN_VERSION..=VERSION).contains(&register.version) {
            return Err(ErrorReason::UnsupportedVersion);
        }
        // With the exporter, a registration is good for nothing but this connection.
        let names = &self.names;
        if !names.is_empty() && !names.iter().any(|name| name.eq_ignore_ascii_case(register.name)) {
            return Err(ErrorReason::WrongName);
        }
        let hello_body = greeting.get(fairlead_wire::relay::HEADER_LENGTH..).unwrap_or_default();
        let transcript = Transcript {
            challenge: hello.challenge,
            hello: hello_body,
            register: signed(parsed.body),
            exporter,
        };
        if !self.key.verify(register.key, &transcript, &register.proof) {
            return Err(ErrorReason::WrongProof);
        }
        let admission = self.access.admit(PublicKey(register.key), register.instance, register.token);
        Ok((admission.ok_or(ErrorReason::NotAllowed)?, register.is_standby))
    }

    /// Makes a client's connection a link, whose first frame is the answer to its registration.
    fn add(
        &self,
        admission: Admission,
        is_standby: bool,
        waker: &Arc<Notify>,
    ) -> Result<LinkId, ErrorReason> {
        let idle_timeout = u16::try_from(self.idle.as_secs()).unwrap_or(u16::MAX);
        let mut links = self.links();
        let now = Instant::now();
        let answer = Registered { idle_timeout };
        let id = match is_standby {
            true => links.relay.register_standby(now, admission, &answer),
            false => links.relay.register(now, admission, &answer),
        }?;
        if let Some(stun) = &self.stun {
            let range = self.relay_ports.as_ref().map(|ports| ports.range());
            let range = range.map_or((0, 0), |range| (*range.start(), *range.end()));
            links.relay.offer_stun(id, stun.add_user(range));
        }
        links.wakers.insert(id, Arc::clone(waker));
        links.wake();
        Ok(id)
    }
}

fn rejection(reason: ErrorReason) -> Rejection {
    match reason {
        ErrorReason::Full => Rejection::Full,
        ErrorReason::NotAllowed => Rejection::NotAllowed,
        ErrorReason::WrongName => Rejection::WrongName,
        ErrorReason::WrongProof => Rejection::WrongProof,
        _ => Rejection::Protocol,
    }
}

/// Frames whose parts have a fixed or a limited length.
fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Nothing in them can be too long.
    let _ = frame.encode(&mut bytes);
    bytes
}

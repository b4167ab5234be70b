//! Frames over a connection: directly, or in the messages of a WebSocket.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use fairlead_wire::relay::{InvalidFrame, Parsed, parse};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::io::{ReadHalf, WriteHalf};

use crate::websocket::{self, Decoder, HandshakeError, Refusal, Role, WebSocketError};

/// Sizes of the buffer for one read: small for the many connections that rest, large for those that are busy.
const MIN_READ: usize = 1 << 10;
const MAX_READ: usize = 32 << 10;

/// Reason why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The other end closed it.
    #[error("the connection was closed")]
    Closed,
    /// Bytes that are not a frame.
    #[error(transparent)]
    Frame(#[from] InvalidFrame),
    /// The response does not open a WebSocket.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The request does not open a WebSocket.
    #[error("the request was refused with HTTP status {0}")]
    Refused(#[from] Refusal),
    /// The other end does not follow the WebSocket protocol.
    #[error(transparent)]
    WebSocket(#[from] WebSocketError),
}

/// A ping of the other end that is to be answered, between the reading and the writing half.
type PendingPong = Arc<Mutex<Option<Vec<u8>>>>;

/// The reading half.
#[derive(Debug)]
pub(crate) struct FrameReader<S> {
    io: ReadHalf<S>,
    websocket: Option<Decoder>,
    pong: PendingPong,
    /// Buffer for reads; its length is the size of the next read.
    chunk: Vec<u8>,
    /// Frames, the first of which may be incomplete.
    buffer: Vec<u8>,
    /// The WebSocket has been closed; what came before may still be in the buffer.
    has_ended: bool,
}

/// The writing half.
#[derive(Debug)]
pub(crate) struct FrameWriter<S> {
    io: WriteHalf<S>,
    websocket: Option<Role>,
    pong: PendingPong,
}

/// Frames directly over a connection.
pub(crate) fn direct<S: AsyncRead + AsyncWrite>(stream: S) -> (FrameReader<S>, FrameWriter<S>) {
    let (read, write) = tokio::io::split(stream);
    let pong = PendingPong::default();
    let reader = FrameReader {
        io: read,
        websocket: None,
        pong: Arc::clone(&pong),
        chunk: vec![0; MIN_READ],
        buffer: Vec::new(),
        has_ended: false,
    };
    (reader, FrameWriter { io: write, websocket: None, pong })
}

/// Accepts a WebSocket. A request that is refused is answered.
pub(crate) async fn accept_websocket<S: AsyncRead + AsyncWrite>(
    stream: S,
) -> Result<(FrameReader<S>, FrameWriter<S>), StreamError> {
    let (mut reader, mut writer) = direct(stream);
    let upgrade = loop {
        reader.fill().await?;
        match websocket::read_request(&reader.buffer) {
            Ok(Some(upgrade)) => break upgrade,
            Ok(None) => {}
            Err(refusal) => {
                writer.io.write_all(&refusal.response()).await?;
                writer.io.shutdown().await?;
                return Err(refusal.into());
            }
        }
    };
    reader.start_websocket(Role::Server, upgrade.length)?;
    writer.websocket = Some(Role::Server);
    writer.io.write_all(&upgrade.response).await?;
    Ok((reader, writer))
}

/// Opens a WebSocket at `host`.
pub(crate) async fn open_websocket<S: AsyncRead + AsyncWrite>(
    stream: S,
    host: &str,
    nonce: [u8; 16],
) -> Result<(FrameReader<S>, FrameWriter<S>), StreamError> {
    let (mut reader, mut writer) = direct(stream);
    writer.io.write_all(&websocket::request(host, nonce)).await?;
    writer.io.flush().await?;
    let length = loop {
        reader.fill().await?;
        if let Some(length) = websocket::read_response(&reader.buffer, nonce)? {
            break length;
        }
    };
    reader.start_websocket(Role::Client, length)?;
    writer.websocket = Some(Role::Client);
    Ok((reader, writer))
}

impl<S: AsyncRead> FrameReader<S> {
    /// Waits for bytes and keeps them. Without an effect if it is dropped while it waits.
    pub(crate) async fn fill(&mut self) -> Result<(), StreamError> {
        if self.has_ended {
            return Err(StreamError::Closed);
        }
        let length = self.io.read(&mut self.chunk).await?;
        let bytes = self.chunk.get(..length).unwrap_or_default();
        if bytes.is_empty() {
            return Err(StreamError::Closed);
        }
        let size = self.chunk.len();
        match &mut self.websocket {
            None => self.buffer.extend_from_slice(bytes),
            Some(decoder) => {
                let signals = decoder.decode(bytes, &mut self.buffer)?;
                if let Some(ping) = signals.ping {
                    *self.pong.lock().unwrap_or_else(PoisonError::into_inner) = Some(ping);
                }
                self.has_ended = signals.closed;
            }
        }
        if length == size && size < MAX_READ {
            self.chunk = vec![0; size.saturating_mul(4).min(MAX_READ)];
        } else if length < size / 8 && size > MIN_READ {
            self.chunk = vec![0; (size / 4).max(MIN_READ)];
        }
        Ok(())
    }

    /// Gives each complete frame to `handle`.
    pub(crate) fn drain(
        &mut self,
        limit: usize,
        mut handle: impl FnMut(Parsed<'_>),
    ) -> Result<(), StreamError> {
        self.drain_with(|bytes| {
            let Some(parsed) = parse(bytes, limit)? else { return Ok(None) };
            let length = parsed.length;
            handle(parsed);
            Ok(Some(length))
        })
    }

    /// Lets `take` have the buffer until it says that there is no complete frame; else it answers the length of the first one.
    pub(crate) fn drain_with(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<Option<usize>, StreamError>,
    ) -> Result<(), StreamError> {
        let mut rest = self.buffer.as_slice();
        while let Some(length) = take(rest)? {
            rest = rest.get(length..).unwrap_or_default();
        }
        let taken = self.buffer.len().saturating_sub(rest.len());
        self.consume(taken);
        Ok(())
    }

    /// Lets `take` have the buffer once; if it has a complete frame, it answers with the length of that.
    pub(crate) fn take_first<T>(
        &mut self,
        take: impl FnOnce(&[u8]) -> Result<Option<(T, usize)>, StreamError>,
    ) -> Result<Option<T>, StreamError> {
        let Some((result, length)) = take(&self.buffer)? else { return Ok(None) };
        self.consume(length);
        Ok(Some(result))
    }

    /// Waits for one frame and gives it to `handle`.
    pub(crate) async fn next<T>(
        &mut self,
        limit: usize,
        handle: impl FnOnce(&Parsed<'_>) -> T,
    ) -> Result<T, StreamError> {
        loop {
            if let Some(parsed) = parse(&self.buffer, limit)? {
                let result = handle(&parsed);
                let length = parsed.length;
                self.consume(length);
                return Ok(result);
            }
            self.fill().await?;
        }
    }

    /// Whether a ping of the WebSocket waits for its answer.
    pub(crate) fn has_ping(&self) -> bool {
        self.websocket.is_some() && self.pong.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn consume(&mut self, length: usize) {
        if length >= self.buffer.len() {
            self.buffer.clear();
            // A connection that rests holds no memory for what it once received.
            self.buffer.shrink_to(MIN_READ);
        } else {
            self.buffer.drain(..length);
        }
    }

    /// From here on the bytes are those of a WebSocket; some may have come with the head of `length` bytes.
    fn start_websocket(&mut self, role: Role, length: usize) -> Result<(), StreamError> {
        let early = self.buffer.split_off(length.min(self.buffer.len()));
        self.buffer.clear();
        let mut decoder = Decoder::new(role);
        self.has_ended = decoder.decode(&early, &mut self.buffer)?.closed;
        self.websocket = Some(decoder);
        Ok(())
    }
}

impl<S: AsyncWrite> FrameWriter<S> {
    /// Writes encoded frames, and the answer to a ping of the WebSocket. Not to be dropped before it is done.
    pub(crate) async fn write(&mut self, frames: &[u8]) -> io::Result<()> {
        match self.websocket {
            None => self.io.write_all(frames).await?,
            Some(role) => {
                let ping = self.pong.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(ping) = ping {
                    self.io.write_all(&websocket::pong_frame(&ping, mask(role)?)).await?;
                }
                if !frames.is_empty() {
                    self.io.write_all(&websocket::encode(frames, mask(role)?)).await?;
                }
            }
        }
        self.io.flush().await
    }

    /// Ends the writing direction.
    pub(crate) async fn close(&mut self) -> io::Result<()> {
        if let Some(role) = self.websocket {
            self.io.write_all(&websocket::close_frame(mask(role)?)).await?;
        }
        self.io.shutdown().await
    }
}

fn mask(role: Role) -> io::Result<Option<[u8; 4]>> {
    match role {
        Role::Client => crate::random::bytes().map(Some),
        Role::Server => Ok(None),
    }
}

//! Messages behind their lengths.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

/// Longest message; a longer one ends the connection. That of a member with 256 flows has 25 KiB.
pub const MAX_FRAME: usize = 64 << 10;
/// Longest time in which the other end takes no bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest silence of the other end: it sends heartbeats, or answers them.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// A message with its length in front.
pub fn encode(message: &impl Message) -> Arc<[u8]> {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(length.saturating_add(4));
    bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend_from_slice(&message.encode_to_vec());
    bytes.into()
}

/// Writes frames.
pub(super) async fn write(to: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> io::Result<()> {
    let written = async {
        to.write_all(frame).await?;
        to.flush().await
    };
    timeout(WRITE_TIMEOUT, written).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Reads the next message, and its length. Not to be cancelled.
///
/// # Errors
/// The stream ends, fails or is silent, or what comes is too long or no such message.
pub async fn read<M: Message + Default>(
    from: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
) -> io::Result<M> {
    let read = async {
        let mut length = [0; 4];
        from.read_exact(&mut length).await?;
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if length > MAX_FRAME {
            let reason = format!("a message of {length} bytes, more than {MAX_FRAME}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        buffer.resize(length, 0);
        from.read_exact(buffer).await?;
        M::decode(buffer.as_slice()).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    };
    timeout(READ_TIMEOUT, read).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

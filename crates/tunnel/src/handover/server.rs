//! The old process's side.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path as FilePath, PathBuf};

use socket2::{Socket, Type};

use super::frame::{self, Frame, Offer};
use super::link::{Link, MAX_MESSAGE_LENGTH, Received};
use crate::udp::Path;
use crate::unix;

/// Listens for the new process, then works beside it.
pub(crate) struct HandoverServer {
    path: PathBuf,
    listener: Socket,
    client: Option<Client>,
    buffer: Vec<u8>,
}

/// The new process.
struct Client {
    link: Link,
    reads_network: bool,
    reads_tunnel: bool,
}

/// Request of the new process.
pub(crate) enum Request<'a> {
    /// The new process has connected and waits for the offer.
    Connected,
    /// Handle these datagrams as if they had just arrived; all but the last are so many bytes long.
    Datagrams(Path, usize, &'a [u8]),
    /// The new process has taken over everything.
    Finished,
}

impl HandoverServer {
    /// Listens at `path`.
    pub(crate) fn listen(path: &FilePath) -> io::Result<Self> {
        let listener = unix::listen(path, Type::SEQPACKET)?;
        Ok(Self { path: path.to_owned(), listener, client: None, buffer: vec![0; MAX_MESSAGE_LENGTH] })
    }

    /// Readable when [`Self::next_request`] has something.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.client.as_ref().map_or_else(|| self.listener.as_fd(), |client| client.link.as_fd())
    }

    /// Whether this process still reads the sockets.
    pub(crate) fn reads_network(&self) -> bool {
        self.client.as_ref().is_none_or(|client| !client.reads_network)
    }

    /// Whether this process still reads the TUN.
    pub(crate) fn reads_tunnel(&self) -> bool {
        self.client.as_ref().is_none_or(|client| !client.reads_tunnel)
    }

    /// The next request; `None` when there is none now.
    pub(crate) fn next_request(&mut self) -> Option<Request<'_>> {
        let Some(client) = &mut self.client else {
            let link = Link::accept(&self.listener).ok()?;
            self.client = Some(Client { link, reads_network: false, reads_tunnel: false });
            return Some(Request::Connected);
        };
        match client.link.receive(&mut self.buffer) {
            Ok(Received::Message(length, _)) => {
                match frame::read(self.buffer.get(..length).unwrap_or_default()) {
                    Some(Frame::TakeNetwork) => client.reads_network = true,
                    Some(Frame::TakeTunnel) => client.reads_tunnel = true,
                    Some(Frame::Datagram(path, datagram)) => {
                        return Some(Request::Datagrams(path, datagram.len(), datagram));
                    }
                    Some(Frame::Datagrams(path, length, datagrams)) => {
                        return Some(Request::Datagrams(path, length.into(), datagrams));
                    }
                    Some(Frame::Offer(_)) | None => {
                        tracing::warn!("ignoring an unknown hand-over message of the new process");
                    }
                }
                None
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Ok(Received::Closed) | Err(_) if client.reads_tunnel => Some(Request::Finished),
            Ok(Received::Closed) | Err(_) => {
                tracing::warn!("the new process ended before the hand-over finished: continuing alone");
                self.client = None;
                None
            }
        }
    }

    /// Sends the offer to the new process; disconnects it if that fails.
    pub(crate) fn send_offer(&mut self, offer: Offer, descriptors: &[BorrowedFd<'_>]) {
        let mut message = Vec::new();
        Frame::Offer(offer).write(&mut message);
        let sent = self.client.as_ref().map(|client| client.link.send(&message, descriptors));
        if let Some(Err(error)) = sent {
            tracing::warn!(%error, "cannot hand the device over to the new process");
            self.client = None;
        }
    }
}

impl Drop for HandoverServer {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

//! The old process's side.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path as FilePath, PathBuf};

use socket2::{Socket, Type};

use super::frame::{self, Frame, Welcome};
use super::link::{LONGEST, Link, Received};
use crate::udp::Path;
use crate::unix;

/// A device that waits for a successor, or works together with it.
pub(crate) struct Retirement {
    path: PathBuf,
    listener: Socket,
    successor: Option<Successor>,
    buffer: Vec<u8>,
}

struct Successor {
    link: Link,
    has_network: bool,
    has_tunnel: bool,
}

/// What the successor wants done.
pub(crate) enum Work<'a> {
    /// It has come and is to be greeted.
    Greet,
    /// Take this datagram as if it had just arrived.
    Datagram(Path, &'a [u8]),
    /// Nothing more now.
    Nothing,
    /// It has everything.
    End,
}

impl Retirement {
    /// Listens for a successor.
    pub(crate) fn start(path: &FilePath) -> io::Result<Self> {
        let listener = unix::listen(path, Type::SEQPACKET)?;
        Ok(Self { path: path.to_owned(), listener, successor: None, buffer: vec![0; LONGEST] })
    }

    /// Readable when there is something to do.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.successor.as_ref().map_or_else(|| self.listener.as_fd(), |successor| successor.link.as_fd())
    }

    /// Whether the sockets are still ours to read.
    pub(crate) fn reads_network(&self) -> bool {
        self.successor.as_ref().is_none_or(|successor| !successor.has_network)
    }

    /// Whether the TUN is still ours to read.
    pub(crate) fn reads_tunnel(&self) -> bool {
        self.successor.as_ref().is_none_or(|successor| !successor.has_tunnel)
    }

    /// The next thing to do.
    pub(crate) fn next(&mut self) -> Work<'_> {
        let Some(successor) = &mut self.successor else {
            let Ok(link) = Link::accept(&self.listener) else { return Work::Nothing };
            self.successor = Some(Successor { link, has_network: false, has_tunnel: false });
            return Work::Greet;
        };
        match successor.link.receive(&mut self.buffer) {
            Ok(Received::Message(length, _)) => {
                match frame::read(self.buffer.get(..length).unwrap_or_default()) {
                    Some(Frame::TakeNetwork) => successor.has_network = true,
                    Some(Frame::TakeTunnel) => successor.has_tunnel = true,
                    Some(Frame::Datagram(path, datagram)) => return Work::Datagram(path, datagram),
                    Some(Frame::Welcome(_)) | None => tracing::warn!("a successor that is not understood"),
                }
                Work::Nothing
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Work::Nothing,
            Ok(Received::Closed) | Err(_) if successor.has_tunnel => Work::End,
            Ok(Received::Closed) | Err(_) => {
                tracing::warn!("the successor of this device went away half-way: carrying on");
                self.successor = None;
                Work::Nothing
            }
        }
    }

    /// Tells a successor what there is; one that does not get it is let go.
    pub(crate) fn greet(&mut self, welcome: Welcome, descriptors: &[BorrowedFd<'_>]) {
        let frame = Frame::Welcome(welcome);
        let sent = self.successor.as_ref().map(|successor| successor.link.send(&frame, descriptors));
        if let Some(Err(error)) = sent {
            tracing::warn!(%error, "cannot hand the device to a successor");
            self.successor = None;
        }
    }
}

impl Drop for Retirement {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

//! The connection between the two processes: packets in order (`SOCK_SEQPACKET`, unix(7)), the first with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg, setsockopt, sockopt,
};
use socket2::{Domain, SockAddr, Socket, Type};

use super::frame::Frame;

/// Longest message: a welcome with some thousand peers, or the longest datagram.
pub(super) const LONGEST: usize = 1 << 20;
/// Descriptors of a welcome: the TUN and two sockets.
const MOST_DESCRIPTORS: usize = 3;
/// Room for a burst of datagrams.
const BUFFER: usize = 4 << 20;

/// One end.
pub(super) struct Link(Socket);

/// What came.
pub(super) enum Received {
    /// A message of so many bytes.
    Message(usize, Vec<OwnedFd>),
    /// The other end is closed.
    Closed,
}

impl Link {
    /// Connects to whoever listens at `path`; waits no longer than `patience` for messages until
    /// [`Self::stop_waiting`].
    pub(super) fn connect(path: &Path, patience: Duration) -> io::Result<Self> {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        socket.connect(&SockAddr::unix(path)?)?;
        socket.set_read_timeout(Some(patience))?;
        Self::new(socket)
    }

    /// The other end of a connection.
    pub(super) fn accept(listener: &Socket) -> io::Result<Self> {
        let (socket, _) = listener.accept()?;
        socket.set_nonblocking(true)?;
        Self::new(socket)
    }

    fn new(socket: Socket) -> io::Result<Self> {
        // Above the system-wide limit; without CAP_NET_ADMIN that limit has to do.
        if setsockopt(&socket, sockopt::SndBufForce, &BUFFER).is_err() {
            socket.set_send_buffer_size(BUFFER)?;
        }
        Ok(Self(socket))
    }

    /// From now on nothing waits.
    pub(super) fn stop_waiting(&self) -> io::Result<()> {
        self.0.set_nonblocking(true)
    }

    /// Sends a frame; `WouldBlock` when the other end does not keep up.
    pub(super) fn send(&self, frame: &Frame<'_>, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[] } else { &rights[..] };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        sendmsg::<UnixAddr>(self.0.as_raw_fd(), &[IoSlice::new(&bytes)], control, flags, None)?;
        Ok(())
    }

    /// The next message, into `buffer`; one that is longer is an error.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut control = nix::cmsg_space!([RawFd; MOST_DESCRIPTORS]);
        let mut buffers = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<UnixAddr>(self.0.as_raw_fd(), &mut buffers, Some(&mut control), flags)?;
        let mut descriptors = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = control {
                descriptors.extend(raw.into_iter().map(own));
            }
        }
        if message.bytes == 0 {
            return Ok(Received::Closed);
        }
        if message.flags.contains(MsgFlags::MSG_TRUNC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
        }
        Ok(Received::Message(message.bytes, descriptors))
    }
}

#[expect(unsafe_code, reason = "descriptors arrive as numbers")]
fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel made this descriptor for us in the call that returned it (unix(7), SCM_RIGHTS), and nobody else
    // has its number.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

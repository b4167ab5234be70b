//! The connection between the two processes: packets in order (`SOCK_SEQPACKET`, unix(7)), the first with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg, setsockopt, sockopt,
};
use socket2::{Domain, SockAddr, Socket, Type};

/// An offer with some thousand peers, or the longest datagram.
pub(super) const MAX_MESSAGE_LENGTH: usize = 1 << 20;
/// The descriptors of an offer: the TUN and two sockets, and those that are kept for peers. The kernel takes 253 (`SCM_MAX_FD`).
const MAX_DESCRIPTORS: usize = 3 + MAX_KEPT;
/// Sockets that are kept for peers, of which an offer has this many at most.
pub(crate) const MAX_KEPT: usize = 250;
/// Room for a burst of datagrams.
const BUFFER: usize = 4 << 20;

/// End of the connection in this process.
pub(super) struct Link(Socket);

/// Result of [`Link::receive`].
pub(super) enum Received {
    /// The length of a message, and its descriptors.
    Message(usize, Vec<OwnedFd>),
    /// The other end is closed.
    Closed,
}

impl Link {
    /// Connects to the process that listens at `path`; waits no longer than `timeout` for messages until
    /// [`Self::set_nonblocking`].
    pub(super) fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;
        socket.connect(&SockAddr::unix(path)?)?;
        socket.set_read_timeout(Some(timeout))?;
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

    /// From now on [`Self::receive`] does not wait.
    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        self.0.set_nonblocking(true)
    }

    /// Sends a message; `WouldBlock` when the connection is full.
    pub(super) fn send(&self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[] } else { &rights[..] };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        sendmsg::<UnixAddr>(self.0.as_raw_fd(), &[IoSlice::new(message)], control, flags, None)?;
        Ok(())
    }

    /// The next message, into `buffer`; one that is longer is an error.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut control = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
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
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
        }
        Ok(Received::Message(message.bytes, descriptors))
    }
}

#[expect(unsafe_code, reason = "descriptors arrive as numbers")]
fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel made this descriptor for us in the call that returned it (unix(7), SCM_RIGHTS), and no
    // other owner has its number.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

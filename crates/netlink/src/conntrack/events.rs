//! Notifications of connections (multicast groups of `nfnetlink_conntrack`).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt, socket,
    sockopt,
};

use super::flow::{Flow, behind_header};
use super::{DELETE, NEW};
use crate::nftables::attributes::{Parsed, explain};
use crate::socket::take_frame;
use crate::{Error, Result};

/// `NFNLGRP_CONNTRACK_NEW`, `NFNLGRP_CONNTRACK_UPDATE`, `NFNLGRP_CONNTRACK_DESTROY` (`linux/netfilter/nfnetlink.h`), as bits.
const GROUPS: u32 = GROUP_NEW | 1 << 1 | GROUP_DESTROYED;
const GROUP_NEW: u32 = 1;
const GROUP_DESTROYED: u32 = 1 << 2;
/// Bytes of notifications that may wait to be read. Each takes some 800 of them, as the kernel counts; more are reported as one
/// [`ConnectionEvent::Missed`].
const RECEIVE_BUFFER: usize = 16 << 20;
/// Largest notification; one message each.
const DATAGRAM: usize = 8 << 10;

/// Something that happened to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEvent {
    /// A connection has ended, or the kernel forgot it.
    Destroyed(Flow),
    /// Notifications were lost because they came faster than they were read, or could not be read: dump everything again.
    Missed,
    /// The first packet of a connection has passed.
    New(Flow),
    /// The status or state of a connection has changed. What has not changed may be missing in the flow.
    Updated(Flow),
}

/// A nonblocking socket that receives what happens to connections in the network namespace of the thread that opened it. The kernel only
/// reports connections that began while there was a subscription, unless `net.netfilter.nf_conntrack_events` is 1.
#[derive(Debug)]
pub struct ConnectionEvents {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl ConnectionEvents {
    /// Subscribes in the calling thread's network namespace.
    ///
    /// # Errors
    /// Descriptors ran out, or the caller lacks CAP_NET_ADMIN.
    pub fn open() -> Result<Self> {
        Self::of(GROUPS)
    }

    /// As [`Self::open`], but only to connections that end.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_destroyed() -> Result<Self> {
        Self::of(GROUP_DESTROYED)
    }

    /// As [`Self::open`], but only to connections that begin or end: the kernel makes no notification of others for this socket.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_new_destroyed() -> Result<Self> {
        Self::of(GROUP_NEW | GROUP_DESTROYED)
    }

    fn of(groups: u32) -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkNetFilter)
            .map_err(|errno| Error::socket("socket", errno))?;
        // Without the privilege the default size stays, and `Missed` is reported earlier.
        let _ = setsockopt(&fd, sockopt::RcvBufForce, &RECEIVE_BUFFER);
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))
            .map_err(|errno| Error::socket("subscribe to connections", errno))?;
        Ok(Self { fd, buffer: vec![0; DATAGRAM] })
    }

    /// Appends what has happened since the last call, in order, up to `most` notifications; never blocks. Returns whether nothing is left.
    ///
    /// # Errors
    /// The socket failed.
    pub fn read(&mut self, most: usize, events: &mut Vec<ConnectionEvent>) -> Result<bool> {
        for _ in 0..most {
            match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC) {
                Ok(length) => match self.buffer.get(..length).map(|datagram| decode(datagram, events)) {
                    Some(Ok(())) => {}
                    // What cannot be read is lost, too.
                    Some(Err(_)) | None => missed(events),
                },
                Err(Errno::EAGAIN) => return Ok(true),
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => missed(events),
                Err(errno) => return Err(Error::socket("receive", errno)),
            }
        }
        Ok(false)
    }
}

impl AsFd for ConnectionEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// For `tokio::io::unix::AsyncFd`.
impl AsRawFd for ConnectionEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn missed(events: &mut Vec<ConnectionEvent>) {
    if events.last() != Some(&ConnectionEvent::Missed) {
        events.push(ConnectionEvent::Missed);
    }
}

/// Number of events in a datagram.
pub(crate) fn count_events(datagram: &[u8]) -> Result<usize> {
    let mut events = Vec::new();
    decode(datagram, &mut events)?;
    Ok(events.len())
}

fn decode(mut datagram: &[u8], events: &mut Vec<ConnectionEvent>) -> Result<()> {
    while let Some(frame) = take_frame(&mut datagram) {
        let event = explain("the subscription to connections", event(&frame))?;
        events.extend(event);
    }
    Ok(())
}

/// `NLM_F_CREATE` and `NLM_F_EXCL` tell new connections from others.
fn event(frame: &crate::socket::Frame<'_>) -> Parsed<Option<ConnectionEvent>> {
    let kind = |kind: i32| (libc::NFNL_SUBSYS_CTNETLINK << 8 | kind) as u16;
    let is_new = frame.flags & libc::NLM_F_CREATE as u16 != 0;
    let flow = || Flow::decode(behind_header(frame.payload));
    Ok(match frame.kind {
        it if it == kind(NEW) && is_new => Some(ConnectionEvent::New(flow()?)),
        it if it == kind(NEW) => Some(ConnectionEvent::Updated(flow()?)),
        it if it == kind(DELETE) => Some(ConnectionEvent::Destroyed(flow()?)),
        _ => None,
    })
}

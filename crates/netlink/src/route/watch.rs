//! Notifications of changes (multicast groups of `rtnetlink(7)`).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use netlink_packet_core::DecodeError;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt, socket,
    sockopt,
};

use super::decode;
use super::types::{Address, Link, Netconf, Route, Rule};
use crate::nftables::watch::changed_table;
use crate::socket::take_frame;
use crate::{Error, Result};

/// The old group constants (`RTMGRP_…`) stop before these.
const NEWER_GROUPS: u32 = 1 << (libc::RTNLGRP_IPV6_RULE - 1)
    | 1 << (libc::RTNLGRP_IPV4_NETCONF - 1)
    | 1 << (libc::RTNLGRP_IPV6_NETCONF - 1);
const GROUPS: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV6_ROUTE
    | libc::RTMGRP_IPV4_RULE)
    .cast_unsigned()
    | NEWER_GROUPS;
/// Bytes of notifications that may wait to be read; more are reported as one [`Change::Missed`].
const RECEIVE_BUFFER: usize = 1 << 20;
/// Largest notification; one message each.
const DATAGRAM: usize = 64 * 1024;

/// Something that changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// An address came, changed or went.
    Address {
        /// The address.
        address: Address,
        /// Whether it was deleted.
        gone: bool,
    },
    /// A link came, changed or went.
    Link {
        /// The link.
        link: Link,
        /// Whether it was deleted.
        gone: bool,
    },
    /// Notifications were lost because they came faster than they were read: dump everything again.
    Missed,
    /// A setting of an interface changed, or of all.
    Netconf(Netconf),
    /// A route was added, changed or deleted.
    Route {
        /// The route.
        route: Route,
        /// Whether it was deleted.
        gone: bool,
    },
    /// A rule was added or deleted.
    Rule {
        /// The rule.
        rule: Rule,
        /// Whether it was deleted.
        gone: bool,
    },
    /// A table of nftables of family `inet` was made, changed or deleted, by name. Elements that were added to its sets do not count.
    Table(String),
}

/// A nonblocking socket that receives notifications of changes in the network namespace of the thread that opened it. Wait until its descriptor is readable (`AsFd`), then call [`changes`](Self::changes).
#[derive(Debug)]
pub struct Subscription {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl Subscription {
    /// Subscribes in the calling thread's network namespace.
    ///
    /// # Errors
    /// Descriptors ran out.
    pub fn open() -> Result<Self> {
        Self::subscribe(SockProtocol::NetlinkRoute, GROUPS)
    }

    /// Subscribes to changes of nftables alone, in the calling thread's network namespace.
    ///
    /// # Errors
    /// Descriptors ran out, or the kernel has no netfilter.
    pub fn open_nftables() -> Result<Self> {
        Self::subscribe(SockProtocol::NetlinkNetFilter, NFTABLES)
    }

    fn subscribe(protocol: SockProtocol, groups: u32) -> Result<Self> {
        let fd = subscribed(protocol, groups)?;
        // Without the privilege the default size stays, and `Missed` is reported earlier.
        let _ = setsockopt(&fd, sockopt::RcvBufForce, &RECEIVE_BUFFER);
        Ok(Self { fd, buffer: vec![0; DATAGRAM] })
    }

    /// Everything that changed since the last call; never blocks.
    ///
    /// # Errors
    /// The socket failed, or a message cannot be read.
    pub fn changes(&mut self) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        loop {
            match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC) {
                Ok(length) => match self.buffer.get(..length) {
                    Some(datagram) => read_changes(datagram, &mut changes)?,
                    None => changes.push(Change::Missed),
                },
                Err(Errno::EAGAIN) => return Ok(changes),
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => changes.push(Change::Missed),
                Err(errno) => return Err(Error::socket("receive", errno)),
            }
        }
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// For `tokio::io::unix::AsyncFd`.
impl AsRawFd for Subscription {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Groups of the notifications that wake a [`ChangeSignal`]: links, routes, rules, filters, settings of interfaces.
const SIGNALLED: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV6_ROUTE
    | libc::RTMGRP_IPV4_RULE
    | libc::RTMGRP_TC)
    .cast_unsigned()
    | NEWER_GROUPS;

/// `NFNLGRP_NFTABLES` (`linux/netfilter/nfnetlink.h`) as a bit.
const NFTABLES: u32 = 1 << 6;

/// A nonblocking socket that only says that links, routes, rules, filters or settings of interfaces have changed in a network
/// namespace, or that nftables have, not what: it holds no buffer, so that there can be one for each of many namespaces.
#[derive(Debug)]
pub struct ChangeSignal(OwnedFd);

impl ChangeSignal {
    /// Subscribes in the calling thread's network namespace.
    ///
    /// # Errors
    /// Descriptors ran out.
    pub fn open() -> Result<Self> {
        Self::subscribe(SockProtocol::NetlinkRoute, SIGNALLED)
    }

    /// Subscribes to changes of nftables in the calling thread's network namespace.
    ///
    /// # Errors
    /// Descriptors ran out, or the kernel has no nftables.
    pub fn open_nftables() -> Result<Self> {
        Self::subscribe(SockProtocol::NetlinkNetFilter, NFTABLES)
    }

    fn subscribe(protocol: SockProtocol, groups: u32) -> Result<Self> {
        Ok(Self(subscribed(protocol, groups)?))
    }

    /// Forgets what has come so far, and says whether there was anything; lost notifications count. Never blocks.
    ///
    /// # Errors
    /// The socket failed.
    pub fn take(&mut self) -> Result<bool> {
        let mut any = false;
        let mut byte = [0; 1];
        loop {
            match recv(self.0.as_raw_fd(), &mut byte, MsgFlags::empty()) {
                Ok(_) | Err(Errno::ENOBUFS) => any = true,
                Err(Errno::EAGAIN) => return Ok(any),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(Error::socket("receive", errno)),
            }
        }
    }
}

/// For `tokio::io::unix::AsyncFd`.
impl AsRawFd for ChangeSignal {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A nonblocking socket in these groups.
fn subscribed(protocol: SockProtocol, groups: u32) -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)
        .map_err(|errno| Error::socket("socket", errno))?;
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups)).map_err(|errno| Error::socket("bind", errno))?;
    Ok(fd)
}

/// Number of changes in a datagram.
pub(crate) fn count_changes(datagram: &[u8]) -> Result<usize> {
    let mut changes = Vec::new();
    read_changes(datagram, &mut changes)?;
    Ok(changes.len())
}

fn read_changes(mut datagram: &[u8], changes: &mut Vec<Change>) -> Result<()> {
    while let Some(frame) = take_frame(&mut datagram) {
        let malformed =
            |reason| Error::Malformed { what: "the subscription to network changes".to_owned(), reason };
        let table =
            changed_table(frame.kind, frame.payload).map_err(|reason| malformed(reason.to_owned()))?;
        if let Some(name) = table {
            // A table that is deleted takes thousands of rules with it.
            if !matches!(changes.last(), Some(Change::Table(last)) if last == name) {
                changes.push(Change::Table(name.to_owned()));
            }
            continue;
        }
        changes.extend(read_change(frame.kind, frame.payload).map_err(|error| malformed(error.to_string()))?);
    }
    Ok(())
}

fn read_change(kind: u16, payload: &[u8]) -> std::result::Result<Option<Change>, DecodeError> {
    Ok(match kind {
        libc::RTM_NEWLINK | libc::RTM_DELLINK => {
            Some(Change::Link { link: decode::link(payload)?, gone: kind == libc::RTM_DELLINK })
        }
        libc::RTM_NEWADDR | libc::RTM_DELADDR => decode::address(payload)?
            .map(|address| Change::Address { address, gone: kind == libc::RTM_DELADDR }),
        libc::RTM_NEWNETCONF => decode::netconf(payload)?.map(Change::Netconf),
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE => {
            decode::route(payload)?.map(|route| Change::Route { route, gone: kind == libc::RTM_DELROUTE })
        }
        libc::RTM_NEWRULE | libc::RTM_DELRULE => {
            decode::rule(payload)?.map(|rule| Change::Rule { rule, gone: kind == libc::RTM_DELRULE })
        }
        _ => None,
    })
}

//! One netlink socket: framing, acknowledgements, dumps (`netlink(7)`, `linux/netlink.h`).

mod dump;

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, sendmsg, setsockopt,
    socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::{Error, Result};

/// `struct nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Room for one datagram of a dump; the kernel fills at most 32 KiB (`netlink_recvmsg`, `netlink_dump`). Every thread that
/// reads keeps as much for each of its sockets.
const RECEIVE: usize = 64 * 1024;
/// Room for the largest batch: 100,000 prefixes are 4 MB.
const SEND_BUFFER: usize = 64 << 20;
/// Messages that may be unacknowledged at once: their acknowledgements must fit the receive buffer.
const WINDOW: usize = 256;

/// Seconds to wait for a reply. The kernel replies while it processes the request, so only a lost reply, or a lock that
/// another process holds for very long, lets this pass; then an error is better than a thread that hangs forever.
const TIMEOUT: i64 = 60;

static CHANGES: AtomicU64 = AtomicU64::new(0);

/// Number of messages that change kernel state which this process has sent so far.
pub fn changes_sent() -> u64 {
    CHANGES.load(Ordering::Relaxed)
}

/// Part of the kernel that a socket talks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `NETLINK_ROUTE`
    Route,
    /// `NETLINK_NETFILTER`
    Netfilter,
    /// `NETLINK_GENERIC`
    Generic,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Message {
    /// `nlmsg_type`
    pub kind: u16,
    /// `nlmsg_flags` besides `NLM_F_REQUEST` and `NLM_F_ACK`, which the socket sets.
    pub flags: u16,
    /// Bytes behind the header.
    pub payload: Vec<u8>,
    /// The operation and its object, for errors: "add address 10.0.0.1/32 to veth1".
    pub what: String,
}

/// One answer.
#[derive(Debug, Clone)]
pub struct Reply {
    /// `nlmsg_type`
    pub kind: u16,
    /// Bytes behind the header.
    pub payload: Vec<u8>,
}

/// A blocking netlink socket in the namespace of the thread that opened it.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

pub(crate) struct Frame<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    sequence: u32,
    pub(crate) payload: &'a [u8],
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel lacks the family, or descriptors ran out.
    pub fn open(family: Family) -> Result<Self> {
        let protocol = match family {
            Family::Route => SockProtocol::NetlinkRoute,
            Family::Netfilter => SockProtocol::NetlinkNetFilter,
            Family::Generic => SockProtocol::NetlinkGeneric,
        };
        let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)
            .map_err(|errno| Error::socket("socket", errno))?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0)).map_err(|errno| Error::socket("bind", errno))?;
        // Without the privilege a smaller buffer has to do; only very large batches need this one.
        let _ = setsockopt(&fd, sockopt::SndBufForce, &SEND_BUFFER);
        let _ = setsockopt(&fd, sockopt::RcvBufForce, &(8 << 20));
        setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(TIMEOUT))
            .map_err(|errno| Error::socket("set the receive timeout", errno))?;
        for option in [libc::NETLINK_EXT_ACK, libc::NETLINK_CAP_ACK, libc::NETLINK_GET_STRICT_CHK] {
            set_netlink_option(&fd, option);
        }
        Ok(Self { fd, sequence: 0, buffer: vec![0; RECEIVE] })
    }

    /// Sends requests that change something, each acknowledged, and stops at the first refusal.
    ///
    /// # Errors
    /// [`Error::Refused`] with the index and description of the first message the kernel refused. Messages of the
    /// same window after it may have been applied.
    pub fn change(&mut self, messages: &[Message]) -> Result<()> {
        for (index, outcome) in self.change_each(messages)?.into_iter().enumerate() {
            outcome.map_err(|error| with_index(error, index))?;
        }
        Ok(())
    }

    /// Sends requests that change something and reports the result of each.
    ///
    /// # Errors
    /// Only when the socket itself fails.
    pub fn change_each(&mut self, messages: &[Message]) -> Result<Vec<Result<()>>> {
        let mut outcomes = Vec::with_capacity(messages.len());
        for window in messages.chunks(WINDOW) {
            CHANGES.fetch_add(window.len() as u64, Ordering::Relaxed);
            let first = self.sequence.wrapping_add(1);
            let mut bytes = Vec::new();
            for message in window {
                self.sequence = self.sequence.wrapping_add(1);
                frame(&mut bytes, message, NLM_F_REQUEST | NLM_F_ACK, self.sequence);
            }
            self.send(&bytes)?;
            for (offset, message) in window.iter().enumerate() {
                outcomes
                    .push(self.acknowledgement(first.wrapping_add(offset as u32), &message.what)?.map(drop));
            }
        }
        Ok(outcomes)
    }

    /// Sends one request and returns the answers that come before its acknowledgement.
    ///
    /// # Errors
    /// The kernel's refusal, or a failure of the socket.
    pub fn ask(&mut self, message: &Message) -> Result<Vec<Reply>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut bytes = Vec::new();
        frame(&mut bytes, message, NLM_F_REQUEST | NLM_F_ACK, self.sequence);
        self.send(&bytes)?;
        self.acknowledgement(self.sequence, &message.what)?
    }

    /// Sends one atomic nftables transaction: `begin`, the messages, `end` (`NFNL_MSG_BATCH_BEGIN`).
    ///
    /// # Errors
    /// The first refusal; then nothing at all was changed.
    pub fn transaction(&mut self, begin: &Message, messages: &[Message], end: &Message) -> Result<()> {
        let Some((last, rest)) = messages.split_last() else { return Ok(()) };
        CHANGES.fetch_add(messages.len() as u64, Ordering::Relaxed);
        let first = self.sequence.wrapping_add(1);
        let mut bytes = Vec::new();
        let mut next = |bytes: &mut Vec<u8>, message: &Message, flags: u16| {
            self.sequence = self.sequence.wrapping_add(1);
            frame(bytes, message, flags, self.sequence);
            self.sequence
        };
        next(&mut bytes, begin, NLM_F_REQUEST);
        for message in rest {
            next(&mut bytes, message, NLM_F_REQUEST);
        }
        // The end of a batch is acknowledged only by recent kernels, its last operation by all.
        let awaited = next(&mut bytes, last, NLM_F_REQUEST | NLM_F_ACK);
        next(&mut bytes, end, NLM_F_REQUEST);
        self.send(&bytes)?;
        self.transaction_outcome(messages, first.wrapping_add(1), awaited)
    }

    fn transaction_outcome(&mut self, messages: &[Message], first: u32, awaited: u32) -> Result<()> {
        let mut refusal: Option<Error> = None;
        loop {
            let received = self.receive()?;
            let mut rest = self.buffer.get(..received).unwrap_or_default();
            while let Some(parsed) = take_frame(&mut rest) {
                if parsed.kind != libc::NLMSG_ERROR as u16 {
                    continue;
                }
                let index = parsed.sequence.wrapping_sub(first) as usize;
                // The batch's begin carries what went wrong with the commit as a whole; everything else outside is
                // left over from something else.
                if index >= messages.len() && parsed.sequence.wrapping_add(1) != first {
                    continue;
                }
                let what = messages.get(index).map_or("commit the nftables transaction", |m| m.what.as_str());
                if let (Err(error), None) = (parse_error(&parsed, what), &refusal) {
                    refusal = Some(with_index(error, index));
                }
                if parsed.sequence == awaited {
                    // Errors come in order of the messages; everything of this batch has been said.
                    return refusal.map_or(Ok(()), Err);
                }
            }
            if let Some(error) = refusal.take_if(|_| received == 0 || self.is_quiet()) {
                return Err(error);
            }
        }
    }

    /// Whether nothing waits to be read: a refused batch may never acknowledge its last message.
    fn is_quiet(&self) -> bool {
        let mut byte = [0u8; 1];
        recv(self.fd.as_raw_fd(), &mut byte, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT)
            == Err(Errno::EAGAIN)
    }

    /// Reads until the acknowledgement of `sequence`. The outer error is the socket's, the inner the kernel's.
    fn acknowledgement(&mut self, sequence: u32, what: &str) -> Result<Result<Vec<Reply>>> {
        let mut replies = Vec::new();
        loop {
            // One datagram per acknowledgement: the kernel never joins two in one buffer here.
            let received = self.receive()?;
            let mut rest = self.buffer.get(..received).unwrap_or_default();
            while let Some(parsed) = take_frame(&mut rest) {
                if parsed.sequence != sequence {
                    continue;
                }
                if i32::from(parsed.kind) == libc::NLMSG_ERROR {
                    return Ok(parse_error(&parsed, what).map(|()| replies));
                }
                replies.push(Reply { kind: parsed.kind, payload: parsed.payload.to_vec() });
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> Result<()> {
        sendmsg::<()>(self.fd.as_raw_fd(), &[IoSlice::new(bytes)], &[], MsgFlags::empty(), None)
            .map(drop)
            .map_err(|errno| Error::socket("send", errno))
    }

    fn receive(&mut self) -> Result<usize> {
        loop {
            // With this flag the kernel returns the length the datagram really had.
            match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC) {
                Err(Errno::EINTR) => {}
                Ok(length) if length > self.buffer.len() => {
                    return Err(Error::Malformed {
                        what: "a request".to_owned(),
                        reason: format!("a datagram of {length} bytes does not fit {RECEIVE}"),
                    });
                }
                Err(Errno::EAGAIN) => {
                    let silence = format!("no answer from the kernel for {TIMEOUT} seconds");
                    return Err(Error::socket("receive", io::Error::new(io::ErrorKind::TimedOut, silence)));
                }
                other => return other.map_err(|errno| Error::socket("receive", errno)),
            }
        }
    }
}

const NLM_F_REQUEST: u16 = libc::NLM_F_REQUEST as u16;
const NLM_F_ACK: u16 = libc::NLM_F_ACK as u16;

#[expect(unsafe_code, reason = "nix has no wrapper for SOL_NETLINK options")]
fn set_netlink_option(fd: &OwnedFd, option: libc::c_int) {
    let on: libc::c_int = 1;
    // SAFETY: `on` outlives the call and its size is passed. Old kernels refuse an option; then errors only say less.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_NETLINK,
            option,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        );
    }
}

fn with_index(error: Error, at: usize) -> Error {
    match error {
        Error::Refused { what, errno, detail, .. } => Error::Refused { what, index: at, errno, detail },
        other => other,
    }
}

fn frame(out: &mut Vec<u8>, message: &Message, flags: u16, sequence: u32) {
    let length = HEADER + message.payload.len();
    out.extend_from_slice(&(length as u32).to_ne_bytes());
    out.extend_from_slice(&message.kind.to_ne_bytes());
    out.extend_from_slice(&(message.flags | flags).to_ne_bytes());
    out.extend_from_slice(&sequence.to_ne_bytes());
    out.extend_from_slice(&0u32.to_ne_bytes());
    out.extend_from_slice(&message.payload);
    out.resize(out.len().next_multiple_of(4), 0);
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

pub(crate) fn take_frame<'a>(rest: &mut &'a [u8]) -> Option<Frame<'a>> {
    let length = read_u32(rest, 0)? as usize;
    let frame = Frame {
        kind: read_u16(rest, 4)?,
        flags: read_u16(rest, 6)?,
        sequence: read_u32(rest, 8)?,
        payload: rest.get(HEADER..length)?,
    };
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some(frame)
}

/// Reads `struct nlmsgerr` and the extended acknowledgement behind it (`NLMSGERR_ATTR_MSG`).
fn parse_error(frame: &Frame<'_>, what: &str) -> Result<()> {
    let code = read_u32(frame.payload, 0).map(|raw| raw as i32).ok_or_else(|| Error::Malformed {
        what: what.to_owned(),
        reason: "a truncated acknowledgement".to_owned(),
    })?;
    if code == 0 {
        return Ok(());
    }
    let capped = frame.flags & libc::NLM_F_CAPPED as u16 != 0;
    let echoed = if capped { HEADER } else { read_u32(frame.payload, 4).unwrap_or(0) as usize };
    let attributes =
        frame.payload.get(4usize.saturating_add(echoed).next_multiple_of(4)..).unwrap_or_default();
    Err(Error::Refused {
        what: what.to_owned(),
        index: 0,
        errno: code.saturating_neg(),
        detail: extended_message(attributes),
    })
}

/// Reads the errno in `NLMSG_DONE` and the extended acknowledgement behind it (`netlink_dump_done`).
fn parse_done(frame: &Frame<'_>, what: &str) -> Result<()> {
    match read_u32(frame.payload, 0).map_or(0, |raw| raw as i32) {
        code if code < 0 => Err(Error::Refused {
            what: what.to_owned(),
            index: 0,
            errno: code.saturating_neg(),
            detail: frame.payload.get(4..).and_then(extended_message),
        }),
        _ => Ok(()),
    }
}

fn extended_message(mut attributes: &[u8]) -> Option<String> {
    const NLMSGERR_ATTR_MSG: u16 = 1;
    loop {
        let length = usize::from(read_u16(attributes, 0)?);
        let kind = read_u16(attributes, 2)?;
        let value = attributes.get(4..length)?;
        if kind == NLMSGERR_ATTR_MSG {
            return Some(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned());
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn datagram(kind: i32, flags: u16, payload: &[u8]) -> Vec<u8> {
        let message = Message { kind: kind as u16, flags, payload: payload.to_vec(), what: String::new() };
        let mut bytes = Vec::new();
        frame(&mut bytes, &message, 0, 7);
        bytes
    }

    /// `NLMSGERR_ATTR_OFFS` before `NLMSGERR_ATTR_MSG`, as the kernel sends them.
    fn attributes(text: &str) -> Vec<u8> {
        let mut bytes = [8u16.to_ne_bytes(), 2u16.to_ne_bytes(), [1, 2], [3, 4]].concat();
        bytes.extend((text.len() as u16 + 5).to_ne_bytes());
        bytes.extend(1u16.to_ne_bytes());
        bytes.extend(text.bytes());
        bytes.resize(bytes.len() + 4 - text.len() % 4, 0);
        bytes
    }

    fn refusal(result: Result<()>) -> (i32, Option<String>) {
        match result {
            Err(Error::Refused { errno, detail, .. }) => (errno, detail),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_kernels_words_are_found_behind_a_whole_and_a_capped_echo() {
        let header = [20u32.to_ne_bytes(), [0; 4], [0; 4], [0; 4]].concat();
        let code = (-libc::ENODEV).to_ne_bytes();
        for (flags, echo) in [(0, [header.clone(), vec![9; 4]].concat()), (libc::NLM_F_CAPPED as u16, header)]
        {
            let payload = [code.to_vec(), echo, attributes("Cannot find device")].concat();
            let bytes = datagram(libc::NLMSG_ERROR, flags, &payload);
            let parsed = take_frame(&mut bytes.as_slice()).unwrap();
            let expected = (libc::ENODEV, Some("Cannot find device".to_owned()));
            assert_eq!(refusal(parse_error(&parsed, "x")), expected, "flags {flags:#x}");
        }
    }

    #[test]
    fn a_dump_may_fail_in_its_last_message() {
        let payload = [(-libc::ENOENT).to_ne_bytes().to_vec(), attributes("no such table")].concat();
        let bytes = datagram(libc::NLMSG_DONE, 0, &payload);
        let parsed = take_frame(&mut bytes.as_slice()).unwrap();
        assert_eq!(refusal(parse_done(&parsed, "x")), (libc::ENOENT, Some("no such table".to_owned())));
        let good = datagram(libc::NLMSG_DONE, 0, &0i32.to_ne_bytes());
        parse_done(&take_frame(&mut good.as_slice()).unwrap(), "x").unwrap();
        let empty = datagram(libc::NLMSG_DONE, 0, &[]);
        parse_done(&take_frame(&mut empty.as_slice()).unwrap(), "x").unwrap();
    }

    proptest! {
        #[test]
        fn any_datagram_is_read_to_its_end_without_panic(bytes in vec(any::<u8>(), 0..256)) {
            let mut rest = bytes.as_slice();
            while let Some(parsed) = take_frame(&mut rest) {
                let _ = parse_error(&parsed, "x");
                let _ = parse_done(&parsed, "x");
            }
        }

        #[test]
        fn any_payload_of_an_error_is_read_without_panic(bytes in vec(any::<u8>(), 0..128), flags: u16) {
            let whole = datagram(libc::NLMSG_ERROR, flags, &bytes);
            let parsed = take_frame(&mut whole.as_slice()).unwrap();
            let _ = parse_error(&parsed, "x");
            let _ = parse_done(&parsed, "x");
        }
    }
}

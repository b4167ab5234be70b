//! ICMP echo (RFC 792, RFC 4443 section 4.1): one connected raw socket for each address, so that the kernel keeps the
//! ICMP of others out of it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, recv, send,
    socket,
};

/// Types of requests and replies.
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST_V6: u8 = 128;
const ECHO_REPLY_V6: u8 = 129;
/// Longest reply that is read.
const MAX_REPLY: usize = 256;
/// Most datagrams that are read from one socket.
const MAX_READ: usize = 32;

/// The requests that wait for replies.
#[derive(Debug)]
pub struct EchoSockets {
    token: [u8; 8],
    round: u64,
    waiting: Vec<(IpAddr, OwnedFd)>,
}

impl EchoSockets {
    /// `token` is one that others do not guess.
    pub fn new(token: [u8; 8]) -> Self {
        Self { token, round: 0, waiting: Vec::new() }
    }

    /// Who has replied since the last call. Then asks these addresses. One that cannot be asked does not reply.
    pub fn exchange(&mut self, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        self.exchange_by(
            addresses,
            |_| None,
            |socket, _, request| send(socket.as_raw_fd(), request, MsgFlags::MSG_DONTWAIT).map(drop),
        )
    }

    /// The same, where `ask` brings a request to an address. Replies come to `local`, if that is known of the address. Requests of
    /// ICMPv6 have no checksum yet.
    pub fn exchange_by(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
        local: impl Fn(IpAddr) -> Option<IpAddr>,
        ask: impl Fn(&OwnedFd, IpAddr, &[u8]) -> nix::Result<()>,
    ) -> BTreeSet<IpAddr> {
        let has_replied = |(_, socket): &&(IpAddr, OwnedFd)| self.has_replied(socket);
        let replied = self.waiting.iter().filter(has_replied).map(|(address, _)| *address).collect();
        self.round = self.round.wrapping_add(1);
        let asked = addresses.iter().filter_map(|address| {
            let socket = replies_of(*address, local(*address));
            let request = self.request(address.is_ipv4());
            match socket.and_then(|socket| ask(&socket, *address, &request).map(|()| socket)) {
                Ok(socket) => Some((*address, socket)),
                Err(error) => {
                    tracing::debug!(%address, %error, "cannot send an ICMP echo request");
                    None
                }
            }
        });
        self.waiting = asked.collect();
        replied
    }

    /// The kernel completes the checksum of ICMPv6.
    fn request(&self, is_ipv4: bool) -> Vec<u8> {
        let kind = if is_ipv4 { ECHO_REQUEST } else { ECHO_REQUEST_V6 };
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend(self.payload());
        if is_ipv4 {
            let sum = checksum(&bytes).to_be_bytes();
            bytes.splice(2..4, sum);
        }
        bytes
    }

    /// Identifier and sequence number, and what follows them.
    fn payload(&self) -> impl Iterator<Item = u8> {
        self.token.into_iter().chain(self.round.to_be_bytes())
    }

    fn has_replied(&self, socket: &OwnedFd) -> bool {
        let mut buffer = [0; MAX_REPLY];
        for _ in 0..MAX_READ {
            let Ok(length) = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) else {
                return false;
            };
            if buffer.get(..length).is_some_and(|datagram| self.is_reply(datagram)) {
                return true;
            }
        }
        false
    }

    /// Whether it is the reply to the last request. IPv4 comes with its header.
    fn is_reply(&self, datagram: &[u8]) -> bool {
        let message = match datagram.first().map(|first| (first >> 4, usize::from(first & 15) * 4)) {
            Some((4, header)) => datagram.get(header..).filter(|it| it.first() == Some(&ECHO_REPLY)),
            _ => Some(datagram).filter(|it| it.first() == Some(&ECHO_REPLY_V6)),
        };
        let payload: Vec<u8> = self.payload().collect();
        message.and_then(|message| message.get(4..)).is_some_and(|rest| rest.starts_with(&payload))
    }
}

/// A socket that the replies of an address come to.
fn replies_of(address: IpAddr, local: Option<IpAddr>) -> nix::Result<OwnedFd> {
    let (family, protocol) = match address {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Raw, flags, protocol)?;
    let end = |address| SockaddrStorage::from(SocketAddr::new(address, 0));
    if let Some(local) = local {
        bind(socket.as_raw_fd(), &end(local))?;
    }
    connect(socket.as_raw_fd(), &end(address))?;
    Ok(socket)
}

/// The checksum of the Internet (RFC 1071).
pub fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| {
        let [high, low] =
            [pair.first(), pair.get(1)].map(|byte| u32::from(byte.copied().unwrap_or_default()));
        high << 8 | low
    });
    let mut sum: u32 = words.fold(0, u32::wrapping_add);
    while sum > 0xffff {
        sum = (sum & 0xffff).wrapping_add(sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reply(sockets: &EchoSockets, is_ipv4: bool) -> Vec<u8> {
        let mut message = sockets.request(is_ipv4);
        message[0] = if is_ipv4 { ECHO_REPLY } else { ECHO_REPLY_V6 };
        let mut datagram = if is_ipv4 { vec![0x45; 20] } else { Vec::new() };
        datagram.extend(message);
        datagram
    }

    #[test]
    fn only_the_reply_to_the_last_request_counts() {
        let mut sockets = EchoSockets::new([7; 8]);
        let (v4, v6) = (reply(&sockets, true), reply(&sockets, false));
        assert!(sockets.is_reply(&v4) && sockets.is_reply(&v6));
        assert!(!sockets.is_reply(&sockets.request(false)), "a request");
        assert!(!EchoSockets::new([8; 8]).is_reply(&v4), "of another program");
        sockets.round += 1;
        assert!(!sockets.is_reply(&v4) && !sockets.is_reply(&v6), "late");
    }

    #[test]
    fn the_checksum_of_a_message_with_its_checksum_is_zero() {
        assert_eq!(checksum(&EchoSockets::new([3; 8]).request(true)), 0);
    }

    proptest! {
        #[test]
        fn any_datagram_is_a_reply_or_not(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let sockets = EchoSockets::new([7; 8]);
            prop_assert!(!sockets.is_reply(&bytes));
        }
    }
}

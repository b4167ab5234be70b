//! ICMP echo (RFC 792, RFC 4443 section 4.1) from one socket of each family: a raw one, whose filter lets nothing in but the replies, or
//! one for echo alone (`SOCK_DGRAM`), which needs no capability.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;

use nix::libc;
use nix::sys::socket::{MsgFlags, SockaddrStorage, recvfrom, sendto};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use crate::raw_port::{accept, instruction, reject};

/// Types of requests and replies.
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST_V6: u8 = 128;
const ECHO_REPLY_V6: u8 = 129;
/// Bytes of a message before identifier and sequence number: type, code and checksum.
const HEADER: usize = 4;
/// Longest reply that is read.
const MAX_REPLY: usize = 256;
/// A reply counts if it is to one of so many last requests: it may take longer than the time between two.
const ROUNDS: u64 = 4;
/// Most datagrams that are read at once, beside the replies to as many requests as were sent.
const MAX_READ: usize = 32;

/// Bytes of the identifier, with which the token begins: the kernel replaces it in requests of a socket for echo alone.
const IDENTIFIER: usize = 2;

/// Type of the sockets that send requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `SOCK_RAW`: CAP_NET_RAW.
    Raw,
    /// `SOCK_DGRAM`: a group in `net.ipv4.ping_group_range`, which counts for both families.
    Echo,
}

/// Sends requests and reads replies.
#[derive(Debug)]
pub struct EchoSockets {
    kind: Kind,
    token: [u8; 8],
    round: u64,
    /// Error of a socket that could not be opened in the last round; `None` if all could.
    refusal: Option<io::Error>,
    /// Number of addresses in the last round.
    asked: usize,
    v4: Option<Socket>,
    v6: Option<Socket>,
}

impl EchoSockets {
    /// Raw sockets, which need `CAP_NET_RAW`. `token` is one that others do not guess.
    pub fn new(token: [u8; 8]) -> Self {
        Self::of(Kind::Raw, token)
    }

    /// Sockets for echo alone, which `net.ipv4.ping_group_range` of the network namespace permits to groups of users.
    pub fn unprivileged(token: [u8; 8]) -> Self {
        Self::of(Kind::Echo, token)
    }

    fn of(kind: Kind, token: [u8; 8]) -> Self {
        Self { kind, token, round: 0, refusal: None, asked: 0, v4: None, v6: None }
    }

    /// Error of a socket that the last [`Self::exchange`] could not open: it asked no address of that family. `None` if there was none.
    pub fn refusal(&self) -> Option<&io::Error> {
        self.refusal.as_ref()
    }

    /// Takes the addresses that have replied since the last call, and then asks these. One that cannot be asked does not reply.
    pub fn exchange(&mut self, addresses: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        self.exchange_by(addresses, |socket, address, request| {
            let address = SockaddrStorage::from(SocketAddr::new(address, 0));
            sendto(socket.as_raw_fd(), request, &address, MsgFlags::MSG_DONTWAIT).map(drop)
        })
    }

    /// Addresses that have replied since the last call of this or of [`Self::exchange`].
    pub fn replies(&self) -> BTreeSet<IpAddr> {
        let mut replied = BTreeSet::new();
        for socket in self.v4.iter().chain(&self.v6) {
            self.read(socket, &mut replied);
        }
        replied
    }

    /// The same as [`Self::exchange`], where `ask` brings a request to an address. Requests of ICMPv6 have no checksum yet.
    pub fn exchange_by(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
        ask: impl Fn(&Socket, IpAddr, &[u8]) -> nix::Result<()>,
    ) -> BTreeSet<IpAddr> {
        let replied = self.replies();
        self.round = self.round.wrapping_add(1);
        self.asked = addresses.len();
        self.refusal = None;
        for address in addresses {
            let request = self.request(address.is_ipv4());
            let asked = match self.socket(address.is_ipv4()) {
                Ok(socket) => ask(socket, *address, &request).map_err(io::Error::from),
                Err(error) => {
                    tracing::debug!(%address, %error, "cannot open a socket for ICMP echo requests");
                    self.refusal = Some(error);
                    continue;
                }
            };
            if let Err(error) = asked {
                tracing::debug!(%address, %error, "cannot send an ICMP echo request");
            }
        }
        replied
    }

    /// Opens it at the first use: most nodes ask in one family, or none.
    fn socket(&mut self, is_ipv4: bool) -> io::Result<&Socket> {
        let kind = self.kind;
        let token = self.token;
        let slot = if is_ipv4 { &mut self.v4 } else { &mut self.v6 };
        match slot {
            Some(socket) => Ok(socket),
            None => Ok(slot.insert(open(kind, is_ipv4, token)?)),
        }
    }

    fn read(&self, socket: &Socket, replied: &mut BTreeSet<IpAddr>) {
        let mut buffer = [0; MAX_REPLY];
        for _ in 0..self.asked.saturating_mul(2).saturating_add(MAX_READ) {
            let Ok((length, from)) = recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut buffer) else {
                return;
            };
            if buffer.get(..length).is_some_and(|datagram| self.is_reply(datagram)) {
                replied.extend(from.and_then(address_of));
            }
        }
    }

    /// The kernel completes the checksum of ICMPv6.
    fn request(&self, is_ipv4: bool) -> Vec<u8> {
        let kind = if is_ipv4 { ECHO_REQUEST } else { ECHO_REQUEST_V6 };
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend(self.token);
        bytes.extend(self.round.to_be_bytes());
        if is_ipv4 {
            let sum = checksum(&bytes).to_be_bytes();
            bytes.splice(2..4, sum);
        }
        bytes
    }

    /// Whether it is the reply to one of the last requests. IPv4 comes with its header from raw sockets, and without it from others.
    fn is_reply(&self, datagram: &[u8]) -> bool {
        let message = match datagram.first().map(|first| (first >> 4, usize::from(first & 15) * 4)) {
            Some((4, header)) if self.kind == Kind::Raw => {
                datagram.get(header..).filter(|it| it.first() == Some(&ECHO_REPLY))
            }
            _ if datagram.first() == Some(&ECHO_REPLY) && self.kind == Kind::Echo => Some(datagram),
            _ => Some(datagram).filter(|it| it.first() == Some(&ECHO_REPLY_V6)),
        };
        // The kernel compares the identifier of a socket for echo alone.
        let skipped = if self.kind == Kind::Echo { IDENTIFIER } else { 0 };
        let rest = message.and_then(|message| message.get(HEADER.saturating_add(skipped)..));
        let token = self.token.get(skipped..).unwrap_or_default();
        let round = rest.and_then(|rest| rest.strip_prefix(token)).and_then(|rest| rest.first_chunk());
        round.is_some_and(|round| self.round.wrapping_sub(u64::from_be_bytes(*round)) < ROUNDS)
    }
}

fn open(kind: Kind, is_ipv4: bool, token: [u8; 8]) -> io::Result<Socket> {
    let (domain, protocol, reply) = match is_ipv4 {
        true => (Domain::IPV4, Protocol::ICMPV4, ECHO_REPLY),
        false => (Domain::IPV6, Protocol::ICMPV6, ECHO_REPLY_V6),
    };
    let kind_of_socket = if kind == Kind::Raw { Type::RAW } else { Type::DGRAM };
    let socket = Socket::new(domain, kind_of_socket, Some(protocol))?;
    socket.set_nonblocking(true)?;
    if kind == Kind::Raw {
        socket.attach_filter(&filter(domain, reply, token))?;
    }
    Ok(socket)
}

/// The filter (classic BPF): what others receive neither wakes this socket nor takes the place of replies. It is given IPv4 packets from
/// their header on, and of IPv6 packets what follows their headers.
fn filter(domain: Domain, kind: u8, token: [u8; 8]) -> Vec<SockFilter> {
    let load = |width: u32, offset: u32| instruction(libc::BPF_LD | width | libc::BPF_IND, 0, 0, offset);
    let unless =
        |skip: u8, value: u32| instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, skip, value);
    // X is the length of the IPv4 header, or zero.
    let header = match domain {
        Domain::IPV4 => libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH,
        _ => libc::BPF_LDX | libc::BPF_W | libc::BPF_IMM,
    };
    let [a, b, c, d, e, f, g, h] = token;
    vec![
        instruction(header, 0, 0, 0),
        load(libc::BPF_B, 0),
        unless(5, kind.into()),
        load(libc::BPF_W, 4),
        unless(3, u32::from_be_bytes([a, b, c, d])),
        load(libc::BPF_W, 8),
        unless(1, u32::from_be_bytes([e, f, g, h])),
        accept(),
        reject(),
    ]
}

fn address_of(from: SockaddrStorage) -> Option<IpAddr> {
    let v4 = from.as_sockaddr_in().map(|it| it.ip().into());
    v4.or_else(|| from.as_sockaddr_in6().map(|it| it.ip().into()))
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

    use testbed_netns::{in_namespace, sh};

    use super::*;

    fn reply(sockets: &EchoSockets, is_ipv4: bool) -> Vec<u8> {
        let mut message = sockets.request(is_ipv4);
        message[0] = if is_ipv4 { ECHO_REPLY } else { ECHO_REPLY_V6 };
        let mut datagram = if is_ipv4 { vec![0x45; 20] } else { Vec::new() };
        datagram.extend(message);
        datagram
    }

    #[test]
    fn only_the_replies_to_the_last_requests_count() {
        let mut sockets = EchoSockets::new([7; 8]);
        let (v4, v6) = (reply(&sockets, true), reply(&sockets, false));
        for _ in 0..ROUNDS {
            assert!(sockets.is_reply(&v4) && sockets.is_reply(&v6));
            assert!(!sockets.is_reply(&sockets.request(false)), "a request");
            assert!(!EchoSockets::new([8; 8]).is_reply(&v4), "of another program");
            sockets.round += 1;
        }
        assert!(!sockets.is_reply(&v4) && !sockets.is_reply(&v6), "late");
    }

    /// The requests that the flood sends are received as well, since it is this host that answers them.
    #[test]
    fn replies_are_read_although_the_host_receives_much_other_icmp() {
        in_namespace(|| {
            sh("ip address add 192.0.2.1/24 dev lo; ip address add 2001:db8::1/64 dev lo nodad");
            let mut sockets = EchoSockets::new([7; 8]);
            let addresses: BTreeSet<IpAddr> =
                ["192.0.2.1", "2001:db8::1"].map(|it| it.parse().unwrap()).into();
            assert!(sockets.exchange(&addresses).is_empty());
            // Other tests can fill the queue of a core, which then loses a request.
            let is_read = (0..5).any(|_| {
                sh("ping -q -n -c 1000 -l 1000 -s 1000 -W 1 192.0.2.1 >/dev/null || true");
                sockets.exchange(&addresses) == addresses
            });
            assert!(is_read);
        });
    }

    #[test]
    fn sockets_for_echo_alone_need_a_group_that_may_have_them() {
        in_namespace(|| {
            sh(
                "ip address add 192.0.2.1/24 dev lo; ip address add 2001:db8::1/64 dev lo nodad; sysctl -qw net.ipv4.ping_group_range='1 0'",
            );
            let addresses: BTreeSet<IpAddr> =
                ["192.0.2.1", "2001:db8::1"].map(|it| it.parse().unwrap()).into();
            let mut sockets = EchoSockets::unprivileged([7; 8]);
            sockets.exchange(&addresses);
            assert_eq!(sockets.refusal().unwrap().kind(), io::ErrorKind::PermissionDenied);
            sh("sysctl -qw net.ipv4.ping_group_range='0 2147483647'");
            assert!(sockets.exchange(&addresses).is_empty() && sockets.refusal().is_none());
            assert_eq!(sockets.exchange(&BTreeSet::new()), addresses);
            assert!(sockets.exchange(&BTreeSet::new()).is_empty());
        });
    }

    #[test]
    fn the_checksum_of_a_message_with_its_checksum_is_zero() {
        assert_eq!(checksum(&EchoSockets::new([3; 8]).request(true)), 0);
    }

    proptest! {
        #[test]
        fn any_datagram_is_a_reply_or_not(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            for sockets in [EchoSockets::new([7; 8]), EchoSockets::unprivileged([7; 8])] {
                prop_assert!(!sockets.is_reply(&bytes));
            }
        }
    }
}

//! Runs of UDP datagrams that one call sends and the kernel cuts (`UDP_SEGMENT`, `net/ipv4/udp_offload.c`).
//!
//! A run has one destination and one length; only its last datagram may be shorter. Until it is cut, often behind the last link of a host, it
//! is one packet to nftables, whose rules read the first datagram alone. So a run has datagrams of one kind.

use std::io;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};

/// Datagrams of a run: `UDP_MAX_SEGMENTS` of `include/linux/udp.h` before Linux 6.9.
pub const MAX_DATAGRAMS: usize = 64;
/// Bytes of a run: the kernel makes one UDP packet of it before it cuts it, and none over IPv4 has a longer payload.
pub const MAX_BYTES: usize = 65_507;

/// Kind of a datagram, by its first four bytes: the type of a WireGuard message, or the magic of a path probe. Rules that tell them apart
/// read no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind(Option<[u8; 4]>);

impl Kind {
    /// Kind of a datagram; those of less than four bytes are of one kind.
    pub fn of(datagram: &[u8]) -> Self {
        Self(datagram.first_chunk().copied())
    }
}

/// Whether the kernel cuts runs (since Linux 4.18). One that does not sends a run as one datagram, without an error.
pub fn are_cut(socket: &impl AsFd) -> bool {
    getsockopt(socket, sockopt::UdpGsoSegment).is_ok()
}

/// Whether the datagrams of a run may go one by one that could not go together: a run is never fragmented (`EMSGSIZE`, `EINVAL` before
/// Linux 6.12), needs a network device with checksum offload (`EIO`, before Linux 6.11; `udp_send_skb` in `net/ipv4/udp.c`), and is as
/// long as all of them to rules of nftables about lengths and rates (`EPERM`).
pub fn go_singly(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMSGSIZE | Errno::EINVAL | Errno::EIO | Errno::EPERM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_wireguard_and_path_probes_are_of_different_kinds() {
        let [initiation, data, probe] = [[1, 0, 0, 0], [4, 0, 0, 0], [0xf1, 0x1e, 0xad, 0x50]];
        let long = |head: [u8; 4], rest: u8| [&head[..], &[rest; 28]].concat();
        assert_eq!(Kind::of(&long(data, 1)), Kind::of(&long(data, 2)));
        for (a, b) in [(initiation, data), (data, probe), (probe, initiation)] {
            assert_ne!(Kind::of(&long(a, 1)), Kind::of(&long(b, 1)));
        }
        assert_eq!(Kind::of(&[]), Kind::of(&[1]));
        assert_ne!(Kind::of(&[]), Kind::of(&long(data, 1)));
    }

    #[test]
    fn this_kernel_cuts_runs_and_only_some_errors_are_of_the_run() {
        assert!(are_cut(&std::net::UdpSocket::bind("127.0.0.1:0").unwrap()));
        let singly = |errno: Errno| go_singly(&io::Error::from(errno));
        assert!([Errno::EMSGSIZE, Errno::EINVAL, Errno::EIO, Errno::EPERM].into_iter().all(singly));
        assert!(![Errno::EAGAIN, Errno::ENETUNREACH, Errno::ENOBUFS].into_iter().any(singly));
    }
}

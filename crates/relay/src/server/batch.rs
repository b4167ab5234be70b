//! Datagrams in batches: those that wait are read with one call (`recvmmsg(2)`), and those that the kernel has merged (`UDP_GRO`) as
//! one; a run of them to one destination is sent with one call (`UDP_SEGMENT`, `net/ipv4/udp_offload.c`). A batch is what there is: none
//! waits for others.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;

use fairlead_transport::udp_runs::{self, Kind, MAX_BYTES, MAX_DATAGRAMS};
use nix::cmsg_space;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, RecvMsg, SockaddrStorage, recvmmsg, sendmsg,
    setsockopt, sockopt,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Bytes of one buffer: the most that the kernel writes into it at once.
const BUFFER: usize = 65_535;
/// Buffers read at once.
const BUFFERS: usize = 32;

thread_local! {
    /// Sockets are many, and each is read by one thread at a time. Memory that no datagram is written to takes none.
    static MEMORY: RefCell<Vec<Vec<u8>>> = RefCell::new(vec![vec![0; BUFFER]; BUFFERS]);
}

/// Lets the kernel merge datagrams of one sender. Old kernels cannot, and need not.
pub(super) fn enable_merging(socket: &UdpSocket) {
    let _ = setsockopt(socket, sockopt::UdpGroSegment, &true);
}

/// Reads what waits, at most some hundred datagrams, and gives `take` each with its source and what is to be sent, in runs if the kernel cuts
/// them (`are_cut`).
///
/// # Errors
/// Error of the read; [`io::ErrorKind::WouldBlock`] if no datagram waits.
pub(super) fn pass(
    socket: &UdpSocket,
    are_cut: bool,
    take: impl for<'a> FnOnce(&mut dyn Iterator<Item = (SocketAddr, &'a [u8])>, &mut Runs<'a>),
) -> io::Result<()> {
    MEMORY.with_borrow_mut(|memory| {
        let mut messages = Vec::new();
        let received = socket.try_io(Interest::READABLE, || {
            messages = read(socket, memory)?;
            // With room left the socket is empty: one more call would only say so.
            if messages.len() < BUFFERS { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
        });
        received.or_else(|error| if messages.is_empty() { Err(error) } else { Ok(()) })?;
        let mut runs = Runs::default();
        let mut datagrams = messages.iter().zip(memory.iter()).flat_map(|(message, buffer)| {
            let bytes = buffer.get(..message.length).unwrap_or_default();
            // An empty one has no chunk.
            let empty = bytes.is_empty().then_some(bytes);
            empty.into_iter().chain(bytes.chunks(message.segment.max(1))).map(|it| (message.source, it))
        });
        take(&mut datagrams, &mut runs);
        drop(datagrams);
        runs.send(socket, are_cut);
        Ok(())
    })
}

/// Contents of one buffer: one datagram, or several of one source that the kernel merged.
#[derive(Debug, Clone, Copy)]
struct Message {
    source: SocketAddr,
    length: usize,
    /// Length of each datagram; the last one may be shorter.
    segment: usize,
}

fn read(socket: &UdpSocket, memory: &mut [Vec<u8>]) -> io::Result<Vec<Message>> {
    // Anew each time: the kernel writes the lengths of what it used into them.
    let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(BUFFERS, Some(cmsg_space!(i32)));
    let mut slices: Vec<[IoSliceMut<'_>; 1]> =
        memory.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let flags = MsgFlags::MSG_DONTWAIT;
    let received = recvmmsg(socket.as_raw_fd(), &mut headers, slices.iter_mut(), flags, None)?;
    Ok(received.map(|message| self::message(&message)).collect())
}

fn message(received: &RecvMsg<'_, '_, SockaddrStorage>) -> Message {
    let merged = received.cmsgs().ok().into_iter().flatten().find_map(|control| match control {
        ControlMessageOwned::UdpGroSegments(segment) => usize::try_from(segment).ok(),
        _ => None,
    });
    // A source that is no address is nothing that was bound.
    let source = received.address.as_ref().and_then(socket_address);
    let source = source.unwrap_or_else(|| SocketAddr::from(([0; 4], 0)));
    Message { source, length: received.bytes, segment: merged.unwrap_or(received.bytes) }
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|address| SocketAddr::V4((*address).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| SocketAddr::V6((*address).into())))
}

/// Datagrams to be sent, in order.
#[derive(Debug, Default)]
pub(super) struct Runs<'a>(Vec<Run<'a>>);

/// Datagrams of one length and one kind to one destination.
#[derive(Debug)]
struct Run<'a> {
    to: SocketAddr,
    kind: Kind,
    length: usize,
    /// A shorter one ends it.
    is_complete: bool,
    datagrams: Vec<IoSlice<'a>>,
}

impl<'a> Runs<'a> {
    /// Adds a datagram behind the others.
    pub(super) fn push(&mut self, to: SocketAddr, datagram: &'a [u8]) {
        let kind = Kind::of(datagram);
        let open = self.0.last_mut().filter(|run| run.kind == kind && run.takes(to, datagram.len()));
        if let Some(run) = open {
            run.is_complete = datagram.len() < run.length;
            run.datagrams.push(IoSlice::new(datagram));
            return;
        }
        let datagrams = vec![IoSlice::new(datagram)];
        self.0.push(Run { to, kind, length: datagram.len(), is_complete: false, datagrams });
    }

    /// Sends all runs. Datagrams that the kernel has no room for are lost, as on the way.
    fn send(&self, socket: &UdpSocket, are_cut: bool) {
        self.0.iter().for_each(|run| run.send(socket, are_cut));
    }
}

impl Run<'_> {
    fn takes(&self, to: SocketAddr, length: usize) -> bool {
        let count = self.datagrams.len();
        let bytes = self.length.saturating_mul(count).saturating_add(length);
        !self.is_complete
            && self.to == to
            && (1..=self.length).contains(&length)
            && count < MAX_DATAGRAMS
            && bytes <= MAX_BYTES
    }

    fn send(&self, socket: &UdpSocket, are_cut: bool) {
        if self.datagrams.len() > 1 && are_cut {
            match self.send_merged(socket) {
                Err(error) if udp_runs::go_singly(&error) => {}
                Ok(_) | Err(_) => return,
            }
        }
        for datagram in &self.datagrams {
            drop(socket.try_send_to(datagram, self.to));
        }
    }

    fn send_merged(&self, socket: &UdpSocket) -> io::Result<usize> {
        let segment = u16::try_from(self.length).map_err(io::Error::other)?;
        let to = SockaddrStorage::from(self.to);
        let control = [ControlMessage::UdpGsoSegments(&segment)];
        socket.try_io(Interest::WRITABLE, || {
            let flags = MsgFlags::MSG_DONTWAIT;
            Ok(sendmsg(socket.as_raw_fd(), &self.datagrams, &control, flags, Some(&to))?)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    /// The first bytes of WireGuard's data messages and of path probes.
    const DATA: &[u8] = &[4, 0, 0, 0];
    const PROBE: &[u8] = &fairlead_wire::probe::MAGIC;

    fn lengths(runs: &Runs<'_>) -> Vec<Vec<usize>> {
        runs.0.iter().map(|run| run.datagrams.iter().map(|datagram| datagram.len()).collect()).collect()
    }

    #[test]
    fn a_run_has_one_destination_one_length_and_a_shorter_end() {
        let to = |port| SocketAddr::from(([192, 0, 2, 1], port));
        let bytes = [0; 1400];
        let mut runs = Runs::default();
        for (port, length) in [(1, 1400), (1, 1400), (1, 9), (1, 9), (2, 9), (2, 10), (2, 0), (2, 0)] {
            runs.push(to(port), &bytes[..length]);
        }
        let expected: [&[usize]; 6] = [&[1400, 1400, 9], &[9], &[9], &[10], &[0], &[0]];
        assert_eq!(lengths(&runs), expected);
    }

    #[test]
    fn path_probes_and_messages_of_wireguard_share_no_run() {
        let to = SocketAddr::from(([192, 0, 2, 1], 1));
        let (data, probe) = ([DATA, &[0; 60]].concat(), [PROBE, &[0; 60]].concat());
        let mut runs = Runs::default();
        for datagram in [&data[..], &data, &probe, &probe[..40], &data, &data[..32]] {
            runs.push(to, datagram);
        }
        let expected: [&[usize]; 3] = [&[64, 64], &[64, 40], &[64, 32]];
        assert_eq!(lengths(&runs), expected);
    }

    /// The rule is that of nodes with the kernel's WireGuard, whose path socket has another port (`dataplane`).
    #[test]
    fn a_rule_of_nftables_meets_each_probe_between_data() {
        let node = testbed_netns::Namespace::new();
        node.sh("ip link set lo up; nft -f - <<END
table inet node { chain received { type filter hook input priority 250;
  udp dport 5000 @th,64,32 0xf11ead50 udp checksum 0 udp dport set 6000
  udp dport 5000 @th,64,32 0xf11ead50 udp dport set 6000
}
}
END");
        let bind = |port: u16| std::net::UdpSocket::bind(("127.0.0.1", port)).unwrap();
        let [relay, wireguard, probes] = node.run(|| [bind(0), bind(5000), bind(6000)]);
        relay.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let (data, probe) = ([DATA, &[7; 60]].concat(), [PROBE, &[8; 60]].concat());
        runtime.block_on(async {
            let relay = UdpSocket::from_std(relay).unwrap();
            let mut runs = Runs::default();
            for datagram in [&data[..], &probe, &data, &data, &probe[..40]] {
                runs.push(wireguard.local_addr().unwrap(), datagram);
            }
            relay.writable().await.unwrap();
            runs.send(&relay, udp_runs::are_cut(&relay));
        });
        let arrived = |socket: &std::net::UdpSocket| {
            socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let mut buffer = [0; 128];
            let mut received = Vec::new();
            while let Ok(length) = socket.recv(&mut buffer) {
                received.push(buffer[..length].to_vec());
            }
            received
        };
        assert_eq!(arrived(&wireguard), [data.clone(), data.clone(), data]);
        assert_eq!(arrived(&probes), [probe.clone(), probe[..40].to_vec()]);
    }

    #[test]
    fn a_run_ends_where_the_kernel_takes_no_more() {
        let to = SocketAddr::from(([192, 0, 2, 1], 1));
        for (length, most) in [(100, MAX_DATAGRAMS), (1400, 46), (40_000, 1)] {
            let bytes = vec![0; length];
            let mut runs = Runs::default();
            (0..=most).for_each(|_| runs.push(to, &bytes));
            let counts: Vec<usize> = lengths(&runs).iter().map(Vec::len).collect();
            assert_eq!(counts, [most, 1], "{length}");
        }
    }

    async fn bound(address: &str) -> UdpSocket {
        let socket = UdpSocket::bind(address).await.unwrap();
        enable_merging(&socket);
        socket
    }

    /// Passes datagrams by way of a socket, and returns what arrives.
    async fn passed(address: &str, sent: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let [from, relay, to] =
            [bound(address).await, bound(address).await, UdpSocket::bind(address).await.unwrap()];
        let destination = to.local_addr().unwrap();
        let mut runs = Runs::default();
        sent.iter().for_each(|datagram| runs.push(relay.local_addr().unwrap(), datagram));
        from.writable().await.unwrap();
        runs.send(&from, true);

        let (mut arrived, mut buffer) = (Vec::new(), vec![0; BUFFER]);
        while arrived.len() < sent.len() {
            relay.readable().await.unwrap();
            let source = from.local_addr().unwrap();
            let passed = pass(&relay, true, |datagrams, runs| {
                datagrams.for_each(|(from, datagram)| {
                    assert_eq!(from, source);
                    runs.push(destination, datagram);
                });
            });
            assert!(passed.is_ok() || passed.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
            while let Ok(received) = timeout(Duration::from_millis(50), to.recv(&mut buffer)).await {
                arrived.push(buffer[..received.unwrap()].to_vec());
            }
        }
        arrived
    }

    #[tokio::test]
    async fn merged_datagrams_arrive_as_they_were_sent() {
        let datagram = |number: u8, length: usize| vec![number; length];
        let sent: Vec<Vec<u8>> = (0..40)
            .map(|number| datagram(number, 1200))
            .chain([datagram(40, 1), vec![], datagram(42, 9000), datagram(43, 1200), datagram(44, 32)])
            .collect();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let arrived = passed(address, &sent).await;
            assert!(arrived == sent, "{:?}", arrived.iter().map(Vec::len).collect::<Vec<_>>());
        }
    }
}

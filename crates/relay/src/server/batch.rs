//! Datagrams in batches: those that wait are read with one call (`recvmmsg(2)`), and those that the kernel has merged (`UDP_GRO`) as
//! one; a run of them to one destination is sent with one call (`UDP_SEGMENT`, `net/ipv4/udp_offload.c`). A batch is what there is: none
//! waits for others.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;

use nix::cmsg_space;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, RecvMsg, SockaddrStorage, recvmmsg, sendmsg,
    setsockopt, sockopt,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// The longest datagram, and the most bytes that are sent or merged at once.
const MAX_BYTES: usize = 65_507;
/// Bytes of one buffer: the most that the kernel writes into it at once.
const BUFFER: usize = 65_535;
/// Buffers read at once.
const BUFFERS: usize = 32;
/// Datagrams of a run (`UDP_MAX_SEGMENTS` of kernels before 6.9).
const MAX_SEGMENTS: usize = 64;

thread_local! {
    /// Sockets are many, and each is read by one thread at a time. Memory that no datagram is written to takes none.
    static MEMORY: RefCell<Vec<Vec<u8>>> = RefCell::new(vec![vec![0; BUFFER]; BUFFERS]);
}

/// Lets the kernel merge datagrams of one sender. Old kernels cannot, and need not.
pub(super) fn enable_merging(socket: &UdpSocket) {
    let _ = setsockopt(socket, sockopt::UdpGroSegment, &true);
}

/// Reads what waits, at most some hundred datagrams, and gives `take` each with its source and what is to be sent.
///
/// # Errors
/// Error of the read; [`io::ErrorKind::WouldBlock`] if no datagram waits.
pub(super) fn pass(
    socket: &UdpSocket,
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
        runs.send(socket);
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

/// Datagrams of one length to one destination.
#[derive(Debug)]
struct Run<'a> {
    to: SocketAddr,
    length: usize,
    /// A shorter one ends it.
    is_complete: bool,
    datagrams: Vec<IoSlice<'a>>,
}

impl<'a> Runs<'a> {
    /// Adds a datagram behind the others.
    pub(super) fn push(&mut self, to: SocketAddr, datagram: &'a [u8]) {
        if let Some(run) = self.0.last_mut().filter(|run| run.takes(to, datagram.len())) {
            run.is_complete = datagram.len() < run.length;
            run.datagrams.push(IoSlice::new(datagram));
            return;
        }
        let datagrams = vec![IoSlice::new(datagram)];
        self.0.push(Run { to, length: datagram.len(), is_complete: false, datagrams });
    }

    /// Sends all runs. Datagrams that the kernel has no room for are lost, as on the way.
    fn send(&self, socket: &UdpSocket) {
        self.0.iter().for_each(|run| run.send(socket));
    }
}

impl Run<'_> {
    fn takes(&self, to: SocketAddr, length: usize) -> bool {
        let count = self.datagrams.len();
        let bytes = self.length.saturating_mul(count).saturating_add(length);
        !self.is_complete
            && self.to == to
            && (1..=self.length).contains(&length)
            && count < MAX_SEGMENTS
            && bytes <= MAX_BYTES
    }

    fn send(&self, socket: &UdpSocket) {
        let is_over = |sent: io::Result<usize>| match sent {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        };
        if self.datagrams.len() > 1 && is_over(self.send_merged(socket)) {
            return;
        }
        // One, or the kernel cannot split them: the MTU of the path is smaller, or the device computes no checksums.
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
    fn a_run_ends_where_the_kernel_takes_no_more() {
        let to = SocketAddr::from(([192, 0, 2, 1], 1));
        for (length, most) in [(100, MAX_SEGMENTS), (1400, 46), (40_000, 1)] {
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
        runs.send(&from);

        let (mut arrived, mut buffer) = (Vec::new(), vec![0; BUFFER]);
        while arrived.len() < sent.len() {
            relay.readable().await.unwrap();
            let source = from.local_addr().unwrap();
            let passed = pass(&relay, |datagrams, runs| {
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

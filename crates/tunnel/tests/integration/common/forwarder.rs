//! A path between two WireGuard devices that reorders and repeats data messages, and loses none.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::RcvBufForce;

use super::Namespace;

/// The type of data messages (WireGuard paper, section 5.4.6).
const DATA: u8 = 4;
/// With no datagram for so long, all that is kept is sent.
const IDLE: Duration = Duration::from_millis(10);
/// Buffer of the socket, in bytes: nothing is lost while the thread waits for its turn.
const BUFFER: usize = 8 << 20;
/// Data messages of which one is sent after its successor.
const SWAPPED: usize = 4;
/// Data messages of which one is sent after twenty later ones.
const LATE: usize = 32;
/// Data messages of which one is sent again after three later ones.
const REPEATED: usize = 5;

/// Counters of a forwarder, by the end that messages come from.
#[derive(Default)]
struct Counts {
    reordered: [AtomicUsize; 2],
    repeated: [AtomicUsize; 2],
    kept: AtomicUsize,
}

/// A thread that forwards datagrams; dropping it ends it.
pub(crate) struct Forwarder {
    counts: Arc<Counts>,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Forwarder {
    /// Forwards between two ends, each of which sends to `address`.
    pub(crate) fn start(namespace: &Namespace, address: &str, ends: [&str; 2]) -> Self {
        let socket = namespace.run(|| UdpSocket::bind(address)).unwrap();
        socket.set_read_timeout(Some(IDLE)).unwrap();
        setsockopt(&socket, RcvBufForce, &BUFFER).unwrap();
        let (counts, stops) = (Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
        let path = Path {
            socket,
            ends: ends.map(|end| end.parse().unwrap()),
            seen: [0; 2],
            kept: Default::default(),
            counts: Arc::clone(&counts),
        };
        let stopped = Arc::clone(&stops);
        let thread = thread::spawn(move || path.run(&stopped));
        Self { counts, stops, thread: Some(thread) }
    }

    /// Whether everything that has come was sent on.
    pub(crate) fn keeps_nothing(&self) -> bool {
        self.counts.kept.load(Ordering::Relaxed) == 0
    }

    /// Numbers of reordered messages and of repeated ones, by the end that they come from.
    pub(crate) fn counts(&self) -> [[usize; 2]; 2] {
        [&self.counts.reordered, &self.counts.repeated]
            .map(|counts| [0, 1].map(|end: usize| counts[end].load(Ordering::Relaxed)))
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

struct Path {
    socket: UdpSocket,
    ends: [SocketAddr; 2],
    /// Data messages that have come from each end.
    seen: [usize; 2],
    /// Messages to be sent when so many others have come from the same end.
    kept: [Vec<(usize, Vec<u8>)>; 2],
    counts: Arc<Counts>,
}

impl Path {
    fn run(mut self, stops: &AtomicBool) {
        let mut buffer = [0; 65_536];
        while !stops.load(Ordering::Relaxed) {
            match self.socket.recv_from(&mut buffer) {
                Ok((length, from)) => {
                    if let Some(end) = self.ends.iter().position(|end| *end == from) {
                        self.forward(end, &buffer[..length]);
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    (0..2).for_each(|end| self.release(end, usize::MAX));
                }
                // An end that is not there yet.
                Err(_) => {}
            }
        }
    }

    fn forward(&mut self, end: usize, message: &[u8]) {
        if message.first() != Some(&DATA) {
            return self.send(end, message);
        }
        let number = self.seen[end];
        self.seen[end] += 1;
        let later = if number % LATE == 2 { 20 } else { usize::from(number % SWAPPED == 1) };
        if later > 0 {
            self.counts.reordered[end].fetch_add(1, Ordering::Relaxed);
            self.keep(end, number + later, message);
        } else {
            self.send(end, message);
        }
        if number.is_multiple_of(REPEATED) {
            self.counts.repeated[end].fetch_add(1, Ordering::Relaxed);
            self.keep(end, number + 3, message);
        }
        self.release(end, number);
    }

    fn keep(&mut self, end: usize, until: usize, message: &[u8]) {
        self.counts.kept.fetch_add(1, Ordering::Relaxed);
        self.kept[end].push((until, message.to_vec()));
    }

    /// Sends what was kept until this message has come.
    fn release(&mut self, end: usize, number: usize) {
        let kept = std::mem::take(&mut self.kept[end]);
        let (due, rest): (Vec<_>, _) = kept.into_iter().partition(|(until, _)| *until <= number);
        self.kept[end] = rest;
        for (_, message) in due {
            self.send(end, &message);
            self.counts.kept.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn send(&self, from: usize, message: &[u8]) {
        self.socket.send_to(message, self.ends[1 - from]).unwrap();
    }
}

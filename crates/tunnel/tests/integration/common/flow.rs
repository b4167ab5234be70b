//! Numbered datagrams from one namespace to another: whether each arrives, unchanged and once.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::RcvBufForce;

use super::{Namespace, TIMEOUT, until};

/// Time between checks of a thread that waits for a datagram whether it is to end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Buffer of a receiver, in bytes: a thread that has to wait for its turn loses nothing.
const BUFFER: usize = 8 << 20;
/// So many more datagrams show that a flow goes on.
const PROGRESS: usize = 5;
/// Payloads are shorter, so that their packets fit the MTU of any tunnel.
const MAX_LENGTH: usize = 1_100;

/// State that the threads of a flow share.
#[derive(Default)]
struct Progress {
    sender_stops: AtomicBool,
    receiver_stops: AtomicBool,
    sent: AtomicUsize,
    arrived: AtomicUsize,
    damaged: AtomicUsize,
    /// Arrivals of each datagram, by number.
    copies: Mutex<Vec<usize>>,
}

/// Size and speed of a flow.
#[derive(Clone, Copy)]
pub(crate) struct Pace {
    /// Number of datagrams; `usize::MAX` until the flow is dropped, or [`Flow::settle`] is called.
    pub(crate) total: usize,
    /// Largest number of datagrams that have not arrived at any moment: fewer than the queues on the way hold, so that none has to be lost.
    pub(crate) under_way: usize,
    /// Time between two datagrams.
    pub(crate) interval: Duration,
}

/// A flow of UDP; dropping it ends it.
pub(crate) struct Flow {
    target: SocketAddr,
    progress: Arc<Progress>,
    pace: Pace,
    threads: Vec<JoinHandle<()>>,
}

impl Flow {
    pub(crate) fn start(from: &Namespace, to: &Namespace, address: IpAddr, pace: Pace) -> Self {
        let receiver = to.run(|| UdpSocket::bind((address, 0))).unwrap();
        receiver.set_read_timeout(Some(POLL_INTERVAL)).unwrap();
        setsockopt(&receiver, RcvBufForce, &BUFFER).unwrap();
        let target = receiver.local_addr().unwrap();
        let any: SocketAddr = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().unwrap();
        let sender = from.run(|| UdpSocket::bind(any)).unwrap();
        let progress = Arc::new(Progress::default());
        let (sending, receiving) = (Arc::clone(&progress), Arc::clone(&progress));
        let threads = vec![
            thread::spawn(move || send(&sender, target, pace, &sending)),
            thread::spawn(move || receive(&receiver, &receiving)),
        ];
        Self { target, progress, pace, threads }
    }

    /// Waits until more datagrams have arrived.
    pub(crate) fn goes_on(&self) {
        let wanted = self.progress.arrived.load(Ordering::Relaxed) + PROGRESS;
        until(&format!("datagrams to {} arrive", self.target), || {
            self.progress.arrived.load(Ordering::Relaxed) >= wanted
        });
    }

    /// Ends a flow without a total, and waits until all datagrams have arrived.
    pub(crate) fn settle(&self) {
        if self.pace.total == usize::MAX {
            self.progress.sender_stops.store(true, Ordering::Relaxed);
        }
        let (start, sender) = (Instant::now(), &self.threads[0]);
        while !sender.is_finished() || self.count() < self.progress.sent.load(Ordering::Relaxed) {
            assert!(start.elapsed() < TIMEOUT, "lost on the way to {}: {:?}", self.target, self.lost());
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Each datagram has arrived once.
    pub(crate) fn assert_each_once(self) {
        self.settle();
        let copies = self.progress.copies.lock().unwrap();
        let repeated: Vec<usize> = (0..copies.len()).filter(|number| copies[*number] > 1).collect();
        assert!(repeated.is_empty(), "arrived more than once at {}: {repeated:?}", self.target);
        assert_eq!(self.progress.damaged.load(Ordering::Relaxed), 0, "damaged on the way to {}", self.target);
    }

    fn count(&self) -> usize {
        self.progress.arrived.load(Ordering::Relaxed)
    }

    fn lost(&self) -> Vec<usize> {
        let copies = self.progress.copies.lock().unwrap();
        let sent = self.progress.sent.load(Ordering::Relaxed);
        (0..sent).filter(|number| copies.get(*number).is_none_or(|copies| *copies == 0)).collect()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.progress.sender_stops.store(true, Ordering::Relaxed);
        self.progress.receiver_stops.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// The number, and bytes that follow from it.
fn datagram(number: usize) -> Vec<u8> {
    let mut bytes = (number as u64).to_be_bytes().to_vec();
    bytes.extend((0..number % (MAX_LENGTH - 8)).map(|index| (number ^ index) as u8));
    bytes
}

fn send(socket: &UdpSocket, target: SocketAddr, pace: Pace, progress: &Progress) {
    let mut sent = 0;
    while sent < pace.total && !progress.sender_stops.load(Ordering::Relaxed) {
        if sent - progress.arrived.load(Ordering::Relaxed) >= pace.under_way {
            thread::sleep(Duration::from_micros(200));
            continue;
        }
        thread::sleep(pace.interval);
        // Counted first: it may arrive before this thread goes on.
        progress.sent.store(sent + 1, Ordering::Relaxed);
        socket.send_to(&datagram(sent), target).unwrap();
        sent += 1;
    }
}

fn receive(socket: &UdpSocket, progress: &Progress) {
    let mut buffer = [0; 2_048];
    while !progress.receiver_stops.load(Ordering::Relaxed) {
        let Ok(length) = socket.recv(&mut buffer) else { continue };
        let number =
            buffer[..length].first_chunk().map_or(usize::MAX, |bytes| u64::from_be_bytes(*bytes) as usize);
        if number >= progress.sent.load(Ordering::Relaxed) || datagram(number) != buffer[..length] {
            progress.damaged.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        let mut copies = progress.copies.lock().unwrap();
        if copies.len() <= number {
            copies.resize(number + 1, 0);
        }
        copies[number] += 1;
        if copies[number] == 1 {
            progress.arrived.fetch_add(1, Ordering::Relaxed);
        }
    }
}

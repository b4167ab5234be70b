//! Queue of frames for the relay, and the link that sends them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_wire::relay::Frame;
use tokio::sync::Notify;

use super::held::HeldInitiations;
use crate::core::{Class, Counters, Outbox, QueueLimits};

/// Limits of the queue for the relay: as in the relay itself.
const QUEUE: QueueLimits =
    QueueLimits { time: Duration::from_millis(100), bytes: 1 << 20, probe_bytes: 64 << 10 };
/// Bytes written at once: as many as the kernel holds unsent, so that probes do not wait behind more.
const BUDGET: usize = 16 << 10;
/// Allocated ports that wait to be taken.
const MAX_PORTS: usize = 1024;

/// A UDP port of the relay for this client and a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayPort {
    /// The peer.
    pub peer: PublicKey,
    /// Address and number of the port.
    pub address: SocketAddr,
    /// The key for requests that bind this client's address to it.
    pub token: [u8; 32],
}

/// Traffic since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkCounters {
    /// Bytes of datagrams given to the relay.
    pub sent_bytes: u64,
    /// Bytes of datagrams that came from it.
    pub received_bytes: u64,
    /// Datagrams that were dropped: there was no link, or they waited too long.
    pub dropped: u64,
}

/// Queue of datagrams for peers. Clones are one queue.
#[derive(Clone)]
pub struct LinkQueue(pub(super) Arc<Shared>);

pub(super) struct Shared {
    state: Mutex<State>,
    /// Numbers of links, which are never used again.
    links: AtomicU64,
    /// UDP ports that the relay has allocated, until they are taken.
    ports: Mutex<VecDeque<RelayPort>>,
    allocated: Notify,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    /// Whether an initiation is held: what is received is looked at only then.
    holds: AtomicBool,
}

#[derive(Default)]
struct State {
    outbox: Outbox,
    counters: Counters,
    /// The last one writes; those before it were replaced, and only receive.
    writers: Vec<Writer>,
    /// The link that writes once that one has ended.
    standby: Option<Writer>,
    initiations: HeldInitiations,
    unsent: u64,
}

/// A link as one that writes.
#[derive(Clone)]
pub(super) struct Writer {
    pub(super) link: u64,
    /// There is something to write.
    pub(super) waker: Arc<Notify>,
}

impl State {
    fn writer(&self) -> Option<&Writer> {
        self.writers.last()
    }

    /// The link that stands by writes from now on: what waits, and before that, that it is to receive as well.
    fn promote(&mut self) {
        if let Some(standby) = self.standby.take() {
            let _ = self.outbox.push_control(&Frame::Activate);
            standby.waker.notify_one();
            self.writers.push(standby);
        }
    }
}

impl Default for LinkQueue {
    fn default() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            links: AtomicU64::new(0),
            ports: Mutex::default(),
            allocated: Notify::new(),
            sent_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            holds: AtomicBool::new(false),
        }))
    }
}

impl LinkQueue {
    /// Queues a datagram for a peer, without waiting. It is dropped while there is no link, but for the newest handshake initiation, which
    /// waits for up to a second; late and excess ones are dropped oldest first, and probes overtake the rest.
    pub fn send(&self, peer: &PublicKey, is_probe: bool, payload: &[u8]) {
        let (frame, class) = match is_probe {
            true => (Frame::Probe { peer: peer.0, payload }, Class::Probe),
            false => (Frame::Datagram { peer: peer.0, payload }, Class::Datagram),
        };
        let mut bytes = Vec::new();
        let now = Instant::now();
        let mut state = self.0.lock();
        let State { outbox, counters, writers, unsent, initiations, .. } = &mut *state;
        let is_held = !is_probe && initiations.sent(now, peer, payload, !writers.is_empty());
        if is_held {
            self.0.holds.store(true, Ordering::Relaxed);
        }
        let Some(writer) = writers.last().filter(|_| frame.encode(&mut bytes).is_ok()) else {
            *unsent = unsent.saturating_add(u64::from(!is_held));
            return;
        };
        outbox.push(now, class, bytes.into(), &QUEUE, counters);
        let waker = Arc::clone(&writer.waker);
        drop(state);
        let length = u64::try_from(payload.len()).unwrap_or(u64::MAX);
        self.0.sent_bytes.fetch_add(length, Ordering::Relaxed);
        waker.notify_one();
    }

    /// Drops the handshake initiation to a peer that is held: WireGuard sends another one, by another path.
    pub fn forget_initiation(&self, peer: &PublicKey) {
        self.0.lock().initiations.forget(peer);
    }

    /// Asks for a UDP port through which the relay passes datagrams to a peer. It may not answer.
    pub fn ask_port(&self, peer: &PublicKey) {
        let mut state = self.0.lock();
        if let Some(waker) = state.writer().map(|writer| Arc::clone(&writer.waker))
            && state.outbox.push_control(&Frame::Allocate(peer.0))
        {
            drop(state);
            waker.notify_one();
        }
    }

    /// Waits for the next port that the relay has allocated. Nothing is lost if it is dropped while it waits.
    pub async fn allocated(&self) -> RelayPort {
        loop {
            let allocated = self.0.allocated.notified();
            if let Some(port) = lock(&self.0.ports).pop_front() {
                return port;
            }
            allocated.await;
        }
    }

    /// Traffic since the start.
    pub fn counters(&self) -> LinkCounters {
        let state = self.0.lock();
        let late: u64 = state.counters.drops().map(|(_, count)| count).sum();
        LinkCounters {
            sent_bytes: self.0.sent_bytes.load(Ordering::Relaxed),
            received_bytes: self.0.received_bytes.load(Ordering::Relaxed),
            dropped: state.unsent.saturating_add(late).saturating_add(state.initiations.lost()),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the next link.
    pub(super) fn next_link(&self) -> u64 {
        self.links.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes this link the writer, also of frames that wait: none has waited for longer than a datagram may.
    pub(super) fn start_writer(&self, writer: Writer) {
        writer.waker.notify_one();
        let mut state = self.lock();
        state.writers.push(writer);
        state.initiations.link_began(Instant::now());
    }

    /// This link writes as soon as the one that does has ended.
    pub(super) fn stand_by(&self, writer: Writer) {
        let mut state = self.lock();
        state.standby = Some(writer);
        if state.writers.is_empty() {
            state.promote();
        }
    }

    /// The link that stands by writes instead of the one that does.
    pub(super) fn promote(&self) {
        self.lock().promote();
    }

    /// A link has ended.
    pub(super) fn stop_writer(&self, link: u64) {
        let mut state = self.lock();
        state.standby.take_if(|standby| standby.link == link);
        let wrote = state.writer().is_some_and(|writer| writer.link == link);
        state.writers.retain(|writer| writer.link != link);
        if wrote {
            state.initiations.link_ended();
            state.promote();
            if state.writer().is_some() {
                state.initiations.link_began(Instant::now());
            }
        }
        match state.writer().map(|writer| Arc::clone(&writer.waker)) {
            // Perhaps one that was replaced, and still works.
            Some(waker) => waker.notify_one(),
            None => state.outbox.clear(),
        }
    }

    /// The relay says over a link that a peer has none.
    pub(super) fn peer_gone(&self, peer: &PublicKey) {
        self.lock().initiations.peer_gone(peer);
    }

    /// A datagram of a peer has come over a link. `is_first` is whether this node has the lower key. Whether WireGuard is to get it.
    pub(super) fn received(&self, peer: &PublicKey, payload: &[u8], is_first: bool) -> bool {
        let length = u64::try_from(payload.len()).unwrap_or(u64::MAX);
        self.received_bytes.fetch_add(length, Ordering::Relaxed);
        if !self.holds.load(Ordering::Relaxed) {
            return true;
        }
        let mut state = self.lock();
        let is_wanted = state.initiations.received(Instant::now(), peer, payload, is_first);
        self.holds.store(!state.initiations.is_empty(), Ordering::Relaxed);
        if let Some(writer) = state.writer().filter(|_| state.initiations.next_due().is_some()) {
            writer.waker.notify_one();
        }
        is_wanted
    }

    /// Time at which this link has a held initiation to send.
    pub(super) fn next_due(&self, link: u64) -> Option<Instant> {
        let state = self.lock();
        state.writer().filter(|writer| writer.link == link)?;
        state.initiations.next_due()
    }

    /// Whether this link writes.
    pub(super) fn is_writer(&self, link: u64) -> bool {
        self.lock().writer().is_some_and(|writer| writer.link == link)
    }

    /// Queues a port that the relay has allocated.
    pub(super) fn allocated(&self, port: RelayPort) {
        let mut ports = lock(&self.ports);
        if ports.len() < MAX_PORTS {
            ports.push_back(port);
            self.allocated.notify_one();
        }
    }

    /// The frames to write; `None` if another link writes.
    pub(super) fn take(&self, link: u64, out: &mut Vec<u8>) -> Option<()> {
        let mut state = self.lock();
        state.writer().filter(|writer| writer.link == link)?;
        let now = Instant::now();
        let State { outbox, counters, initiations, .. } = &mut *state;
        for (peer, message) in initiations.take_due(now) {
            let frame = Frame::Datagram { peer: peer.0, payload: &message };
            let mut bytes = Vec::new();
            if frame.encode(&mut bytes).is_ok() {
                outbox.push(now, Class::Datagram, bytes.into(), &QUEUE, counters);
            }
        }
        outbox.pop_into(now, &QUEUE, BUDGET, out, counters);
        Some(())
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(link: u64) -> Writer {
        Writer { link, waker: Arc::new(Notify::new()) }
    }

    fn writes(queue: &LinkQueue) -> Vec<u64> {
        (0..9).filter(|link| queue.0.is_writer(*link)).collect()
    }

    fn taken(queue: &LinkQueue, link: u64) -> Vec<u8> {
        let mut out = Vec::new();
        queue.0.take(link, &mut out);
        out
    }

    #[test]
    fn what_waits_goes_over_the_other_link_behind_its_activation() {
        let (queue, peer) = (LinkQueue::default(), PublicKey([1; 32]));
        queue.0.start_writer(writer(1));
        queue.0.stand_by(writer(2));
        queue.send(&peer, false, b"x");
        assert_eq!(taken(&queue, 2), b"", "it stands by");
        queue.0.stop_writer(1);
        let mut expected = Vec::new();
        Frame::Activate.encode(&mut expected).unwrap();
        Frame::Datagram { peer: peer.0, payload: b"x" }.encode(&mut expected).unwrap();
        assert_eq!(taken(&queue, 2), expected);
        queue.0.stop_writer(2);
        queue.send(&peer, false, b"y");
        assert_eq!(queue.counters().dropped, 1, "there is no link");
    }

    #[test]
    fn a_link_that_was_replaced_writes_again_if_the_newer_one_ends() {
        let queue = LinkQueue::default();
        queue.0.start_writer(writer(1));
        queue.0.start_writer(writer(2));
        assert_eq!(writes(&queue), [2]);
        queue.0.stop_writer(2);
        assert_eq!(writes(&queue), [1]);
        queue.0.start_writer(writer(3));
        queue.0.stop_writer(1);
        assert_eq!(writes(&queue), [3]);
        queue.0.stand_by(writer(4));
        queue.0.stop_writer(4);
        queue.0.promote();
        assert_eq!(writes(&queue), [3]);
    }

    #[test]
    fn a_handshake_initiation_waits_for_a_link_and_for_the_next_one() {
        let (queue, peer) = (LinkQueue::default(), PublicKey([1; 32]));
        let initiation = [&[1, 0, 0, 0][..], &[7; 144]].concat();
        let mut expected = Vec::new();
        Frame::Datagram { peer: peer.0, payload: &initiation }.encode(&mut expected).unwrap();
        queue.send(&peer, false, &initiation);
        queue.0.start_writer(writer(1));
        assert_eq!(taken(&queue, 1), expected);
        assert_eq!(taken(&queue, 1), b"");
        queue.0.stop_writer(1);
        queue.0.start_writer(writer(2));
        assert_eq!(taken(&queue, 2), expected, "the first link may not have passed it on");
        queue.0.received(&peer, &[2, 0, 0, 0], true);
        queue.0.stop_writer(2);
        queue.0.start_writer(writer(3));
        assert_eq!((taken(&queue, 3), queue.counters().dropped), (vec![], 0));
        queue.send(&peer, false, &initiation);
        queue.forget_initiation(&peer);
        queue.0.stop_writer(3);
        queue.0.start_writer(writer(4));
        assert_eq!(taken(&queue, 4), b"", "it takes another path");
    }
}

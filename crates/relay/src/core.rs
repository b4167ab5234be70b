//! Decisions of a relay, without I/O and without a clock: which link gets a datagram, what is dropped, which links end.
//!
//! The shell calls [`Relay::register`] when a client has proved its key, [`Relay::handle_frame`] for each frame,
//! [`Relay::poll_transmit`] for what is to be written, [`Relay::handle_timeout`] every second, and [`Relay::remove`] when a
//! connection has ended. [`Relay::take_ready`] says which links have something to write.

mod allocations;
mod codel;
mod counters;
mod links;
mod outbox;
mod registrations;
mod replicas;
mod stun;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_limits::{Rate, TokenBucket};
use fairlead_wire::relay::{AllocatedPort, ErrorReason, Frame, Notice, Registered, StunServer};

use registrations::{Receiver, Registration, Registrations};
use replicas::Replicas;

pub use allocations::{
    AllocationCounters, AllocationLimits, AllocationRefusal, Allocations, Output, Token, UdpDrop,
};
pub use counters::{Counters, DropReason};
pub use links::{Admission, LinkId, ReplicaLinkId, Transmit};
pub use outbox::QueueLimits;
pub(crate) use outbox::{Class, Outbox};
pub use replicas::{ReplicaRefusal, TooManyKeys};
pub use stun::{StunAnswer, StunCounters, StunDrop, StunResponder};

/// Pings and frames that are ignored, a second and at once. A client needs one every second.
const CONTROL_RATE: Rate = Rate::per_second(20, 100);
/// Probes a second and at once; a node sends at most 500 a second.
const PROBE_RATE: Rate = Rate::per_second(1000, 1000);
/// Notices of peers without a link, a second and at once.
const PEER_GONE_RATE: Rate = Rate::per_second(10, 64);
/// UDP ports that a client asks for, a second and at once. What is beyond that it asks for again.
const ALLOCATION_RATE: Rate = Rate::per_second(10, 32);
/// Shortest time between two notices to a client that it exceeds its rate.
const RATE_NOTICE_INTERVAL: Duration = Duration::from_secs(10);
/// Datagrams that a client may send at once where its rate is limited: two of the longest.
const MIN_BURST: u64 = 128 << 10;

/// Limits for the clients of a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most links of all clients together.
    pub links: usize,
    /// Limits of the queues for one client.
    pub queue: QueueLimits,
    /// Bytes of datagrams that one client may send in a second.
    pub client_rate: Option<u64>,
    /// Longest silence of a link before the relay closes it.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let time = Duration::from_millis(100);
        Self {
            links: 10_000,
            queue: QueueLimits { time, bytes: 1 << 20, probe_bytes: 64 << 10 },
            client_rate: None,
            idle: Duration::from_secs(60),
        }
    }
}

/// All links of a relay.
#[derive(Debug)]
pub struct Relay {
    limits: Limits,
    next: u64,
    links: HashMap<LinkId, Link>,
    keys: HashMap<PublicKey, Registrations>,
    ready: Vec<LinkId>,
    allocations: Vec<AllocationRequest>,
    replicas: Replicas,
    counters: Counters,
}

/// A client asks for a UDP port to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocationRequest {
    /// The client's link.
    pub link: LinkId,
    /// The client.
    pub client: Admission,
    /// The peer.
    pub peer: PublicKey,
    /// Reason why the client gets no port, if that is known already.
    pub refusal: Option<AllocationRefusal>,
}

#[derive(Debug)]
struct Link {
    admission: Admission,
    heard: Instant,
    outbox: Outbox,
    /// Whether the link is in [`Relay::ready`], or its shell is writing.
    is_ready: bool,
    closing: bool,
    control: TokenBucket,
    probes: TokenBucket,
    peer_gone: TokenBucket,
    allocations: TokenBucket,
    bytes: Option<TokenBucket>,
    rate_notice: Option<Instant>,
}

impl Relay {
    /// A relay without links.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            next: 0,
            links: HashMap::new(),
            keys: HashMap::new(),
            ready: Vec::new(),
            allocations: Vec::new(),
            replicas: Replicas::default(),
            counters: Counters::default(),
        }
    }

    /// Totals since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Number of links, with those that are ending.
    pub fn links(&self) -> usize {
        self.links.len()
    }

    /// Adds a link for a client that has proved its key. It is the one that receives from now on, after `answer`.
    ///
    /// # Errors
    /// There are too many links.
    pub fn register(
        &mut self,
        now: Instant,
        admission: Admission,
        answer: &Registered,
    ) -> Result<LinkId, ErrorReason> {
        self.add(now, admission, answer, false)
    }

    /// The same for a link that receives only while its key has no other one.
    ///
    /// # Errors
    /// There are too many links.
    pub fn register_standby(
        &mut self,
        now: Instant,
        admission: Admission,
        answer: &Registered,
    ) -> Result<LinkId, ErrorReason> {
        self.add(now, admission, answer, true)
    }

    fn add(
        &mut self,
        now: Instant,
        admission: Admission,
        answer: &Registered,
        is_standby: bool,
    ) -> Result<LinkId, ErrorReason> {
        if self.links.len() >= self.limits.links {
            return Err(ErrorReason::Full);
        }
        let id = LinkId(self.next);
        self.next = self.next.wrapping_add(1);
        let stamp = self.replicas.stamp(now);
        let registration = Registration { link: id, instance: admission.instance, stamp, is_standby };
        let key = admission.key;
        let outcome = self.keys.entry(key).or_default().add(now, registration);
        self.links.insert(id, Link::new(now, admission, self.limits.client_rate));
        self.counters.registrations = self.counters.registrations.wrapping_add(1);
        self.send(id, &Frame::Registered(*answer));
        self.tell_of_replicas(id);
        self.follow(outcome);
        self.replicas.announce(key);
        Ok(id)
    }

    fn activate(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.control.take(now, 1).is_err() {
            return;
        }
        let key = link.admission.key;
        let stamp = self.replicas.stamp(now);
        let outcome = self.keys.get_mut(&key).and_then(|links| links.activate(now, id, stamp));
        if let Some(outcome) = outcome {
            self.follow(outcome);
            self.replicas.announce(key);
        }
    }

    fn tell_of_duplicate(&mut self, id: LinkId) {
        self.send(id, &Frame::Notice(Notice::DuplicateKey));
    }

    /// Tells a client where the relay answers STUN requests.
    pub fn offer_stun(&mut self, id: LinkId, server: StunServer) {
        self.send(id, &Frame::StunServer(server));
    }

    /// Takes the requests for UDP ports since the last call; to be answered by [`Self::answer_allocation`]. Call it after each
    /// read of a client's frames.
    pub fn take_allocation_requests(&mut self) -> Vec<AllocationRequest> {
        std::mem::take(&mut self.allocations)
    }

    /// Tells a client of the port that it asked for.
    pub fn answer_allocation(&mut self, id: LinkId, port: AllocatedPort) {
        self.send(id, &Frame::Allocated(port));
    }

    fn ask_port(&mut self, now: Instant, id: LinkId, peer: PublicKey) {
        // A port here is of no use for a peer that sends to another replica.
        let receiver = self.keys.get(&peer).and_then(Registrations::receiver);
        let has_link = matches!(receiver, Some(Receiver::Link(_)));
        let Some(link) = self.links.get_mut(&id) else { return };
        let client = link.admission.clone();
        let refusal = if link.allocations.take(now, 1).is_err() {
            Some(AllocationRefusal::RateLimited)
        } else if !has_link || client.key == peer {
            Some(AllocationRefusal::NotRegistered)
        } else {
            None
        };
        self.allocations.push(AllocationRequest { link: id, client, peer, refusal });
    }

    /// Handles one frame of a client.
    pub fn handle_frame(&mut self, now: Instant, id: LinkId, frame: &Frame<'_>) {
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.closing) else { return };
        link.heard = now;
        match frame {
            Frame::Activate => self.activate(now, id),
            Frame::Allocate(peer) => self.ask_port(now, id, PublicKey(*peer)),
            Frame::Datagram { peer, payload } => self.forward(now, id, *peer, payload, Class::Datagram),
            Frame::Probe { peer, payload } => self.forward(now, id, *peer, payload, Class::Probe),
            Frame::Ping(data) => {
                if link.control.take(now, 1).is_ok() {
                    self.send(id, &Frame::Pong(*data));
                }
            }
            Frame::Error { .. } => self.close(id, ErrorReason::Other(0)),
            Frame::Notice(_) | Frame::Pong(_) | Frame::Unknown(_) => {}
            Frame::Allocated(_)
            | Frame::Draining { .. }
            | Frame::Hello(_)
            | Frame::PeerGone(_)
            | Frame::Register(_)
            | Frame::Registered(_)
            | Frame::Replicas(_)
            | Frame::StunServer(_) => self.close(id, ErrorReason::UnexpectedFrame),
        }
    }

    fn forward(&mut self, now: Instant, id: LinkId, peer: [u8; 32], payload: &[u8], class: Class) {
        let Some(sender) = self.links.get_mut(&id) else { return };
        if !sender.may_send(now, class, payload.len()) {
            self.counters.count_drop(DropReason::RateLimited);
            if sender.is_to_be_told_of_its_rate(now) {
                self.send(id, &Frame::Notice(Notice::RateLimited));
            }
            return;
        }
        let source = sender.admission.key.0;
        match self.keys.get(&PublicKey(peer)).and_then(Registrations::receiver) {
            Some(Receiver::Link(to)) => self.deliver(now, to, class, source, payload),
            Some(Receiver::Replica(to)) => {
                let limits = &self.limits.queue;
                self.replicas.forward(now, to, class, (source, peer), payload, limits);
            }
            None => {
                self.counters.count_drop(DropReason::NotRegistered);
                if sender.peer_gone.take(now, 1).is_ok() {
                    self.send(id, &Frame::PeerGone(peer));
                }
            }
        }
    }

    /// Queues a datagram of the client with the key `peer` for the client of a link.
    fn deliver(&mut self, now: Instant, to: LinkId, class: Class, peer: [u8; 32], payload: &[u8]) {
        let frame = match class {
            Class::Datagram => Frame::Datagram { peer, payload },
            Class::Probe => Frame::Probe { peer, payload },
        };
        let mut encoded = Vec::new();
        // What was read is not too long to be written.
        if let (Some(link), Ok(())) = (self.links.get_mut(&to), frame.encode(&mut encoded)) {
            self.counters.count_datagram(payload.len());
            link.outbox.push(now, class, encoded.into(), &self.limits.queue, &mut self.counters);
            self.wake(to);
        }
    }

    fn send(&mut self, id: LinkId, frame: &Frame<'_>) {
        if self.links.get_mut(&id).is_some_and(|link| link.outbox.push_control(frame)) {
            self.wake(id);
        }
    }

    fn wake(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id).filter(|link| !link.is_ready) {
            link.is_ready = true;
            self.ready.push(id);
        }
    }

    /// Links that have something to write since [`Self::poll_transmit`] answered [`Transmit::Nothing`].
    pub fn take_ready(&mut self) -> Vec<LinkId> {
        std::mem::take(&mut self.ready)
    }

    /// Appends frames to `out` until it has about `budget` bytes, datagrams after all others.
    pub fn poll_transmit(&mut self, now: Instant, id: LinkId, budget: usize, out: &mut Vec<u8>) -> Transmit {
        let Some(link) = self.links.get_mut(&id) else { return Transmit::Close };
        link.outbox.pop_into(now, &self.limits.queue, budget, out, &mut self.counters);
        if !out.is_empty() {
            return Transmit::Frames;
        }
        link.is_ready = !link.outbox.is_empty();
        if link.closing { Transmit::Close } else { Transmit::Nothing }
    }

    /// Ends what has been silent or draining for too long. Call it every second.
    pub fn handle_timeout(&mut self, now: Instant) {
        let drained: Vec<LinkId> = self.keys.values().flat_map(|links| links.drained(now)).collect();
        for id in drained {
            self.close(id, ErrorReason::Superseded);
        }
        let idle = self.limits.idle;
        let is_idle = |link: &Link| !link.closing && now.saturating_duration_since(link.heard) >= idle;
        for id in self.ids(is_idle) {
            self.close(id, ErrorReason::IdleTimeout);
        }
        self.keys.retain(|_, links| !links.is_obsolete(now));
    }

    /// Ends the links of clients that are not allowed any more.
    pub fn retain(&mut self, is_allowed: impl Fn(&Admission) -> bool) {
        for id in self.ids(|link| !link.closing && !is_allowed(&link.admission)) {
            self.close(id, ErrorReason::Revoked);
        }
    }

    /// Tells all clients that the relay ends after `close_after`. They are to connect again at different moments of the time
    /// before.
    pub fn drain(&mut self, close_after: Duration) {
        let ids = self.ids(|link| !link.closing);
        let milliseconds = |duration: Duration| u32::try_from(duration.as_millis()).unwrap_or(u32::MAX);
        let count = u32::try_from(ids.len()).unwrap_or(u32::MAX).max(1);
        for (number, id) in (0..count).zip(ids) {
            let reconnect_after =
                close_after.saturating_mul(number).checked_div(count).unwrap_or_default() / 2;
            let reconnect_after = milliseconds(reconnect_after);
            let close_after = milliseconds(close_after);
            self.send(id, &Frame::Draining { reconnect_after, close_after });
        }
    }

    /// Ends a link; the client is told the reason.
    pub fn close(&mut self, id: LinkId, reason: ErrorReason) {
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.closing) else { return };
        link.closing = true;
        link.outbox.clear();
        let key = link.admission.key;
        self.unregister(key, id);
        self.send(id, &Frame::Error { reason, message: &reason.to_string() });
        // Also where there is no room for the reason.
        self.wake(id);
    }

    /// Whether a link is to end as soon as its client has been told.
    pub fn is_closing(&self, id: LinkId) -> bool {
        self.links.get(&id).is_none_or(|link| link.closing)
    }

    /// Forgets a link whose connection has ended.
    pub fn remove(&mut self, id: LinkId) {
        let Some(link) = self.links.remove(&id) else { return };
        self.unregister(link.admission.key, id);
        self.ready.retain(|ready| *ready != id);
    }

    fn unregister(&mut self, key: PublicKey, id: LinkId) {
        let Some(links) = self.keys.get_mut(&key) else { return };
        let before = links.local().copied();
        links.remove(id);
        if links.local().copied() != before {
            self.replicas.announce(key);
        }
    }

    fn ids(&self, choose: impl Fn(&Link) -> bool) -> Vec<LinkId> {
        self.links.iter().filter(|(_, link)| choose(link)).map(|(id, _)| *id).collect()
    }
}

impl Link {
    fn new(now: Instant, admission: Admission, client_rate: Option<u64>) -> Self {
        let bucket = |rate| TokenBucket::full(rate, now);
        Self {
            admission,
            heard: now,
            outbox: Outbox::default(),
            is_ready: false,
            closing: false,
            control: bucket(CONTROL_RATE),
            probes: bucket(PROBE_RATE),
            peer_gone: bucket(PEER_GONE_RATE),
            allocations: bucket(ALLOCATION_RATE),
            bytes: client_rate.map(|rate| bucket(Rate::per_second(rate, (rate / 5).max(MIN_BURST)))),
            rate_notice: None,
        }
    }

    fn is_to_be_told_of_its_rate(&mut self, now: Instant) -> bool {
        let due = self.rate_notice.is_none_or(|at| now.saturating_duration_since(at) >= RATE_NOTICE_INTERVAL);
        if due {
            self.rate_notice = Some(now);
        }
        due
    }

    fn may_send(&mut self, now: Instant, class: Class, length: usize) -> bool {
        let bytes = u64::try_from(length).unwrap_or(u64::MAX);
        let within_rate = self.bytes.as_mut().is_none_or(|bucket| bucket.take(now, bytes).is_ok());
        within_rate && (class == Class::Datagram || self.probes.take(now, 1).is_ok())
    }
}

#[cfg(test)]
mod tests;

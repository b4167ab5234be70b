//! Other replicas of the relay: which client is at which one, and what waits for each.
//!
//! Every replica has connections to all others. Over each it announces the keys of its own clients and passes on datagrams of its
//! own clients for those of the other end. What came from a replica never goes to another one: one hop at most, so there are no
//! loops. A connection that ends takes its announcements with it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_wire::relay::replica::{ReplicaFrame, ReplicaRegistration};
use fairlead_wire::relay::{ErrorReason, Frame};

use super::links::{LinkId, ReplicaLinkId, Stamp, Transmit};
use super::registrations::{Outcome, Registration, Registrations};
use super::{Class, Counters, DropReason, Outbox, QueueLimits, Relay};

/// Connections to other replicas: each of five has two to each other one, for each address family.
const MAX_LINKS: usize = 64;
/// Keys that a replica may announce: more than a relay has clients.
const MAX_ANNOUNCED: usize = 1 << 17;
/// Limits of the queue for a replica, as a multiple of those for a client.
const QUEUE_FACTOR: usize = 4;

/// Reason why a connection to a replica is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplicaRefusal {
    /// There are too many.
    #[error("there are {MAX_LINKS} connections to other replicas already")]
    Full,
    /// The other replica is this one.
    #[error("it is this replica itself")]
    Itself,
}

/// A replica announces more keys than any has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the replica announces more than {MAX_ANNOUNCED} keys")]
pub struct TooManyKeys;

/// All connections to other replicas.
#[derive(Debug, Default)]
pub(super) struct Replicas {
    own: [u8; 16],
    /// The time since 1970 at a moment. Without it registrations are only counted.
    epoch: Option<(Instant, Duration)>,
    /// The highest clock of all registrations that were seen.
    clock: u64,
    next: u64,
    links: BTreeMap<ReplicaLinkId, ReplicaLink>,
    ready: Vec<ReplicaLinkId>,
    counters: Counters,
    /// Number of other replicas that accept stand-by links, as clients were last told.
    told: u8,
}

#[derive(Debug)]
struct ReplicaLink {
    replica: [u8; 16],
    /// Whether the other end knows of stand-by links.
    standby_links: bool,
    /// Keys that the other end has announced.
    announced: BTreeSet<PublicKey>,
    /// Keys whose state here the other end is to be told.
    pending: BTreeSet<PublicKey>,
    outbox: Outbox,
    /// Whether the link is in [`Replicas::ready`], or its shell is writing.
    is_ready: bool,
}

impl Replicas {
    /// The stamp of a registration now: after all that were seen, and after those of before where clocks are right, which counts
    /// when replicas could not reach each other.
    pub(super) fn stamp(&mut self, now: Instant) -> Stamp {
        let since_1970 = self.epoch.map(|(at, then)| then.saturating_add(now.saturating_duration_since(at)));
        let milliseconds = since_1970.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        self.clock = self.clock.saturating_add(1).max(milliseconds);
        Stamp { clock: self.clock, replica: self.own }
    }

    /// The state of this key here has changed.
    pub(super) fn announce(&mut self, key: PublicKey) {
        for link in self.links.values_mut() {
            link.pending.insert(key);
        }
        let ids: Vec<ReplicaLinkId> = self.links.keys().copied().collect();
        ids.into_iter().for_each(|id| self.wake(id));
    }

    /// Queues a datagram for another replica.
    pub(super) fn forward(
        &mut self,
        now: Instant,
        id: ReplicaLinkId,
        class: Class,
        keys: ([u8; 32], [u8; 32]),
        payload: &[u8],
        limits: &QueueLimits,
    ) {
        let (from, to) = keys;
        let frame = match class {
            Class::Datagram => ReplicaFrame::Datagram { from, to, payload },
            Class::Probe => ReplicaFrame::Probe { from, to, payload },
        };
        let mut encoded = Vec::new();
        // What was read is not too long to be written.
        if let (Some(link), Ok(())) = (self.links.get_mut(&id), frame.encode(&mut encoded)) {
            self.counters.count_datagram(payload.len());
            link.outbox.push(now, class, encoded.into(), &of_replica(limits), &mut self.counters);
            self.wake(id);
        }
    }

    fn wake(&mut self, id: ReplicaLinkId) {
        if let Some(link) = self.links.get_mut(&id).filter(|link| !link.is_ready) {
            link.is_ready = true;
            self.ready.push(id);
        }
    }
}

/// Bounds of the queues to another replica.
fn of_replica(limits: &QueueLimits) -> QueueLimits {
    QueueLimits {
        time: limits.time,
        bytes: limits.bytes.saturating_mul(QUEUE_FACTOR),
        probe_bytes: limits.probe_bytes.saturating_mul(QUEUE_FACTOR),
    }
}

impl Relay {
    /// Gives a relay the ID that other replicas know it by, and the time since 1970 at this moment.
    #[must_use]
    pub fn identified(mut self, replica: [u8; 16], now: Instant, since_1970: Duration) -> Self {
        self.replicas.own = replica;
        self.replicas.epoch = Some((now, since_1970));
        self
    }

    /// Adds a connection to another replica, which is told of all clients: also of stand-by links if it knows of them.
    ///
    /// # Errors
    /// See [`ReplicaRefusal`].
    pub fn add_replica(
        &mut self,
        replica: [u8; 16],
        standby_links: bool,
    ) -> Result<ReplicaLinkId, ReplicaRefusal> {
        if replica == self.replicas.own {
            return Err(ReplicaRefusal::Itself);
        }
        if self.replicas.links.len() >= MAX_LINKS {
            return Err(ReplicaRefusal::Full);
        }
        let id = ReplicaLinkId(self.replicas.next);
        self.replicas.next = self.replicas.next.wrapping_add(1);
        let here = self.keys.iter().filter(|(_, links)| links.local().is_some()).map(|(key, _)| *key);
        let link = ReplicaLink {
            replica,
            standby_links,
            announced: BTreeSet::new(),
            pending: here.collect(),
            outbox: Outbox::default(),
            is_ready: false,
        };
        self.replicas.links.insert(id, link);
        self.replicas.wake(id);
        self.count_replicas();
        Ok(id)
    }

    /// Handles one frame of another replica.
    ///
    /// # Errors
    /// The connection is to end.
    pub fn handle_replica_frame(
        &mut self,
        now: Instant,
        id: ReplicaLinkId,
        frame: &ReplicaFrame<'_>,
    ) -> Result<(), TooManyKeys> {
        let Some(link) = self.replicas.links.get_mut(&id) else { return Ok(()) };
        match frame {
            ReplicaFrame::Datagram { from, to, payload } => {
                self.deliver_forwarded(now, Class::Datagram, *from, *to, payload);
            }
            ReplicaFrame::Gone(key) => {
                let key = PublicKey(*key);
                if link.announced.remove(&key) {
                    self.withdraw(id, key);
                }
            }
            ReplicaFrame::Probe { from, to, payload } => {
                self.deliver_forwarded(now, Class::Probe, *from, *to, payload);
            }
            ReplicaFrame::Registered(registration) => {
                let key = PublicKey(registration.key);
                if !link.announced.contains(&key) && link.announced.len() >= MAX_ANNOUNCED {
                    return Err(TooManyKeys);
                }
                link.announced.insert(key);
                let stamp = Stamp { clock: registration.stamp, replica: link.replica };
                self.replicas.clock = self.replicas.clock.max(stamp.clock);
                let ReplicaRegistration { instance, is_standby, .. } = *registration;
                let remote = Registration { link: id, instance, stamp, is_standby };
                let outcome = self.keys.entry(key).or_default().announce(now, remote);
                self.follow(outcome);
            }
            ReplicaFrame::Hello(_) | ReplicaFrame::Ping | ReplicaFrame::Unknown(_) => {}
        }
        Ok(())
    }

    /// To a client of this replica and to no other one, which could send it back.
    fn deliver_forwarded(
        &mut self,
        now: Instant,
        class: Class,
        from: [u8; 32],
        to: [u8; 32],
        payload: &[u8],
    ) {
        let link = self.keys.get(&PublicKey(to)).and_then(Registrations::local).map(|here| here.link);
        match link {
            Some(link) => self.deliver(now, link, class, from, payload),
            None => self.replicas.counters.count_drop(DropReason::NotRegistered),
        }
    }

    /// Does what a registration brings about for other links of its key.
    pub(super) fn follow(&mut self, outcome: Outcome) {
        self.counters.key_changes = self.counters.key_changes.wrapping_add(outcome.changed.into());
        for link in outcome.duplicates {
            self.tell_of_duplicate(link);
        }
        if let Some(ended) = outcome.ended {
            self.close(ended, ErrorReason::Superseded);
        }
    }

    fn withdraw(&mut self, id: ReplicaLinkId, key: PublicKey) {
        if let Some(links) = self.keys.get_mut(&key) {
            links.withdraw(id);
        }
    }

    /// Connections to other replicas that have something to write since [`Self::poll_replica`] answered [`Transmit::Nothing`].
    pub fn take_ready_replicas(&mut self) -> Vec<ReplicaLinkId> {
        std::mem::take(&mut self.replicas.ready)
    }

    /// Appends frames to `out` until it has about `budget` bytes: announcements, then probes, then other datagrams.
    pub fn poll_replica(
        &mut self,
        now: Instant,
        id: ReplicaLinkId,
        budget: usize,
        out: &mut Vec<u8>,
    ) -> Transmit {
        let Replicas { links, counters, .. } = &mut self.replicas;
        let Some(link) = links.get_mut(&id) else { return Transmit::Close };
        while out.len() < budget
            && let Some(key) = link.pending.pop_first()
        {
            let here = self.keys.get(&key).and_then(Registrations::local);
            // For a replica that does not know of them, it would be the newest.
            let here = here.filter(|here| !here.is_standby || link.standby_links);
            let frame = here.map_or(ReplicaFrame::Gone(key.0), |here| {
                ReplicaFrame::Registered(ReplicaRegistration {
                    key: key.0,
                    instance: here.instance,
                    stamp: here.stamp.clock,
                    is_standby: here.is_standby,
                })
            });
            // Announcements have a fixed length.
            let _ = frame.encode(out);
        }
        link.outbox.pop_into(now, &of_replica(&self.limits.queue), budget, out, counters);
        if !out.is_empty() {
            return Transmit::Frames;
        }
        link.is_ready = !link.outbox.is_empty();
        Transmit::Nothing
    }

    /// Forgets a connection to another replica that has ended, and what was announced over it.
    pub fn remove_replica(&mut self, id: ReplicaLinkId) {
        let Some(link) = self.replicas.links.remove(&id) else { return };
        self.replicas.ready.retain(|ready| *ready != id);
        for key in link.announced {
            self.withdraw(id, key);
        }
        self.count_replicas();
    }

    /// Tells all clients how many other replicas accept stand-by links, if that has changed.
    fn count_replicas(&mut self) {
        let with_standby = self.replicas.links.values().filter(|link| link.standby_links);
        let others = with_standby.map(|link| link.replica).collect::<BTreeSet<_>>().len();
        let others = u8::try_from(others).unwrap_or(u8::MAX);
        if std::mem::replace(&mut self.replicas.told, others) != others {
            let ids = self.ids(|link| !link.closing);
            ids.into_iter().for_each(|id| self.send(id, &Frame::Replicas(others)));
        }
    }

    /// Tells a new client the same, if there are any.
    pub(super) fn tell_of_replicas(&mut self, id: LinkId) {
        if self.replicas.told > 0 {
            self.send(id, &Frame::Replicas(self.replicas.told));
        }
    }

    /// Datagrams that were passed on to other replicas, and those of other replicas or for them that were not passed on.
    pub fn forwarding(&self) -> &Counters {
        &self.replicas.counters
    }

    /// Number of other replicas that this one is connected to.
    pub fn replicas(&self) -> usize {
        self.replicas.links.values().map(|link| link.replica).collect::<BTreeSet<_>>().len()
    }
}

#[cfg(test)]
mod tests;

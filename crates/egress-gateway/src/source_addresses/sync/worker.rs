//! The task that copies connections: reads notifications of the kernel, and says and does what [`Outgoing`] and [`Incoming`] decide.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_netlink::Result;
use fairlead_netlink::conntrack::{ConnectionEvent, ConnectionEvents, ConnectionTable, Flow, TableChange};
use fairlead_source_addresses::copies::incoming::{Addresses, Facts, Incoming, Refused};
use fairlead_source_addresses::copies::outgoing::{BATCH, Outgoing};
use fairlead_source_addresses::copies::{Slot, Slots, copied};
use fairlead_wire::egress_peers::to_member;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::kernel;
use super::metrics::SyncMetrics;
use crate::source_addresses::peers::{FLOWS, Heard, News, Peers};

/// Time in which changes are gathered before they are sent.
pub const INTERVAL: Duration = Duration::from_millis(80);
/// Interval at which all connections are compared with the kernel, and copied.
const FULL_COPY: Duration = Duration::from_secs(60);
/// The least time between two full copies of a slot that a member asks for.
const AGAIN: Duration = Duration::from_secs(2);
/// Messages of full copies to a member in an interval: 1,024 connections, so 12,800 in a second.
const COPY_MESSAGES: usize = 4;
// A member that is sent more than it reads would read changes and heartbeats late.
const _: () = assert!((COPY_MESSAGES * BATCH) as u128 * 1000 <= FLOWS as u128 * INTERVAL.as_millis() * 3 / 4);
/// Messages of changes in an interval; more changes wait for the next. Full copies leave as much room in a member's queue.
const RESERVED: usize = 16;
/// Messages that are taken at once.
const HEARD: usize = 64;
/// Notifications that are read in an interval; more wait in the kernel, which reports what it loses.
const EVENTS: usize = 20_000;
/// The least time between two comparisons after notifications were lost, also as a multiple of what the last one took.
const COMPARE: Duration = Duration::from_secs(1);
const COMPARE_PART: u32 = 10;
/// Connections that are copied, at most, in each direction. One takes about 250 bytes here.
const LIMIT: usize = 262_144;
/// Pause after the kernel has failed.
const RETRY: Duration = Duration::from_millis(500);

/// Copies connections.
pub struct Copier {
    peers: Arc<Peers>,
    heard: mpsc::Receiver<Heard>,
    slots: watch::Receiver<Arc<Slots>>,
    addresses: Arc<dyn Addresses>,
    metrics: SyncMetrics,
    complete: watch::Sender<BTreeSet<u32>>,
}

impl Copier {
    /// Copies the connections of the slots, among these peers.
    pub fn new(
        peers: Arc<Peers>,
        heard: mpsc::Receiver<Heard>,
        slots: watch::Receiver<Arc<Slots>>,
        addresses: Arc<dyn Addresses>,
        metrics: SyncMetrics,
    ) -> Self {
        Self { peers, heard, slots, addresses, metrics, complete: watch::Sender::default() }
    }

    /// Slots of which this gateway has the holder's connections: a full copy has arrived from the gateway that holds it last.
    pub fn complete(&self) -> watch::Receiver<BTreeSet<u32>> {
        self.complete.subscribe()
    }

    /// Runs in the network namespace of the calling thread until it is stopped. While there is no slot, it does nothing. Copies of slots
    /// that there are at the end stay in the kernel, for the next process.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut worker = None;
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let slots = Arc::clone(&self.slots.borrow_and_update());
            let is_idle = slots.is_empty();
            self.peers.listen(!is_idle);
            if is_idle && worker.is_some() {
                self.end(worker.take(), slots).await;
            }
            if stop.is_cancelled() {
                return;
            }
            if is_idle {
                self.idle(&stop).await;
                continue;
            }
            let mut heard = Vec::new();
            let is_tick = tokio::select! {
                () = stop.cancelled() => continue,
                _ = ticks.tick() => true,
                count = self.heard.recv_many(&mut heard, HEARD) => count == 0,
                changed = self.slots.changed() => {
                    if changed.is_err() {
                        // The program is ending.
                        stop.cancelled().await;
                    }
                    false
                }
            };
            let now = Instant::now();
            let slots = Arc::clone(&self.slots.borrow_and_update());
            let connections = self.peers.connections().borrow().clone();
            let step = Step { slots, connections, heard, is_tick, now };
            worker = self.step(worker, step).await;
        }
    }

    /// Waits for a slot. What is heard meanwhile is dropped, and its senders are told.
    async fn idle(&mut self, stop: &CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            changed = self.slots.changed() => if changed.is_err() {
                stop.cancelled().await;
            },
            heard = self.heard.recv() => if heard.is_none() {
                stop.cancelled().await;
            },
        }
    }

    /// There is no slot any more.
    async fn end(&self, worker: Option<Worker>, slots: Arc<Slots>) {
        let connections = BTreeMap::new();
        let heard = Vec::new();
        let now = Instant::now();
        let step = Step { slots, connections, heard, is_tick: false, now };
        drop(self.step(worker, step).await);
        self.metrics.lag(Duration::ZERO);
    }

    async fn step(&self, worker: Option<Worker>, step: Step) -> Option<Worker> {
        let peers = Arc::clone(&self.peers);
        let addresses = Arc::clone(&self.addresses);
        let metrics = self.metrics.clone();
        let work = move || {
            let mut worker = match worker {
                Some(worker) => worker,
                None => Worker::open(peers, addresses, metrics)?,
            };
            worker.step(step).map(|()| worker)
        };
        // A panic inside ends the program, as one here would.
        let worked = match tokio::task::spawn_blocking(work).await {
            Ok(worked) => worked,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        match worked {
            Ok(worker) => {
                let complete = worker.complete();
                self.complete.send_if_modified(|known| {
                    let is_new = *known != complete;
                    *known = complete;
                    is_new
                });
                Some(worker)
            }
            Err(error) => {
                tracing::error!(%error, "cannot copy connections; beginning again");
                self.complete.send_replace(BTreeSet::new());
                tokio::time::sleep(RETRY).await;
                None
            }
        }
    }
}

/// Events that the blocking part works on together.
struct Step {
    slots: Arc<Slots>,
    /// Number of the connection to each member.
    connections: BTreeMap<String, u64>,
    heard: Vec<Heard>,
    /// Whether it is time to send.
    is_tick: bool,
    now: Instant,
}

/// State of the blocking part.
struct Worker {
    peers: Arc<Peers>,
    addresses: Arc<dyn Addresses>,
    metrics: SyncMetrics,
    table: ConnectionTable,
    events: ConnectionEvents,
    outgoing: Outgoing,
    incoming: Incoming,
    slots: Arc<Slots>,
    connections: BTreeMap<String, u64>,
    copied: Instant,
    /// Whether notifications were lost since the last comparison, and when the next may be.
    is_missed: bool,
    compare_at: Instant,
    /// Time when a member last got a full copy because it asked for it, and whether it has asked again since.
    asked: BTreeMap<(String, u32), (Instant, bool)>,
    /// Time when the holder of a slot was last asked for a full copy.
    wanted: BTreeMap<u32, Instant>,
    /// Whether `events` has more than the end of connections, which is all that a gateway without a slot needs.
    has_all_events: bool,
}

impl Worker {
    fn open(peers: Arc<Peers>, addresses: Arc<dyn Addresses>, metrics: SyncMetrics) -> Result<Self> {
        // Also of connections that begin while no program runs. Where the pod may not set it, full copies show what became of these.
        let _ = std::fs::write("/proc/sys/net/netfilter/nf_conntrack_events", "1");
        Ok(Self {
            peers,
            addresses,
            metrics,
            table: ConnectionTable::open()?,
            events: ConnectionEvents::open_destroyed()?,
            outgoing: Outgoing::new(LIMIT),
            incoming: Incoming::new(LIMIT),
            slots: Arc::default(),
            connections: BTreeMap::new(),
            copied: Instant::now(),
            is_missed: false,
            compare_at: Instant::now(),
            asked: BTreeMap::new(),
            wanted: BTreeMap::new(),
            has_all_events: false,
        })
    }

    fn complete(&self) -> BTreeSet<u32> {
        self.slots.keys().copied().filter(|slot| self.incoming.completed(*slot).is_some()).collect()
    }

    fn step(&mut self, step: Step) -> Result<()> {
        let Step { slots, connections, heard, is_tick, now } = step;
        self.set_slots(slots)?;
        self.set_connections(connections);
        for heard in heard {
            self.hear(heard, now)?;
        }
        if is_tick {
            self.read_events(now)?;
            if now.saturating_duration_since(self.copied) >= FULL_COPY {
                self.copied = now;
                self.compare()?;
                self.outgoing.copy_all();
            }
            self.send(now);
            self.want_copies(now);
        }
        self.metrics.dropped.inc_by(self.peers.take_lost());
        self.metrics.set_copies(self.incoming.flows());
        self.metrics.held.set(i64::try_from(self.outgoing.flows()).unwrap_or(i64::MAX));
        Ok(())
    }

    fn set_slots(&mut self, slots: Arc<Slots>) -> Result<()> {
        if self.slots == slots {
            return Ok(());
        }
        let is_holder = slots.values().any(|slot| slot.is_held);
        if is_holder != self.has_all_events {
            // Before the connections are listed, so that nothing is missed between.
            self.events =
                if is_holder { ConnectionEvents::open()? } else { ConnectionEvents::open_destroyed()? };
            self.has_all_events = is_holder;
        }
        let former = std::mem::replace(&mut self.slots, Arc::clone(&slots));
        self.delete_former(&former)?;
        for slot in former.keys().filter(|slot| !slots.contains_key(*slot)) {
            self.outgoing.release(*slot);
            self.incoming.forget(*slot);
        }
        let mut is_new = BTreeSet::new();
        for (number, slot) in slots.iter() {
            let was = former.get(number);
            if slot.is_held {
                if self.outgoing.hold(*number, slot.addresses.clone(), slot.term) {
                    self.incoming.forget(*number);
                    is_new.insert(*number);
                }
            } else if was.is_none_or(|was| was.is_held || was.addresses != slot.addresses) {
                self.outgoing.release(*number);
                self.incoming.forget(*number);
                is_new.insert(*number);
            }
        }
        let flows = self.flows(&is_new)?;
        for (number, slot) in slots.iter().filter(|(number, _)| is_new.contains(*number)) {
            if slot.is_held {
                self.outgoing.fill(*number, &flows);
            } else {
                let of_slot = flows.iter().filter(|flow| slot.addresses.contains(&flow.reply.destination));
                self.incoming.adopt(*number, of_slot);
            }
        }
        Ok(())
    }

    /// Deletes connections with addresses that the Egress has no longer, copies and own ones: their packets leave no more, and no other
    /// gateway would say that they have ended.
    fn delete_former(&mut self, former: &Slots) -> Result<()> {
        let is_there = |address: &IpAddr| self.slots.values().any(|slot| slot.addresses.contains(address));
        let all = former.values().flat_map(|slot| &slot.addresses);
        let gone: BTreeSet<IpAddr> = all.filter(|address| !is_there(address)).copied().collect();
        let flows = self.table.translated_to(&gone)?;
        let changes: Vec<TableChange> =
            flows.iter().map(|flow| TableChange::DeleteReply(flow.reply)).collect();
        let deleted = self.table.apply(&changes)?.into_iter().filter(Result::is_ok).count();
        self.metrics.deleted.inc_by(deleted as u64);
        Ok(())
    }

    fn set_connections(&mut self, connections: BTreeMap<String, u64>) {
        for (member, number) in &connections {
            if self.connections.get(member) != Some(number) {
                self.outgoing.connected(member);
            }
        }
        for member in self.connections.keys().filter(|member| !connections.contains_key(*member)) {
            self.outgoing.disconnected(member);
            self.asked.retain(|(of, _), _| of != member);
        }
        self.connections = connections;
    }

    fn hear(&mut self, heard: Heard, now: Instant) -> Result<()> {
        let Heard { from, news } = heard;
        let kind = match news {
            News::Flows(kind) => kind,
            News::Missed(slot) => {
                self.ask(from, slot, now);
                return Ok(());
            }
        };
        if self.peers.take_dropped(&from) {
            self.incoming.dropped(&from);
        }
        let facts = Facts { slots: &self.slots, addresses: &*self.addresses };
        let mut refused = Vec::new();
        let changes = self.incoming.receive(&from, &kind, now, facts, &mut refused);
        let applied = kernel::apply(&mut self.table, &changes, &self.slots)?;
        for (slot, key, reason) in &applied.failed {
            tracing::debug!(?key, reason, "the kernel did not take the copy of a connection");
            self.incoming.lost(*slot, key);
            refused.push(Refused::Kernel);
        }
        self.metrics.injected.inc_by(applied.set as u64);
        self.metrics.deleted.inc_by(applied.deleted as u64);
        self.metrics.refused(&refused);
        Ok(())
    }

    /// Asks holders for what has not arrived: they sent it before this gateway knew of the slot.
    fn want_copies(&mut self, now: Instant) {
        self.wanted.retain(|slot, _| self.slots.contains_key(slot));
        for (number, slot) in self.slots.iter().filter(|(_, slot)| !slot.is_held) {
            let last = self.wanted.entry(*number).or_insert(now);
            let is_due = now.saturating_duration_since(*last) >= AGAIN;
            if let Some(holder) = slot.holder.as_ref().filter(|_| is_due && self.incoming.needs_copy(*number))
            {
                *last = now;
                self.peers.want(holder, *number);
            }
        }
    }

    /// A member could not take something. It gets a full copy: at once, or when the last time is long enough ago.
    fn ask(&mut self, member: String, slot: u32, now: Instant) {
        // A member may name any slot.
        if !self.outgoing.slots().contains(&slot) {
            return;
        }
        let asked = self.asked.entry((member.clone(), slot)).or_insert((now, true));
        asked.1 = true;
        if asked.0 == now || now.saturating_duration_since(asked.0) >= AGAIN {
            *asked = (now, false);
            self.outgoing.copy(&member, slot);
        }
    }

    fn read_events(&mut self, now: Instant) -> Result<()> {
        let mut events = Vec::new();
        self.events.read(EVENTS, &mut events)?;
        for event in &events {
            match event {
                ConnectionEvent::Destroyed(flow) => {
                    self.outgoing.ended(flow);
                    self.lost(flow);
                }
                ConnectionEvent::Missed => {
                    self.is_missed = true;
                    self.metrics.missed.inc();
                }
                ConnectionEvent::New(flow) | ConnectionEvent::Updated(flow) => self.outgoing.observed(flow),
            }
        }
        if self.is_missed && now >= self.compare_at {
            self.compare()?;
        }
        let due: Vec<(String, u32)> =
            self.asked.iter().filter(|(_, asked)| asked.1).map(|it| it.0.clone()).collect();
        due.into_iter().for_each(|(member, slot)| self.ask(member, slot, now));
        Ok(())
    }

    /// The kernel has forgotten a copy, or another program has deleted it.
    fn lost(&mut self, flow: &Flow) {
        let of =
            |(_, slot): &(&u32, &Slot)| !slot.is_held && slot.addresses.contains(&flow.reply.destination);
        let slot = self.slots.iter().find(of).map(|(number, _)| *number);
        if let (Some(slot), Some(key)) = (slot, copied::key(&flow.original)) {
            self.incoming.lost(slot, &key);
        }
    }

    /// Compares what others should have with the kernel.
    fn compare(&mut self) -> Result<()> {
        self.is_missed = false;
        let began = Instant::now();
        let held = self.outgoing.slots();
        let flows = self.flows(&held)?;
        held.iter().for_each(|slot| self.outgoing.replace(*slot, &flows));
        let pause = began.elapsed().saturating_mul(COMPARE_PART).max(COMPARE);
        self.compare_at = Instant::now().checked_add(pause).unwrap_or(began);
        Ok(())
    }

    /// Connections in the kernel that are translated to addresses of these slots.
    fn flows(&mut self, slots: &BTreeSet<u32>) -> Result<Vec<Flow>> {
        let of = |slot: &u32| self.slots.get(slot).map(|slot| slot.addresses.clone()).unwrap_or_default();
        self.table.translated_to(&slots.iter().flat_map(of).collect())
    }

    fn send(&mut self, now: Instant) {
        for kind in self.outgoing.changes(RESERVED) {
            self.count(&kind);
            for member in self.peers.flows(&self.connections, kind) {
                // It gets all of them when there is room again.
                self.metrics.dropped.inc();
                self.outgoing.connected(&member);
            }
        }
        let mut lag = Duration::ZERO;
        for (member, connection) in self.connections.clone() {
            let (room, waited) = self.peers.room(&member);
            lag = lag.max(waited);
            let to = [(member.clone(), connection)].into();
            for _ in 0..room.saturating_sub(RESERVED).min(COPY_MESSAGES) {
                let Some(kind) = self.outgoing.next_copy(&member) else { break };
                self.count(&kind);
                if !self.peers.flows(&to, kind).is_empty() {
                    self.metrics.dropped.inc();
                    self.outgoing.connected(&member);
                    break;
                }
            }
        }
        self.metrics.lag(lag);
        self.asked.retain(|_, asked| asked.1 || now.saturating_duration_since(asked.0) < AGAIN);
    }

    fn count(&self, kind: &to_member::Kind) {
        match kind {
            to_member::Kind::Flows(flows) => {
                let count = flows.set.len().saturating_add(flows.removed.len());
                self.metrics.sent.inc_by(count as u64);
            }
            to_member::Kind::CopyEnds(_) => drop(self.metrics.full_copies.inc()),
            to_member::Kind::CopyBegins(_) | to_member::Kind::Heartbeat(_) => {}
        }
    }
}

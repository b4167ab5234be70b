//! Source addresses that this gateway holds: the task that runs [`fairlead_source_addresses::hold`] with heartbeats to other gateways, Leases and the
//! kernel. What it decides goes to the nftables table ([`SourceTable`]), where the kernel keeps the time, to the data path and to node programs.
//!
//! Without `spec.sourceAddresses` it waits and does nothing.

pub(crate) mod announced;
mod leases;
mod machine;
pub(crate) mod metrics;
pub(crate) mod start;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_dataplane::egress_gateway::Holding;
use fairlead_source_addresses::copies::{Slot, Slots};
use fairlead_source_addresses::hold::{self, Cause, Held, Outcome, Write};
use fairlead_source_addresses::leases::SlotLease;
use fairlead_source_addresses::members::Members;
use fairlead_wire::egress_peers::Heartbeat;
use futures::StreamExt as _;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

pub(crate) use leases::Leases;
pub(crate) use machine::Machine;

use self::announced::{Announcer, HeldAddress, sources};
use self::leases::Watched;
use self::metrics::HoldMetrics;
use crate::cluster::SlotAddresses;
use crate::condition::Conditions;
use crate::data_path::InPlace;
use crate::source_addresses::peers::Peers;

/// Interval at which the machine is asked what is to be done.
const TICK: Duration = Duration::from_millis(50);
/// Interval at which the kernel is told anew until when addresses are held.
const CONFIRM: Duration = Duration::from_millis(250);
/// Interval at which node programs are told.
const TELL: Duration = Duration::from_millis(500);
/// Time after a handover for which clients stay with the gateway before this one, which goes on using the addresses for 0.9 s: until
/// this node lets packets with them leave, and answers to them come here.
const SETTLE: Duration = Duration::from_millis(200);

/// Connections to members, through which heartbeats are sent.
pub(crate) trait Transport: Send + Sync + 'static {
    /// Sends it to a member; it may be lost.
    fn heartbeat(&self, member: &str, heartbeat: Heartbeat);
}

impl Transport for Peers {
    fn heartbeat(&self, member: &str, heartbeat: Heartbeat) {
        // Without a connection the member is silent, which the machine sees.
        let _ = Self::heartbeat(self, member, heartbeat);
    }
}

/// Channels that the task follows.
pub(crate) struct Inputs {
    pub(crate) slots: watch::Receiver<SlotAddresses>,
    pub(crate) in_place: watch::Receiver<InPlace>,
    pub(crate) members: watch::Receiver<Option<Arc<Members>>>,
    /// Whether this gateway is in the Lease of members.
    pub(crate) joined: watch::Receiver<bool>,
    /// Whether it is to leave the source addresses to others, as one that is not healthy.
    pub(crate) leaves: watch::Receiver<bool>,
    /// Slots of which the holder's connections have been copied.
    pub(crate) copies: watch::Receiver<BTreeSet<u32>>,
}

/// The task.
pub(crate) struct Holds {
    pub(crate) machine: Arc<Machine>,
    pub(crate) pod: String,
    pub(crate) leases: Leases,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) holding: Holding,
    /// Addresses that an earlier process of this gateway has left in the kernel, each with the end of its use.
    pub(crate) earlier: BTreeMap<IpAddr, Instant>,
    pub(crate) conditions: Arc<Conditions>,
    pub(crate) announcer: Arc<Announcer>,
    pub(crate) metrics: HoldMetrics,
    pub(crate) inputs: Inputs,
    /// For the task that copies connections.
    pub(crate) slots: watch::Sender<Arc<Slots>>,
    /// The slots that it has worked with last.
    pub(crate) current: Vec<Vec<IpAddr>>,
    /// Writes of Leases, which go on while the slots change.
    pub(crate) writes: JoinSet<(Write, Outcome)>,
}

/// Reads of Leases, with the time of the machine when each began.
type Reads = JoinSet<(Option<Watched>, Duration)>;

/// State that was announced last.
#[derive(Default)]
struct Done {
    held: BTreeMap<u32, Held>,
    /// Slots that were handed over just now, and when clients may come for them.
    settling: BTreeMap<u32, Instant>,
    /// End of the use of each address, as the kernel was told.
    deadlines: BTreeMap<IpAddr, Instant>,
    confirmed: Option<Instant>,
    told: Option<Instant>,
}

impl Holds {
    /// Runs until it is dropped. [`finish`] has to follow.
    pub(crate) async fn run(mut self) -> Infallible {
        let mut wanted = self.inputs.slots.clone();
        loop {
            let slots = wanted.borrow_and_update().clone();
            match slots {
                Some(slots) => self.follow(&slots, &mut wanted).await,
                // This task is about to be stopped ([`start::run`]).
                None => {
                    if wanted.changed().await.is_err() {
                        return std::future::pending().await;
                    }
                }
            }
        }
    }

    /// Works with these slots until there are others.
    async fn follow(&mut self, slots: &[Vec<IpAddr>], wanted: &mut watch::Receiver<SlotAddresses>) {
        let count = u32::try_from(slots.len()).unwrap_or(u32::MAX);
        self.machine.with(|hold, _| hold.set_slots(count));
        for (number, (before, after)) in (0u32..).zip(self.current.iter().zip(slots)) {
            if before != after {
                // What it holds are other addresses than these.
                self.machine.with(|hold, now| hold.lease(number, None, now));
            }
        }
        self.current = slots.to_vec();
        let mut watched = self.leases.watch(count);
        // Those of other addresses are of no use.
        let mut reads = Reads::new();
        let mut done = Done::default();
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut members = self.inputs.members.clone();
        members.mark_changed();
        let mut in_place = self.inputs.in_place.clone();
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                changed = wanted.changed() => if changed.is_ok() {
                    return;
                },
                Some(Watched { slot, lease }) = watched.next() => {
                    let lease = of_slot(slots, slot, lease);
                    if self.machine.with(|hold, now| hold.lease(slot, lease, now)) {
                        self.read(slot, &mut reads);
                    }
                }
                Some(Ok((shown, began))) = reads.join_next() => if let Some(Watched { slot, lease }) = shown {
                    let lease = of_slot(slots, slot, lease);
                    self.machine.with(|hold, now| hold.read(slot, lease, began, now));
                },
                Some(Ok((write, outcome))) = self.writes.join_next() => {
                    tracing::debug!(slot = write.slot, kind = ?write.kind, term = write.term, ?outcome, "wrote a Lease");
                    self.machine.with(|hold, now| hold.written(&write, outcome, now));
                    if outcome == Outcome::Refused {
                        // The watch may be late.
                        self.read(write.slot, &mut reads);
                    }
                }
                Ok(()) = members.changed() => {}
                Ok(()) = in_place.changed() => {}
            }
            self.note_members(&mut members);
            for write in self.act(slots, &mut done).await {
                self.writes.spawn(self.leases.write(write));
            }
        }
    }

    fn read(&self, slot: u32, reads: &mut Reads) {
        let began = self.machine.with(|_, now| now);
        let read = self.leases.read(slot);
        reads.spawn(async move { (read.await, began) });
    }

    fn note_members(&self, members: &mut watch::Receiver<Option<Arc<Members>>>) {
        let joined = *self.inputs.joined.borrow();
        let known = members.borrow_and_update().clone();
        if let Some(known) = known {
            let mut all: BTreeSet<String> = known.keys().cloned().collect();
            if joined {
                all.insert(self.pod.clone());
            }
            self.machine.with(|hold, now| hold.members(&all, now));
        }
    }

    /// One round: what the machine decides, to the kernel first. Returns what is to be written.
    async fn act(&mut self, slots: &[Vec<IpAddr>], done: &mut Done) -> Vec<Write> {
        let state = self.conditions.now();
        let copies = self.inputs.copies.borrow().clone();
        let in_place = self.inputs.in_place.borrow().clone();
        let leaves = *self.inputs.leaves.borrow();
        let round = self.machine.with(|hold, now| {
            if in_place.version.is_some() {
                hold.set_healthy(!state.unhealthy && !leaves);
            }
            if state.draining {
                hold.drain();
            }
            hold.set_copies(copies);
            let actions = hold.tick(now);
            (actions, hold.held(now), hold.undecided(), hold.taken(), hold.since_confirmed(now))
        });
        let (actions, held, undecided, taken, since) = round;
        let instant = Instant::now();
        let settling = done.settling.len();
        done.settling.retain(|_, at| *at > instant);
        let is_settled = done.settling.len() < settling;
        for (slot, cause) in taken {
            tracing::info!(slot, ?cause, "this gateway holds a source address");
            self.metrics.taken(cause);
            let settled = instant.checked_add(SETTLE).filter(|_| cause == Cause::Handover);
            done.settling.extend(settled.map(|at| (slot, at)));
        }
        let deadlines = self.deadlines(slots, &held, &undecided);
        let addresses: BTreeSet<IpAddr> = deadlines.keys().copied().collect();
        let is_old = |at: Option<Instant>, limit| at.is_none_or(|at| instant.duration_since(at) >= limit);
        let is_changed = is_other(&deadlines, &done.deadlines);
        let mut writes = actions.writes;
        if is_changed || (!addresses.is_empty() && is_old(done.confirmed, CONFIRM)) {
            if self.tell_kernel(deadlines.clone()).await {
                done.confirmed = Some(instant);
                done.deadlines = deadlines.clone();
            } else {
                // What is not out of use must not be released; it is tried again.
                self.machine.refuse(&writes);
                writes.clear();
            }
        }
        if let Some(heartbeat) = actions.heartbeat {
            let members = self.inputs.members.borrow().clone().unwrap_or_default();
            let heartbeat = Heartbeat::from(&heartbeat);
            members.keys().for_each(|member| self.transport.heartbeat(member, heartbeat.clone()));
        }
        // Clients must not come before the data path lets their packets pass.
        let is_standby = is_standby(&held, &deadlines, &done.settling) || in_place.standby;
        self.publish(slots, &addresses, &done.settling, is_standby);
        if is_settled || held.keys().ne(done.held.keys()) || is_old(done.told, TELL) {
            self.tell_nodes(slots, &held, &deadlines, &done.settling);
            self.metrics.set(&held, since);
            done.told = Some(instant);
        }
        done.held = held;
        writes
    }

    /// Until when each address may be used: those of slots that are held, and what an earlier process left of slots of which nothing is known yet.
    fn deadlines(
        &self,
        slots: &[Vec<IpAddr>],
        held: &BTreeMap<u32, Held>,
        undecided: &BTreeSet<u32>,
    ) -> BTreeMap<IpAddr, Instant> {
        let now = Instant::now();
        let mut deadlines = BTreeMap::new();
        for (number, addresses) in (0u32..).zip(slots) {
            let until = held.get(&number).and_then(|it| self.machine.instant(it.until));
            for address in addresses {
                let kept =
                    self.earlier.get(address).filter(|until| undecided.contains(&number) && **until > now);
                if let Some(until) = until.or(kept.copied()) {
                    deadlines.insert(*address, until);
                }
            }
        }
        deadlines
    }

    /// Whether the kernel has it, or has no table yet, so that nothing is in use.
    async fn tell_kernel(&self, deadlines: BTreeMap<IpAddr, Instant>) -> bool {
        let holding = self.holding.clone();
        match tokio::task::spawn_blocking(move || holding.hold(deadlines)).await {
            Ok(Ok(_)) => true,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot tell the kernel which source addresses are held; trying again");
                false
            }
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// For the data path, and for the task that copies connections.
    fn publish(
        &self,
        slots: &[Vec<IpAddr>],
        addresses: &BTreeSet<IpAddr>,
        settling: &BTreeMap<u32, Instant>,
        is_standby: bool,
    ) {
        self.announcer.set_sources(Some(sources(slots, addresses, settling)));
        self.conditions.set_standby(is_standby);
        let slot = |(number, all): (u32, &Vec<IpAddr>)| {
            let (term, holder) = self.machine.with(|hold, _| hold.slot(number));
            let is_held = !all.is_empty() && all.iter().all(|address| addresses.contains(address));
            (number, Slot { addresses: all.clone(), term, holder, is_held })
        };
        let all: Slots = (0u32..).zip(slots).map(slot).collect();
        self.slots.send_if_modified(|known| {
            let is_new = **known != all;
            if is_new {
                *known = Arc::new(all);
            }
            is_new
        });
    }

    fn tell_nodes(
        &self,
        slots: &[Vec<IpAddr>],
        held: &BTreeMap<u32, Held>,
        deadlines: &BTreeMap<IpAddr, Instant>,
        settling: &BTreeMap<u32, Instant>,
    ) {
        let of = |(number, addresses): (u32, &Vec<IpAddr>)| {
            let term = held.get(&number)?.term;
            let settling = settling.contains_key(&number);
            let hold = |address: &IpAddr| {
                let until = *deadlines.get(address)?;
                Some(HeldAddress { address: *address, term, until, settling })
            };
            Some(addresses.iter().filter_map(hold).collect::<Vec<_>>())
        };
        self.announcer.set_held((0u32..).zip(slots).filter_map(of).flatten().collect());
    }
}

/// The Lease of a slot, as the machine sees it. One that is for other addresses than the status says is none: the controller replaces it.
fn of_slot(slots: &[Vec<IpAddr>], slot: u32, lease: Option<SlotLease>) -> Option<hold::Lease> {
    let addresses = usize::try_from(slot).ok().and_then(|slot| slots.get(slot));
    let lease = lease.filter(|lease| Some(&lease.addresses) == addresses && !lease.addresses.is_empty());
    lease.map(|lease| lease.lease)
}

/// The last thing before the program ends: what it holds is out of use, then free.
pub(crate) async fn finish(
    machine: &Machine,
    holding: Holding,
    leases: &Leases,
    conditions: &Conditions,
    announcer: &Announcer,
) {
    let writes = machine.with(|hold, now| hold.give_up_all(now));
    let emptied = tokio::task::spawn_blocking(move || holding.close()).await;
    // Node programs take an empty list for an answer only from one that is standby.
    conditions.set_standby(true);
    announcer.set_held(Vec::new());
    if !matches!(emptied, Ok(Ok(_))) {
        // The kernel ends the use within 1.8 s, and others take the addresses then.
        return;
    }
    let writes: JoinSet<_> = writes.into_iter().map(|write| leases.write(write)).collect();
    for (write, outcome) in writes.join_all().await {
        tracing::info!(slot = write.slot, ?outcome, "released a source address");
    }
}

/// Whether the kernel is to be told before anything else is done: addresses have come or gone, or one ends earlier than it was told.
fn is_other(deadlines: &BTreeMap<IpAddr, Instant>, told: &BTreeMap<IpAddr, Instant>) -> bool {
    let ends_earlier = |(address, until): (&IpAddr, &Instant)| {
        told.get(address).is_some_and(|told| told.saturating_duration_since(*until) > TICK)
    };
    deadlines.keys().ne(told.keys()) || deadlines.iter().any(ends_earlier)
}

/// Whether clients should send to other gateways: this one may use nothing, or only what was handed over to it just now.
fn is_standby(
    held: &BTreeMap<u32, Held>,
    deadlines: &BTreeMap<IpAddr, Instant>,
    settling: &BTreeMap<u32, Instant>,
) -> bool {
    let is_new = !held.is_empty() && held.keys().all(|slot| settling.contains_key(slot));
    deadlines.is_empty() || is_new
}

//! Holds of the source addresses of an Egress: the protocol of one gateway, without I/O. Time is that of its own monotonic clock.
//!
//! Source addresses are numbered as slots, and a gateway holds a slot with all of its addresses. Each slot has a Lease. Who is named there
//! has the slot with the Lease's term, and may use it until 1.8 s ([`VALIDITY`]) after
//!
//! * it sent the heartbeat that all other members have answered with a promise, or
//! * it began a write of the Lease that succeeded.
//!
//! A promise says that for 2 s ([`PROMISE`]) its giver does not take the slot. Another gateway takes it by a write of the Lease with the next
//! term, which succeeds only if the Lease is what it has seen ([`Write`]), and which it begins only
//!
//! * when it has promised nothing, and no member that answers has, and
//! * when it has seen the Lease unchanged for 2 s, or released by its holder.
//!
//! A gateway that hands a slot over writes that into the Lease and uses the slot for 0.9 s ([`LINGER`]) more at most, while the next one begins, so
//! that one of both forwards every packet. Both have the connections. In no other case do two gateways use a slot.
//!
//! So while all gateways are there nothing is written, and without the API server the holder stays the holder. The difference of 0.2 s is for
//! clocks that run at different speeds (up to 5 %).
//!
//! The caller tells what it hears ([`Hold::lease`], [`Hold::read`], [`Hold::members`], [`Hold::heartbeat`], [`Hold::answer`],
//! [`Hold::written`]), and calls [`Hold::tick`] every 50 ms or so. What [`Hold::held`] no longer has must be out of use before the writes of
//! that tick begin.
//!
//! Terms are those of Leases. What a member says of a term that this gateway has not read counts until a promise for it is over and another
//! version of the Lease is seen, and not at all for a slot that this gateway holds. A member can keep slots from the others, as by taking them, for which it has the
//! right; once it is gone, nothing of what it said is left.
//!
//! One case is open: a gateway that starts while its holder hears neither from the API server nor from the new gateway. The holder does not know
//! it, so does not need its promise, and [`JOIN`] later the new one may take the slot, unless a member that it reaches has promised it.

mod confirmations;
mod handover;
mod message;
mod slot;
#[cfg(test)]
mod tests;
mod wire;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use message::{Answer, Claim, Condition, Heartbeat, Lease, Outcome, Report, Write, WriteKind};

use slot::Slot;

/// Time for which a hold lasts after the heartbeat or write that confirms it began.
pub const VALIDITY: Duration = Duration::from_millis(1800);
/// Time for which a promise lasts, and for which a Lease must be seen unchanged.
pub const PROMISE: Duration = Duration::from_secs(2);
/// Interval of heartbeats.
pub const HEARTBEAT: Duration = Duration::from_millis(250);
/// Time after which a member that has not answered is not reachable.
pub const SILENCE: Duration = Duration::from_millis(700);
/// Time for which the API server is expected to take another write of a Lease after one has succeeded.
const WRITABLE: Duration = Duration::from_secs(1);
/// Time for which the gateway that hands a slot over goes on using it, until routers, hosts and clients send to the next one.
const LINGER: Duration = Duration::from_millis(900);
/// Interval of writes of a Lease.
pub const WRITE: Duration = Duration::from_millis(500);
/// Time for which a gateway must be a member before it takes a slot that was not released: others may hear of it late.
pub const JOIN: Duration = Duration::from_secs(4);
/// Number of heartbeats whose answers count.
const REMEMBERED: u64 = 16;
/// The greatest term that a Lease can have (`spec.leaseTransitions` is an int32). Then it stays the same with further holders.
const MAX_TERM: u64 = i32::MAX.unsigned_abs() as u64;

/// State of another gateway, as it has said it.
#[derive(Debug, Clone, Default)]
struct Member {
    /// Time at which it last answered or sent.
    heard: Option<Duration>,
    /// Time since when it has been ready to take slots.
    ready_since: Option<Duration>,
    is_healthy: bool,
    held: u32,
    /// Slots of which it has a copy of the connections.
    copies: BTreeSet<u32>,
    /// Slots that it has promised to others, or holds itself.
    blocks: BTreeMap<u32, Block>,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    term: u64,
    until: Duration,
}

/// Actions of this gateway that are due.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Actions {
    /// Heartbeat to be sent to all other members.
    pub heartbeat: Option<Heartbeat>,
    /// Writes to be tried; [`Hold::written`] is to hear of each.
    pub writes: Vec<Write>,
}

/// Cause by which this gateway got a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Cause {
    /// No gateway held it: none had before, or it was released.
    #[default]
    Free,
    /// The holder was silent.
    Failure,
    /// The holder gave it up while it could be heard, and may go on using it for [`LINGER`].
    Handover,
    /// This gateway held it before its program started.
    Restart,
}

/// A slot that may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Term of the hold.
    pub term: u64,
    /// Time until which it may be used, unless it is confirmed again.
    pub until: Duration,
}

/// One gateway.
#[derive(Debug)]
pub struct Hold {
    own: String,
    members: BTreeMap<String, Member>,
    /// Whether the API server has said who the members are.
    is_known: bool,
    /// Time since when this gateway has been a member.
    joined: Option<Duration>,
    slots: BTreeMap<u32, Slot>,
    sequence: u64,
    /// Times at which heartbeats were sent, by their sequence numbers.
    sent: BTreeMap<u64, Duration>,
    /// `None` until the data path can forward.
    healthy: Option<bool>,
    draining: bool,
    copies: BTreeSet<u32>,
    /// Slots that were got since the last call of [`Hold::taken`], each with the cause.
    taken: Vec<(u32, Cause)>,
}

impl Hold {
    /// A gateway that knows nothing yet; `own` is the name of its pod.
    pub fn new(own: &str) -> Self {
        Self {
            own: own.to_owned(),
            members: BTreeMap::new(),
            is_known: false,
            joined: None,
            slots: BTreeMap::new(),
            sequence: 0,
            sent: BTreeMap::new(),
            healthy: None,
            draining: false,
            copies: BTreeSet::new(),
            taken: Vec::new(),
        }
    }

    /// Sets the number of slots. Others are out of use at once.
    pub fn set_slots(&mut self, count: u32) {
        self.slots.retain(|slot, _| *slot < count);
        for slot in 0..count {
            self.slots.entry(slot).or_default();
        }
    }

    /// Tells that the data path can forward, and whether the network behind it answers. A gateway that is not healthy hands its slots over to
    /// one that is, and takes a slot only while no gateway that answers is healthy. One of which this has not been said yet takes none, and
    /// keeps what its earlier process held.
    pub fn set_healthy(&mut self, healthy: bool) {
        self.healthy = Some(healthy);
    }

    /// The gateway is to end: it hands its slots over and takes none.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// The slots of others of which this gateway has a full copy of the connections.
    pub fn set_copies(&mut self, copies: BTreeSet<u32>) {
        self.copies = copies;
    }

    /// The gateways that there are, as the API server says.
    pub fn members(&mut self, all: &BTreeSet<String>, now: Duration) {
        self.is_known = true;
        self.joined = all.contains(&self.own).then(|| self.joined.unwrap_or(now));
        self.members.retain(|name, _| all.contains(name));
        let new: Vec<&String> =
            all.iter().filter(|name| **name != self.own && !self.members.contains_key(*name)).collect();
        for slot in self.slots.values_mut() {
            slot.joined(&self.members, &new, now);
        }
        for name in new {
            self.members.insert(name.clone(), Member::default());
        }
        for slot in self.slots.values_mut() {
            slot.retain(|name| self.members.contains_key(name));
        }
    }

    /// The Lease of a slot, as a watch shows it; `None` if there is none, so that no gateway may hold it. Returns whether it differs from a
    /// known one and is not newer. Then the watch is late, or etcd was restored from a backup, which [`Hold::read`] decides.
    pub fn lease(&mut self, slot: u32, lease: Option<Lease>, now: Duration) -> bool {
        self.slots.get_mut(&slot).is_some_and(|slot| {
            let is_doubtful = lease.as_ref().is_some_and(|lease| slot.is_older(lease));
            slot.seen(&self.own, lease, now);
            is_doubtful
        })
    }

    /// The Lease of a slot, as a consistent read shows it that began then.
    pub fn read(&mut self, slot: u32, lease: Option<Lease>, began: Duration, now: Duration) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.read(&self.own, lease, began, now);
        }
    }

    /// Answers a heartbeat of another gateway.
    pub fn heartbeat(&mut self, from: &str, heartbeat: &Heartbeat, now: Duration) -> Answer {
        self.hear(from, &heartbeat.condition, now);
        let condition = self.condition(now);
        let mut answer = Answer { sequence: heartbeat.sequence, condition, slots: BTreeMap::new() };
        for (number, slot) in &mut self.slots {
            let claim = heartbeat.claims.iter().find(|claim| claim.slot == *number);
            let promised = claim.is_some_and(|claim| slot.promise(claim.term, from, &self.members, now));
            let until = slot.blocked(&self.members, now);
            let blocked = until.map(|until| until.saturating_sub(now));
            answer.slots.insert(*number, Report { term: slot.term(), promised, blocked });
        }
        answer
    }

    /// The answer of another gateway to a heartbeat of this one.
    pub fn answer(&mut self, from: &str, answer: &Answer, now: Duration) {
        let Some(sent) = self.sent.get(&answer.sequence).copied() else { return };
        self.hear(from, &answer.condition, now);
        let Some(member) = self.members.get_mut(from) else { return };
        member.blocks.clear();
        for (number, report) in answer.slots.iter().filter(|(_, report)| report.term <= MAX_TERM) {
            if let Some(left) = report.blocked {
                member.blocks.insert(*number, Block { term: report.term, until: now.saturating_add(left) });
            }
            if let Some(slot) = self.slots.get_mut(number) {
                slot.reported(from, report, sent);
            }
        }
    }

    /// Takes the outcome of a write.
    pub fn written(&mut self, write: &Write, outcome: Outcome, now: Duration) {
        if let Some(slot) = self.slots.get_mut(&write.slot)
            && let Some(cause) = slot.written(&self.own, write, outcome, now)
        {
            self.taken.push((write.slot, cause));
        }
    }

    /// Slots that were got since the last call, each with the cause.
    pub fn taken(&mut self) -> Vec<(u32, Cause)> {
        std::mem::take(&mut self.taken)
    }

    /// The slots that this gateway may use, until when. One that it has just handed over is among them for [`LINGER`].
    pub fn held(&self, now: Duration) -> BTreeMap<u32, Held> {
        if !self.is_known {
            // It would seem to be alone.
            return BTreeMap::new();
        }
        let held =
            self.slots.iter().filter_map(|(number, slot)| Some((*number, slot.held(&self.members, now)?)));
        held.collect()
    }

    /// Slots of which this process does not know yet whether it goes on holding them: what an earlier one has left in the kernel may stay
    /// there as long as it was to.
    pub fn undecided(&self) -> BTreeSet<u32> {
        let is_undecided = |slot: &Slot| {
            let may_be_own = slot.lease.as_ref().is_none_or(|lease| lease.holder.as_ref() == Some(&self.own));
            may_be_own && slot.taken.is_none() && !slot.is_given_up() && !self.draining
        };
        let slots = self.slots.iter().filter(|(_, slot)| is_undecided(slot));
        slots.map(|(number, _)| *number).collect()
    }

    /// Actions that are due now.
    pub fn tick(&mut self, now: Duration) -> Actions {
        let mut actions = Actions::default();
        if !self.is_known {
            return actions;
        }
        self.hand_over(now);
        let condition = self.condition(now);
        let numbers: Vec<u32> = self.slots.keys().copied().collect();
        for number in numbers {
            if let Some(write) = self.write(number, now) {
                actions.writes.push(write);
            }
        }
        let is_due = self.sent.last_key_value().is_none_or(|(_, sent)| now >= sent.saturating_add(HEARTBEAT));
        if is_due && !self.members.is_empty() {
            actions.heartbeat = Some(self.beat(condition, now));
        }
        actions
    }

    /// Releases all slots, as the last thing before the end. The caller stops their use, then tries the writes once.
    pub fn give_up_all(&mut self, now: Duration) -> Vec<Write> {
        self.draining = true;
        let mut writes = Vec::new();
        for (number, slot) in &mut self.slots {
            if slot.claim().is_some() {
                slot.give_up(None, None);
            }
            slot.wrote = None;
            writes.extend(slot.release(*number, now));
        }
        writes
    }

    fn beat(&mut self, condition: Condition, now: Duration) -> Heartbeat {
        self.sequence = self.sequence.saturating_add(1);
        self.sent.insert(self.sequence, now);
        self.sent.retain(|sequence, _| sequence.saturating_add(REMEMBERED) > self.sequence);
        let all_answer = self.members.values().all(|member| is_heard(member, now));
        // A promise that cannot help this gateway would only keep others from taking the slot.
        let claims = self.slots.iter().filter_map(|(number, slot)| {
            let term = slot.claim()?;
            let is_of_use = slot.valid_until(&self.members, now) > now || all_answer;
            is_of_use.then_some(Claim { slot: *number, term })
        });
        Heartbeat { sequence: self.sequence, claims: claims.collect(), condition }
    }

    /// Whether it may take slots.
    fn is_able(&self) -> bool {
        self.healthy.is_some() && !self.draining && self.joined.is_some()
    }

    fn condition(&self, now: Duration) -> Condition {
        Condition {
            ready: self.is_able(),
            healthy: self.healthy != Some(false),
            held: self.count(now),
            copies: self.copies.clone(),
        }
    }

    /// Slots that this gateway holds and has not handed over.
    fn claimed(&self, now: Duration) -> impl Iterator<Item = Held> {
        let claims = self.slots.values().filter(|slot| self.is_known && slot.claim().is_some());
        claims.filter_map(move |slot| slot.held(&self.members, now))
    }

    fn count(&self, now: Duration) -> u32 {
        u32::try_from(self.claimed(now).count()).unwrap_or(u32::MAX)
    }

    fn hear(&mut self, from: &str, condition: &Condition, now: Duration) {
        let Some(member) = self.members.get_mut(from) else { return };
        member.heard = Some(now);
        member.ready_since = condition.ready.then(|| member.ready_since.unwrap_or(now));
        member.is_healthy = condition.healthy;
        member.held = condition.held;
        // Members may name any slots.
        member.copies =
            condition.copies.iter().filter(|slot| self.slots.contains_key(slot)).copied().collect();
    }

    /// Time since when members have been silent, for metrics: the age of the older confirmation of each held slot.
    pub fn since_confirmed(&self, now: Duration) -> Option<Duration> {
        self.claimed(now).map(|held| now.saturating_add(VALIDITY).saturating_sub(held.until)).max()
    }

    /// The term of a slot, and who holds it: as its Lease says, or with which this gateway claims it.
    pub fn slot(&self, slot: u32) -> (u64, Option<String>) {
        let Some(slot) = self.slots.get(&slot) else { return (0, None) };
        let lease = slot.lease.clone().unwrap_or_default();
        (slot.claim().unwrap_or(lease.term), lease.holder)
    }
}

fn is_heard(member: &Member, now: Duration) -> bool {
    member.heard.is_some_and(|at| now < at.saturating_add(SILENCE))
}

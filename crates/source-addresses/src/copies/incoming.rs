//! The part of the other members: what they take of the holder's messages, and what they change in their kernel. Without I/O.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_netlink::conntrack::Flow;
use fairlead_wire::egress_peers as wire;
use wire::to_member::Kind;

use super::Slots;
use super::copied::{self, Copied, Judged, Key};

/// After this time the kernel is told again of a copy that a full copy still has, so that it does not forget it.
pub const REFRESH: Duration = Duration::from_secs(240);
/// Longest time for which a gateway that says that it has taken a slot is believed without the Lease.
pub const UNCONFIRMED: Duration = Duration::from_secs(5);

/// Addresses of clients and destinations, as far as a gateway knows them.
pub trait Addresses: Send + Sync + 'static {
    /// Whether it is that of a registered client, or inside of an AddressBlock or podCIDR of a Node: a client may be registered here later
    /// than at the holder.
    fn is_client(&self, address: IpAddr) -> bool;

    /// Whether clients may send to it.
    fn is_destination(&self, address: IpAddr) -> bool;
}

/// Facts that decide whether a copy is taken.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    /// All slots.
    pub slots: &'a Slots,
    /// Clients and destinations.
    pub addresses: &'a dyn Addresses,
}

/// Reason why a copy, or a message with copies, was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refused {
    /// The client is not registered, and no pod has the address.
    Client,
    /// Clients may not send to the destination.
    Destination,
    /// The connection belongs to no slot, or its translated source is no address of the slot.
    ForeignSource,
    /// This gateway holds the slot itself.
    Held,
    /// The copy is no valid connection.
    Malformed,
    /// The kernel refused the copy, or has another connection in its place.
    Kernel,
    /// There are too many copies.
    Full,
    /// The sender does not hold the slot.
    Sender,
}

impl Refused {
    /// All, for metrics.
    pub const ALL: [Self; 8] = [
        Self::Client,
        Self::Destination,
        Self::ForeignSource,
        Self::Held,
        Self::Malformed,
        Self::Kernel,
        Self::Full,
        Self::Sender,
    ];

    /// Value of the label `reason` in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Destination => "destination",
            Self::ForeignSource => "foreign_source",
            Self::Held => "held",
            Self::Malformed => "malformed",
            Self::Kernel => "kernel",
            Self::Full => "full",
            Self::Sender => "sender",
        }
    }
}

/// Change of a connection in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A connection that the kernel does not have.
    Add(u32, Key, Copied),
    /// A connection that the kernel has, with the same translation.
    Update(u32, Key, Copied),
    /// A connection that is to go.
    Delete(Key, Copied),
}

/// Copies of the flows of all slots that others hold.
#[derive(Debug, Default)]
pub struct Incoming {
    slots: BTreeMap<u32, Copies>,
    limit: usize,
    count: usize,
}

#[derive(Debug, Default)]
struct Copies {
    sender: Option<Sender>,
    flows: BTreeMap<Key, Entry>,
    /// While a full copy arrives; flows that have come since have this number.
    copying: bool,
    copy: u64,
    /// Time when the last full copy had arrived.
    completed: Option<Instant>,
}

/// Pod that sends the flows of a slot, the term in which it does, and the time when that began.
#[derive(Debug)]
struct Sender {
    pod: String,
    term: u64,
    since: Instant,
}

#[derive(Debug)]
struct Entry {
    copied: Copied,
    /// Time when the kernel was told.
    told: Option<Instant>,
    copy: u64,
}

impl Incoming {
    /// With at most so many flows.
    pub fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Number of copies of all slots.
    pub fn flows(&self) -> usize {
        self.count
    }

    /// The copies of a slot.
    #[cfg(test)]
    pub fn table(&self, slot: u32) -> BTreeMap<Key, Copied> {
        let copies = self.slots.get(&slot).map(|copies| &copies.flows);
        copies.into_iter().flatten().map(|(key, entry)| (*key, entry.copied)).collect()
    }

    /// Time when the last full copy of a slot had arrived from the gateway that sends now.
    pub fn completed(&self, slot: u32) -> Option<Instant> {
        self.slots.get(&slot)?.completed
    }

    /// Whether no full copy of a slot has arrived, and none is arriving.
    pub fn needs_copy(&self, slot: u32) -> bool {
        self.slots.get(&slot).is_none_or(|copies| copies.completed.is_none() && !copies.copying)
    }

    /// This gateway holds the slot itself now, or the slot is gone: what it knows of it stays in the kernel, and is no copy any more.
    pub fn forget(&mut self, slot: u32) {
        if let Some(copies) = self.slots.remove(&slot) {
            self.count = self.count.saturating_sub(copies.flows.len());
        }
    }

    /// Takes over copies that the kernel has of a slot that another holds: of an earlier process, or of the time when this gateway
    /// held it. A copy is deleted unless the next full copy has it.
    pub fn adopt<'a>(&mut self, slot: u32, flows: impl IntoIterator<Item = &'a Flow>) {
        let copies = self.slots.entry(slot).or_default();
        for flow in flows {
            // Those that have ended run out by themselves.
            if self.count < self.limit
                && let Some(Judged::Alive(key, copied)) = copied::judge(flow)
            {
                let entry = Entry { copied, told: None, copy: copies.copy };
                if copies.flows.insert(key, entry).is_none() {
                    self.count = self.count.saturating_add(1);
                }
            }
        }
    }

    /// The kernel has no such connection any more, or never took it: the next full copy brings it again.
    pub fn lost(&mut self, slot: u32, key: &Key) {
        if let Some(copies) = self.slots.get_mut(&slot)
            && copies.flows.remove(key).is_some()
        {
            self.count = self.count.saturating_sub(1);
        }
    }

    /// Messages of a member were dropped: full copies of it that are under way are not whole. Returns their slots.
    pub fn dropped(&mut self, from: &str) -> Vec<u32> {
        let of_sender = |copies: &Copies| copies.sender.as_ref().is_some_and(|sender| sender.pod == from);
        let mut slots = Vec::new();
        for (slot, copies) in self.slots.iter_mut().filter(|(_, copies)| of_sender(copies)) {
            copies.copying = false;
            slots.push(*slot);
        }
        slots
    }

    /// Takes a message of a member about flows. Returns what is to be changed in the kernel, and appends what was refused.
    pub fn receive(
        &mut self,
        from: &str,
        message: &Kind,
        now: Instant,
        facts: Facts<'_>,
        refused: &mut Vec<Refused>,
    ) -> Vec<Change> {
        let (slot, term) = match message {
            Kind::Heartbeat(_) => return Vec::new(),
            Kind::Flows(flows) => (flows.slot, flows.term),
            Kind::CopyBegins(begins) => (begins.slot, begins.term),
            Kind::CopyEnds(ends) => (ends.slot, ends.term),
        };
        if let Err(reason) = self.sender(from, slot, term, facts.slots, now) {
            refused.push(reason);
            return Vec::new();
        }
        let Some(copies) = self.slots.get_mut(&slot) else { return Vec::new() };
        match message {
            Kind::CopyBegins(_) => {
                copies.copy = copies.copy.wrapping_add(1);
                copies.copying = true;
                Vec::new()
            }
            Kind::CopyEnds(_) if !copies.copying => Vec::new(),
            Kind::CopyEnds(_) => self.complete(slot, now),
            Kind::Flows(flows) => self.flows_of(slot, flows, now, facts, refused),
            Kind::Heartbeat(_) => Vec::new(),
        }
    }

    /// Whether a member may say what flows a slot has: the one that the Lease names, or one that has just taken it and whose Lease has not
    /// been seen yet.
    fn sender(
        &mut self,
        from: &str,
        slot: u32,
        term: u64,
        slots: &Slots,
        now: Instant,
    ) -> Result<(), Refused> {
        let known = slots.get(&slot).ok_or(Refused::ForeignSource)?;
        if known.is_held {
            return Err(Refused::Held);
        }
        let is_holder = term == known.term && known.holder.as_deref() == Some(from);
        let is_next = term == known.term.saturating_add(1);
        if !is_holder && !is_next {
            return Err(Refused::Sender);
        }
        let copies = self.slots.entry(slot).or_default();
        if let Some(current) = &copies.sender {
            let is_early = now.saturating_duration_since(current.since) < UNCONFIRMED;
            if current.pod == from && current.term == term {
                if is_holder || is_early {
                    return Ok(());
                }
                // What is refused from now on is missing: once the Lease names it, it is asked for a full copy.
                copies.copying = false;
                copies.completed = None;
                return Err(Refused::Sender);
            }
            // What the former holder has sent before comes late. Of two that have taken the slot, the first counts until the Lease shows who
            // has.
            let is_unconfirmed = current.term > known.term;
            if is_unconfirmed && is_early {
                return Err(Refused::Sender);
            }
        }
        copies.sender = Some(Sender { pod: from.to_owned(), term, since: now });
        copies.copying = false;
        copies.completed = None;
        Ok(())
    }

    fn complete(&mut self, slot: u32, now: Instant) -> Vec<Change> {
        let Some(copies) = self.slots.get_mut(&slot) else { return Vec::new() };
        let copy = copies.copy;
        let old = copies.flows.extract_if(.., |_, entry| entry.copy != copy);
        let changes: Vec<Change> = old.map(|(key, entry)| Change::Delete(key, entry.copied)).collect();
        self.count = self.count.saturating_sub(changes.len());
        copies.copying = false;
        copies.completed = Some(now);
        changes
    }

    fn flows_of(
        &mut self,
        slot: u32,
        flows: &wire::Flows,
        now: Instant,
        facts: Facts<'_>,
        refused: &mut Vec<Refused>,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        for key in &flows.removed {
            let Some(copies) = self.slots.get_mut(&slot) else { break };
            match Key::decode(key).map(|key| (key, copies.flows.remove(&key))) {
                Some((key, Some(entry))) => {
                    self.count = self.count.saturating_sub(1);
                    changes.push(Change::Delete(key, entry.copied));
                }
                // It was refused, or the kernel has forgotten it.
                Some((_, None)) => {}
                None => refused.push(Refused::Malformed),
            }
        }
        for flow in &flows.set {
            match judge(slot, flow, facts) {
                Ok((key, copied)) => match self.set(slot, key, copied, now) {
                    Ok(set) => changes.extend(set),
                    Err(reason) => refused.push(reason),
                },
                Err(reason) => refused.push(reason),
            }
        }
        changes
    }

    fn set(&mut self, slot: u32, key: Key, copied: Copied, now: Instant) -> Result<Vec<Change>, Refused> {
        let Some(copies) = self.slots.get_mut(&slot) else { return Ok(Vec::new()) };
        let copy = copies.copy;
        let Some(entry) = copies.flows.get_mut(&key) else {
            if self.count >= self.limit {
                return Err(Refused::Full);
            }
            self.count = self.count.saturating_add(1);
            copies.flows.insert(key, Entry { copied, told: Some(now), copy });
            return Ok(vec![Change::Add(slot, key, copied)]);
        };
        let is_old = entry.told.is_none_or(|told| now.saturating_duration_since(told) >= REFRESH);
        let needs_kernel = is_old || entry.copied.differs(&copied);
        let is_moved = !entry.copied.has_source_of(&copied);
        let former = entry.copied;
        *entry = Entry { copied, told: if needs_kernel { Some(now) } else { entry.told }, copy };
        Ok(match (needs_kernel, is_moved) {
            (false, _) => Vec::new(),
            (true, false) => vec![Change::Update(slot, key, copied)],
            (true, true) => vec![Change::Delete(key, former), Change::Add(slot, key, copied)],
        })
    }
}

fn judge(slot: u32, flow: &wire::Flow, facts: Facts<'_>) -> Result<(Key, Copied), Refused> {
    let (key, copied) = copied::decode(flow).ok_or(Refused::Malformed)?;
    let known = facts.slots.get(&slot).ok_or(Refused::ForeignSource)?;
    if !known.addresses.contains(&copied.source) {
        return Err(Refused::ForeignSource);
    }
    let is_source = |address: IpAddr| facts.slots.values().any(|slot| slot.addresses.contains(&address));
    if is_source(key.client) || !facts.addresses.is_client(key.client) {
        return Err(Refused::Client);
    }
    if is_source(key.server) || !facts.addresses.is_destination(key.server) {
        return Err(Refused::Destination);
    }
    Ok((key, copied))
}

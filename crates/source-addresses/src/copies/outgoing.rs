//! The holder's part: its table of flows, and what is sent of it to whom. Without I/O.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::ops::Bound;

use fairlead_netlink::conntrack::Flow;
use fairlead_wire::egress_peers as wire;
use wire::to_member::Kind;

use super::copied::{self, Copied, Judged, Key};

/// Flows in a message, at most: about 25 KiB.
pub const BATCH: usize = 256;

/// All slots that this gateway holds, and the members that have their flows.
#[derive(Debug, Default)]
pub struct Outgoing {
    slots: BTreeMap<u32, Table>,
    members: BTreeMap<String, VecDeque<Progress>>,
    /// Flows of all slots that are kept, at most; others are not copied.
    limit: usize,
}

/// A slot and its flows.
#[derive(Debug, Default)]
struct Table {
    addresses: Vec<IpAddr>,
    term: u64,
    flows: BTreeMap<Key, Copied>,
    /// Connections that have changed since the last message, and whether members had each before.
    changed: BTreeMap<Key, bool>,
}

/// A full copy to a member.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Progress {
    slot: u32,
    has_begun: bool,
    /// The last flow that was sent.
    after: Option<Key>,
}

impl Progress {
    fn new(slot: u32) -> Self {
        Self { slot, has_begun: false, after: None }
    }
}

impl Outgoing {
    /// Without slots and members.
    pub fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// The gateway holds a slot from now on, and all members get a full copy. Whether that is new: then [`Self::fill`] has to say which
    /// flows it has.
    pub fn hold(&mut self, slot: u32, addresses: Vec<IpAddr>, term: u64) -> bool {
        let known = self.slots.get(&slot);
        let is_new = known.is_none_or(|known| (&known.addresses, known.term) != (&addresses, term));
        if is_new {
            self.slots.insert(slot, Table { addresses, term, ..Table::default() });
            self.copy_slot(slot);
        }
        is_new
    }

    /// It no longer holds the slot.
    pub fn release(&mut self, slot: u32) {
        self.slots.remove(&slot);
        self.members.values_mut().for_each(|copies| copies.retain(|copy| copy.slot != slot));
    }

    /// The slots that it holds.
    pub fn slots(&self) -> BTreeSet<u32> {
        self.slots.keys().copied().collect()
    }

    /// Number of flows that others should have a copy of.
    pub fn flows(&self) -> usize {
        self.slots.values().map(|table| table.flows.len()).fold(0, usize::saturating_add)
    }

    /// Flows of a slot.
    #[cfg(test)]
    pub fn table(&self, slot: u32) -> BTreeMap<Key, Copied> {
        self.slots.get(&slot).map(|table| table.flows.clone()).unwrap_or_default()
    }

    /// A connection has begun, or has changed.
    pub fn observed(&mut self, flow: &Flow) {
        let Some(judged) = copied::judge(flow) else { return };
        let room = self.flows() < self.limit;
        let Some(table) = self.of_address(flow.reply.destination) else { return };
        match judged {
            Judged::Alive(key, copied) if room || table.flows.contains_key(&key) => table.set(key, copied),
            Judged::Alive(..) => {}
            Judged::Ended(key) => table.remove(&key),
            Judged::Unchanged(key) => {
                if let Some(known) = table.flows.get(&key).copied() {
                    let replied = flow.status & fairlead_netlink::conntrack::STATUS_SEEN_REPLY != 0;
                    let assured = flow.status & fairlead_netlink::conntrack::STATUS_ASSURED != 0;
                    table.set(key, Copied { is_replied: replied, is_assured: assured, ..known });
                }
            }
        }
    }

    /// A connection has ended.
    pub fn ended(&mut self, flow: &Flow) {
        let Some(key) = copied::key(&flow.original) else { return };
        if let Some(table) = self.of_address(flow.reply.destination) {
            table.remove(&key);
        }
    }

    /// All connections that are translated to the addresses of a slot, as they are in the kernel.
    pub fn replace<'a>(&mut self, slot: u32, flows: impl IntoIterator<Item = &'a Flow>) {
        let room = self.limit.saturating_sub(self.flows());
        let Some(table) = self.slots.get_mut(&slot) else { return };
        let room = room.saturating_add(table.flows.len());
        let alive = |flow| match copied::judge(flow) {
            Some(Judged::Alive(key, copied)) if table.addresses.contains(&copied.source) => {
                Some((key, copied))
            }
            _ => None,
        };
        let wanted: BTreeMap<Key, Copied> = flows.into_iter().filter_map(alive).take(room).collect();
        let gone: Vec<Key> = table.flows.keys().filter(|key| !wanted.contains_key(key)).copied().collect();
        gone.iter().for_each(|key| table.remove(key));
        wanted.into_iter().for_each(|(key, copied)| table.set(key, copied));
    }

    /// The same of a slot that was just taken. They come to members by the full copy, at its pace, and not as changes all at once.
    pub fn fill<'a>(&mut self, slot: u32, flows: impl IntoIterator<Item = &'a Flow>) {
        self.replace(slot, flows);
        if let Some(table) = self.slots.get_mut(&slot) {
            table.changed.clear();
        }
    }

    /// There is a new connection to a member: it gets full copies.
    pub fn connected(&mut self, member: &str) {
        let copies = self.slots.keys().copied().map(Progress::new).collect();
        self.members.insert(member.to_owned(), copies);
    }

    /// There is none any more.
    pub fn disconnected(&mut self, member: &str) {
        self.members.remove(member);
    }

    /// A member could not take something of a slot: it gets a full copy.
    pub fn copy(&mut self, member: &str, slot: u32) {
        if self.slots.contains_key(&slot)
            && let Some(copies) = self.members.get_mut(member)
        {
            copies.retain(|copy| copy.slot != slot);
            copies.push_back(Progress::new(slot));
        }
    }

    /// All members get full copies of everything, after those that are under way.
    pub fn copy_all(&mut self) {
        for copies in self.members.values_mut() {
            let missing = self.slots.keys().filter(|slot| copies.iter().all(|copy| copy.slot != **slot));
            let missing: Vec<u32> = missing.copied().collect();
            copies.extend(missing.into_iter().map(Progress::new));
        }
    }

    /// Messages to all members with the changes since the last call, at most so many. The rest comes with the next call.
    pub fn changes(&mut self, most: usize) -> Vec<Kind> {
        let mut messages = Vec::new();
        for (slot, table) in &mut self.slots {
            let left = most.saturating_sub(messages.len());
            messages.extend(table.messages(*slot, left));
        }
        messages
    }

    /// The next message of a full copy to a member, if one is under way.
    pub fn next_copy(&mut self, member: &str) -> Option<Kind> {
        let copies = self.members.get_mut(member)?;
        let progress = copies.front_mut()?;
        let slot = progress.slot;
        let table = self.slots.get_mut(&slot)?;
        let term = table.term;
        if !progress.has_begun {
            progress.has_begun = true;
            return Some(Kind::CopyBegins(wire::CopyBegins { slot, term }));
        }
        let from = progress.after.map_or(Bound::Unbounded, Bound::Excluded);
        let next = table.flows.range((from, Bound::Unbounded)).take(BATCH);
        let next: Vec<(Key, Copied)> = next.map(|(key, copied)| (*key, *copied)).collect();
        let Some((last, _)) = next.last() else {
            copies.pop_front();
            return Some(Kind::CopyEnds(wire::CopyEnds { slot, term }));
        };
        progress.after = Some(*last);
        for (key, _) in &next {
            // The member has it now, so it must hear when it ends.
            if let Some(was_known) = table.changed.get_mut(key) {
                *was_known = true;
            }
        }
        let set = next.iter().map(|(key, copied)| copied::encode(key, copied)).collect();
        Some(Kind::Flows(wire::Flows { slot, term, set, removed: Vec::new() }))
    }

    fn copy_slot(&mut self, slot: u32) {
        let members: Vec<String> = self.members.keys().cloned().collect();
        members.iter().for_each(|member| self.copy(member, slot));
    }

    fn of_address(&mut self, address: IpAddr) -> Option<&mut Table> {
        self.slots.values_mut().find(|table| table.addresses.contains(&address))
    }
}

impl Table {
    fn set(&mut self, key: Key, copied: Copied) {
        let known = self.flows.insert(key, copied);
        if known.is_none_or(|known| known.differs(&copied)) {
            self.changed.entry(key).or_insert(known.is_some());
        }
    }

    fn remove(&mut self, key: &Key) {
        if self.flows.remove(key).is_some() {
            self.changed.entry(*key).or_insert(true);
        }
    }

    fn messages(&mut self, slot: u32, most: usize) -> Vec<Kind> {
        let mut messages = Vec::new();
        while messages.len() < most {
            let mut flows = wire::Flows { slot, term: self.term, ..wire::Flows::default() };
            while flows.set.len().saturating_add(flows.removed.len()) < BATCH
                && let Some((key, was_known)) = self.changed.pop_first()
            {
                match self.flows.get(&key) {
                    Some(copied) => flows.set.push(copied::encode(&key, copied)),
                    None if was_known => flows.removed.push(key.encode()),
                    // Members never had it.
                    None => {}
                }
            }
            if flows.set.is_empty() && flows.removed.is_empty() {
                break;
            }
            messages.push(Kind::Flows(flows));
        }
        messages
    }
}

//! Gateways, an API server with compare-and-swap, and a network between them that loses, delays and parts. Real time is in milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use proptest::test_runner::TestCaseError;

use super::super::*;
use super::faults::{Fault, Settings};

/// The step of the simulation in milliseconds.
const STEP: u64 = 10;
/// The first version of a Lease that is written, and by how much the next is greater: those after a restoration differ from all before.
const FIRST_VERSION: u64 = 1000;
const VERSION: u64 = 1000;
/// Time for which a gateway waits for the API server, on its clock.
const API_TIMEOUT: Duration = Duration::from_secs(1);

enum Event {
    Heartbeat(usize, usize, Heartbeat),
    Answer(usize, usize, Answer),
    Request(usize, u64, Write),
    Response(usize, u64, Write, Outcome),
    Watch(usize, u64, u32, Lease),
    /// A consistent read, that began then by the gateway's clock.
    Read(usize, u64, u32, Duration),
    Shown(usize, u64, u32, Duration, Lease),
}

struct Gateway {
    hold: Option<Hold>,
    /// Number of its process: events for an earlier one are dropped.
    life: u64,
    healthy: bool,
    copies: BTreeSet<u32>,
    stalled_until: u64,
    offset: u64,
    drift: i64,
    /// Slots in its kernel, which outlives the process: until when on its clock, and whether the slot was handed over.
    kernel: BTreeMap<u32, (Duration, bool)>,
    requests: Vec<(Write, Duration)>,
    /// Events that arrived while it was stalled.
    inbox: Vec<Event>,
}

impl Gateway {
    fn clock(&self, now: u64) -> Duration {
        let micros = i64::try_from(now).unwrap() * (1000 + self.drift);
        Duration::from_micros(self.offset + u64::try_from(micros).unwrap())
    }
}

pub(super) struct Simulation {
    now: u64,
    random: u64,
    gateways: Vec<Gateway>,
    leases: Vec<Lease>,
    version: u64,
    saved: (Vec<Lease>, u64),
    restored: u64,
    writes: usize,
    /// From one end to another.
    cut: BTreeSet<(usize, usize)>,
    loss: u32,
    slow: u64,
    queue: BTreeMap<(u64, u64), Event>,
    queued: u64,
    /// By gateway: when its last watch event arrives, so that they stay in order.
    watches: BTreeMap<usize, u64>,
    /// By slot: when it was held last, and pauses with their ends.
    held: BTreeMap<u32, u64>,
    /// By slot: when one gateway at most used it, last.
    both: BTreeMap<u32, u64>,
    gaps: Vec<(u64, u64)>,
    log: Vec<String>,
}

impl fmt::Debug for Simulation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "at {} ms, cut {:?}", self.now, self.cut)?;
        self.log.iter().rev().take(60).rev().try_for_each(|line| writeln!(out, "{line}"))
    }
}

impl Simulation {
    pub(super) fn new(settings: &Settings) -> Self {
        let gateway = |number: usize| Gateway {
            hold: None,
            life: 0,
            healthy: true,
            copies: (0..settings.slots).collect(),
            stalled_until: 0,
            offset: 1_000_000 + 77_777_777 * u64::try_from(number).unwrap(),
            drift: settings.drift[number],
            kernel: BTreeMap::new(),
            requests: Vec::new(),
            inbox: Vec::new(),
        };
        let leases =
            (0..settings.slots).map(|slot| Lease { version: u64::from(slot) + 1, ..Lease::default() });
        let mut simulation = Self {
            now: 0,
            random: settings.seed,
            gateways: (0..settings.drift.len()).map(gateway).collect(),
            leases: leases.collect(),
            version: FIRST_VERSION,
            saved: (Vec::new(), FIRST_VERSION),
            restored: 0,
            writes: 0,
            cut: BTreeSet::new(),
            loss: 0,
            slow: 30,
            queue: BTreeMap::new(),
            queued: 0,
            watches: BTreeMap::new(),
            held: BTreeMap::new(),
            both: BTreeMap::new(),
            gaps: Vec::new(),
            log: Vec::new(),
        };
        for number in 0..simulation.gateways.len() {
            simulation.start(number);
        }
        simulation
    }

    /// SplitMix64.
    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below.max(1)
    }

    fn api(&self) -> usize {
        self.gateways.len()
    }

    fn all(&self) -> BTreeSet<String> {
        (0..self.api()).map(|number| format!("g{number}")).collect()
    }

    fn start(&mut self, number: usize) {
        if self.gateways[number].hold.is_some() {
            return;
        }
        let slots = u32::try_from(self.leases.len()).unwrap();
        let mut hold = Hold::new(&format!("g{number}"));
        hold.set_slots(slots);
        let gateway = &mut self.gateways[number];
        hold.set_healthy(gateway.healthy);
        hold.set_copies(gateway.copies.clone());
        gateway.life += 1;
        gateway.stalled_until = 0;
        gateway.requests.clear();
        gateway.hold = Some(hold);
        self.relist(number);
    }

    /// A watch begins: it shows what there is, later, and only if the API server is reached.
    fn relist(&mut self, number: usize) {
        for slot in 0..self.leases.len() {
            self.watch(number, slot);
        }
    }

    fn watch(&mut self, number: usize, slot: usize) {
        if self.is_cut(self.api(), number) || self.is_cut(number, self.api()) {
            return;
        }
        let (slow, lease, life) = (self.slow, self.leases[slot].clone(), self.gateways[number].life);
        let at = (self.now + 1 + self.random(slow)).max(self.watches.get(&number).copied().unwrap_or(0));
        self.watches.insert(number, at);
        self.push(at, Event::Watch(number, life, u32::try_from(slot).unwrap(), lease));
    }

    fn push(&mut self, at: u64, event: Event) {
        self.queued += 1;
        self.queue.insert((at, self.queued), event);
    }

    fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut.contains(&(from, to))
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        self.log.push(format!("{:6} {fault:?}", self.now));
        let api = self.api();
        match fault {
            Fault::Crash(number) => self.gateways[number].hold = None,
            Fault::Start(number) => self.start(number),
            Fault::Cut(a, b) => self.cut.extend([(a, b), (b, a)]),
            Fault::OneWay(a, b) => drop(self.cut.insert((a, b))),
            Fault::Join(a, b) => {
                self.cut.remove(&(a, b));
                self.cut.remove(&(b, a));
                self.relist_all();
            }
            Fault::Isolate(number) => {
                let others = (0..=api).filter(|other| *other != number);
                self.cut.extend(others.flat_map(|other| [(number, other), (other, number)]));
            }
            Fault::Heal => {
                self.cut.clear();
                self.relist_all();
            }
            Fault::Stall(number, time) => self.gateways[number].stalled_until = self.now + time,
            Fault::Loss(percent) => self.loss = percent,
            Fault::Slow(most) => self.slow = most,
            Fault::Healthy(number, healthy) => {
                self.gateways[number].healthy = healthy;
                if let Some(hold) = &mut self.gateways[number].hold {
                    hold.set_healthy(healthy);
                }
            }
            Fault::Copies(number, copies) => {
                let gateway = &mut self.gateways[number];
                gateway.copies = copies.into_iter().collect();
                if let Some(hold) = &mut gateway.hold {
                    hold.set_copies(gateway.copies.clone());
                }
            }
            Fault::Save => self.saved = (self.leases.clone(), self.version),
            Fault::Restore => {
                self.restored += 1;
                let (leases, version) = self.saved.clone();
                (self.leases, self.version) = (leases, version + self.restored);
                self.relist_all();
            }
            Fault::Drain(number) => {
                if let Some(hold) = &mut self.gateways[number].hold {
                    hold.drain();
                }
            }
        }
    }

    fn relist_all(&mut self) {
        for number in 0..self.api() {
            self.relist(number);
        }
    }

    /// Ends all faults; gateways that drain are replaced, in the place of the same member.
    pub(super) fn heal_all(&mut self) {
        self.log.push(format!("{:6} all is healed", self.now));
        (self.loss, self.slow) = (0, 30);
        self.cut.clear();
        for number in 0..self.api() {
            if self.gateways[number].hold.as_ref().is_some_and(|hold| hold.draining) {
                self.gateways[number].hold = None;
            }
            self.gateways[number].stalled_until = 0;
            self.fault(Fault::Healthy(number, true));
            self.start(number);
        }
        self.relist_all();
    }

    pub(super) fn run(&mut self, time: u64) -> Result<(), TestCaseError> {
        let end = self.now + time;
        while self.now < end {
            self.now += STEP;
            while let Some(entry) = self.queue.first_entry().filter(|entry| entry.key().0 <= self.now) {
                let event = entry.remove();
                self.deliver(event);
            }
            for number in 0..self.api() {
                self.turn(number);
            }
            self.check()?;
        }
        Ok(())
    }

    fn deliver(&mut self, event: Event) {
        let number = match &event {
            Event::Request(..) => return self.request(event),
            Event::Read(number, life, slot, began) => return self.show(*number, *life, *slot, *began),
            Event::Heartbeat(_, to, _) | Event::Answer(_, to, _) => *to,
            Event::Response(to, life, ..) | Event::Watch(to, life, ..) | Event::Shown(to, life, ..) => {
                if *life != self.gateways[*to].life {
                    return;
                }
                *to
            }
        };
        if self.gateways[number].hold.is_none() {
            return;
        }
        if self.gateways[number].stalled_until > self.now {
            self.gateways[number].inbox.push(event);
            return;
        }
        self.hear(number, event);
    }

    fn hear(&mut self, number: usize, event: Event) {
        let now = self.gateways[number].clock(self.now);
        let all = self.all();
        let Some(hold) = &mut self.gateways[number].hold else { return };
        match event {
            Event::Heartbeat(from, _, heartbeat) => {
                let answer = hold.heartbeat(&format!("g{from}"), &heartbeat, now);
                self.send(number, from, |from, to| Event::Answer(from, to, answer));
            }
            Event::Answer(from, _, answer) => hold.answer(&format!("g{from}"), &answer, now),
            Event::Response(_, _, write, outcome) => {
                let gateway = &mut self.gateways[number];
                let waiting = gateway.requests.iter().position(|(other, _)| *other == write);
                // Else it came too late.
                let Some(place) = waiting else { return };
                gateway.requests.remove(place);
                if let Some(hold) = &mut gateway.hold {
                    hold.written(&write, outcome, now);
                }
                self.note(number, &write, outcome);
                if outcome == Outcome::Refused {
                    self.read(number, write.slot, now);
                }
            }
            Event::Watch(_, _, slot, lease) => {
                hold.members(&all, now);
                if hold.lease(slot, Some(lease), now) {
                    self.read(number, slot, now);
                }
            }
            Event::Shown(_, _, slot, began, lease) => hold.read(slot, Some(lease), began, now),
            Event::Request(..) | Event::Read(..) => {}
        }
    }

    /// A gateway reads a Lease.
    fn read(&mut self, number: usize, slot: u32, now: Duration) {
        if !self.is_cut(number, self.api()) {
            let (slow, life) = (self.slow, self.gateways[number].life);
            let at = self.now + 1 + self.random(slow);
            self.push(at, Event::Read(number, life, slot, now));
        }
    }

    fn show(&mut self, number: usize, life: u64, slot: u32, began: Duration) {
        if !self.is_cut(self.api(), number) {
            let lease = self.leases[usize::try_from(slot).unwrap()].clone();
            let slow = self.slow;
            let at = self.now + 1 + self.random(slow);
            self.push(at, Event::Shown(number, life, slot, began, lease));
        }
    }

    fn note(&mut self, number: usize, write: &Write, outcome: Outcome) {
        let Write { slot, kind, term, .. } = write;
        self.log.push(format!("{:6} g{number} {kind:?} slot {slot} term {term}: {outcome:?}", self.now));
    }

    fn send(&mut self, from: usize, to: usize, event: impl FnOnce(usize, usize) -> Event) {
        let is_lost = self.random(100) < u64::from(self.loss);
        if is_lost || self.is_cut(from, to) {
            return;
        }
        let at = self.now + 1 + if self.random(20) == 0 { self.random(400) } else { self.random(15) };
        self.push(at, event(from, to));
    }

    fn request(&mut self, event: Event) {
        let Event::Request(number, life, write) = event else { return };
        let slot = usize::try_from(write.slot).unwrap();
        let outcome = if self.leases[slot].version == write.base {
            self.version += VERSION;
            self.writes += 1;
            let Write { holder, term, successor, .. } = write.clone();
            self.leases[slot] = Lease { version: self.version, holder, term, successor };
            for other in 0..self.api() {
                self.watch(other, slot);
            }
            Outcome::Done(self.version)
        } else {
            Outcome::Refused
        };
        if !self.is_cut(self.api(), number) {
            let slow = self.slow;
            let at = self.now + 1 + self.random(slow);
            self.push(at, Event::Response(number, life, write, outcome));
        }
    }

    fn turn(&mut self, number: usize) {
        let (api, real) = (self.api(), self.now);
        let gateway = &mut self.gateways[number];
        let now = gateway.clock(real);
        if gateway.stalled_until > real || gateway.hold.is_none() {
            return;
        }
        for event in std::mem::take(&mut gateway.inbox) {
            self.hear(number, event);
        }
        let gateway = &mut self.gateways[number];
        let Some(hold) = &mut gateway.hold else { return };
        let (late, waiting) = std::mem::take(&mut gateway.requests)
            .into_iter()
            .partition(|(_, began)| now > *began + API_TIMEOUT);
        gateway.requests = waiting;
        let late: Vec<(Write, Duration)> = late;
        for (write, _) in &late {
            hold.written(write, Outcome::Unknown, now);
        }
        let Actions { heartbeat, writes } = hold.tick(now);
        let held = hold.held(now);
        let undecided = hold.undecided();
        gateway.kernel.retain(|slot, _| undecided.contains(slot));
        let lingers = |slot: &u32| hold.slots[slot].claim().is_none();
        gateway.kernel.extend(held.into_iter().map(|(slot, held)| (slot, (held.until, lingers(&slot)))));
        gateway.requests.extend(writes.iter().map(|write| (write.clone(), now)));
        let life = gateway.life;
        for (write, _) in late {
            self.note(number, &write, Outcome::Unknown);
        }
        for write in writes {
            if !self.is_cut(number, api) {
                let slow = self.slow;
                let at = real + 1 + self.random(slow);
                self.push(at, Event::Request(number, life, write));
            }
        }
        if let Some(heartbeat) = heartbeat {
            for other in (0..api).filter(|other| *other != number) {
                self.send(number, other, |from, to| Event::Heartbeat(from, to, heartbeat.clone()));
            }
        }
    }

    /// Gateways whose kernel lets packets pass with the addresses of a slot.
    fn users(&self, slot: u32) -> Vec<usize> {
        let uses = |gateway: &Gateway| {
            gateway.kernel.get(&slot).is_some_and(|(until, _)| gateway.clock(self.now) < *until)
        };
        (0..self.api()).filter(|number| uses(&self.gateways[*number])).collect()
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        for slot in 0..u32::try_from(self.leases.len()).unwrap() {
            let users = self.users(slot);
            let lingers = |number: &&usize| self.gateways[**number].kernel[&slot].1;
            let lingering = users.iter().filter(lingers).count();
            if users.len() < 2 {
                self.both.insert(slot, self.now);
            }
            let both = self.now - self.both.get(&slot).copied().unwrap_or(0);
            if users.len() > lingering + 1 || lingering > 1 || both > 1000 {
                let text = format!("slot {slot} is held by {users:?}: {self:?}");
                return Err(TestCaseError::fail(text));
            }
            if users.is_empty() {
                continue;
            }
            let last = self.held.insert(slot, self.now).unwrap_or(self.now);
            if self.now > last + STEP {
                self.gaps.push((last, self.now));
            }
        }
        Ok(())
    }

    /// Whether each slot is held, or is just being handed over.
    pub(super) fn is_held(&self) -> Result<(), TestCaseError> {
        let last = |slot: &usize| self.held.get(&u32::try_from(*slot).unwrap()).copied();
        let is_held = |slot: &usize| last(slot).is_some_and(|last| last + 300 > self.now);
        match (0..self.leases.len()).find(|slot| !is_held(slot)) {
            None => Ok(()),
            Some(slot) => Err(TestCaseError::fail(format!("no gateway holds slot {slot}: {self:?}"))),
        }
    }

    /// The longest time that no gateway held a slot, of what ended within the last milliseconds.
    pub(super) fn longest_gap_since(&self, time: u64) -> u64 {
        let recent = self.gaps.iter().filter(|(_, end)| *end + time >= self.now);
        recent.map(|(start, end)| end - start).max().unwrap_or(0)
    }

    pub(super) fn holder(&self, slot: u32) -> Option<usize> {
        self.users(slot).first().copied()
    }

    /// Causes by which the gateway has got slots since it was last asked.
    pub(super) fn causes(&mut self, gateway: usize) -> Vec<Cause> {
        let taken = self.gateways[gateway].hold.as_mut().map(Hold::taken).unwrap_or_default();
        taken.into_iter().map(|(_, cause)| cause).collect()
    }

    pub(super) fn term(&self, slot: usize) -> u64 {
        self.leases[slot].term
    }

    pub(super) fn writes(&self) -> usize {
        self.writes
    }
}

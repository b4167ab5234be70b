//! What the gateways of an Egress tell each other, as it is read from a stream: a byte that says who sends it and to whom, then the message
//! behind its length.
#![no_main]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use fairlead_egress_gateway::hold_among;
use fairlead_egress_gateway::source_addresses::peers::{Hold, frames};
use fairlead_source_addresses::copies::copied::{self, Key};
use fairlead_source_addresses::copies::incoming::{Addresses, Change, Facts, Incoming};
use fairlead_source_addresses::copies::{Slot, Slots};
use fairlead_source_addresses::hold::{Lease, PROMISE};
use fairlead_wire::egress_peers::{FromMember, Heartbeat, ToMember, from_member, to_member};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use tokio::runtime::{Builder, Runtime};

const MEMBERS: [&str; 2] = ["a", "b"];
/// Copies that are taken.
const LIMIT: usize = 4;

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_time().build().expect("it needs no descriptor");
    static BUFFER: RefCell<Vec<u8>> = RefCell::default();
}

/// Slots 0 and 1 are those of the two members, slot 2 is this gateway's own, and slot 3 has no holder.
static SLOTS: LazyLock<Slots> = LazyLock::new(|| {
    let slot = |number: u8, holder: Option<&str>| Slot {
        addresses: vec![[192, 0, 2, number].into(), format!("2001:db8::{number}").parse().unwrap()],
        term: u64::from(number) + 1,
        holder: holder.map(str::to_owned),
        is_held: holder == Some("own"),
    };
    let holders = [Some("a"), Some("b"), Some("own"), None];
    (0..).zip((0u8..).zip(holders).map(|(number, holder)| slot(number, holder))).collect()
});

struct Known;

impl Addresses for Known {
    fn is_client(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => address.octets()[0] == 10,
            IpAddr::V6(address) => address.segments()[0] == 0xfd00,
        }
    }

    fn is_destination(&self, address: IpAddr) -> bool {
        !self.is_client(address)
    }
}

fuzz_target!(|bytes: &[u8]| {
    let leases: Vec<Lease> = (1..).zip(SLOTS.values()).map(|(version, slot)| lease(version, slot)).collect();
    let members = MEMBERS.iter().chain(&["own"]).map(|it| (*it).to_owned()).collect();
    let hold = hold_among("own", &members, &leases);
    let mut copies = Copies { incoming: Incoming::new(LIMIT), known: 0, now: Instant::now() };
    let mut rest = bytes;
    while let Some((which, frame)) = rest.split_first() {
        rest = frame;
        let from = MEMBERS[usize::from(which & 1)];
        copies.now += Duration::from_secs(u64::from(which >> 2));
        if which & 2 == 0 {
            let Some(ToMember { kind }) = read(&mut rest) else { return };
            match kind {
                Some(to_member::Kind::Heartbeat(heartbeat)) => beat(&hold, from, heartbeat),
                Some(kind) => copies.take(from, &kind),
                None => {}
            }
        } else {
            let Some(FromMember { kind }) = read(&mut rest) else { return };
            if let Some(from_member::Kind::Answer(answer)) = kind {
                hold.answer(from, answer);
                beat(&hold, from, Heartbeat::default());
            }
        }
    }
});

fn lease(version: u64, slot: &Slot) -> Lease {
    Lease { version, holder: slot.holder.clone(), term: slot.term, successor: None }
}

/// Reads a message as from a connection. What was read is read again when it is written.
fn read<M: Message + Default + PartialEq + Debug>(from: &mut &[u8]) -> Option<M> {
    let read = |from: &mut &[u8]| -> Option<M> {
        BUFFER.with_borrow_mut(|buffer| {
            RUNTIME.with(|runtime| runtime.block_on(frames::read(from, buffer))).ok()
        })
    };
    let message: M = read(from)?;
    let frame = frames::encode(&message);
    if frame.len() <= frames::MAX_FRAME {
        assert_eq!(read(&mut &*frame).as_ref(), Some(&message));
    }
    Some(message)
}

/// Takes a heartbeat, and checks the answer.
fn beat(hold: &impl Hold, from: &str, heartbeat: Heartbeat) {
    let answer = hold.heartbeat(from, heartbeat.clone());
    assert_eq!(answer.sequence, heartbeat.sequence);
    assert!(answer.slots.iter().map(|report| report.slot).eq(SLOTS.keys().copied()));
    assert!(frames::encode(&answer).len() < 1024, "whatever was said");
    for report in &answer.slots {
        let claims = || heartbeat.claims.iter().filter(|claim| claim.slot == report.slot);
        assert!(!report.promised || claims().any(|claim| claim.term == report.term));
        assert!(!report.promised || report.blocked_milliseconds.is_some());
        let left = report.blocked_milliseconds.unwrap_or_default();
        assert!(
            Duration::from_millis(left.into()) <= PROMISE
                && report.term <= u64::from(i32::MAX.unsigned_abs())
        );
    }
}

struct Copies {
    incoming: Incoming,
    /// As many copies as the changes leave in the kernel.
    known: usize,
    now: Instant,
}

impl Copies {
    /// Takes a message about connections, and checks what changes in the kernel.
    fn take(&mut self, from: &str, kind: &to_member::Kind) {
        let facts = Facts { slots: &SLOTS, addresses: &Known };
        let mut refused = Vec::new();
        let changes = self.incoming.receive(from, kind, self.now, facts, &mut refused);
        for change in &changes {
            match change {
                Change::Add(slot, key, copied) | Change::Update(slot, key, copied) => {
                    self.known += usize::from(matches!(change, Change::Add(..)));
                    check(*slot, key, copied);
                }
                Change::Delete(..) => self.known = self.known.checked_sub(1).expect("it was added"),
            }
        }
        assert!(self.incoming.flows() == self.known && self.known <= LIMIT);
        let slots: BTreeSet<u32> =
            SLOTS.keys().copied().filter(|slot| self.incoming.completed(*slot).is_some()).collect();
        assert!(slots.iter().all(|slot| !SLOTS[slot].is_held));
    }
}

/// What may get into the kernel: a connection of a client to a destination, translated to an address of a slot that another gateway holds.
fn check(slot: u32, key: &Key, copied: &copied::Copied) {
    let known = &SLOTS[&slot];
    assert!(!known.is_held && known.addresses.contains(&copied.source));
    assert!(Known.is_client(key.client) && Known.is_destination(key.server));
    assert!(!SLOTS.values().any(|slot| slot.addresses.contains(&key.server)));
    assert_eq!(Key::decode(&key.encode()), Some(*key));
    assert_eq!(copied::decode(&copied::encode(key, copied)), Some((*key, *copied)));
    let flow = copied::flow(key, copied);
    assert_eq!((copied::key(&flow.original), flow.reply.destination), (Some(*key), copied.source));
    assert_eq!(flow.reply.source, flow.original.destination);
    assert_eq!(flow.reply.destination_port(), Some(copied.source_port));
}

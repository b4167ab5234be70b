use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_netlink::conntrack::{
    Flow, Ports, STATUS_ASSURED, STATUS_CONFIRMED, STATUS_SEEN_REPLY, STATUS_SOURCE_TRANSLATED, Tcp, Tuple,
};
use fairlead_wire::egress_peers as wire;
use proptest::prelude::*;
use wire::to_member::Kind;

use super::copied::{self, Copied, Key};
use super::incoming::{Addresses, Change, Facts, Incoming, REFRESH, Refused, UNCONFIRMED};
use super::outgoing::{BATCH, Outgoing};
use super::{Slot, Slots};

const SOURCE: [&str; 2] = ["192.0.2.9", "2001:db8::9"];

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn slots() -> Slots {
    let addresses = SOURCE.map(address).to_vec();
    [(0, Slot { addresses, term: 3, holder: Some("a".to_owned()), is_held: false })].into()
}

struct Known;

impl Addresses for Known {
    fn is_client(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => address.octets()[0] == 10,
            IpAddr::V6(address) => address.octets()[0] == 0xfd,
        }
    }

    fn is_destination(&self, address: IpAddr) -> bool {
        address != IpAddr::from([198, 51, 100, 66])
    }
}

fn facts(slots: &Slots) -> Facts<'_> {
    Facts { slots, addresses: &Known }
}

/// A connection of one of a few clients, as the kernel reports it.
fn flow(number: u8, protocol: u8, state: u8, port: u16) -> Flow {
    let is_ipv6 = number.is_multiple_of(2) && protocol != 1;
    let [client, server, source] = if is_ipv6 {
        [format!("fd00::{number:x}"), "2001:db8:1::1".to_owned(), SOURCE[1].to_owned()]
    } else {
        [format!("10.0.0.{number}"), "198.51.100.1".to_owned(), SOURCE[0].to_owned()]
    };
    let ports = match protocol {
        1 => Ports::Icmp { id: 7, kind: 8, code: 0 },
        _ => Ports::Ports { source: 4000, destination: 80 },
    };
    let original = Tuple { protocol, source: address(&client), destination: address(&server), ports };
    let ports = match original.inverted().unwrap().ports {
        Ports::Icmp { kind, code, .. } => Ports::Icmp { id: port, kind, code },
        Ports::Ports { source, .. } => Ports::Ports { source, destination: port },
        Ports::None => Ports::None,
    };
    let reply = Tuple { destination: address(&source), ports, ..original.inverted().unwrap() };
    let tcp = (protocol == 6).then_some(Tcp { state, scales: [7, 9], flags: [0x23, 0x21] });
    let status = STATUS_CONFIRMED
        | STATUS_SOURCE_TRANSLATED
        | if state > 2 { STATUS_SEEN_REPLY | STATUS_ASSURED } else { 0 };
    Flow { original, reply, zone: 0, status, tcp, timeout: Some(100), mark: 0, id: None, counters: None }
}

fn key(flow: &Flow) -> Key {
    copied::key(&flow.original).unwrap()
}

/// The kernel of a member, as far as it is told; what it is told must fit what it has.
#[derive(Default)]
struct Kernel(BTreeMap<Key, Copied>);

impl Kernel {
    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Add(_, key, copied) => {
                    assert!(self.0.insert(key, copied).is_none(), "{key:?} is there")
                }
                Change::Delete(key, former) => {
                    let known = self.0.remove(&key);
                    assert!(known.is_some_and(|known| known.has_source_of(&former)), "{key:?} is not there");
                }
                Change::Update(_, key, copied) => {
                    let known = self.0.insert(key, copied).unwrap();
                    assert!(known.has_source_of(&copied), "the kernel cannot change a translation");
                }
            }
        }
    }
}

/// A holder, a member, and a connection between them that loses what its queue cannot take.
struct Bed {
    slots: Slots,
    outgoing: Outgoing,
    /// Connections in the holder's kernel.
    holder: BTreeMap<Key, Flow>,
    queue: VecDeque<Kind>,
    incoming: Incoming,
    kernel: Kernel,
    now: Instant,
    refused: Vec<Refused>,
}

impl Bed {
    fn new() -> Self {
        let mut outgoing = Outgoing::new(1000);
        outgoing.hold(0, SOURCE.map(address).to_vec(), 3);
        outgoing.connected("b");
        Self {
            slots: slots(),
            outgoing,
            holder: BTreeMap::new(),
            queue: VecDeque::new(),
            incoming: Incoming::new(1000),
            kernel: Kernel::default(),
            now: Instant::now(),
            refused: Vec::new(),
        }
    }

    fn event(&mut self, flow: Flow, is_heard: bool) {
        self.holder.insert(key(&flow), flow);
        if is_heard {
            self.outgoing.observed(&flow);
        }
    }

    fn end(&mut self, number: usize, is_heard: bool) {
        let Some(key) = self.holder.keys().nth(number).copied() else { return };
        let flow = self.holder.remove(&key).unwrap();
        if is_heard {
            self.outgoing.ended(&flow);
        }
    }

    fn send_changes(&mut self) {
        self.queue.extend(self.outgoing.changes(usize::MAX));
    }

    fn send_copy(&mut self) {
        self.queue.extend(self.outgoing.next_copy("b"));
    }

    fn deliver(&mut self) {
        if let Some(message) = self.queue.pop_front() {
            let facts = facts(&self.slots);
            let changes = self.incoming.receive("a", &message, self.now, facts, &mut self.refused);
            self.kernel.apply(changes);
        }
    }

    /// The member drops a message, and says so.
    fn lose(&mut self) {
        if self.queue.pop_front().is_some() {
            self.incoming.dropped("a");
            self.outgoing.copy("b", 0);
        }
    }

    /// The connection ends with all that is under way, and there is another.
    fn reconnect(&mut self) {
        self.queue.clear();
        self.outgoing.disconnected("b");
        self.outgoing.changes(usize::MAX);
        self.outgoing.connected("b");
    }

    /// As the program does every minute and after notifications were lost.
    fn full_copy(&mut self) {
        let all: Vec<Flow> = self.holder.values().copied().collect();
        self.outgoing.replace(0, &all);
        self.outgoing.copy_all();
    }

    fn finish(&mut self) {
        // Copies that had begun, and one that begins after them.
        for _ in 0..2 {
            self.send_changes();
            while let Some(message) = self.outgoing.next_copy("b") {
                self.queue.push_back(message);
            }
            self.full_copy();
        }
        while !self.queue.is_empty() {
            self.deliver();
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Begin(u8, u8, u8, u16, bool),
    Copy,
    Deliver,
    End(usize, bool),
    FullCopy,
    Later,
    Lose,
    Reconnect,
    SendChanges,
}

fn step() -> impl Strategy<Value = Step> {
    let protocol = prop_oneof![Just(1u8), Just(6), Just(17)];
    prop_oneof![
        6 => (1..9u8, protocol, 1..9u8, 4000..4003u16, any::<bool>()).prop_map(|(a, b, c, d, e)| Step::Begin(a, b, c, d, e)),
        3 => Just(Step::Copy),
        4 => Just(Step::Deliver),
        3 => (0..8usize, any::<bool>()).prop_map(|(number, is_heard)| Step::End(number, is_heard)),
        1 => Just(Step::FullCopy),
        1 => Just(Step::Later),
        1 => Just(Step::Lose),
        1 => Just(Step::Reconnect),
        4 => Just(Step::SendChanges),
    ]
}

proptest! {
    #[test]
    fn after_a_full_copy_the_copy_is_the_holders_table(steps in proptest::collection::vec(step(), 0..120)) {
        let mut bed = Bed::new();
        for step in steps {
            match step {
                Step::Begin(number, protocol, state, port, is_heard) => {
                    bed.event(flow(number, protocol, state, port), is_heard);
                }
                Step::Copy => bed.send_copy(),
                Step::Deliver => bed.deliver(),
                Step::End(number, is_heard) => bed.end(number, is_heard),
                Step::FullCopy => bed.full_copy(),
                Step::Later => bed.now += REFRESH,
                Step::Lose => bed.lose(),
                Step::Reconnect => bed.reconnect(),
                Step::SendChanges => bed.send_changes(),
            }
        }
        bed.full_copy();
        bed.finish();
        let alive = |flow: &&Flow| flow.tcp.is_none_or(|tcp| (3..=6).contains(&tcp.state));
        let wanted: Vec<Key> = bed.holder.values().filter(alive).map(key).collect();
        let table = bed.incoming.table(0);
        prop_assert_eq!(table.keys().copied().collect::<Vec<_>>(), wanted);
        for (key, copied) in &bed.outgoing.table(0) {
            prop_assert!(!copied.differs(&table[key]));
        }
        prop_assert_eq!(bed.incoming.flows(), table.len());
        prop_assert_eq!(&bed.kernel.0.keys().collect::<Vec<_>>(), &table.keys().collect::<Vec<_>>());
        prop_assert!(bed.kernel.0.iter().all(|(key, copied)| !copied.differs(&table[key])));
        prop_assert_eq!(bed.refused, vec![]);
    }

    #[test]
    fn without_losses_changes_alone_make_the_copy(steps in proptest::collection::vec((1..9u8, 1..9u8, 4000..4003u16, any::<bool>()), 0..60)) {
        let mut bed = Bed::new();
        while !bed.queue.is_empty() || bed.outgoing.next_copy("b").map(|it| bed.queue.push_back(it)).is_some() {
            bed.deliver();
        }
        for (number, state, port, sends) in steps {
            bed.event(flow(number, 6, state, port), true);
            if sends {
                bed.send_changes();
            }
        }
        bed.send_changes();
        while !bed.queue.is_empty() {
            bed.deliver();
        }
        prop_assert_eq!(bed.incoming.table(0).len(), bed.outgoing.table(0).len());
        for (key, copied) in bed.outgoing.table(0) {
            prop_assert!(!copied.differs(&bed.incoming.table(0)[&key]));
        }
    }

    #[test]
    fn what_is_copied_comes_back_from_the_wire_and_from_the_kernels_form(
        number in 1..9u8, protocol in prop_oneof![Just(1u8), Just(6), Just(17)], state in 3..7u8, port: u16,
    ) {
        let flow = flow(number, protocol, state, port);
        let Some(copied::Judged::Alive(key, copied)) = copied::judge(&flow) else { panic!("{flow:?}") };
        let (read, value) = copied::decode(&copied::encode(&key, &copied)).unwrap();
        prop_assert_eq!((read, value.differs(&copied), value.timeout), (key, false, copied.timeout));
        let written = copied::flow(&key, &copied);
        prop_assert_eq!((written.original, written.reply), (flow.original, flow.reply));
        prop_assert!(written.tcp.is_none_or(|tcp| tcp.flags.iter().all(|flags| flags & 8 != 0)));
    }

    #[test]
    fn hostile_messages_are_refused_without_panic(
        numbers in any::<[u32; 9]>(), octets in proptest::collection::vec(any::<u8>(), 0..20), port: u32,
    ) {
        let [protocol, client_port, source_port, status, timeout_seconds, tcp_state, flags, scale, slot] = numbers;
        let key = wire::FlowKey { protocol: protocol % 64, client: octets.clone(), server: octets.clone(), client_port, server_port: port };
        let flow = wire::Flow {
            key: Some(key.clone()), source: octets, source_port, status, timeout_seconds, tcp_state: tcp_state % 12,
            tcp_flags_client: flags, tcp_flags_server: flags, tcp_scale_client: scale, tcp_scale_server: scale,
        };
        let slots = slots();
        let message = Kind::Flows(wire::Flows { slot: slot % 2, term: 3, set: vec![flow], removed: vec![key] });
        let changes = Incoming::new(10).receive("a", &message, Instant::now(), facts(&slots), &mut Vec::new());
        prop_assert!(changes.len() <= 1);
    }
}

/// Reason why a flow is refused that a member of this name sends in this term; `None` if it is taken.
fn refusal(incoming: &mut Incoming, slots: &Slots, from: &str, term: u64, flow: &Flow) -> Option<Refused> {
    let copied = Copied {
        source: flow.reply.destination,
        source_port: 1,
        is_replied: true,
        is_assured: true,
        timeout: 5,
        tcp: flow.tcp,
    };
    let set = vec![copied::encode(&key(flow), &copied)];
    let message = Kind::Flows(wire::Flows { slot: 0, term, set, removed: Vec::new() });
    let mut refused = Vec::new();
    let changes = incoming.receive(from, &message, Instant::now(), facts(slots), &mut refused);
    assert_eq!(changes.is_empty(), !refused.is_empty(), "{refused:?}");
    refused.pop()
}

#[test]
fn only_plausible_flows_of_the_holder_are_taken() {
    let (mut incoming, mut slots) = (Incoming::new(2), slots());
    let good = flow(1, 6, 3, 4000);
    let mut of = |from, term, flow: &Flow| refusal(&mut incoming, &slots, from, term, flow);
    assert_eq!(of("b", 3, &good), Some(Refused::Sender), "another is the holder");
    assert_eq!(of("a", 2, &good), Some(Refused::Sender), "an earlier term");
    assert_eq!(of("a", 5, &good), Some(Refused::Sender), "a term that no holder can have");
    let mut stranger = good;
    stranger.original.source = address("203.0.113.1");
    assert_eq!(of("a", 3, &stranger), Some(Refused::Client));
    let mut own = good;
    own.original.source = address(SOURCE[0]);
    assert_eq!(of("a", 3, &own), Some(Refused::Client));
    let mut elsewhere = good;
    elsewhere.original.destination = address("198.51.100.66");
    assert_eq!(of("a", 3, &elsewhere), Some(Refused::Destination));
    let mut foreign = good;
    foreign.reply.destination = address("192.0.2.10");
    assert_eq!(of("a", 3, &foreign), Some(Refused::ForeignSource));
    assert_eq!(of("a", 3, &flow(1, 6, 8, 1)), Some(Refused::Malformed), "it has ended");
    assert_eq!((of("a", 3, &good), of("a", 3, &flow(3, 6, 3, 1))), (None, None));
    assert_eq!(of("a", 3, &flow(5, 6, 3, 1)), Some(Refused::Full));
    assert_eq!(of("b", 4, &flow(1, 6, 4, 1)), None, "it has just taken the slot");
    assert_eq!(of("a", 3, &flow(1, 6, 5, 1)), Some(Refused::Sender), "what the former holder sent before");
    assert_eq!(of("c", 4, &good), Some(Refused::Sender), "another says so, too");
    slots.insert(0, Slot { term: 4, holder: Some("c".to_owned()), ..slots[&0].clone() });
    let mut of = |from, term, flow: &Flow| refusal(&mut incoming, &slots, from, term, flow);
    assert_eq!(of("b", 4, &flow(1, 6, 5, 1)), Some(Refused::Sender), "the Lease names another");
    assert_eq!(of("c", 4, &flow(1, 6, 6, 1)), None);
    slots.get_mut(&0).unwrap().is_held = true;
    assert_eq!(refusal(&mut incoming, &slots, "c", 4, &good), Some(Refused::Held));
}

#[test]
fn a_gateway_is_believed_without_the_lease_for_a_few_seconds_only() {
    let (mut incoming, mut slots) = (Incoming::new(10), slots());
    let begin = Instant::now();
    let mut say = |slots: &Slots, from, after: Duration, is_end: bool| {
        let kind = match is_end {
            false => Kind::CopyBegins(wire::CopyBegins { slot: 0, term: 4 }),
            true => Kind::CopyEnds(wire::CopyEnds { slot: 0, term: 4 }),
        };
        let mut refused = Vec::new();
        incoming.receive(from, &kind, begin + after, facts(slots), &mut refused);
        (refused.pop(), incoming.completed(0).is_some())
    };
    let [early, late] = [Duration::from_secs(1), UNCONFIRMED];
    assert_eq!(say(&slots, "b", Duration::ZERO, false), (None, false));
    assert_eq!(say(&slots, "b", early, true), (None, true));
    assert_eq!(say(&slots, "b", late, false), (Some(Refused::Sender), false), "what is refused is missing");
    assert_eq!(say(&slots, "b", 2 * late, false), (Some(Refused::Sender), false), "it stays so");
    slots.insert(0, Slot { term: 4, holder: Some("b".to_owned()), ..slots[&0].clone() });
    assert_eq!(say(&slots, "b", 3 * late, false), (None, false), "the Lease names it");
    assert_eq!(say(&slots, "b", 3 * late, true), (None, true));
}

#[test]
fn changes_are_sent_in_so_many_messages_at_once() {
    let mut outgoing = Outgoing::new(1000);
    outgoing.hold(0, SOURCE.map(address).to_vec(), 3);
    outgoing.connected("b");
    let flows = (0..600u16).map(|port| {
        let mut flow = flow(1, 17, 3, 4000 + port);
        flow.original.ports = Ports::Ports { source: 4000 + port, destination: 80 };
        flow
    });
    let flows: Vec<Flow> = flows.collect();
    outgoing.fill(0, &flows);
    assert_eq!(outgoing.changes(9), [], "members get them by the full copy");
    outgoing.release(0);
    outgoing.hold(0, SOURCE.map(address).to_vec(), 4);
    flows.iter().for_each(|flow| outgoing.observed(flow));
    let mut count = |most| {
        let sizes = |kind| if let Kind::Flows(flows) = kind { flows.set.len() } else { 0 };
        outgoing.changes(most).into_iter().map(sizes).collect::<Vec<_>>()
    };
    assert_eq!(
        [count(0), count(1), count(9), count(9)],
        [vec![], vec![BATCH], vec![BATCH, 600 - 2 * BATCH], vec![]]
    );
}

#[test]
fn copies_are_renewed_in_the_kernel_only_when_they_are_old() {
    let (mut bed, udp) = (Bed::new(), flow(1, 17, 3, 4000));
    let copy = |bed: &mut Bed| {
        bed.event(udp, true);
        bed.full_copy();
        let mut changes = Vec::new();
        bed.send_changes();
        while let Some(message) = bed.queue.pop_front().or_else(|| bed.outgoing.next_copy("b")) {
            changes.extend(bed.incoming.receive("a", &message, bed.now, facts(&bed.slots), &mut bed.refused));
        }
        changes
    };
    assert!(matches!(copy(&mut bed)[..], [Change::Add(..)]));
    bed.now += Duration::from_secs(60);
    assert_eq!(copy(&mut bed), []);
    bed.now += REFRESH;
    assert!(matches!(copy(&mut bed)[..], [Change::Update(..)]));
    assert_eq!(bed.incoming.completed(0), Some(bed.now));
}

#[test]
fn connections_that_end_before_a_message_are_not_sent() {
    let mut outgoing = Outgoing::new(10);
    outgoing.hold(0, SOURCE.map(address).to_vec(), 3);
    outgoing.observed(&flow(1, 6, 1, 4000));
    outgoing.observed(&flow(1, 6, 3, 4000));
    outgoing.observed(&flow(1, 6, 7, 4000));
    outgoing.ended(&flow(1, 6, 7, 4000));
    assert_eq!(outgoing.changes(usize::MAX), []);
    outgoing.observed(&flow(1, 6, 3, 4000));
    let [Kind::Flows(flows)] = &outgoing.changes(usize::MAX)[..] else { panic!("one message") };
    assert_eq!((flows.set.len(), flows.removed.len()), (1, 0));
    // The notification of the status alone has no state.
    outgoing.observed(&Flow { tcp: None, ..flow(1, 6, 3, 4000) });
    assert_eq!(outgoing.changes(usize::MAX), []);
    outgoing.observed(&flow(1, 6, 7, 4000));
    let [Kind::Flows(flows)] = &outgoing.changes(usize::MAX)[..] else { panic!("one message") };
    assert_eq!((flows.set.len(), flows.removed.len()), (0, 1));
}

#[test]
fn former_connections_of_the_kernel_go_with_the_first_full_copy() {
    let mut bed = Bed::new();
    let (old, kept) = (flow(1, 6, 3, 4000), flow(3, 17, 3, 4000));
    bed.incoming.adopt(0, &[old, kept]);
    bed.event(kept, true);
    let mut changes = Vec::new();
    bed.send_changes();
    while let Some(message) = bed.queue.pop_front().or_else(|| bed.outgoing.next_copy("b")) {
        changes.extend(bed.incoming.receive("a", &message, bed.now, facts(&bed.slots), &mut bed.refused));
    }
    assert!(
        matches!(changes[..], [Change::Update(0, ..), Change::Delete(gone, _)] if gone == key(&old)),
        "{changes:?}"
    );
}

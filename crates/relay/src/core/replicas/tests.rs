use fairlead_wire::relay::replica::parse_replica_frame;
use fairlead_wire::relay::{Frame, MAX_BODY, Registered, parse};
use proptest::prelude::*;

use super::*;
use crate::core::{Admission, Limits, LinkId};

const A: [u8; 32] = [1; 32];
const B: [u8; 32] = [2; 32];
const BUDGET: usize = 16 << 10;
const LATER: Duration = Duration::from_secs(1_000_000);

/// Replicas of one relay, and a clock.
struct Mesh {
    relays: Vec<Relay>,
    /// From, to, the connection at either end.
    connections: Vec<(usize, usize, ReplicaLinkId, ReplicaLinkId)>,
    /// Whether each replica knows of stand-by links.
    standby_links: Vec<bool>,
    now: Instant,
}

impl Mesh {
    fn new(count: u8) -> Self {
        Self::of(&vec![true; count.into()])
    }

    fn of(standby_links: &[bool]) -> Self {
        let count = u8::try_from(standby_links.len()).unwrap();
        let now = Instant::now();
        let relay = |number| Relay::new(Limits::default()).identified([number; 16], now, LATER);
        let mut mesh = Self {
            relays: (0..count).map(relay).collect(),
            connections: Vec::new(),
            standby_links: standby_links.to_vec(),
            now,
        };
        for to in 0..count.into() {
            (0..to).for_each(|from| mesh.connect(from, to));
        }
        mesh
    }

    fn connect(&mut self, from: usize, to: usize) {
        let id = |number| [u8::try_from(number).unwrap(); 16];
        let here = self.relays[from].add_replica(id(to), self.standby_links[to]).unwrap();
        let there = self.relays[to].add_replica(id(from), self.standby_links[from]).unwrap();
        self.connections.push((from, to, here, there));
        self.exchange();
    }

    fn disconnect(&mut self, number: usize) {
        let gone = self.connections.extract_if(.., |(from, to, ..)| *from == number || *to == number);
        for (from, to, here, there) in gone.collect::<Vec<_>>() {
            self.relays[from].remove_replica(here);
            self.relays[to].remove_replica(there);
        }
        self.exchange();
    }

    /// Everything that waits for another replica arrives. The number of frames.
    fn exchange(&mut self) -> usize {
        let mut frames = 0;
        loop {
            let before = frames;
            for (from, to, here, there) in self.connections.clone() {
                frames += self.carry(from, here, to, there) + self.carry(to, there, from, here);
            }
            if frames == before {
                return frames;
            }
            assert!(frames < 1000, "datagrams go round");
        }
    }

    fn carry(&mut self, from: usize, here: ReplicaLinkId, to: usize, there: ReplicaLinkId) -> usize {
        let (mut out, mut frames) = (Vec::new(), 0);
        while self.relays[from].poll_replica(self.now, here, BUDGET, &mut out) == Transmit::Frames {
            let mut rest = out.as_slice();
            while let Some((frame, length)) = parse_replica_frame(rest).unwrap() {
                self.relays[to].handle_replica_frame(self.now, there, &frame).unwrap();
                rest = &rest[length..];
                frames += 1;
            }
            assert!(rest.is_empty());
            out.clear();
        }
        frames
    }

    fn after(&mut self, milliseconds: u64) {
        self.now += Duration::from_millis(milliseconds);
        self.relays.iter_mut().for_each(|relay| relay.handle_timeout(self.now));
        self.exchange();
    }

    fn register(&mut self, at: usize, key: [u8; 32], instance: u8) -> LinkId {
        let admission = Admission { key: PublicKey(key), instance: [instance; 8], token: None };
        let answer = Registered { idle_timeout: 60 };
        let link = self.relays[at].register(self.now, admission, &answer).unwrap();
        self.exchange();
        self.received(at, link);
        link
    }

    fn register_standby(&mut self, at: usize, key: [u8; 32], instance: u8) -> LinkId {
        let admission = Admission { key: PublicKey(key), instance: [instance; 8], token: None };
        let answer = Registered { idle_timeout: 60 };
        let link = self.relays[at].register_standby(self.now, admission, &answer).unwrap();
        self.exchange();
        self.received(at, link);
        link
    }

    fn activate(&mut self, at: usize, link: LinkId) {
        self.relays[at].handle_frame(self.now, link, &Frame::Activate);
        self.exchange();
    }

    fn send(&mut self, at: usize, link: LinkId, peer: [u8; 32], payload: &[u8]) -> usize {
        self.relays[at].handle_frame(self.now, link, &Frame::Datagram { peer, payload });
        self.exchange()
    }

    fn received(&mut self, at: usize, link: LinkId) -> Vec<String> {
        let (mut out, mut frames) = (Vec::new(), Vec::new());
        while self.relays[at].poll_transmit(self.now, link, BUDGET, &mut out) == Transmit::Frames {
            let mut rest = out.as_slice();
            while let Some(parsed) = parse(rest, MAX_BODY).unwrap() {
                frames.push(match parsed.frame {
                    Frame::Datagram { peer, payload } | Frame::Probe { peer, payload } => {
                        format!("{} from {}", String::from_utf8_lossy(payload), peer[0])
                    }
                    Frame::Error { reason, .. } => format!("{reason:?}"),
                    Frame::PeerGone(peer) => format!("{} is gone", peer[0]),
                    other => format!("{other:?}"),
                });
                frames.pop_if(|frame| frame.starts_with("Replicas"));
                rest = &rest[parsed.length..];
            }
            out.clear();
        }
        frames
    }
}

#[test]
fn clients_of_different_replicas_exchange_datagrams() {
    let mut mesh = Mesh::new(3);
    let (a, b) = (mesh.register(0, A, 1), mesh.register(2, B, 1));
    assert_eq!(mesh.send(0, a, B, b"there"), 1, "one frame between replicas");
    assert_eq!(mesh.received(2, b), ["there from 1"]);
    let probe = Frame::Probe { peer: A, payload: b"and back" };
    mesh.relays[2].handle_frame(mesh.now, b, &probe);
    mesh.exchange();
    assert_eq!(mesh.received(0, a), ["and back from 2"]);
    let forwarded = mesh.relays[0].forwarding();
    assert_eq!((forwarded.datagrams, forwarded.bytes, mesh.relays[0].counters().datagrams), (1, 5, 1));
    mesh.send(0, a, [9; 32], b"x");
    assert_eq!(mesh.received(0, a), ["9 is gone"]);
}

#[test]
fn clients_of_before_a_connection_are_announced_too() {
    let mut mesh = Mesh::new(2);
    mesh.disconnect(1);
    let (a, b) = (mesh.register(0, A, 1), mesh.register(1, B, 1));
    mesh.send(0, a, B, b"x");
    assert_eq!(mesh.received(0, a), ["2 is gone"]);
    mesh.connect(0, 1);
    mesh.send(0, a, B, b"now");
    assert_eq!(mesh.received(1, b), ["now from 1"]);
}

#[test]
fn the_newest_of_all_replicas_receives_and_the_older_one_drains() {
    let mut mesh = Mesh::new(3);
    let (b, old) = (mesh.register(2, B, 1), mesh.register(0, A, 1));
    let new = mesh.register(1, A, 1);
    mesh.send(2, b, A, b"x");
    assert_eq!((mesh.received(1, new), mesh.received(0, old)), (vec!["x from 2".to_owned()], vec![]));
    // It can still send.
    mesh.send(0, old, B, b"y");
    assert_eq!(mesh.received(2, b), ["y from 1"]);
    mesh.after(5_000);
    assert_eq!(mesh.received(0, old), ["Superseded"]);
    // And back: a later registration at the first replica.
    let back = mesh.register(0, A, 1);
    mesh.send(2, b, A, b"z");
    assert_eq!(mesh.received(0, back), ["z from 2"]);
}

#[test]
fn an_older_link_receives_again_if_the_newer_one_ends_before_it_has_drained() {
    let mut mesh = Mesh::new(3);
    let (b, old) = (mesh.register(2, B, 1), mesh.register(0, A, 1));
    let new = mesh.register(1, A, 1);
    mesh.relays[1].remove(new);
    mesh.exchange();
    mesh.after(6_000);
    mesh.send(2, b, A, b"x");
    assert_eq!(mesh.received(0, old), ["x from 2"], "and it stays");
    // The replica of the newer one is lost.
    mesh.register(1, A, 1);
    mesh.disconnect(1);
    mesh.after(6_000);
    assert_eq!(mesh.received(0, old), Vec::<String>::new());
    assert!(!mesh.relays[0].is_closing(old));
}

#[test]
fn registrations_that_replicas_did_not_hear_of_are_ordered_by_time_and_both_agree() {
    let mut mesh = Mesh::new(2);
    mesh.disconnect(1);
    // Many others: only the time says that theirs were earlier.
    for number in 10..60 {
        mesh.register(0, [number; 32], 1);
    }
    let old = mesh.register(0, A, 1);
    mesh.after(100);
    let new = mesh.register(1, A, 1);
    mesh.connect(0, 1);
    mesh.after(5_000);
    assert_eq!((mesh.received(0, old), mesh.received(1, new)), (vec!["Superseded".to_owned()], vec![]));
    // At the same moment: one of them, and not both.
    mesh.disconnect(1);
    let (first, second) = (mesh.register(0, B, 1), mesh.register(1, B, 1));
    mesh.connect(0, 1);
    mesh.after(5_000);
    let ended = [mesh.received(0, first), mesh.received(1, second)];
    assert_eq!(
        ended.iter().filter(|frames| frames.contains(&"Superseded".to_owned())).count(),
        1,
        "{ended:?}"
    );
}

#[test]
fn a_replica_that_is_gone_loses_its_clients_at_once() {
    let mut mesh = Mesh::new(3);
    let a = mesh.register(0, A, 1);
    mesh.register(1, B, 1);
    // A second connection to the same replica: the clients stay until both are gone.
    mesh.connect(0, 1);
    assert_eq!(mesh.relays[0].replicas(), 2);
    let (.., here, _) = mesh.connections.pop().unwrap();
    mesh.relays[0].remove_replica(here);
    assert_eq!(mesh.send(0, a, B, b"x"), 1);
    mesh.disconnect(1);
    assert_eq!((mesh.send(0, a, B, b"x"), mesh.received(0, a)), (0, vec!["2 is gone".to_owned()]));
    assert_eq!(mesh.relays[0].replicas(), 1);
    mesh.after(1_000);
    assert_eq!(mesh.relays[0].keys.len(), 1, "nothing is kept");
}

#[test]
fn a_client_that_leaves_is_withdrawn() {
    let mut mesh = Mesh::new(2);
    let (a, b) = (mesh.register(0, A, 1), mesh.register(1, B, 1));
    mesh.relays[1].remove(b);
    mesh.exchange();
    mesh.send(0, a, B, b"x");
    assert_eq!(mesh.received(0, a), ["2 is gone"]);
}

#[test]
fn a_datagram_never_goes_further_than_one_hop() {
    let mut mesh = Mesh::new(3);
    let (a, b) = (mesh.register(0, A, 1), mesh.register(1, B, 1));
    let connection = mesh.connections.iter().find(|(from, to, ..)| (*from, *to) == (0, 1)).copied().unwrap();
    // The client moves to the third replica while datagrams are on their way to the second.
    mesh.relays[0].handle_frame(mesh.now, a, &Frame::Datagram { peer: B, payload: b"x" });
    mesh.relays[1].remove(b);
    let there = connection.3;
    let admission = Admission { key: PublicKey(B), instance: [1; 8], token: None };
    mesh.relays[2].register(mesh.now, admission, &Registered { idle_timeout: 60 }).unwrap();
    mesh.exchange();
    assert_eq!(mesh.relays[1].forwarding().datagrams, 0);
    assert_eq!(mesh.relays[1].forwarding().dropped(DropReason::NotRegistered), 1);
    // Replicas that each say that the other one has a client: nothing goes round.
    let frame = ReplicaFrame::Datagram { from: A, to: [9; 32], payload: b"x" };
    let registration = ReplicaRegistration { key: [9; 32], instance: [1; 8], stamp: 1, is_standby: false };
    let claim = ReplicaFrame::Registered(registration);
    mesh.relays[0].handle_replica_frame(mesh.now, connection.2, &claim).unwrap();
    mesh.relays[1].handle_replica_frame(mesh.now, there, &claim).unwrap();
    mesh.relays[1].handle_replica_frame(mesh.now, there, &frame).unwrap();
    assert_eq!(mesh.exchange(), 0);
}

#[test]
fn programs_with_the_same_key_at_different_replicas_are_told() {
    let mut mesh = Mesh::new(2);
    let mut told = Vec::new();
    for round in 0..5 {
        mesh.register(round % 2, A, u8::try_from(round).unwrap());
        for at in 0..2 {
            let links: Vec<LinkId> = mesh.relays[at].links.keys().copied().collect();
            told.extend(links.into_iter().flat_map(|link| mesh.received(at, link)));
        }
    }
    assert!(told.iter().any(|frame| frame.contains("DuplicateKey")), "{told:?}");
}

#[test]
fn udp_ports_are_for_peers_of_the_same_replica() {
    let mut mesh = Mesh::new(2);
    let a = mesh.register(0, A, 1);
    mesh.register(1, B, 1);
    mesh.relays[0].handle_frame(mesh.now, a, &Frame::Allocate(B));
    let refused = mesh.relays[0].take_allocation_requests().remove(0).refusal;
    assert_eq!(refused, Some(crate::core::AllocationRefusal::NotRegistered));
    mesh.register(0, B, 1);
    mesh.relays[0].handle_frame(mesh.now, a, &Frame::Allocate(B));
    assert_eq!(mesh.relays[0].take_allocation_requests().remove(0).refusal, None);
}

#[test]
fn what_waits_for_a_replica_is_bounded_and_counted() {
    let mut mesh = Mesh::new(2);
    let a = mesh.register(0, A, 1);
    mesh.register(1, B, 1);
    let payload = [0; 60_000];
    for _ in 0..100 {
        mesh.relays[0].handle_frame(mesh.now, a, &Frame::Datagram { peer: B, payload: &payload });
    }
    let full = mesh.relays[0].forwarding().dropped(DropReason::QueueFull);
    assert!((20..40).contains(&full), "{full}");
    mesh.now += Duration::from_millis(101);
    mesh.exchange();
    assert_eq!(mesh.relays[0].forwarding().dropped(DropReason::QueueTime), 100 - full);
    assert_eq!(mesh.relays[1].counters().datagrams, 0);
}

#[test]
fn a_replica_is_not_connected_to_itself_nor_without_end() {
    let mut relay = Relay::new(Limits::default()).identified([1; 16], Instant::now(), LATER);
    assert_eq!(relay.add_replica([1; 16], true), Err(ReplicaRefusal::Itself));
    let links: Vec<_> = (0..=MAX_LINKS).map(|_| relay.add_replica([2; 16], true)).collect();
    assert_eq!(links.last(), Some(&Err(ReplicaRefusal::Full)));
    relay.remove_replica(links[0].unwrap());
    assert!(relay.add_replica([2; 16], true).is_ok());
}

#[test]
fn a_standby_link_receives_once_the_replica_of_the_other_is_gone() {
    let mut mesh = Mesh::new(3);
    let (b, first) = (mesh.register(2, B, 1), mesh.register(0, A, 1));
    let standby = mesh.register_standby(1, A, 1);
    mesh.after(6_000);
    mesh.send(2, b, A, b"x");
    assert_eq!((mesh.received(0, first), mesh.received(1, standby)), (vec!["x from 2".to_owned()], vec![]));
    mesh.disconnect(0);
    mesh.send(2, b, A, b"y");
    assert_eq!(mesh.received(1, standby), ["y from 2"], "before its client says anything");
    mesh.activate(1, standby);
    mesh.send(2, b, A, b"z");
    assert_eq!(mesh.received(1, standby), ["z from 2"]);
    assert_eq!(mesh.relays.iter().map(|relay| relay.counters().key_changes).sum::<u64>(), 0);
}

#[test]
fn a_client_activates_its_standby_link_while_others_still_know_the_older_one() {
    let mut mesh = Mesh::new(3);
    // The replica of the first says nothing more, and the others have not noticed.
    let (b, first) = (mesh.register(2, B, 1), mesh.register(0, A, 1));
    let standby = mesh.register_standby(1, A, 1);
    mesh.activate(1, standby);
    mesh.send(2, b, A, b"x");
    assert_eq!((mesh.received(0, first), mesh.received(1, standby)), (vec![], vec!["x from 2".to_owned()]));
    mesh.after(5_000);
    assert_eq!(mesh.received(0, first), ["Superseded"]);
    // Again, and of a link that does not stand by: nothing changes.
    mesh.activate(1, standby);
    mesh.send(2, b, A, b"y");
    assert_eq!(mesh.received(1, standby), ["y from 2"]);
}

#[test]
fn a_replica_that_does_not_know_standby_links_is_not_told_of_them() {
    let mut mesh = Mesh::of(&[false, true, true]);
    let (b, first) = (mesh.register(2, B, 1), mesh.register(0, A, 1));
    let standby = mesh.register_standby(1, A, 1);
    mesh.after(6_000);
    assert_eq!(mesh.received(0, first), [""; 0], "it does not drain");
    mesh.send(2, b, A, b"x");
    assert_eq!(mesh.received(0, first), ["x from 2"]);
    mesh.activate(1, standby);
    mesh.after(6_000);
    assert_eq!(mesh.received(0, first), ["Superseded"]);
}

#[test]
fn programs_with_the_same_key_and_standby_links_are_told() {
    let mut mesh = Mesh::new(3);
    let active = [mesh.register(0, A, 1), mesh.register(1, A, 2)];
    let mut standby = [(2, mesh.register_standby(2, A, 1)), (0, mesh.register_standby(0, A, 2))];
    let mut told = mesh.received(1, active[1]);
    for round in 0..4 {
        mesh.after(5_000);
        let (at, link) = standby[round % 2];
        mesh.activate(at, link);
        told.extend(mesh.received(at, link));
        let other = (at + 1) % 3;
        standby[round % 2] = (other, mesh.register_standby(other, A, u8::try_from(round % 2 + 1).unwrap()));
    }
    assert!(told.iter().any(|frame| frame.contains("DuplicateKey")), "{told:?}");
}

#[test]
fn clients_are_told_how_many_replicas_accept_standby_links() {
    let mut mesh = Mesh::of(&[true, true, false]);
    let link = mesh.register(0, A, 1);
    let told = |mesh: &mut Mesh| {
        let mut out = Vec::new();
        mesh.relays[0].poll_transmit(mesh.now, link, BUDGET, &mut out);
        let frame = parse(&out, MAX_BODY).unwrap().map(|parsed| format!("{:?}", parsed.frame));
        frame.unwrap_or_default()
    };
    mesh.disconnect(1);
    assert_eq!(told(&mut mesh), "Replicas(0)");
    mesh.connect(0, 1);
    mesh.connect(0, 1);
    assert_eq!(told(&mut mesh), "Replicas(1)");
}

proptest! {
    /// Frames of a replica never make another one fail, keep what it has withdrawn, or send without end.
    #[test]
    fn hostile_frames_do_no_harm(actions in proptest::collection::vec((0_u8..6, 0_u8..4, any::<u64>()), 0..60)) {
        let mut mesh = Mesh::new(2);
        let (.., there) = mesh.connections[0];
        let client = mesh.register(1, A, 1);
        for (action, key, stamp) in actions {
            let key = [key; 32];
            let registration = ReplicaRegistration { key, instance: [key[0]; 8], stamp, is_standby: stamp % 2 > 0 };
            let frame = match action {
                0 => ReplicaFrame::Datagram { from: key, to: A, payload: b"x" },
                1 => ReplicaFrame::Gone(key),
                2 => ReplicaFrame::Probe { from: A, to: key, payload: b"y" },
                3 => ReplicaFrame::Registered(registration),
                4 => ReplicaFrame::Unknown(action),
                _ => ReplicaFrame::Ping,
            };
            mesh.relays[1].handle_replica_frame(mesh.now, there, &frame).unwrap();
            mesh.send(1, client, key, b"z");
            mesh.received(1, client);
            mesh.after(stamp % 3000);
        }
        mesh.disconnect(0);
        mesh.after(100_000);
        mesh.after(1);
        prop_assert!(mesh.relays[1].keys.is_empty());
        prop_assert!(mesh.relays[1].replicas.links.is_empty());
    }
}

//! Both peers begin a handshake before either has the other's: what was sent in a session arrives, and they end in the same one.

use std::collections::BTreeSet;
use std::time::Duration;

use fairlead_wireguard::{Due, Kind, kind_of};
use proptest::prelude::*;

use crate::tunnel::support::{Clock, MILLISECOND, SECOND, Side, established, send, strangers};

/// A path with the same delay both ways, on which both sides send a packet every millisecond once they can.
struct Path {
    sides: [Side; 2],
    clock: Clock,
    delay: Duration,
    /// Messages on their way, in the order of their arrival, each with its time and the side it goes to.
    under_way: Vec<(Duration, usize, Vec<u8>)>,
    /// Initiations and responses sent so far, and the numbers of those that are lost.
    handshake_messages: usize,
    lost: BTreeSet<usize>,
    sends_data: bool,
    /// Whether every data message has to arrive.
    is_strict: bool,
    /// Both indexes of every session: the responder's and the initiator's.
    sessions: BTreeSet<[Vec<u8>; 2]>,
    /// Data messages sent and received.
    counts: [usize; 2],
}

impl Path {
    fn new((a, b, clock): (Side, Side, Clock), delay: Duration, swapped: bool) -> Self {
        Self {
            sides: if swapped { [b, a] } else { [a, b] },
            clock,
            delay,
            under_way: Vec::new(),
            handshake_messages: 0,
            lost: BTreeSet::new(),
            sends_data: true,
            is_strict: true,
            sessions: BTreeSet::new(),
            counts: [0; 2],
        }
    }

    fn emit(&mut self, from: usize, message: Vec<u8>) {
        if kind_of(&message) == Some(Kind::Response) {
            self.sessions.insert([message[4..8].to_vec(), message[8..12].to_vec()]);
        }
        if kind_of(&message) != Some(Kind::Data) {
            self.handshake_messages += 1;
            if self.lost.contains(&self.handshake_messages) {
                return;
            }
        }
        self.under_way.push((self.clock.elapsed + self.delay, 1 - from, message));
    }

    fn initiate(&mut self, side: usize) -> Vec<u8> {
        let message = self.sides[side].initiate(true, self.clock.now()).unwrap();
        self.emit(side, message.clone());
        message
    }

    fn send(&mut self, side: usize, packet: &[u8]) {
        if let Some(message) = self.sides[side].seal(packet, self.clock.now()) {
            self.counts[0] += 1;
            self.emit(side, message);
        }
    }

    /// A millisecond passes.
    fn step(&mut self) {
        let now = self.clock.now();
        let (arrived, rest) = std::mem::take(&mut self.under_way)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, ..)| *at <= self.clock.elapsed);
        self.under_way = rest;
        for (_, to, message) in arrived {
            match self.sides[to].receive(&message, now) {
                Ok(received) => {
                    self.counts[1] += usize::from(received.packet.is_some());
                    received.answer.into_iter().for_each(|answer| self.emit(to, answer));
                }
                // An answer that is no longer needed, or a copy.
                Err(error) => assert!(!self.is_strict || kind_of(&message) != Some(Kind::Data), "{error}"),
            }
        }
        for side in 0..2 {
            for due in self.sides[side].due(now) {
                match due {
                    Due::Handshake => drop(self.initiate(side)),
                    Due::Keepalive => self.send(side, b""),
                    Due::Expired | Due::GaveUp => panic!("{due:?}"),
                }
            }
            if self.sends_data {
                self.send(side, b"data");
            }
        }
        self.clock.advance(MILLISECOND);
    }

    fn run(&mut self, duration: Duration) {
        let end = self.clock.elapsed + duration;
        while self.clock.elapsed < end {
            self.step();
        }
    }

    /// Both begin, the second side `later`.
    fn cross(&mut self, later: Duration) {
        self.initiate(0);
        self.run(later);
        self.initiate(1);
    }

    /// Lets all messages under way arrive, and checks that nothing was lost and both send in the same session.
    fn end(&mut self) {
        for side in 0..2 {
            self.send(side, b"last");
        }
        self.sends_data = false;
        self.run(self.delay + MILLISECOND);
        assert_eq!(self.counts[0], self.counts[1]);
        let now = self.clock.now();
        let [to_second, to_first] =
            [0, 1].map(|side| self.sides[side].seal(b"", now).expect("there is a session")[4..8].to_vec());
        let is_one = [[&to_first, &to_second], [&to_second, &to_first]]
            .into_iter()
            .any(|[responder, initiator]| self.sessions.contains(&[responder.clone(), initiator.clone()]));
        assert!(is_one, "the sides are in different sessions");
    }
}

#[test]
fn handshakes_that_cross_at_the_start_lead_to_one_session() {
    for (later, swapped) in [0, 1, 12, 24].into_iter().flat_map(|later| [(later, false), (later, true)]) {
        let mut path = Path::new(strangers(), 25 * MILLISECOND, swapped);
        path.cross(later * MILLISECOND);
        path.run(SECOND);
        path.end();
        assert!(path.counts[0] > 1_800, "{:?}", path.counts);
    }
}

#[test]
fn handshakes_that_cross_at_a_renewal_lose_nothing() {
    for (later, swapped) in [0, 1, 12, 24].into_iter().flat_map(|later| [(later, false), (later, true)]) {
        let mut path = Path::new(established(), 25 * MILLISECOND, swapped);
        path.run(100 * MILLISECOND);
        for _ in 0..2 {
            path.cross(later * MILLISECOND);
            path.run(SECOND);
        }
        path.end();
        assert!(path.counts[0] > 4_200, "{:?}", path.counts);
    }
}

/// The session of one handshake has one initiator, so that the next two cannot cross.
#[test]
fn after_crossing_one_side_renews_the_session() {
    for swapped in [false, true] {
        let mut path = Path::new(strangers(), 25 * MILLISECOND, swapped);
        path.cross(3 * MILLISECOND);
        path.run(SECOND);
        path.end();
        let now = path.clock.set(122 * SECOND);
        path.sides.iter_mut().for_each(|side| drop(side.due(now)));
        let renewing = path.sides.iter_mut().filter_map(|side| {
            side.seal(b"data", now).unwrap();
            side.due(now).contains(&Due::Handshake).then_some(())
        });
        assert_eq!(renewing.count(), 1);
    }
}

#[test]
fn crossing_handshakes_with_a_lost_message_lose_no_data() {
    for (lost, swapped) in (1..=4).flat_map(|lost| [(lost, false), (lost, true)]) {
        let mut path = Path::new(established(), 25 * MILLISECOND, swapped);
        path.lost.insert(lost);
        path.run(100 * MILLISECOND);
        path.cross(2 * MILLISECOND);
        path.run(SECOND);
        // The other handshake is enough.
        path.end();
        assert_eq!(path.sides.each_ref().map(|side| side.tunnel.is_handshaking()), [false; 2]);
    }
    // Without both responses, the timers lead to another handshake.
    for swapped in [false, true] {
        let mut path = Path::new(established(), 25 * MILLISECOND, swapped);
        path.lost.extend([3, 4]);
        path.cross(2 * MILLISECOND);
        path.run(6 * SECOND);
        path.end();
        assert!(path.handshake_messages > 4);
        assert_eq!(path.sides.each_ref().map(|side| side.tunnel.is_handshaking()), [false; 2]);
    }
}

/// The initiation of one side arrives when the other one has its session, so that only the first knows that they have crossed. Both
/// change to the other's session at once; one of them has to come back.
#[test]
fn a_side_follows_a_peer_that_has_changed_to_its_session() {
    for swapped in [false, true] {
        let (mut a, mut b, mut clock) = strangers();
        if swapped {
            std::mem::swap(&mut a, &mut b);
        }
        let (of_a, of_b) = (a.initiate(true, clock.now()).unwrap(), b.initiate(true, clock.now()).unwrap());
        let to_b = a.respond(&of_b, clock.advance(MILLISECOND)).unwrap();
        b.tunnel.finish(&to_b, clock.advance(MILLISECOND)).unwrap();
        let to_a = b.respond(&of_a, clock.advance(MILLISECOND)).unwrap();
        a.tunnel.finish(&to_a, clock.advance(MILLISECOND)).unwrap();
        let crossing = [a.seal(b"to b", clock.now()).unwrap(), b.seal(b"to a", clock.now()).unwrap()];
        clock.advance(MILLISECOND);
        let of_session = b.open(&crossing[0], clock.now()).unwrap().1.index;
        a.open(&crossing[1], clock.now()).unwrap();
        send(&mut b, &mut a, b"data", clock.now());
        assert_eq!(send(&mut a, &mut b, b"data", clock.now()).index, of_session);
    }
}

/// A repeated initiation of the peer, sent before it got the response to its first one, arrives after the handshakes have crossed. The peer
/// sends in the session of the first response, and gets no response to the second.
#[test]
fn a_repeated_initiation_does_not_end_the_session_that_the_peer_is_about_to_use() {
    for swapped in [false, true] {
        let (mut a, mut b, mut clock) = strangers();
        if swapped {
            std::mem::swap(&mut a, &mut b);
        }
        let (of_a, of_b) = (a.initiate(true, clock.now()).unwrap(), b.initiate(true, clock.now()).unwrap());
        let to_b = a.respond(&of_b, clock.advance(400 * MILLISECOND)).unwrap();
        let to_a = b.respond(&of_a, clock.now()).unwrap();
        b.tunnel.finish(&to_b, clock.advance(400 * MILLISECOND)).unwrap();
        let repeated = a.initiate(true, clock.now()).unwrap();
        a.tunnel.finish(&to_a, clock.now()).unwrap();
        let data = a.seal(b"data", clock.now()).unwrap();
        b.respond(&repeated, clock.advance(400 * MILLISECOND)).unwrap();
        assert_eq!(b.open(&data, clock.now()).unwrap().0, b"data");
    }
}

/// A peer that has forgotten its own initiation when it takes another one, as the kernel does.
#[test]
fn a_peer_that_forgets_its_own_initiation_gets_a_session() {
    for swapped in [false, true] {
        let (mut a, mut b, mut clock) = strangers();
        if swapped {
            std::mem::swap(&mut a, &mut b);
        }
        let now = clock.advance(SECOND);
        let (of_a, of_b) = (a.initiate(true, now).unwrap(), b.initiate(true, now).unwrap());
        b.respond(&of_a, now).map(|to_a| a.tunnel.finish(&to_a, now).unwrap()).unwrap();
        // Its answer to `of_b` finds no initiation.
        a.respond(&of_b, clock.advance(25 * MILLISECOND)).unwrap();
        assert!(send(&mut a, &mut b, b"", clock.now()).is_first);
        for _ in 0..3 {
            send(&mut a, &mut b, b"data", clock.advance(4 * SECOND));
            send(&mut b, &mut a, b"data", clock.now());
        }
        assert_eq!([&a, &b].map(|side| side.tunnel.indexes().count()), [1, 1]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Initiations are sent again, as a copy and anew, and some of the first messages are lost, as when a NAT opens late.
    #[test]
    fn repeated_initiations_that_cross_lead_to_one_session(
        delay in prop::sample::select(vec![1_u32, 25, 140, 400]),
        later in 0..400_u32,
        swapped in any::<bool>(),
        lost in prop::collection::btree_set(1..=8_usize, 0..3),
        is_renewal in any::<bool>(),
    ) {
        let sides = if is_renewal { established() } else { strangers() };
        let mut path = Path::new(sides, delay * MILLISECOND, swapped);
        path.lost = lost;
        // When the time to an answer is longer than that between two initiations, the second answer may end the session of the first.
        path.is_strict = delay < 400;
        let mut last = [const { None::<Vec<u8>> }; 2];
        for millisecond in 0..2_500_u32 {
            for (side, last) in last.iter_mut().enumerate() {
                let begun = if side == 0 { 0 } else { later };
                let is_unanswered = path.sides[side].tunnel.is_handshaking();
                match (millisecond.checked_sub(begun), &last) {
                    (Some(0), _) => *last = Some(path.initiate(side)),
                    (Some(300), Some(copy)) if is_unanswered => path.emit(side, copy.clone()),
                    (Some(1_000 | 2_000), _) if is_unanswered => drop(path.initiate(side)),
                    _ => {}
                }
            }
            path.step();
        }
        path.run(12 * SECOND);
        if !path.is_strict {
            // Then the peer begins another handshake once what it sent was not answered for 15 s, with up to 0.3 s of jitter.
            path.run(6 * SECOND);
            path.sends_data = false;
            path.run(SECOND);
            (path.sends_data, path.is_strict, path.counts) = (true, true, [0; 2]);
            path.run(SECOND);
        }
        path.end();
    }
}

//! Two peers and what is under way between them. Whatever becomes of it: a peer takes nothing that the other one has not made, nothing
//! twice, and no counter is used twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fairlead_wireguard::{Due, SendKey};

use super::support::{Clock, Side, strangers};

pub(crate) struct World {
    pub(crate) sides: [Side; 2],
    pub(crate) clock: Clock,
    /// Messages on their way, each with the side it goes to.
    pub(crate) under_way: Vec<(usize, Vec<u8>)>,
    /// Numbers of the packets that were decrypted.
    pub(crate) received: BTreeSet<u32>,
    /// Initiations, responses, cookie replies and data messages that were taken.
    pub(crate) taken: [usize; 4],
    last_packet: u32,
    /// Messages that a side has made and the other one not taken: their authentic part, and the packet in a data message.
    made: BTreeMap<(usize, Vec<u8>), Vec<u8>>,
    /// The keys of all sessions so far, and the next counter.
    keys: Vec<(Arc<SendKey>, u64)>,
    /// First blocks of what packets were encrypted with.
    key_streams: BTreeSet<u128>,
}

impl World {
    pub(crate) fn new() -> Self {
        let (a, b, clock) = strangers();
        Self {
            sides: [a, b],
            clock,
            under_way: Vec::new(),
            received: BTreeSet::new(),
            taken: [0; 4],
            last_packet: 0,
            made: BTreeMap::new(),
            keys: Vec::new(),
            key_streams: BTreeSet::new(),
        }
    }

    pub(crate) fn initiate(&mut self, side: usize, again: bool) {
        if let Some(message) = self.sides[side].initiate(again, self.clock.now()) {
            self.made(side, message, b"");
        }
    }

    /// Sends a packet, whose number is returned, with so many bytes behind the number; or begins a handshake.
    pub(crate) fn send(&mut self, side: usize, more: usize) -> Option<u32> {
        self.last_packet += 1;
        let number = self.last_packet;
        let packet = [&u128::from(number).to_le_bytes()[..], &vec![0x5a; more]].concat();
        if let Some(message) = self.seal(side, &packet) {
            let start: &[u8; 16] = message[16..].first_chunk().unwrap();
            let is_new = self.key_streams.insert(u128::from_le_bytes(*start) ^ u128::from(number));
            assert!(is_new, "packet {number} was encrypted as another one");
            Some(number)
        } else {
            self.initiate(side, false);
            None
        }
    }

    /// Sends an empty packet, if there is a session.
    pub(crate) fn send_keepalive(&mut self, side: usize) -> bool {
        self.seal(side, b"").is_some()
    }

    fn seal(&mut self, side: usize, packet: &[u8]) -> Option<Vec<u8>> {
        let now = self.clock.now();
        let key = Arc::clone(self.sides[side].tunnel.sealer(now.instant)?.key());
        let message = self.sides[side].seal(packet, now)?;
        let counter = u64::from_le_bytes(message[8..16].try_into().unwrap());
        match self.keys.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &key)) {
            Some((_, next)) => {
                assert_eq!(counter, *next);
                *next += 1;
            }
            None => {
                assert_eq!(counter, 0);
                self.keys.push((key, 1));
            }
        }
        self.made(side, message.clone(), packet);
        Some(message)
    }

    /// A side has made a message with this packet, for the other one.
    pub(crate) fn made(&mut self, side: usize, message: Vec<u8>, packet: &[u8]) {
        let before = self.made.insert((side, authentic(&message)), packet.to_vec());
        assert_eq!(before, None, "the same message again");
        self.under_way.push((1 - side, message));
    }

    /// A side receives any message.
    pub(crate) fn arrive(&mut self, to: usize, message: &[u8]) {
        let Ok(received) = self.sides[to].receive(message, self.clock.now()) else { return };
        let made = self.made.remove(&(1 - to, authentic(message)));
        let packet = made.expect("the other side has not made it, or it was taken before");
        self.taken[usize::from(message[0]) - 1] += 1;
        if let Some(answer) = received.answer {
            self.made(to, answer, b"");
        }
        if let Some(same) = received.packet {
            assert_eq!(same, packet);
            let number = packet.first_chunk().map(|number| u32::from_le_bytes(*number));
            self.received.extend(number);
        }
    }

    /// Time passes from timer to timer, as for a device.
    pub(crate) fn wait(&mut self, duration: Duration) {
        let end = self.clock.elapsed + duration;
        loop {
            let deadlines = self.sides.iter().filter_map(|side| side.tunnel.poll_timeout());
            let next = deadlines.min().map(|next| next.saturating_duration_since(self.clock.start.instant));
            let Some(next) = next.filter(|next| *next <= end) else { break };
            self.clock.set(next.max(self.clock.elapsed));
            self.run_timers();
        }
        self.clock.set(end);
    }

    fn run_timers(&mut self) {
        for side in 0..2 {
            for due in self.sides[side].due(self.clock.now()) {
                match due {
                    Due::Expired => assert!(!self.send_keepalive(side), "there is no session"),
                    Due::GaveUp => {}
                    Due::Handshake => self.initiate(side, true),
                    Due::Keepalive => assert!(self.send_keepalive(side), "there is a session"),
                }
            }
        }
    }
}

/// The type of a message and the part of it that no other peer can make: without indexes, which are not authenticated, and MACs, for
/// which the public key is enough (WireGuard paper 5.4).
fn authentic(message: &[u8]) -> Vec<u8> {
    let part = match message[0] {
        // Ephemeral key, static key and time stamp.
        1 => 8..116,
        // Ephemeral key and an empty text.
        2 => 12..60,
        // Nonce and cookie; or counter and packet.
        _ => 8..message.len(),
    };
    [&message[..1], &message[part]].concat()
}

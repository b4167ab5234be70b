//! Any bytes as a sequence of operations on two peers. The fuzz target `wireguard_messages` includes this file, with [`super::support`]
//! and [`super::world`].

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_wireguard::{
    COOKIE_REPLY_LENGTH, HandshakeLimiter, INITIATION_LENGTH, Kind, MacSender, RESPONSE_LENGTH, Verdict,
    kind_of, read_initiation,
};

use super::support::public;
use super::world::World;

/// Bounds the time for one input.
const MAX_OPERATIONS: usize = 128;
/// Most messages under way; the oldest ones are lost.
const MAX_UNDER_WAY: usize = 64;
/// Three sessions, and two initiations without answer.
const MAX_INDEXES: usize = 5;
/// One more than a network of IPv6 may send in a second without a cookie.
const FLOOD: usize = 501;

/// Runs the operations: a byte for each, of which bit 7 says which of the two peers, and then its operands. Returns how many
/// initiations, responses, cookie replies and data messages the peers have taken.
pub(crate) fn run(bytes: &[u8]) -> [usize; 4] {
    let mut network = Network::new();
    let mut input = Input(bytes);
    for _ in 0..MAX_OPERATIONS {
        if network.operate(&mut input).is_none() {
            break;
        }
        network.check_bounds();
    }
    network.world.taken
}

/// Bytes that no operation has used yet.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

/// The peers, with an address that knows who has to send a cookie in front of each.
struct Network {
    world: World,
    limiters: [HandshakeLimiter; 2],
}

impl Network {
    fn new() -> Self {
        let world = World::new();
        let now = world.clock.now().instant;
        let limiters = [0, 1].map(|side| HandshakeLimiter::new(&public(&world.sides[side]), now));
        Self { world, limiters }
    }

    /// `None`: the input is at its end.
    fn operate(&mut self, input: &mut Input<'_>) -> Option<()> {
        let operation = input.byte()?;
        let (side, flag) = (usize::from(operation >> 7), operation & 0x40 != 0);
        match operation % 16 {
            0 => self.world.initiate(side, flag),
            1 => drop(self.world.send(side, usize::from(input.byte()?))),
            2 => drop(self.world.send_keepalive(side)),
            3 => {
                // From 16 ms to 17 minutes.
                let length = input.byte()?;
                self.world.wait(Duration::from_millis(u64::from(16 + length % 16) << (length / 16)));
            }
            4 => self.world.sides[side].tunnel.forget_sessions(),
            5 => {
                let key = input.byte()?;
                self.world.sides[side].tunnel.set_preshared_key((key != 0).then_some([key; 32]));
            }
            6 => self.inject(side, flag, input)?,
            other => self.operate_network(other, flag, input)?,
        }
        Some(())
    }

    /// The same for what happens to messages under way.
    fn operate_network(&mut self, operation: u8, flag: bool, input: &mut Input<'_>) -> Option<()> {
        match operation {
            7 => {
                let at = self.choose_message(input)?;
                self.take_message(at);
            }
            8 => {
                let at = self.choose_message(input)?;
                let repeated = self.world.under_way.get(at).cloned();
                self.world.under_way.extend(repeated);
            }
            9 => {
                let chosen = self.choose_message(input)?;
                let at = input.byte()?;
                let change = input.byte()?;
                let message = self.world.under_way.get_mut(chosen);
                if let Some((_, message)) = message.filter(|(_, message)| !message.is_empty()) {
                    let at = usize::from(at) % message.len();
                    message[at] ^= change;
                }
            }
            10 => self.sign(input)?,
            11 => self.flood(input, flag)?,
            12 => {
                let at = self.choose_message(input)?;
                if let Some((to, message)) = self.take_message(at) {
                    self.deliver(to, &message);
                }
            }
            _ => {
                if let Some((to, message)) = self.world.under_way.pop() {
                    self.deliver(to, &message);
                }
            }
        }
        Some(())
    }

    /// Index of a message under way, which the next byte chooses; of none if there is none.
    fn choose_message(&self, input: &mut Input<'_>) -> Option<usize> {
        Some(usize::from(input.byte()?) % self.world.under_way.len().max(1))
    }

    fn take_message(&mut self, at: usize) -> Option<(usize, Vec<u8>)> {
        (at < self.world.under_way.len()).then(|| self.world.under_way.remove(at))
    }

    /// As for a device: handshake messages pass the limiter first.
    fn deliver(&mut self, to: usize, message: &[u8]) {
        let is_handshake = matches!(kind_of(message), Some(Kind::Initiation | Kind::Response));
        if !is_handshake || self.is_accepted(to, false, message) {
            self.world.arrive(to, message);
        }
    }

    /// Whether a message passes the limiter.
    fn is_accepted(&mut self, to: usize, is_v6: bool, message: &[u8]) -> bool {
        let is_signed = self.signed(to, message).is_some_and(|signed| {
            let mac2 = message.len() - 16;
            signed[..mac2] == message[..mac2]
        });
        let verdict = self.ask(to, is_v6, message);
        assert!(is_signed || verdict == Verdict::Refuse, "the message has no mac1");
        verdict == Verdict::Accept
    }

    /// Asks the limiter, whose cookie is sent.
    fn ask(&mut self, to: usize, is_v6: bool, message: &[u8]) -> Verdict {
        let sender = 1 - to;
        let from: SocketAddr = if is_v6 {
            ([0x2001, 0xdb8, 0, 0, 0, 0, 0, sender as u16], 51_820).into()
        } else {
            ([192, 0, 2, sender as u8], 51_820).into()
        };
        let now = self.world.clock.now().instant;
        let verdict = self.limiters[to].check(from, message, now, &mut self.world.sides[to].random);
        if let Verdict::Cookie(reply) = verdict {
            self.world.made(to, reply.to_vec(), b"");
        }
        verdict
    }

    /// A handshake message to a side with the `mac1` that it has to have, which needs only the public key; `None` if it is no such
    /// message.
    fn signed(&self, to: usize, message: &[u8]) -> Option<Vec<u8>> {
        let mut signed = message.to_vec();
        matches!(kind_of(message)?, Kind::Initiation | Kind::Response).then(|| {
            let peer = public(&self.world.sides[to]);
            MacSender::new(&peer).sign(&mut signed, self.world.clock.now().instant);
            signed
        })
    }

    /// An attacker signs a message under way that was changed.
    fn sign(&mut self, input: &mut Input<'_>) -> Option<()> {
        let at = self.choose_message(input)?;
        if let Some((to, message)) = self.world.under_way.get(at).cloned()
            && let Some(signed) = self.signed(to, &message)
        {
            self.world.under_way.push((to, signed));
        }
        Some(())
    }

    /// The same message comes so often that its sender has to answer with a cookie.
    fn flood(&mut self, input: &mut Input<'_>, is_v6: bool) -> Option<()> {
        let at = self.choose_message(input)?;
        if let Some((to, message)) = self.world.under_way.get(at).cloned() {
            let _ = (0..FLOOD).find(|_| self.ask(to, is_v6, &message) != Verdict::Accept);
        }
        Some(())
    }

    /// Any bytes reach a side, which takes them for nothing; they may be as long as a message. Afterwards they are under way too.
    fn inject(&mut self, to: usize, fits: bool, input: &mut Input<'_>) -> Option<()> {
        let length = input.byte()?;
        let mut message = input.take(length.into())?.to_vec();
        if let Some(first) = message.first_mut().filter(|_| fits) {
            *first = 1 + *first % 4;
            let length =
                [INITIATION_LENGTH, RESPONSE_LENGTH, COOKIE_REPLY_LENGTH, 48][usize::from(*first) - 1];
            message.resize(length, 0);
            message[1..4].fill(0);
        }
        let (side, now) = (&mut self.world.sides[to], self.world.clock.now());
        assert!(read_initiation(&side.identity, &message).is_err());
        assert!(side.tunnel.finish(&message, now).is_err());
        assert!(side.tunnel.receive_cookie(&message, now.instant).is_err());
        assert!(side.open(&message, now).is_err());
        self.is_accepted(to, false, &message);
        self.world.under_way.push((to, message));
        Some(())
    }

    fn check_bounds(&mut self) {
        let surplus = self.world.under_way.len().saturating_sub(MAX_UNDER_WAY);
        self.world.under_way.drain(..surplus);
        for side in &self.world.sides {
            assert!(side.tunnel.indexes().count() <= MAX_INDEXES);
        }
    }
}

//! A network that loses, repeats, reorders, delays and damages messages.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::tunnel::support::{MILLISECOND, SECOND};
use crate::tunnel::world::World;

#[derive(Debug, Clone)]
enum Step {
    /// A message arrives, and stays under way: it may arrive again.
    Arrive(Index),
    /// One bit of a message is changed.
    Damage(Index, Index, u8),
    Forget(usize),
    Initiate(usize, bool),
    Lose(Index),
    Send(usize),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let side = 0..2_usize;
    prop_oneof![
        8 => any::<Index>().prop_map(Step::Arrive),
        1 => (any::<Index>(), any::<Index>(), 0..8_u8).prop_map(|(at, byte, bit)| Step::Damage(at, byte, bit)),
        1 => side.clone().prop_map(Step::Forget),
        2 => (side.clone(), any::<bool>()).prop_map(|(side, again)| Step::Initiate(side, again)),
        2 => any::<Index>().prop_map(Step::Lose),
        6 => side.prop_map(Step::Send),
        // From a moment to longer than a session lives.
        3 => prop_oneof![0..50_u64, 0..11_000_u64, 0..200_000_u64].prop_map(Step::Wait),
    ]
}

impl World {
    fn step(&mut self, step: Step) {
        match step {
            Step::Arrive(at) if !self.under_way.is_empty() => {
                let (to, message) = at.get(&self.under_way).clone();
                self.arrive(to, &message);
            }
            Step::Damage(at, byte, bit) if !self.under_way.is_empty() => {
                let at = at.index(self.under_way.len());
                let message = &mut self.under_way[at].1;
                let byte = byte.index(message.len());
                message[byte] ^= 1 << bit;
            }
            Step::Forget(side) => self.sides[side].tunnel.forget_sessions(),
            Step::Initiate(side, again) => self.initiate(side, again),
            Step::Lose(at) if !self.under_way.is_empty() => {
                let at = at.index(self.under_way.len());
                self.under_way.swap_remove(at);
            }
            Step::Send(side) => drop(self.send(side, 0)),
            Step::Wait(milliseconds) => self.wait(Duration::from_millis(milliseconds)),
            Step::Arrive(_) | Step::Damage(..) | Step::Lose(_) => {}
        }
    }

    /// From now on the network is a good one. Returns after how long a packet has arrived at both.
    fn heal(&mut self) -> Duration {
        let start = self.clock.elapsed;
        loop {
            let sent = [0, 1].map(|side| self.send(side, 0));
            for _ in 0..6 {
                for (to, message) in std::mem::take(&mut self.under_way) {
                    self.arrive(to, &message);
                }
                self.wait(10 * MILLISECOND);
            }
            let arrived = |number: Option<u32>| number.is_some_and(|number| self.received.contains(&number));
            if sent.into_iter().all(arrived) {
                return self.clock.elapsed - start;
            }
            self.wait(SECOND);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// No panic, nothing is decrypted twice, and a network that works again leads to sessions: at the latest, data without answer
    /// leads to a handshake (15.3 s), which collides with the peer's once.
    #[test]
    fn no_network_breaks_a_tunnel_for_long(steps in prop::collection::vec(step(), 0..120)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        let healed = world.heal();
        prop_assert!(healed <= 25 * SECOND, "it took {:?}", healed);
    }

    #[test]
    fn hostile_messages_never_panic(
        kind in 1..=4_u8,
        index in prop::sample::select(vec![0_u32, 0x0100_0001, 0x0100_0002, 0x0200_0001]),
        rest in prop::collection::vec(any::<u8>(), 0..150),
        fits in any::<bool>(),
    ) {
        let mut world = World::new();
        world.initiate(0, true);
        let mut message = [&[kind, 0, 0, 0], &index.to_le_bytes()[..], &rest].concat();
        if fits {
            message.resize([148, 92, 64, 48][usize::from(kind) - 1], 0);
        }
        for side in &mut world.sides {
            prop_assert!(side.receive(&message, world.clock.now()).is_err());
        }
        prop_assert!(world.heal() < 6 * SECOND);
    }
}

//! Health of IP tunnels: packets take a tunnel only to nodes of the location that answer through it. Pure; `watch` asks.
//!
//! A request is an ICMP echo in a tunnel; the answer may take any way. So each node learns of its own direction, and decides for
//! itself. Where the tunnel has not been used, requests are as long as the tunnel lets through: a network that drops long packets is
//! not used either.

mod packet;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

pub use self::watch::EncapsulationWatch;

/// Requests without an answer after which the tunnel is left.
const MISSES: u32 = 6;
/// Time for which a node answers without a break before a tunnel that failed is used again. It doubles with each time that the tunnel fails
/// soon after, up to [`MAX_HOLD`].
const HOLD: Duration = Duration::from_secs(10);
const MAX_HOLD: Duration = Duration::from_secs(600);
/// Most nodes that are asked at once. Of more, each is asked the more rarely.
const MAX_ASKED: usize = 200;

/// Health of the ends of a node's tunnels.
#[derive(Debug, Default)]
pub struct TunnelHealth {
    remotes: BTreeMap<IpAddr, Remote>,
    round: usize,
}

#[derive(Debug, Default)]
struct Remote {
    is_up: bool,
    has_failed: bool,
    missed: u32,
    /// Time since which the end has answered without a break, after it failed.
    since: Option<Instant>,
    hold: Option<Duration>,
    /// Time at which the tunnel was used again.
    back: Option<Instant>,
}

impl TunnelHealth {
    /// Takes ends that an earlier program used as those that answer.
    pub fn adopt(&mut self, in_use: impl IntoIterator<Item = IpAddr>) {
        for remote in in_use {
            self.remotes.entry(remote).or_insert_with(|| Remote { is_up: true, ..Remote::default() });
        }
    }

    /// Whether packets may take the tunnel to this end.
    pub fn is_up(&self, remote: IpAddr) -> bool {
        self.remotes.get(&remote).is_some_and(|it| it.is_up)
    }

    /// Whether this end has not answered often enough to say that it does not.
    pub fn has_failed(&self, remote: IpAddr) -> bool {
        self.remotes.get(&remote).is_some_and(|it| it.has_failed && !it.is_up)
    }

    /// Forgets all but these ends, and returns those that are to be asked now.
    pub fn next(&mut self, remotes: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        self.remotes.retain(|remote, _| remotes.contains(remote));
        let groups = remotes.len().div_ceil(MAX_ASKED).max(1);
        self.round = self.round.wrapping_add(1);
        let turn = self.round.checked_rem(groups).unwrap_or_default();
        remotes.iter().skip(turn).step_by(groups).copied().collect()
    }

    /// Takes who was asked and who has answered. Returns whether packets take other ways now.
    pub fn observe(&mut self, now: Instant, asked: &BTreeSet<IpAddr>, replies: &BTreeSet<IpAddr>) -> bool {
        let mut has_changed = false;
        for remote in asked {
            let known = self.remotes.entry(*remote).or_default();
            let was_up = known.is_up;
            if replies.contains(remote) {
                known.answered(now)
            } else {
                known.missed(now)
            }
            if known.is_up != was_up {
                has_changed = true;
                tracing::info!(%remote, is_up = known.is_up, "the IP tunnel to a node of the location");
            }
        }
        has_changed
    }
}

impl Remote {
    fn answered(&mut self, now: Instant) {
        self.missed = 0;
        if self.is_up {
            return;
        }
        let answers_for = now.saturating_duration_since(*self.since.get_or_insert(now));
        if !self.has_failed || answers_for >= self.hold.unwrap_or(HOLD) {
            self.is_up = true;
            self.since = None;
            self.back = self.has_failed.then_some(now);
        }
    }

    fn missed(&mut self, now: Instant) {
        self.since = None;
        self.missed = self.missed.saturating_add(1);
        if self.missed < MISSES {
            return;
        }
        if self.is_up {
            let hold = self.hold.unwrap_or(HOLD);
            let is_soon = self.back.is_some_and(|back| now.saturating_duration_since(back) < hold);
            self.hold = Some(if is_soon { hold.saturating_mul(2).min(MAX_HOLD) } else { HOLD });
        }
        self.is_up = false;
        self.has_failed = true;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::apply::gateways::INTERVAL;

    fn remote(number: u32) -> IpAddr {
        std::net::Ipv4Addr::from_bits(0x0a00_0000 + number).into()
    }

    struct World {
        health: TunnelHealth,
        now: Instant,
    }

    impl World {
        fn new() -> Self {
            Self { health: TunnelHealth::default(), now: Instant::now() }
        }

        fn round(&mut self, answers: bool) -> bool {
            self.now += INTERVAL;
            let asked = self.health.next(&[remote(1)].into());
            let replies = if answers { asked.clone() } else { BTreeSet::new() };
            self.health.observe(self.now, &asked, &replies);
            self.health.is_up(remote(1))
        }

        fn rounds_until(&mut self, is_up: bool) -> u32 {
            (1..2000).find(|_| self.round(is_up) == is_up).unwrap()
        }
    }

    #[test]
    fn a_tunnel_is_used_with_the_first_answer_and_left_after_several_requests_without_one() {
        let mut world = World::new();
        assert!(!world.health.is_up(remote(1)) && !world.health.has_failed(remote(1)));
        assert!(world.round(true));
        assert!((1..MISSES).all(|_| world.round(false)));
        assert!(world.round(true), "a single answer starts the count anew");
        assert_eq!(world.rounds_until(false), MISSES);
        assert!(world.health.has_failed(remote(1)));
        assert_eq!(world.rounds_until(true), 21, "it has to answer for a while");
        assert!(!world.health.has_failed(remote(1)));
    }

    #[test]
    fn a_tunnel_that_never_works_is_not_used_and_said_to_fail() {
        let mut world = World::new();
        assert!((1..MISSES).all(|_| !world.round(false)));
        assert!(!world.health.has_failed(remote(1)), "not yet");
        assert!(!world.round(false) && world.health.has_failed(remote(1)));
        for _ in 0..100 {
            assert!(!world.round(false));
        }
    }

    #[test]
    fn a_tunnel_that_fails_again_and_again_is_used_ever_more_rarely() {
        let mut world = World::new();
        world.round(true);
        for hold in [10, 20, 40, 80] {
            assert_eq!(world.rounds_until(false), MISSES);
            assert_eq!(world.rounds_until(true), 2 * hold + 1);
        }
    }

    #[test]
    fn what_an_earlier_program_used_is_used_until_it_fails() {
        let mut world = World::new();
        world.health.adopt([remote(1), remote(2)]);
        assert!((1..MISSES).all(|_| world.round(false)) && !world.round(false));
        assert!(!world.health.is_up(remote(2)), "it is the end of no tunnel any more");
    }

    proptest! {
        /// Each of any number of nodes is asked in its turn, and never too many at once.
        #[test]
        fn each_is_asked_in_its_turn(count in 0u32..1000) {
            let remotes: BTreeSet<IpAddr> = (0..count).map(remote).collect();
            let mut health = TunnelHealth::default();
            let rounds = remotes.len().div_ceil(MAX_ASKED);
            let mut asked = BTreeSet::new();
            for _ in 0..rounds {
                let now = health.next(&remotes);
                prop_assert!(now.len() <= MAX_ASKED);
                asked.extend(now);
            }
            prop_assert_eq!(asked, remotes);
        }

        /// After several requests without an answer no packet takes the tunnel, whatever was before.
        #[test]
        fn a_tunnel_that_does_not_work_is_no_black_hole(history in prop::collection::vec(any::<bool>(), 0..100)) {
            let mut world = World::new();
            let mut misses = 0;
            for answers in history {
                let is_up = world.round(answers);
                misses = if answers { 0 } else { misses + 1 };
                prop_assert!(misses < MISSES || !is_up);
            }
        }
    }
}

//! Health of gateways, by the ICMP echo requests of this node that they answer. Pure; `probes` sends them.
//!
//! The kernel of the gateway answers, so that a gateway under load is not left. What this node itself could not do does not count: neither
//! the time in which the program was stalled, nor that no gateway answers (`registry`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Time between two requests.
pub(super) const INTERVAL: Duration = Duration::from_millis(500);
/// After a longer time between two rounds, the program was stalled: what was not answered in it does not count.
const STALLED: Duration = Duration::from_millis(750);
/// When a request counts as not answered that would be one too many, if the gateway's last answer came sooner. Then it is left half a
/// round earlier than at the next request.
pub(super) const EARLY: Duration = Duration::from_millis(250);
/// After a longer time, the program was stalled.
const EARLY_STALLED: Duration = Duration::from_millis(375);
/// Requests in a row without an answer after which a gateway gets no new flows.
const MISSES: u32 = 3;
/// Requests in a row without an answer after which the flows that it has go to others, where they end: an embedded tunnel between both nodes
/// may only be starting again, which takes a second or two. A TCP connection that sends does so again some 3 s after its first loss, and is
/// reset then.
const MISSES_OF_FLOWS: u32 = 5;
/// Answers in a row after which a gateway is used again.
const ANSWERS: u32 = 3;

/// Health of each address that is asked.
#[derive(Debug, Default)]
pub(super) struct Health {
    addresses: BTreeMap<IpAddr, Address>,
    /// Addresses that were asked in the last round.
    asked: BTreeSet<IpAddr>,
    /// Addresses that have answered within [`EARLY`] of the last round.
    early: BTreeSet<IpAddr>,
    last: Option<Instant>,
}

#[derive(Debug, Default)]
struct Address {
    /// Whether it has ever answered: else echo requests may be filtered.
    has_answered: bool,
    missed: u32,
    answered: u32,
    is_down: bool,
    is_lost: bool,
    /// The last answer of it came within [`EARLY`].
    is_prompt: bool,
    /// The last request was not answered, and has been counted.
    is_counted: bool,
}

/// Addresses that changed in a round.
#[derive(Debug, PartialEq, Eq, Default)]
pub(super) struct Changes {
    /// Addresses that get no new flows.
    pub(super) down: Vec<IpAddr>,
    /// Addresses that lose their flows, too.
    pub(super) lost: Vec<IpAddr>,
    /// Addresses that are used again.
    pub(super) up: Vec<IpAddr>,
}

impl Health {
    /// Whether packets to the address are lost.
    pub(super) fn is_down(&self, address: IpAddr) -> bool {
        self.addresses.get(&address).is_some_and(|it| it.is_down)
    }

    /// Whether this has lasted so long that flows are better off elsewhere.
    pub(super) fn is_lost(&self, address: IpAddr) -> bool {
        self.addresses.get(&address).is_some_and(|it| it.is_down && it.is_lost)
    }

    /// Takes who has answered since the last round, and who is asked now. Others are forgotten.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        replies: &BTreeSet<IpAddr>,
        asking: &BTreeSet<IpAddr>,
    ) -> Changes {
        let stalled = self.last.is_none_or(|last| now.saturating_duration_since(last) > STALLED);
        let mut changes = Changes::default();
        self.addresses.retain(|address, _| asking.contains(address));
        for address in asking {
            let known = self.addresses.entry(*address).or_default();
            let was_early = self.early.contains(address);
            if was_early || replies.contains(address) {
                known.answer(*address, &mut changes);
                known.is_prompt = was_early;
            } else if self.asked.contains(address) && !stalled && !known.is_counted {
                known.miss(*address, &mut changes);
            }
            known.is_counted = false;
        }
        self.early.clear();
        self.asked = asking.clone();
        self.last = Some(now);
        changes
    }

    /// Takes who has answered within [`EARLY`] of the last round. Of those that have not, and whose last answer was as fast, this is one request too many for some.
    pub(super) fn observe_early(&mut self, now: Instant, replies: &BTreeSet<IpAddr>) -> Changes {
        let mut changes = Changes::default();
        self.early.extend(replies);
        let since = self.last.map(|last| now.saturating_duration_since(last));
        if since.is_none_or(|since| since > EARLY_STALLED) {
            return changes;
        }
        for (address, known) in &mut self.addresses {
            let is_last = [MISSES, MISSES_OF_FLOWS].contains(&known.missed.saturating_add(1));
            let is_late = self.asked.contains(address) && !self.early.contains(address);
            if is_last && is_late && known.is_prompt {
                known.is_counted = true;
                known.miss(*address, &mut changes);
            }
        }
        changes
    }
}

impl Address {
    fn answer(&mut self, address: IpAddr, changes: &mut Changes) {
        self.has_answered = true;
        self.missed = 0;
        self.answered = self.answered.saturating_add(1);
        if self.is_down && self.answered >= ANSWERS {
            self.is_down = false;
            self.is_lost = false;
            changes.up.push(address);
        }
    }

    fn miss(&mut self, address: IpAddr, changes: &mut Changes) {
        self.answered = 0;
        self.missed = self.missed.saturating_add(1);
        if self.has_answered && !self.is_down && self.missed >= MISSES {
            self.is_down = true;
            changes.down.push(address);
        }
        if self.is_down && !self.is_lost && self.missed >= MISSES_OF_FLOWS {
            self.is_lost = true;
            changes.lost.push(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct World {
        health: Health,
        now: Instant,
        address: IpAddr,
    }

    impl World {
        fn new() -> Self {
            Self { health: Health::default(), now: Instant::now(), address: IpAddr::from([10, 0, 0, 1]) }
        }

        fn round_after(&mut self, time: Duration, answers: bool) -> bool {
            self.now += time;
            let asking = BTreeSet::from([self.address]);
            let replies = if answers { asking.clone() } else { BTreeSet::new() };
            self.health.observe(self.now, &replies, &asking);
            self.health.is_down(self.address)
        }

        fn round(&mut self, answers: bool) -> bool {
            self.round_after(INTERVAL, answers)
        }
    }

    #[test]
    fn three_misses_take_a_gateway_out_of_use_and_three_answers_bring_it_back() {
        let mut world = World::new();
        world.round(true);
        assert_eq!([false; 3].map(|it| world.round(it)), [false, false, true]);
        assert_eq!(
            [true, true, false, true, true, true].map(|it| world.round(it)),
            [true, true, true, true, true, false]
        );
    }

    #[test]
    fn flows_are_lost_after_two_more_misses_and_until_it_is_used_again() {
        let mut world = World::new();
        world.round(true);
        let mut lost = |answers| {
            world.round(answers);
            world.health.is_lost(world.address)
        };
        assert_eq!([false; 5].map(&mut lost), [false, false, false, false, true]);
        assert_eq!([true; 3].map(&mut lost), [true, true, false]);
        assert_eq!([false, false, false, false, true, false, false, false].map(&mut lost), [false; 8]);
    }

    #[test]
    fn one_that_was_prompt_is_left_half_a_round_earlier_and_another_is_not() {
        for is_prompt in [true, false] {
            let mut world = World::new();
            let early = |world: &mut World, answers: bool| {
                let replies = answers.then_some(world.address).into_iter().collect();
                let changes = world.health.observe_early(world.now + EARLY, &replies);
                (changes.down.len(), changes.lost.len())
            };
            world.round(false);
            assert_eq!(early(&mut world, is_prompt), (0, 0));
            world.round(!is_prompt);
            let mut changes = Vec::new();
            for _ in 0..5 {
                changes.push(early(&mut world, false));
                assert!(!world.health.is_lost(world.address) || changes.len() == 5);
                world.round(false);
            }
            let expected = if is_prompt { [(0, 0), (0, 0), (1, 0), (0, 0), (0, 1)] } else { [(0, 0); 5] };
            assert_eq!(changes, expected, "{is_prompt}");
            assert!(world.health.is_lost(world.address), "in any case after the fifth");
            // An answer is one whenever it comes, and each request counts once.
            early(&mut world, true);
            assert_eq!([false, true, true].map(|it| world.round(it)), [true, true, false]);
        }
    }

    #[test]
    fn nothing_is_judged_early_after_a_stall() {
        let mut world = World::new();
        world.round(false);
        world.health.observe_early(world.now + EARLY, &[world.address].into());
        for _ in 0..3 {
            world.round(false);
        }
        let mut at = |time| world.health.observe_early(world.now + time, &BTreeSet::new()).down;
        assert_eq!([2 * EARLY, EARLY].map(&mut at), [vec![], vec![IpAddr::from([10, 0, 0, 1])]]);
    }

    #[test]
    fn one_that_never_answered_is_not_judged() {
        let mut world = World::new();
        assert!((0..100).all(|_| !world.round(false)));
    }

    #[test]
    fn misses_while_the_program_was_stalled_do_not_count() {
        let mut world = World::new();
        world.round(true);
        world.round(false);
        world.round(false);
        for _ in 0..10 {
            assert!(!world.round_after(Duration::from_secs(20), false));
        }
        assert!(world.round(false));
    }

    #[test]
    fn an_address_that_is_not_in_use_is_forgotten() {
        let mut world = World::new();
        world.round(true);
        assert!([false; 3].map(|it| world.round(it))[2]);
        world.health.observe(world.now, &BTreeSet::new(), &BTreeSet::new());
        assert!((0..10).all(|_| !world.round(false)), "nothing is known of it");
    }

    proptest! {
        #[test]
        fn a_gateway_is_down_only_after_three_misses_in_a_row(rounds in prop::collection::vec(any::<bool>(), 0..100)) {
            let mut world = World::new();
            world.round(true);
            let mut seen = vec![true];
            for answers in rounds {
                let was_down = world.health.is_down(world.address);
                let is_down = world.round(answers);
                seen.push(answers);
                let last: Vec<bool> = seen.iter().rev().take(3).copied().collect();
                if is_down && !was_down { prop_assert_eq!(&last, &[false; 3]); }
                if was_down && !is_down { prop_assert_eq!(&last, &[true; 3]); }
            }
        }
    }
}

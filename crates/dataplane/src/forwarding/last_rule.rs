//! The place of the rule at the end of a chain of iptables, which another program may want as well: each would move its rule behind the other's for ever.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fairlead_limits::Backoff;

use super::ForwardingProblem;

/// Most moves of the rule within [`WINDOW`]; then it rests. A program that appends its rules one by one is followed that often.
const MOVES: usize = 5;
const WINDOW: Duration = Duration::from_secs(600);
/// First and longest time for which the rule rests.
const FIRST_REST: Duration = Duration::from_secs(600);
const LONGEST_REST: Duration = Duration::from_secs(3600);

/// Moves of the rule, by chain.
#[derive(Debug, Default)]
pub(super) struct LastRules(BTreeMap<String, LastRule>);

impl LastRules {
    /// Whether the rule is to be moved, which another one follows in the chain.
    pub(super) fn may_move(&mut self, chain: &str, now: Instant) -> bool {
        self.0.entry(chain.to_owned()).or_insert_with(|| LastRule::new(now)).may_move(now)
    }

    /// Chains whose end another program wants as well.
    pub(super) fn problems(&self, now: Instant) -> impl Iterator<Item = ForwardingProblem> + '_ {
        let contested = self.0.iter().filter(move |(_, rule)| rule.is_contested(now));
        contested.map(|(chain, _)| ForwardingProblem::Contested { chain: chain.clone() })
    }
}

#[derive(Debug)]
struct LastRule {
    /// Times of the moves within the window, since the last rest.
    moves: Vec<Instant>,
    /// Time at which another rule was last seen behind it.
    followed: Instant,
    /// End of the last rest, which may be yet to come.
    rests_until: Option<Instant>,
    rests: Backoff,
}

impl LastRule {
    fn new(now: Instant) -> Self {
        let rests = Backoff::new(FIRST_REST, LONGEST_REST);
        Self { moves: Vec::new(), followed: now, rests_until: None, rests }
    }

    fn may_move(&mut self, now: Instant) -> bool {
        if self.was_left_alone(now) {
            *self = Self::new(now);
        }
        self.followed = now;
        if self.rests_until.is_some_and(|end| now < end) {
            return false;
        }
        self.moves.retain(|at| now.saturating_duration_since(*at) < WINDOW);
        if self.moves.len() < MOVES {
            self.moves.push(now);
            return true;
        }
        self.moves.clear();
        self.rests_until = now.checked_add(self.rests.next_whole());
        false
    }

    /// Whether it has been the last one for so long that another program wants the place no more.
    fn was_left_alone(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.followed) >= WINDOW
    }

    fn is_contested(&self, now: Instant) -> bool {
        self.rests_until.is_some() && !self.was_left_alone(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAIN: &str = "ip filter FORWARD";

    /// Seconds of the moves while another program appends its rule again each time that it is no more the last one; looks are five seconds apart.
    fn moves(rules: &mut LastRules, start: Instant, seconds: std::ops::Range<u64>) -> Vec<u64> {
        let looks = seconds.step_by(5);
        looks.filter(|second| rules.may_move(CHAIN, start + Duration::from_secs(*second))).collect()
    }

    fn is_told(rules: &LastRules, now: Instant) -> bool {
        rules.problems(now).next().is_some()
    }

    #[test]
    fn the_rule_rests_ever_longer_after_five_moves_and_the_user_is_told() {
        let (start, mut rules) = (Instant::now(), LastRules::default());
        assert_eq!(moves(&mut rules, start, 0..25), [0, 5, 10, 15, 20]);
        assert!(!is_told(&rules, start + Duration::from_secs(20)));
        // Ten minutes, twenty, forty, and then an hour each time.
        let later = moves(&mut rules, start, 25..4_300);
        let five = |first: u64| (0..5).map(move |number| first + 5 * number);
        let rests = [625_u64, 1_850, 4_275];
        assert_eq!(later, rests.into_iter().flat_map(five).collect::<Vec<_>>());
        let all = moves(&mut rules, start, 4_300..40_000);
        assert!(all.len() < 60, "{all:?}");
        assert!(is_told(&rules, start + Duration::from_secs(40_000)));
        let text = rules.problems(start + Duration::from_secs(40_000)).next().map(|it| it.to_string());
        assert!(text.is_some_and(|text| text.contains(CHAIN)));
    }

    #[test]
    fn rules_that_others_append_now_and_then_are_followed_for_ever() {
        let (start, mut rules) = (Instant::now(), LastRules::default());
        for day in 0..30 {
            for minute in 0..4 {
                let at = start + Duration::from_secs(86_400 * day + 60 * minute);
                assert!(rules.may_move(CHAIN, at), "{day} {minute}");
                assert!(!is_told(&rules, at));
            }
        }
    }

    #[test]
    fn a_rule_that_was_left_alone_is_told_no_more_and_moves_as_before() {
        let (start, mut rules) = (Instant::now(), LastRules::default());
        moves(&mut rules, start, 0..30);
        let at = |second| start + Duration::from_secs(second);
        assert!(is_told(&rules, at(624)) && !is_told(&rules, at(625)));
        assert_eq!(moves(&mut rules, start, 700..730), [700, 705, 710, 715, 720]);
        assert_eq!(moves(&mut rules, start, 730..1_330), [1_325], "the first rest again");
    }

    #[test]
    fn each_chain_has_its_own_moves() {
        let (now, mut rules) = (Instant::now(), LastRules::default());
        for _ in 0..=MOVES {
            rules.may_move(CHAIN, now);
        }
        assert!(!rules.may_move(CHAIN, now) && rules.may_move("ip6 filter FORWARD", now));
        assert_eq!(rules.problems(now).count(), 1);
    }
}

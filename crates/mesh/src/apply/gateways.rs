//! Health of gateways: which of them forward. An ICMP echo goes each half second to nodes behind those in use, and path probes to those
//! that are not. Pure; `watch` sends the requests.
//!
//! That a gateway answers says nothing of what it forwards, so what counts is an answer of a node behind it. Each node
//! decides for itself, and tells no other: whichever gateway it uses, its packets arrive
//! (`fairlead_topology::gateways`).

mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_topology::Down;

pub use self::watch::{GatewayWatch, several};

/// Time between two requests.
pub const INTERVAL: Duration = Duration::from_millis(500);
/// Time between two path probes to a gateway that is not in use.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// Requests in a row without an answer after which another gateway is used. Where one packet in ten is lost each way, so many of one node
/// are about every half hour.
const MISSES: u32 = 5;
/// Limit of such requests while no node behind it has ever answered: the tunnel may not be up yet, or these nodes answer no echo requests.
const MISSES_AT_FIRST: u32 = 30;
/// Path probes in a row without an answer after which a gateway that is not in use counts as one that does not answer.
const UNANSWERED_PROBES: u32 = 3;
/// Time for which a gateway answers without a break before it is used again. It doubles with each time that the gateway does not forward
/// then, up to [`MAX_HOLD`].
const HOLD: Duration = Duration::from_secs(60);
const MAX_HOLD: Duration = Duration::from_secs(3600);

/// Health of the gateways that a node may use.
#[derive(Debug, Default)]
pub struct GatewayHealth {
    gateways: BTreeMap<String, Gateway>,
    /// Nodes that have answered. The firewall of another one may refuse all requests.
    answered: BTreeSet<IpAddr>,
}

#[derive(Debug, Default)]
struct Gateway {
    missed: u32,
    /// Path probes that it has not answered, in a row.
    unanswered: u32,
    state: State,
    hold: Option<Duration>,
    /// Time at which it was used again.
    back: Option<Instant>,
    /// The nodes behind it, if none of them had ever answered when it went out of use: their firewalls may refuse all requests. Empty
    /// once one of them has answered through another gateway.
    unproven: BTreeSet<IpAddr>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    InUse,
    /// Out of use. It has answered path probes since this time.
    Recovering(Instant),
    /// Out of use. It answers no path probes.
    Silent,
}

/// Observations of one gateway.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Nodes that are reached through it; empty unless it is in use.
    pub behind: Vec<IpAddr>,
    /// There is a session with it.
    pub has_session: bool,
    /// Whether it has answered a path probe; `None` while it has time to.
    pub answers: Option<bool>,
}

/// Cost of trying another gateway although it is not known that the one in use does not forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trials {
    /// Nothing: packets of the location are accepted from each of its gateways.
    Lossless,
    /// Packets that come through the gateway that was used before, as the kernel's WireGuard drops them. Where nodes answer no echo
    /// requests, that would be for nothing.
    Lossy,
}

impl GatewayHealth {
    /// Gateways that are not to be used.
    pub fn down(&self) -> Down {
        self.gateways.iter().filter(|(_, it)| it.is_down()).map(|(name, _)| name.clone()).collect()
    }

    /// Gateways among these that are known not to forward. Of the others it is not known: no node behind them answers through any gateway.
    pub fn known_down(&self) -> Down {
        let known = self.gateways.iter().filter(|(_, it)| it.is_down() && it.unproven.is_empty());
        known.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a gateway is not to be used.
    pub fn is_down(&self, gateway: &str) -> bool {
        self.gateways.get(gateway).is_some_and(Gateway::is_down)
    }

    /// Takes what was seen of all gateways in the last [`INTERVAL`], and which nodes have answered.
    pub fn observe(
        &mut self,
        now: Instant,
        seen: &BTreeMap<String, Seen>,
        replies: &BTreeSet<IpAddr>,
        trials: Trials,
    ) {
        self.answered.extend(replies);
        let behind: BTreeSet<IpAddr> = seen.values().flat_map(|it| &it.behind).copied().collect();
        self.answered.retain(|address| behind.contains(address));
        self.gateways.retain(|name, _| seen.contains_key(name));
        for (name, seen) in seen {
            let gateway = self.gateways.entry(name.clone()).or_default();
            gateway.hear(replies);
            let is_known = seen.behind.iter().any(|address| self.answered.contains(address));
            if !is_known && seen.has_session && trials == Trials::Lossy {
                gateway.missed = 0;
            } else if gateway.judge(now, seen, replies, is_known) {
                tracing::warn!(
                    gateway = name,
                    has_session = seen.has_session,
                    "no node behind the gateway answers; using another gateway if there is any"
                );
            }
            if gateway.recover(now, seen.answers) {
                tracing::info!(gateway = name, "the gateway may be used again");
            }
        }
    }
}

impl Gateway {
    fn is_down(&self) -> bool {
        self.state != State::InUse
    }

    /// A node that answers some gateway would have answered this one.
    fn hear(&mut self, replies: &BTreeSet<IpAddr>) {
        if self.unproven.iter().any(|address| replies.contains(address)) {
            self.unproven.clear();
        }
    }

    /// Counts what was not answered; `is_known` is whether a node behind it has ever answered. Returns whether it goes out of use.
    ///
    /// A gateway behind which no node has ever answered is left as well: after a start, what this node has forgotten must not keep it at one
    /// that does not forward. If the nodes answer through no gateway, the first is used again.
    fn judge(&mut self, now: Instant, seen: &Seen, replies: &BTreeSet<IpAddr>, is_known: bool) -> bool {
        if seen.behind.iter().any(|address| replies.contains(address)) {
            self.missed = 0;
            self.state = State::InUse;
            self.unproven.clear();
            return false;
        }
        if seen.behind.is_empty() {
            return false;
        }
        self.missed = self.missed.saturating_add(1);
        let limit = if is_known { MISSES } else { MISSES_AT_FIRST };
        let fails = self.missed >= limit && !self.is_down();
        if fails {
            self.fail(now);
            let is_proven = is_known || !seen.has_session;
            self.unproven = if is_proven { BTreeSet::new() } else { seen.behind.iter().copied().collect() };
        }
        fails
    }

    fn fail(&mut self, now: Instant) {
        let hold = self.hold.unwrap_or(HOLD);
        let is_soon = self.back.is_some_and(|back| now.saturating_duration_since(back) < hold);
        let next = if is_soon { hold.saturating_mul(2).min(MAX_HOLD) } else { HOLD };
        self.hold = Some(next);
        self.state = State::Silent;
        self.missed = 0;
    }

    /// Counts how long it has answered. Returns whether it is to be used again.
    fn recover(&mut self, now: Instant, answers: Option<bool>) -> bool {
        let Some(answers) = answers.filter(|_| self.is_down()) else { return false };
        if !answers {
            self.unanswered = self.unanswered.saturating_add(1);
            if self.unanswered >= UNANSWERED_PROBES {
                self.state = State::Silent;
            }
            return false;
        }
        self.unanswered = 0;
        let since = if let State::Recovering(since) = self.state { since } else { now };
        let is_back = now.saturating_duration_since(since) >= self.hold.unwrap_or(HOLD);
        if is_back {
            self.state = State::InUse;
            self.back = Some(now);
        } else {
            self.state = State::Recovering(since);
        }
        is_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEHIND: [IpAddr; 1] = [IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9))];

    struct World {
        health: GatewayHealth,
        now: Instant,
        trials: Trials,
    }

    impl World {
        fn new() -> Self {
            Self { health: GatewayHealth::default(), now: Instant::now(), trials: Trials::Lossless }
        }

        /// The time between two requests passes. The first gateway is in use, unless it is down; then the second is.
        fn round(&mut self, replies: bool, answers: bool, has_session: bool) -> bool {
            self.now += INTERVAL;
            let is_first_down = self.health.is_down("a");
            let seen = |is_in_use: bool, answers| Seen {
                behind: if is_in_use { BEHIND.to_vec() } else { Vec::new() },
                has_session,
                answers: Some(answers),
            };
            let seen = [
                ("a".to_owned(), seen(!is_first_down, answers)),
                ("b".to_owned(), seen(is_first_down, true)),
            ];
            let replies = if replies { BEHIND.into() } else { BTreeSet::new() };
            self.health.observe(self.now, &seen.into(), &replies, self.trials);
            self.health.is_down("a")
        }

        fn rounds_until(&mut self, is_down: bool, replies: bool, answers: bool) -> u32 {
            (1..5000).find(|_| self.round(replies, answers, true) == is_down).unwrap()
        }
    }

    #[test]
    fn a_gateway_behind_which_no_node_answers_is_left_after_several_requests_and_used_after_a_minute() {
        let mut world = World::new();
        assert!(!world.round(true, true, true));
        assert_eq!(world.rounds_until(true, false, true), MISSES);
        assert!(!world.health.is_down("b"));
        assert_eq!(world.health.down(), ["a".to_owned()].into());
        for _ in 0..100 {
            assert!(world.round(true, false, true), "it does not answer");
        }
        let back = world.rounds_until(false, true, true);
        assert_eq!(back, 121);
    }

    #[test]
    fn a_gateway_that_still_does_not_forward_is_used_ever_more_rarely() {
        let mut world = World::new();
        world.round(true, true, true);
        for hold in [60, 120, 240] {
            assert_eq!(world.rounds_until(true, false, true), MISSES);
            assert_eq!(world.rounds_until(false, true, true), 2 * hold);
        }
    }

    #[test]
    fn a_single_answer_starts_the_count_anew() {
        let mut world = World::new();
        for round in 0..100 {
            assert!(!world.round(round % MISSES == 0, true, true));
        }
    }

    #[test]
    fn probes_that_get_lost_now_and_then_do_not_keep_a_gateway_out_of_use() {
        for (lost, returns) in [(UNANSWERED_PROBES - 1, true), (UNANSWERED_PROBES, false)] {
            let mut world = World::new();
            world.round(true, true, true);
            assert_eq!(world.rounds_until(true, false, true), MISSES);
            let is_back = (0..1000).any(|round| !world.round(true, round % (lost + 1) == lost, true));
            assert_eq!(is_back, returns, "{lost} in a row");
        }
    }

    #[test]
    fn while_a_probe_has_time_to_be_answered_nothing_is_concluded() {
        let mut world = World::new();
        world.round(true, true, true);
        assert_eq!(world.rounds_until(true, false, true), MISSES);
        for round in 0..200 {
            world.now += INTERVAL;
            let answers = (round % 4 == 0).then_some(true);
            let seen = [("a".to_owned(), Seen { behind: Vec::new(), has_session: true, answers })];
            world.health.observe(world.now, &seen.into(), &BTreeSet::new(), world.trials);
        }
        assert!(!world.health.is_down("a"));
    }

    #[test]
    fn without_a_session_a_gateway_is_left_and_known_not_to_forward() {
        let mut world = World::new();
        let after = (1..100).find(|_| world.round(false, false, false)).unwrap();
        assert_eq!((after, world.health.known_down()), (MISSES_AT_FIRST, ["a".to_owned()].into()));
    }

    /// As after a start of the program.
    #[test]
    fn a_gateway_that_never_forwarded_is_left_and_known_once_nodes_answer_through_another_one() {
        let mut world = World::new();
        assert_eq!(world.rounds_until(true, false, true), MISSES_AT_FIRST);
        assert_eq!(world.health.known_down(), Down::default(), "the nodes may answer no requests");
        assert!(world.round(true, true, true));
        assert_eq!(world.health.known_down(), ["a".to_owned()].into());
        assert!(!world.health.is_down("b"));
    }

    #[test]
    fn where_nodes_answer_through_no_gateway_all_are_tried_ever_more_rarely_and_none_is_blamed() {
        let mut world = World::new();
        for hold in [60, 120, 240] {
            assert_eq!(world.rounds_until(true, false, true), MISSES_AT_FIRST, "before {hold} s");
            assert_eq!(world.rounds_until(false, false, true), 2 * hold);
            assert_eq!(world.health.known_down(), Down::default());
        }
    }

    #[test]
    fn where_trials_lose_packets_only_a_gateway_that_has_forwarded_or_has_no_session_is_left() {
        let mut world = World { trials: Trials::Lossy, ..World::new() };
        for _ in 0..100 {
            assert!(!world.round(false, true, true), "the nodes may answer no requests");
        }
        let after = (1..100).find(|_| world.round(false, false, false)).unwrap();
        assert_eq!((after, world.health.known_down()), (MISSES_AT_FIRST, ["a".to_owned()].into()));

        let mut world = World { trials: Trials::Lossy, ..World::new() };
        world.round(true, true, true);
        assert_eq!(world.rounds_until(true, false, true), MISSES);
    }

    #[test]
    fn a_gateway_that_is_used_because_all_are_down_and_forwards_is_not_down() {
        let mut health = GatewayHealth::default();
        let mut now = Instant::now();
        let seen = Seen { behind: BEHIND.to_vec(), has_session: true, answers: Some(true) };
        let seen = BTreeMap::from([("a".to_owned(), seen)]);
        for replies in [true, false, false, false, false, false] {
            now += INTERVAL;
            health.observe(
                now,
                &seen,
                &if replies { BEHIND.into() } else { BTreeSet::new() },
                Trials::Lossless,
            );
        }
        assert!(health.is_down("a"));
        health.observe(now + INTERVAL, &seen, &BEHIND.into(), Trials::Lossless);
        assert!(!health.is_down("a"));
        health.observe(now, &BTreeMap::new(), &BTreeSet::new(), Trials::Lossless);
        assert!(health.down().is_empty());
    }
}

//! Rounds through all paths: when they begin, for this node's own reasons or because the peer began one.

use std::time::Duration;

use fairlead_limits::doubled;

use super::Prober;
use super::path::{LAST_REQUEST, Path};

/// Rounds without a session in which each path gets a whole attempt, after the first attempts.
const FULL_ROUNDS: u32 = 1;
/// Time between rounds through all candidates while there is no session. It doubles with each round that brings none.
const ROUND_INTERVAL: Duration = Duration::from_secs(5);
/// The same for rounds that the peer asks for: it has new candidates, or a new network. What this costs is limited for each peer.
const JOINED_ROUND_INTERVAL: Duration = Duration::from_secs(1);
const MAX_ROUND_INTERVAL: Duration = Duration::from_secs(300);
/// Time between rounds that look for a better path while a session uses a direct one. It doubles as well. While the session is
/// relayed, rounds are as close together as without one: the relay costs latency, and a node that was busy for a moment would wait for it.
const SEARCH_INTERVAL: Duration = Duration::from_secs(30);

impl Prober {
    pub(super) fn needs_round(&self, now: Duration) -> bool {
        self.uses_relay() || !self.works_directly(now)
    }

    /// The peer tries all its paths. This node does so now, or when its own last round is long enough ago.
    pub(super) fn join_round(&mut self, now: Duration) {
        let (last_request, _) = LAST_REQUEST;
        match self.round_began {
            // They are the same round.
            Some(began) if now.saturating_sub(began) <= last_request => {}
            Some(began) if now.saturating_sub(began) < JOINED_ROUND_INTERVAL => {
                self.joined_round = Some(began.saturating_add(JOINED_ROUND_INTERVAL));
            }
            _ => self.start_joined_round(now),
        }
    }

    /// The peer is not asked back, unless this node is about to ask for a reason of its own: what the peer has sent so far may have
    /// come too early.
    pub(super) fn start_joined_round(&mut self, now: Duration) {
        let is_asking =
            !self.is_joined && self.paths.iter().any(|path| path.is_relay() && path.attempt.is_some());
        self.start_round(now);
        self.is_joined = !is_asking;
    }

    pub(super) fn start_round(&mut self, now: Duration) {
        // A peer that stays away gets one request for each path: thousands may be away.
        let is_short = !self.session.is_up && self.rounds >= FULL_ROUNDS;
        let attempt = if is_short { LAST_REQUEST } else { (Duration::ZERO, 0) };
        let attempt = Some((now.saturating_sub(attempt.0), attempt.1));
        for path in self.paths.iter_mut().filter(|path| path.attempt.is_none()) {
            path.attempt = attempt;
        }
        self.has_untried = false;
        self.rounds = self.rounds.saturating_add(1);
        self.round_began = Some(now);
        self.joined_round = None;
        self.is_joined = false;
        self.plan_round(now);
    }

    /// While a session is idle there are no rounds.
    pub(super) fn plan_round(&mut self, now: Duration) {
        let is_relayed = self.current_path().is_some_and(Path::is_relay);
        let first = match (self.session.is_up, self.is_active(now)) {
            (false, _) => ROUND_INTERVAL,
            (true, true) if is_relayed => ROUND_INTERVAL,
            (true, true) => SEARCH_INTERVAL,
            (true, false) => {
                self.next_round = None;
                return;
            }
        };
        let relayed = is_relayed.then_some(self.relay).flatten();
        let longest = relayed.map_or(MAX_ROUND_INTERVAL, |relay| relay.direct_retry.min(MAX_ROUND_INTERVAL));
        let interval = doubled(first, self.rounds.saturating_sub(1), longest);
        self.next_round = (!self.paths.is_empty()).then(|| now.saturating_add(interval));
    }
}

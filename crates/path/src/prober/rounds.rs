//! Rounds through all paths: when they begin, for this node's own reasons or because the peer began one.

use std::time::Duration;

use fairlead_limits::doubled;

use super::attempt::LAST_REQUEST;
use super::path::Path;
use super::paths::Paths;
use super::traffic::Traffic;
use crate::relay_path::RelayPath;

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

/// The last round, and the next one.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// A candidate came while the session was idle.
    pub(super) has_untried: bool,
    /// Rounds in a row that changed nothing.
    pub(super) in_vain: u32,
    pub(super) next: Option<Duration>,
    /// Time at which all paths were last tried.
    pub(super) began: Option<Duration>,
    /// Time at which they are tried next because the peer has done so.
    pub(super) joins: Option<Duration>,
    /// The last round was one that the peer asked for: it is not asked back.
    pub(super) is_joined: bool,
}

impl Rounds {
    /// The peer tries all its paths. Whether this node is to do so now; it does when its own last round is long enough ago.
    pub(super) fn join(&mut self, now: Duration) -> bool {
        let (last_request, _) = LAST_REQUEST;
        match self.began {
            // They are the same round.
            Some(began) if now.saturating_sub(began) <= last_request => false,
            Some(began) if now.saturating_sub(began) < JOINED_ROUND_INTERVAL => {
                self.joins = Some(began.saturating_add(JOINED_ROUND_INTERVAL));
                false
            }
            _ => true,
        }
    }

    /// Tries all paths; `has_session` if there is one. To be followed by [`Self::plan`].
    pub(super) fn start(&mut self, now: Duration, paths: &mut Paths, has_session: bool) {
        // A peer that stays away gets one request for each path: thousands may be away.
        let is_short = !has_session && self.in_vain >= FULL_ROUNDS;
        let attempt = if is_short { LAST_REQUEST } else { (Duration::ZERO, 0) };
        let attempt = Some((now.saturating_sub(attempt.0), attempt.1));
        for path in paths.iter_mut().filter(|path| path.attempt.is_none()) {
            path.attempt = attempt;
        }
        self.has_untried = false;
        self.in_vain = self.in_vain.saturating_add(1);
        self.began = Some(now);
        self.joins = None;
        self.is_joined = false;
    }

    /// Sets when the next one begins. While a session is idle there are none.
    pub(super) fn plan(&mut self, now: Duration, paths: &Paths, traffic: &Traffic, relay: Option<RelayPath>) {
        let is_relayed = paths.in_use().is_some_and(Path::is_relay);
        let first = match (traffic.session.is_up, traffic.is_active(now)) {
            (false, _) => ROUND_INTERVAL,
            (true, true) if is_relayed => ROUND_INTERVAL,
            (true, true) => SEARCH_INTERVAL,
            (true, false) => {
                self.next = None;
                return;
            }
        };
        let relayed = is_relayed.then_some(relay).flatten();
        let longest = relayed.map_or(MAX_ROUND_INTERVAL, |relay| relay.direct_retry.min(MAX_ROUND_INTERVAL));
        let interval = doubled(first, self.in_vain.saturating_sub(1), longest);
        self.next = (!paths.all.is_empty()).then(|| now.saturating_add(interval));
    }
}

//! Moves of a live session from one path to another.

use std::time::Duration;

/// Least time between two moves of a live session.
const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// The last move.
#[derive(Debug, Default)]
pub(super) struct Moves {
    pub(super) last: Option<Duration>,
    /// That was from one kind of path to a better one, such as from a relay to a direct path.
    has_climbed: bool,
}

impl Moves {
    /// The session moves now; `climbs` if to a better kind of path.
    pub(super) fn add(&mut self, now: Duration, climbs: bool) {
        *self = Self { last: Some(now), has_climbed: climbs };
    }

    /// Whether the last move is long enough ago, or was one to a better kind of path, as this one is if it `climbs`.
    pub(super) fn may_move(&self, now: Duration, climbs: bool) -> bool {
        let climbs_again = self.has_climbed && climbs;
        climbs_again || self.last.is_none_or(|at| now.saturating_sub(at) >= MIN_INTERVAL)
    }
}

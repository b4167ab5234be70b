//! Moves of a live session from one path to another.

use std::net::SocketAddr;
use std::time::Duration;

/// Least time between two moves of a live session.
const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// The last move.
#[derive(Debug, Default)]
pub(super) struct Moves {
    pub(super) last: Option<Duration>,
    /// That was from one kind of path to a better one, such as from a relay to a direct path.
    has_climbed: bool,
    /// Address that a birthday attempt has found since.
    found: Option<SocketAddr>,
}

impl Moves {
    /// The session moves now; `climbs` if to a better kind of path.
    pub(super) fn add(&mut self, now: Duration, climbs: bool) {
        *self = Self { last: Some(now), has_climbed: climbs, found: None };
    }

    /// A birthday attempt has found this address: the session may move there once at any time. The interval keeps sessions off a path that
    /// fails again and again; this one is new, and attempts that found a path have an interval of their own.
    pub(super) fn add_found(&mut self, address: SocketAddr) {
        self.found = Some(address);
    }

    /// Whether the last move is long enough ago for one to this address. One that `climbs` to a better kind of path need not wait if the last
    /// one did so too, or if a birthday attempt has found the address.
    pub(super) fn may_move(&self, now: Duration, to: SocketAddr, climbs: bool) -> bool {
        let may_climb = climbs && (self.has_climbed || self.found == Some(to));
        may_climb || self.last.is_none_or(|at| now.saturating_sub(at) >= MIN_INTERVAL)
    }
}

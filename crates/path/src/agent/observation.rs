//! Times at which the device's state of a peer is needed.

use std::time::Duration;

use crate::rotation::State;

/// Time between observations while a peer is not up: at first, and again after each endpoint that is set.
pub(super) const MIN_OBSERVATION_INTERVAL: Duration = Duration::from_millis(500);
/// Time between observations while a peer is up, or has been away for long.
pub(super) const MAX_OBSERVATION_INTERVAL: Duration = Duration::from_secs(5);
/// Observations are due at multiples of this. One reads all peers, so timers that fall together cost one wake-up.
pub(super) const OBSERVATION_GRID: Duration = Duration::from_millis(100);

/// Short after an endpoint was set, ever longer while the peer stays away: a peer that is gone for good costs next to nothing.
pub(super) fn observation_interval(state: State, since_changed: Duration) -> Duration {
    match state {
        State::Up => MAX_OBSERVATION_INTERVAL,
        State::Connecting | State::Down => {
            (since_changed / 4).clamp(MIN_OBSERVATION_INTERVAL, MAX_OBSERVATION_INTERVAL)
        }
    }
}

/// The first moment of the grid that is not before `at`.
pub(super) fn on_grid(at: Duration) -> Duration {
    let grid = OBSERVATION_GRID.as_nanos();
    let past = at.as_nanos().checked_rem(grid).unwrap_or_default();
    if past == 0 {
        return at;
    }
    at.saturating_add(Duration::from_nanos(u64::try_from(grid.saturating_sub(past)).unwrap_or_default()))
}

//! One reading of both clocks.

use std::time::{Instant, SystemTime};

/// One reading of both clocks: timers follow the monotonic one, time stamps of handshakes (WireGuard paper 5.4.2) the one of the
/// wall.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// The monotonic clock.
    pub instant: Instant,
    /// The time of day.
    pub wall: SystemTime,
}

impl Now {
    /// Reads both clocks.
    pub fn read() -> Self {
        Self { instant: Instant::now(), wall: SystemTime::now() }
    }
}

//! The clock of a device.

use std::time::{Duration, Instant, SystemTime};

use fairlead_wireguard::Now;
use nix::time::{ClockId, clock_gettime};

/// Counts while the machine sleeps, as `CLOCK_BOOTTIME` does and [`Instant`] does not: the kernel's WireGuard measures the age of
/// sessions by that clock too. After a night's sleep a session would else pass for new here, and be long gone at the peer.
#[derive(Debug)]
pub(crate) struct Clock {
    start: Instant,
    /// The time since the machine was started.
    boot_time: Duration,
}

impl Clock {
    /// Starts with the time of an [`Instant`].
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), boot_time: boot_time().unwrap_or_default() }
    }

    /// Reads both clocks. Without a reading of the kernel's, which every Linux since 2.6.39 has, sleep does not count.
    pub(crate) fn now(&self) -> Now {
        let since_start = boot_time().map(|boot_time| self.since_start(boot_time));
        let instant =
            since_start.and_then(|since| self.start.checked_add(since)).unwrap_or_else(Instant::now);
        Now { instant, wall: SystemTime::now() }
    }

    fn since_start(&self, boot_time: Duration) -> Duration {
        boot_time.saturating_sub(self.boot_time)
    }
}

fn boot_time() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_BOOTTIME).ok().map(Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeping_machine_s_time_counts() {
        let clock = Clock { start: Instant::now(), boot_time: Duration::from_secs(100) };
        // 20 s of these the machine has slept.
        assert_eq!(clock.since_start(Duration::from_secs(130)), Duration::from_secs(30));
        assert_eq!(clock.since_start(Duration::from_secs(99)), Duration::ZERO);
    }

    #[test]
    fn it_never_goes_back_and_keeps_pace() {
        let (clock, start) = (Clock::new(), Instant::now());
        let readings = [(); 1_000].map(|()| clock.now().instant);
        assert!(readings.is_sorted());
        std::thread::sleep(Duration::from_millis(50));
        let (ours, theirs) = (clock.now().instant.saturating_duration_since(start), start.elapsed());
        assert!(ours >= Duration::from_millis(50) && ours <= theirs, "{ours:?} {theirs:?}");
    }
}

//! Leases: the time for which etcd keeps a key, and the age of its value.
//!
//! Clocks of hosts disagree, so no time is written to etcd. A replica attaches what it writes to a lease, of which it gets a new
//! one every minute, and writes how old that lease was. etcd says how old a lease is to every replica that asks; what passed since
//! the write is the difference. etcd knows whole seconds, and extends leases when it elects a leader: then something lives longer,
//! never shorter.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time for which new keys are attached to the same lease.
pub(super) const LEASE_INTERVAL: Duration = Duration::from_secs(60);
/// Time by which a lease outlives the keys that are attached to it.
const MARGIN: Duration = Duration::from_secs(120);
/// More leases than replicas grant while one lives are not ours.
const MAX_LEASES: usize = 100_000;

/// Time to live of a lease for affiliates that live up to `ttl`, in seconds.
pub(super) fn lease_ttl(ttl: Duration) -> i64 {
    let whole = ttl.saturating_add(LEASE_INTERVAL).saturating_add(MARGIN);
    i64::try_from(whole.as_secs()).unwrap_or(i64::MAX)
}

/// Ages of leases by ID, by the clock of this host.
#[derive(Debug, Default)]
pub(super) struct Leases(HashMap<i64, Known>);

#[derive(Debug)]
struct Known {
    at: Instant,
    /// Age of the lease at that time.
    age: Duration,
    forget: Instant,
}

impl Leases {
    /// A lease that was granted for this time, in seconds, of which so much is left. A lease that is over is not learnt.
    pub(super) fn learn(&mut self, id: i64, granted: i64, left: i64, now: Instant) {
        let seconds = |seconds: i64| u64::try_from(seconds).ok().map(Duration::from_secs);
        let (Some(granted), Some(left)) = (seconds(granted), seconds(left)) else { return };
        // etcd rounds down what is left.
        let age = granted.saturating_sub(left).saturating_sub(Duration::from_secs(1));
        self.0.retain(|_, known| known.forget > now);
        let Some(forget) = now.checked_add(granted) else { return };
        if self.0.len() < MAX_LEASES {
            self.0.insert(id, Known { at: now, age, forget });
        }
    }

    /// Age of a lease; `None` if it is not known.
    pub(super) fn age(&self, id: i64, now: Instant) -> Option<Duration> {
        let known = self.0.get(&id)?;
        Some(known.age.saturating_add(now.saturating_duration_since(known.at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_ages_from_what_etcd_said() {
        let (mut leases, now) = (Leases::default(), Instant::now());
        leases.learn(1, 100, 100, now);
        leases.learn(2, 100, 40, now);
        leases.learn(3, 100, -1, now);
        leases.learn(4, i64::MIN, i64::MAX, now);
        let seconds = Duration::from_secs;
        assert_eq!(leases.age(1, now), Some(Duration::ZERO));
        assert_eq!(leases.age(2, now), Some(seconds(59)));
        assert_eq!(leases.age(2, now + seconds(10)), Some(seconds(69)));
        assert_eq!((leases.age(3, now), leases.age(4, now)), (None, None));
        leases.learn(5, 100, 100, now + seconds(100));
        assert_eq!(leases.age(1, now + seconds(100)), None, "it is over, and forgotten");
        assert!(lease_ttl(seconds(1800)) > 1800 + 60);
    }
}

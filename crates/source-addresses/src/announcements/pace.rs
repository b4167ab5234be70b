//! Limits on how often the holders of an Egress's source addresses may change. Without I/O and without a clock.
//!
//! With each change routes and tunnels of the node programs change. The gateways of an Egress decide it, by Leases and by what they say to the
//! node program, so what one of them says too often must not keep all nodes busy. A change that comes too early waits, and only those of the
//! same Egress wait with it. That an address is held no longer never waits.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fairlead_egress::EgressName;
use fairlead_limits::{Rate, TokenBucket};

use super::Permitted;

/// Changes without a pause: as many as an Egress has addresses.
const BURST: u32 = 32;
/// Pause between two changes after that.
const PAUSE: Duration = Duration::from_secs(1);

/// Rate of changes of each Egress.
#[derive(Debug, Default)]
pub struct Pace(BTreeMap<EgressName, TokenBucket>);

impl Pace {
    /// Counts a change of an Egress. `Err` is the time from which on it may change again.
    pub fn change(&mut self, egress: &EgressName, now: Instant) -> Result<(), Instant> {
        // What is full again is as if it had never changed.
        self.0.retain(|_, bucket| !bucket.is_full(now));
        let new = || TokenBucket::full(Rate::one_each(PAUSE, BURST.into()), now);
        let bucket = self.0.entry(egress.clone()).or_insert_with(new);
        bucket.take(now, 1).map_err(|wait| now.checked_add(wait).unwrap_or(now))
    }
}

/// Source addresses as the API server shows them, with holders that do not change too often.
#[derive(Debug, Default)]
pub struct PacedHolders {
    pace: Pace,
    last: Permitted,
}

impl PacedHolders {
    /// Takes what it says now. Returns what counts, and when more may count without a change of it. Which addresses there are counts at
    /// once: gateways do not decide that.
    pub fn take(&mut self, permitted: &Permitted, now: Instant) -> (&Permitted, Option<Instant>) {
        let mut again: Option<Instant> = None;
        let mut next = Permitted::new();
        for (egress, said) in permitted {
            let mut counts = said.clone();
            if let Some(known) = self.last.get(egress).filter(|known| *known != said) {
                let is_other = said.iter().any(|(address, holder)| known.get(address) != Some(holder));
                if is_other && let Err(at) = self.pace.change(egress, now) {
                    for (address, holder) in &mut counts {
                        *holder = known.get(address).cloned().flatten();
                    }
                    again = again.into_iter().chain([at]).min();
                }
            }
            next.insert(egress.clone(), counts);
        }
        self.last = next;
        (&self.last, again)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn egress(name: &str) -> EgressName {
        EgressName { namespace: "n".to_owned(), name: name.to_owned() }
    }

    #[test]
    fn an_egress_that_changes_all_the_time_changes_once_a_second_and_others_are_free() {
        let (start, mut pace) = (Instant::now(), Pace::default());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // A hundred times a second for ten seconds.
        let changes = (0..1000).filter(|it| pace.change(&egress("a"), at(it * 10)).is_ok()).count();
        assert_eq!(changes, 32 + 9);
        assert_eq!(pace.change(&egress("a"), at(9995)), Err(at(10_000)));
        assert_eq!(pace.change(&egress("b"), at(9995)), Ok(()));
        assert_eq!(pace.change(&egress("a"), at(10_000)), Ok(()));
        // After a rest it has all changes again.
        let after = at(10_000) + BURST * PAUSE;
        assert!((0..32).all(|_| pace.change(&egress("a"), after).is_ok()));
        assert!(pace.change(&egress("a"), after).is_err());
    }

    #[test]
    fn holders_that_change_too_often_wait_and_addresses_do_not() {
        let address = |last| IpAddr::from([192, 0, 2, last]);
        let said = |addresses: &[u8], holder: &str| -> Permitted {
            let of = addresses.iter().map(|last| (address(*last), Some(holder.to_owned()))).collect();
            [(egress("a"), of), (egress("b"), [(address(9), Some(holder.to_owned()))].into())].into()
        };
        let (now, mut paced) = (Instant::now(), PacedHolders::default());
        let (first, flapping) = (said(&[1], "g0"), ["g1", "g2"].into_iter().cycle());
        assert_eq!(paced.take(&first, now), (&first, None));
        for holder in flapping.take(32) {
            let next = said(&[1], holder);
            assert_eq!(paced.take(&next, now), (&next, None));
            assert_eq!(paced.take(&next, now), (&next, None), "the same is no change");
        }
        let wanted = [(egress("a"), said(&[1, 2], "g3").remove(&egress("a")).unwrap())].into();
        let (counts, again) = paced.take(&wanted, now);
        assert_eq!(again, Some(now + PAUSE));
        let expected = [(address(1), Some("g2".to_owned())), (address(2), None)].into();
        assert_eq!(counts[&egress("a")], expected);
        assert_eq!(counts.len(), 1, "what is gone is gone at once");
        assert_eq!(paced.take(&wanted, now + PAUSE), (&wanted, None));
    }
}

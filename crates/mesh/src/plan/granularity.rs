//! A mesh that changes from tunnels between all nodes to gateways of locations, or back: what this node has of the other of the two, and
//! when it says that it has it. Pure.
//!
//! Each node prepares once it sees another `spec.topology.granularity`, and says so in its WireKubePeer. Once all live ones have, the
//! controller changes `status.granularity` of the WireKubeMesh, which is what nodes use. They see that at different moments too, so each
//! keeps what it had for a while.

use std::time::{Duration, Instant};

use fairlead_api::resources::Granularity;

/// Time for which the previous granularity is kept: until all nodes have seen the change, which one write told them.
const KEPT: Duration = Duration::from_secs(10);
/// Longest wait for peers to answer through new tunnels before a node says that it has prepared: they may be off.
const PATIENCE: Duration = Duration::from_secs(15);

/// Granularity in use, with the previous and the next one for which this node has tunnels, too.
#[derive(Debug, Default)]
pub(crate) struct GranularityChange {
    used: Option<Granularity>,
    previous: Option<(Granularity, Instant)>,
    next: Option<Next>,
}

#[derive(Debug)]
struct Next {
    granularity: Granularity,
    since: Instant,
    /// Whether this node has prepared. Stays true, or a peer that comes and goes would cost writes.
    is_prepared: bool,
}

impl GranularityChange {
    /// Takes what is used and what is to be, and returns for which other one this node has tunnels too.
    pub(crate) fn follow(
        &mut self,
        used: Granularity,
        wanted: Granularity,
        now: Instant,
    ) -> Option<Granularity> {
        if let Some(before) = self.used.replace(used).filter(|before| *before != used) {
            self.previous = Some((before, now));
        }
        self.previous = self.previous.filter(|(_, since)| now.saturating_duration_since(*since) < KEPT);
        let is_known = |next: &Next| next.granularity == wanted;
        match &self.next {
            _ if wanted == used => self.next = None,
            Some(next) if is_known(next) => {}
            _ => self.next = Some(Next { granularity: wanted, since: now, is_prepared: false }),
        }
        let next = self.next.as_ref().map(|next| next.granularity);
        let previous = self.previous.map(|(previous, _)| previous);
        next.into_iter().chain(previous).find(|other| needs_tunnels(used, *other))
    }

    /// Takes whether the new tunnels work.
    pub(crate) fn observe(&mut self, are_up: bool, now: Instant) {
        if let Some(next) = &mut self.next {
            next.is_prepared |= are_up || now.saturating_duration_since(next.since) >= PATIENCE;
        }
    }

    /// Whether what was used before need not be kept any more.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.previous.is_some_and(|(_, since)| now.saturating_duration_since(since) >= KEPT)
    }

    /// Granularity for which this node is prepared: the next one, or else that in use.
    pub(crate) fn prepared(&self) -> Option<Granularity> {
        let next = self.next.as_ref().filter(|next| next.is_prepared);
        next.map(|next| next.granularity).or(self.used)
    }
}

/// Whether a node has other tunnels with the one than with the other.
fn needs_tunnels(one: Granularity, other: Granularity) -> bool {
    (one == Granularity::Location) != (other == Granularity::Location)
}

#[cfg(test)]
mod tests {
    use Granularity::{Cross, Full, Location};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_node_prepares_says_so_and_keeps_what_it_had_for_a_while() {
        let (mut change, start) = (GranularityChange::default(), Instant::now());
        assert_eq!(change.prepared(), None);
        assert_eq!(change.follow(Full, Full, start), None);
        assert_eq!(change.prepared(), Some(Full));
        assert_eq!(change.follow(Full, Location, start), Some(Location));
        change.observe(false, start);
        assert_eq!(change.prepared(), Some(Full), "its tunnels are not up");
        change.observe(true, start + SECOND);
        change.observe(false, start + 2 * SECOND);
        assert_eq!(change.prepared(), Some(Location), "it stays so");
        let changed = start + 3 * SECOND;
        assert_eq!(change.follow(Location, Location, changed), Some(Full), "others may not have seen it");
        assert_eq!(change.prepared(), Some(Location));
        assert_eq!(change.follow(Location, Location, changed + KEPT - SECOND), Some(Full));
        assert!(!change.is_over(changed) && change.is_over(changed + KEPT));
        assert_eq!(change.follow(Location, Location, changed + KEPT), None);
    }

    #[test]
    fn peers_that_are_off_do_not_keep_a_node_from_saying_that_it_has_prepared() {
        let (mut change, start) = (GranularityChange::default(), Instant::now());
        change.follow(Location, Full, start);
        change.follow(Location, Full, start + 14 * SECOND);
        change.observe(false, start + 14 * SECOND);
        assert_eq!(change.prepared(), Some(Location));
        change.observe(false, start + PATIENCE);
        assert_eq!(change.prepared(), Some(Full));
    }

    #[test]
    fn one_that_is_taken_back_is_dropped_and_another_one_is_prepared_anew() {
        let (mut change, start) = (GranularityChange::default(), Instant::now());
        change.follow(Full, Location, start);
        change.observe(true, start);
        assert_eq!(change.follow(Full, Full, start), None);
        assert_eq!(change.prepared(), Some(Full));
        assert_eq!(change.follow(Full, Location, start), Some(Location));
        assert_eq!(change.prepared(), Some(Full));
        assert_eq!(change.follow(Full, Cross, start), None, "the same tunnels");
        change.observe(true, start);
        assert_eq!(change.prepared(), Some(Cross));
    }
}

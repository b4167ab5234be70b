//! Prefixes to which packets are refused as long as no pod of this node has the address: its blocks, and those that it has just released.
//!
//! The mesh hears of a release a moment later, by the watch and its next step, and takes the block for this node's own until then: packets to it would
//! leave in clear text. The mesh's rule for the table of pods (100) comes before its others, so a route there also keeps this node from the pods of the node that has
//! the block next. So the order is: the mesh leads packets to the block into a tunnel or drops them, then the refusing route goes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ipnet::IpNet;

/// Longest time for which packets to a released block are refused because of the mesh. A watch that was interrupted begins again within a minute. Where
/// the mesh takes the block for its own for longer, as with a `podCIDR` around it, this node would not reach the block's next node.
const GRACE: Duration = Duration::from_secs(60);

/// Prefixes that are refused, as of the last comparison.
#[derive(Debug, Default)]
pub(super) struct Refused {
    /// Prefixes of this node's blocks.
    own: Vec<IpNet>,
    /// Prefixes of blocks that it has no more, with the times at which they were first missed.
    released: BTreeMap<IpNet, Instant>,
    /// Prefixes for which the kernel has the routes, and no others; `None` where that is not known.
    set: Option<Vec<IpNet>>,
}

impl Refused {
    /// Prefixes that are to be refused: the `own` ones, and those that this node had less than [`GRACE`] ago and that the mesh still takes for its own.
    pub(super) fn update(
        &mut self,
        own: Vec<IpNet>,
        now: Instant,
        takes_for_own: impl Fn(&IpNet) -> bool,
    ) -> Vec<IpNet> {
        for prefix in std::mem::replace(&mut self.own, own) {
            self.released.entry(prefix).or_insert(now);
        }
        let Self { own, released, .. } = self;
        released.retain(|prefix, since| {
            !own.contains(prefix) && now.saturating_duration_since(*since) < GRACE && takes_for_own(prefix)
        });
        own.iter().chain(released.keys()).copied().collect()
    }

    /// Whether any of them is no block of this node: it may go at any time.
    pub(super) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Whether the kernel had the routes for exactly these prefixes after the last comparison.
    pub(super) fn are_set(&self, prefixes: &[IpNet]) -> bool {
        self.set.as_deref() == Some(prefixes)
    }

    /// Notes the prefixes for which the kernel has the routes; `None` if it may have others as well.
    pub(super) fn set(&mut self, prefixes: Option<Vec<IpNet>>) {
        self.set = prefixes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn a_released_block_is_refused_until_the_mesh_takes_it_for_this_node_s_own_no_more() {
        let (kept, released) = (net("10.0.0.0/27"), net("10.0.1.0/27"));
        let now = Instant::now();
        let mut refused = Refused::default();
        assert_eq!(refused.update(vec![kept, released], now, |_| true), [kept, released]);
        assert!(!refused.has_released());
        assert_eq!(refused.update(vec![kept], now, |_| true), [kept, released]);
        assert!(refused.has_released());
        assert_eq!(refused.update(vec![kept], now, |prefix| *prefix == kept), [kept]);
        assert!(!refused.has_released());
        assert_eq!(refused.update(vec![kept], now, |_| true), [kept], "the mesh has released it once");
    }

    #[test]
    fn without_a_mesh_a_released_block_is_refused_no_more() {
        let mut refused = Refused::default();
        let now = Instant::now();
        assert_eq!(refused.update(vec![net("10.0.0.0/27")], now, |_| false).len(), 1);
        assert_eq!(refused.update(Vec::new(), now, |_| false), []);
    }

    #[test]
    fn a_mesh_that_never_releases_a_block_keeps_this_node_from_it_for_a_minute() {
        let block = net("10.0.0.0/27");
        let mut refused = Refused::default();
        let start = Instant::now();
        let mut at = |seconds, own: &[IpNet]| {
            refused.update(own.to_vec(), start + Duration::from_secs(seconds), |_| true).len()
        };
        assert_eq!(at(0, &[block]), 1);
        assert_eq!([at(100, &[]), at(159, &[]), at(160, &[])], [1, 1, 0]);
        assert_eq!([at(200, &[block]), at(300, &[block])], [1, 1], "this node has it again");
        assert_eq!([at(310, &[]), at(320, &[block]), at(380, &[])], [1, 1, 1], "each release counts anew");
        assert_eq!(at(440, &[]), 0);
    }
}

//! Choice of the nodes that publish what all of them see: an endpoint of a peer, a problem. Pure.
//!
//! Rendezvous hashing (Thaler and Ravishankar, 1998) orders all nodes differently for each subject. The first few publish.
//! Each node computes its own place from its own name alone, so that nothing is proportional to the square of the nodes.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// Number of nodes that publish one thing.
pub(crate) const OBSERVERS: usize = 3;
/// Most members of a mesh in which every node may publish at once: there is nothing to save.
const SMALL: usize = 32;
/// Time that nodes of the next places wait for those before them to publish.
const PATIENCE: Duration = Duration::from_secs(4);

/// The place of `node` among the nodes that could publish something of `subject`: lower comes first.
pub(crate) fn place(node: &str, subject: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (node, subject).hash(&mut hasher);
    hasher.finish()
}

/// Number of nodes, of `members`, that come before this place, on average.
pub(crate) fn rank(place: u64, members: usize) -> usize {
    let scaled = u128::from(place).saturating_mul(members as u128) >> u64::BITS;
    usize::try_from(scaled).unwrap_or(usize::MAX)
}

/// Whether a node of this place is one of the first.
pub(crate) fn is_chosen(place: u64, members: usize) -> bool {
    rank(place, members) < OBSERVERS
}

/// Time that a node waits for those before it, which may not see the subject at all. The number of nodes doubles with each step.
pub(crate) fn delay(place: u64, members: usize) -> Duration {
    let rank = rank(place, members);
    if members <= SMALL || rank < OBSERVERS {
        return Duration::ZERO;
    }
    let steps =
        rank.checked_div(OBSERVERS).and_then(usize::checked_ilog2).unwrap_or_default().saturating_add(1);
    PATIENCE.saturating_mul(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_of_many_are_chosen_and_others_for_another_subject() {
        let nodes: Vec<String> = (0..1000).map(|number| format!("node-{number}")).collect();
        let chosen = |subject: &str| -> Vec<&String> {
            nodes.iter().filter(|node| is_chosen(place(node, subject), nodes.len())).collect()
        };
        let counts: Vec<usize> = (0..200).map(|number| chosen(&format!("node-{number}")).len()).collect();
        let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
        assert!((2.5..3.5).contains(&mean), "{mean}");
        assert!(counts.iter().all(|count| *count < 12), "{counts:?}");
        assert_ne!(chosen("node-1"), chosen("node-2"));
    }

    #[test]
    fn those_behind_wait_longer_and_in_a_small_mesh_none_waits() {
        let at = |rank: u64| u64::MAX / 1000 * rank + 1;
        let delays: Vec<u64> = [0, 2, 4, 7, 100, 999].map(|rank| delay(at(rank), 1000).as_secs()).to_vec();
        assert_eq!(delays, [0, 0, 4, 8, 24, 36]);
        assert_eq!(delay(u64::MAX, SMALL), Duration::ZERO);
    }
}

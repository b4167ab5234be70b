//! Deletion costs of gateways, and the choice of the costs that are worth a write. Pure.

use serde::Deserialize;

/// Load of a gateway, as it answers `/load`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Load {
    /// Tracked connections; `None` before it has counted them.
    pub(super) connections: Option<u64>,
    /// Whether the gateway ends once its flows have ended.
    pub(super) draining: bool,
    /// Seconds by which its clock is ahead of the API server's (positive) or behind it; `None` if that has not been seen.
    pub(super) clock_error_seconds: Option<i64>,
}

/// A gateway, as far as costs are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gateway {
    /// Cost in the annotation of the pod; `None`, without the annotation, counts as 0.
    pub(super) present: Option<i32>,
    /// Cost that the gateway should have; `None` if its load is not known.
    pub(super) wanted: Option<i32>,
}

/// Cost of a gateway that drains: less than of any other.
const DRAINING: i32 = -1;

/// The cost: the number of binary digits of its connections. Twice as many make it one more, so that it changes rarely.
pub(super) fn cost(load: Load) -> Option<i32> {
    if load.draining {
        return Some(DRAINING);
    }
    load.connections.map(|connections| {
        let digits = u64::BITS.saturating_sub(connections.leading_zeros());
        i32::try_from(digits).unwrap_or(i32::MAX)
    })
}

/// The costs to write, by position: none while those that are there have the right order.
pub(super) fn changes(gateways: &[Gateway]) -> Vec<(usize, i32)> {
    let known = || gateways.iter().enumerate().filter_map(|(at, it)| Some((at, it.present, it.wanted?)));
    let mut sorted: Vec<(i32, i32)> =
        known().map(|(_, present, wanted)| (wanted, present.unwrap_or_default())).collect();
    sorted.sort_unstable();
    // Of neighbours with different costs, the last of the lower and the first of the higher one are next to each other.
    let is_in_order = |pair: &[(i32, i32)]| match pair {
        [lower, higher] => lower.0 == higher.0 || lower.1 < higher.1,
        _ => true,
    };
    if sorted.windows(2).all(is_in_order) {
        return Vec::new();
    }
    let differs =
        |(at, present, wanted): (usize, Option<i32>, i32)| (present != Some(wanted)).then_some((at, wanted));
    known().filter_map(differs).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn connections(count: u64) -> Option<i32> {
        cost(Load { connections: Some(count), ..Load::default() })
    }

    #[test]
    fn costs_grow_with_the_logarithm_of_connections() {
        assert_eq!(
            [0, 1, 2, 3, 4, 1000, 1023, 1024].map(connections).map(Option::unwrap),
            [0, 1, 2, 2, 3, 10, 10, 11]
        );
        assert_eq!(connections(u64::MAX), Some(64));
        assert_eq!(cost(Load { connections: Some(1000), draining: true, ..Load::default() }), Some(-1));
        assert_eq!(cost(Load::default()), None);
    }

    fn gateway(present: impl Into<Option<i32>>, wanted: impl Into<Option<i32>>) -> Gateway {
        Gateway { present: present.into(), wanted: wanted.into() }
    }

    #[test]
    fn nothing_is_written_while_the_order_is_right() {
        assert_eq!(changes(&[gateway(None, 5), gateway(None, 5)]), [], "none is better");
        assert_eq!(changes(&[gateway(3, 5), gateway(9, 6)]), []);
        assert_eq!(changes(&[gateway(None, 0), gateway(7, 6)]), [], "none counts as 0");
        assert_eq!(changes(&[gateway(9, 5), gateway(3, 6)]), [(0, 5), (1, 6)]);
        assert_eq!(changes(&[gateway(None, 5), gateway(None, -1)]), [(0, 5), (1, -1)]);
        assert_eq!(changes(&[gateway(5, 5), gateway(5, 6), gateway(0, None)]), [(1, 6)]);
    }

    proptest! {
        #[test]
        fn what_is_written_is_in_order_and_is_not_written_again(all in prop::collection::vec((prop::option::of(-2i32..20), prop::option::of(-1i32..20)), 0..12)) {
            let mut gateways: Vec<Gateway> = all.into_iter().map(|(present, wanted)| Gateway { present, wanted }).collect();
            for (at, cost) in changes(&gateways) {
                prop_assert_ne!(gateways[at].present, Some(cost));
                gateways[at].present = Some(cost);
            }
            prop_assert_eq!(changes(&gateways), []);
            for a in &gateways {
                for b in &gateways {
                    if let (Some(low), Some(high)) = (a.wanted, b.wanted) && low < high {
                        prop_assert!(a.present.unwrap_or_default() < b.present.unwrap_or_default());
                    }
                }
            }
        }
    }
}

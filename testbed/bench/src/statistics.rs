//! Few samples of a busy machine: the median, and from where to where they reach.

/// Samples in three numbers. There is no mean: one disturbed sample would move it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
}

impl Summary {
    /// `None` without a sample.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let upper = *sorted.get(middle)?;
        let lower = if sorted.len().is_multiple_of(2) { *sorted.get(middle.checked_sub(1)?)? } else { upper };
        Some(Self { median: f64::midpoint(lower, upper), lowest: *sorted.first()?, highest: *sorted.last()? })
    }
}

/// The sample that a share of all samples does not exceed (nearest rank: always one that was taken). `share` is from 0
/// to 1; `None` without a sample.
pub(crate) fn percentile(samples: &[f64], share: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)).saturating_sub(1)).copied()
}

/// Ours divided by the peer's, pair by pair: what slowed the machine down for a while slowed both down.
///
/// Samples without a partner, and pairs whose quotient is no number, are left out.
pub(crate) fn ratios(ours: &[f64], peers: &[f64]) -> Vec<f64> {
    ours.iter().zip(peers).map(|(ours, peer)| ours / peer).filter(|ratio| ratio.is_finite()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(samples: &[f64]) -> (f64, f64, f64) {
        let Summary { median, lowest, highest } = Summary::of(samples).unwrap();
        (median, lowest, highest)
    }

    #[test]
    fn an_odd_number_of_samples_has_a_middle_one() {
        assert_eq!(summary(&[7.0]), (7.0, 7.0, 7.0));
        assert_eq!(summary(&[9.0, 1.0, 2.0]), (2.0, 1.0, 9.0));
    }

    #[test]
    fn an_even_number_of_samples_has_two() {
        assert_eq!(summary(&[4.0, 1.0, 100.0, 2.0]), (3.0, 1.0, 100.0));
    }

    #[test]
    fn no_samples_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn percentiles_are_samples() {
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&samples, 0.5), Some(50.0));
        assert_eq!(percentile(&samples, 0.99), Some(99.0));
        assert_eq!(percentile(&samples, 1.0), Some(100.0));
        assert_eq!(percentile(&[3.0, 1.0], 0.99), Some(3.0));
        assert_eq!(percentile(&[7.0], 0.0), Some(7.0));
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn ratios_are_taken_pair_by_pair() {
        // Both were slow in the second round, so the ratio did not change.
        assert_eq!(ratios(&[10.0, 5.0, 12.0], &[20.0, 10.0, 20.0]), [0.5, 0.5, 0.6]);
        assert_eq!(ratios(&[1.0, 2.0], &[4.0]), [0.25]);
    }

    #[test]
    fn a_peer_that_did_nothing_gives_no_ratio() {
        assert_eq!(ratios(&[1.0, 0.0, 3.0], &[0.0, 0.0, 2.0]), [1.5]);
    }
}

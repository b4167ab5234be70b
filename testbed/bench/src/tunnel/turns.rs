//! Subjects that are measured in turns, and whose samples may fail.

use std::fmt::Display;

use anyhow::Result;

use super::CASE;
use super::subject::Subject;
use crate::egress::repeated;
use crate::progress;
use crate::report::Measurement;

/// Fewer samples say nothing.
const LEAST: usize = 3;
/// Subject by whose figures those of the others are divided.
const REFERENCE: Subject = Subject::WireguardGo;

/// Samples of one subject, each with the number of its round.
#[derive(Debug)]
pub(super) struct Series<T> {
    pub(super) subject: Subject,
    taken: Vec<(usize, T)>,
    rounds: usize,
}

/// Quantity that a row of the table shows, computed from samples.
pub(super) struct Quantity<T> {
    metric: String,
    unit: &'static str,
    of: fn(Subject) -> bool,
    value: fn(&T) -> f64,
}

impl<T> Quantity<T> {
    /// `of` says whether a subject has it.
    pub(super) fn new(
        metric: String,
        unit: &'static str,
        of: fn(Subject) -> bool,
        value: fn(&T) -> f64,
    ) -> Self {
        Self { metric, unit, of, value }
    }
}

/// Takes a sample of each subject in every round; who is first rotates. A sample that fails is repeated, and left out if it fails every
/// time. A subject that cannot reach enough samples any more is left alone.
pub(super) fn in_turns<T: Display>(
    what: &str,
    rounds: usize,
    subjects: &[Subject],
    mut take: impl FnMut(Subject) -> Result<T>,
) -> Vec<Series<T>> {
    let series = |subject: &Subject| Series { subject: *subject, taken: Vec::new(), rounds };
    let mut all: Vec<Series<T>> = subjects.iter().map(series).collect();
    for round in 0..rounds {
        let mut turns: Vec<_> = all.iter_mut().collect();
        let first = round % turns.len().max(1);
        turns.rotate_left(first);
        for series in turns.into_iter().filter(|series| !series.has_failed_by(round)) {
            let turn = format!("{what}, round {} of {rounds}, {}", round + 1, series.subject);
            if let Some(sample) = repeated(|| take(series.subject), &turn) {
                progress(&format!("    {turn}: {sample}"));
                series.taken.push((round, sample));
            }
        }
    }
    all
}

impl<T> Series<T> {
    /// Combines the samples of two series, in the rounds in which both have one.
    pub(super) fn combined<U>(&self, other: &Self, combine: impl Fn(&T, &T) -> U) -> Series<U> {
        let partner = |round| other.taken.iter().find(|(each, _)| each == round).map(|(_, sample)| sample);
        let taken = self.taken.iter();
        let taken =
            taken.filter_map(|(round, sample)| Some((*round, combine(sample, partner(round)?)))).collect();
        Series { subject: self.subject, taken, rounds: self.rounds }
    }

    /// Whether too many samples of the rounds before this one are missing.
    fn has_failed_by(&self, round: usize) -> bool {
        round.saturating_sub(self.taken.len()) > self.rounds - LEAST.min(self.rounds)
    }

    fn row(&self, quantity: &Quantity<T>) -> Result<Measurement> {
        let Quantity { metric, value, .. } = quantity;
        let (name, unit) = (self.subject.name(), quantity.unit);
        if self.has_failed_by(self.rounds) {
            let (taken, rounds) = (self.taken.len(), self.rounds);
            progress(&format!("    error: {metric}, {name}: {taken} samples in {rounds} rounds are too few"));
            return Ok(Measurement::failed(CASE, name, metric, unit));
        }
        let (rounds, samples) = self.taken.iter().map(|(round, sample)| (*round, value(sample))).unzip();
        let row = Measurement::new(CASE, name, metric, unit, samples)?.in_rounds(rounds);
        Ok(if self.subject == REFERENCE { row } else { row.against(REFERENCE.name()) })
    }
}

/// A row for each subject that has the quantity.
pub(super) fn rows<T>(all: &[Series<T>], quantity: &Quantity<T>) -> Result<Vec<Measurement>> {
    all.iter().filter(|series| (quantity.of)(series.subject)).map(|series| series.row(quantity)).collect()
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    const SUBJECTS: [Subject; 2] = [Subject::Fairlead, Subject::WireguardGo];

    fn quantity() -> Quantity<f64> {
        Quantity::new("TCP".to_owned(), "Gbit/s", |_| true, |sample| *sample)
    }

    #[test]
    fn who_is_first_rotates() {
        let mut order = Vec::new();
        let all = in_turns("TCP", 3, &SUBJECTS, |subject| {
            order.push(subject);
            Ok(1.0)
        });
        let [ours, peer] = SUBJECTS;
        assert_eq!(order, [ours, peer, peer, ours, ours, peer]);
        let rows = rows(&all, &quantity()).unwrap();
        assert_eq!((rows[0].samples.len(), rows[0].peer), (3, Some("wireguard-go")));
        assert_eq!((rows[1].subject, rows[1].peer), ("wireguard-go", None));
    }

    #[test]
    fn a_sample_that_fails_is_repeated_then_left_out_and_never_fatal() {
        let mut calls = 0;
        // Ours fails once, and then in all attempts of its second round.
        let all = in_turns("TCP", 5, &[Subject::Fairlead], |_| {
            calls += 1;
            if calls == 1 || (3..8).contains(&calls) { bail!("the server is busy") } else { Ok(1.0) }
        });
        let rows = rows(&all, &quantity()).unwrap();
        assert_eq!(rows[0].rounds, [0, 2, 3, 4]);
    }

    #[test]
    fn a_subject_without_enough_samples_has_failed_and_is_left_alone() {
        let mut calls = 0;
        let all = in_turns("TCP", 5, &SUBJECTS, |subject| {
            if subject == Subject::Fairlead {
                calls += 1;
                bail!("the device ended");
            }
            Ok(2.0)
        });
        let rows = rows(&all, &quantity()).unwrap();
        assert_eq!((rows[0].samples.len(), rows[1].samples.len()), (0, 5));
        assert_eq!(calls, 15, "three of five rounds, five attempts each");
    }

    #[test]
    fn combined_series_have_the_rounds_of_both() {
        let series = |taken| Series { subject: Subject::Fairlead, taken, rounds: 3 };
        let (path, cable) = (series(vec![(0, 5.0), (1, 6.0), (2, 7.0)]), series(vec![(0, 1.0), (2, 3.0)]));
        assert_eq!(path.combined(&cable, |path, cable| path - cable).taken, [(0, 4.0), (2, 4.0)]);
    }
}

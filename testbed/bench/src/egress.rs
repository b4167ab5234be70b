//! Egress gateways: the way through one of ours beside a plain routed one that translates addresses, and the tunnels of ours beside the
//! kernel's in a VM.
//!
//! Tests of `fairlead-egress-client` and `fairlead-egress-gateway`, which have what that takes, measure the costs of an ADD and of a
//! client: docs/benchmarks.md has their commands.

mod ends;
pub(crate) mod flow;
mod machine;
mod path;

use anyhow::Result;

pub(crate) use ends::{END_COMMAND, End};
use flow::{Flow, Sample};

use crate::report::Measurement;
use crate::{Effort, Options, progress};

pub(crate) const CASE: &str = "egress";
const OURS: &str = "fairlead";
/// A round that fails is repeated so often, and then left out.
const ATTEMPTS: usize = 5;

/// Extent of a measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) rounds: usize,
    /// Duration of one transfer in seconds.
    pub(crate) seconds: usize,
}

impl Extent {
    /// Extent that the command line asks for; `full` without options.
    pub(crate) fn of(options: Options, full: Self) -> Self {
        let usual = if options.effort == Effort::Quick { Self { rounds: 2, seconds: 1 } } else { full };
        Self {
            rounds: options.rounds.unwrap_or(usual.rounds),
            seconds: options.seconds.unwrap_or(usual.seconds),
        }
    }
}

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let extent = Extent::of(options, Extent { rounds: 7, seconds: 3 });
    let mut measurements = path::run(extent)?;
    measurements.extend(machine::run(extent)?);
    Ok(measurements)
}

/// Measures both subjects in turns; `transfer` is given the number of the subject, of which the first is ours.
fn in_turns(
    subjects: [&'static str; 2],
    flow: Flow,
    extent: Extent,
    transfer: impl FnMut(usize) -> Result<Sample>,
) -> Result<Vec<Measurement>> {
    let [ours, peers] = samples_in_turns(subjects, &flow.to_string(), extent, transfer);
    let mut measurements = Vec::new();
    if ours.is_empty() {
        progress(&format!("    {flow} is left out: no round succeeded"));
        return Ok(measurements);
    }
    for (metric, unit, value) in [
        (format!("{flow}"), "Gbit/s", Sample::gigabits_per_second as fn(&Sample) -> f64),
        (format!("{flow}, work"), "MB/CPU s", Sample::megabytes_per_cpu_second),
    ] {
        let values = |samples: &[Sample]| samples.iter().map(value).collect();
        let [own, peer] = subjects;
        measurements.push(Measurement::new(CASE, own, &metric, unit, values(&ours))?.against(peer));
        measurements.push(Measurement::new(CASE, peer, &metric, unit, values(&peers))?);
    }
    Ok(measurements)
}

/// Samples of both subjects, of the same rounds: one that fails every time is left out. `transfer` is given the number of the subject.
pub(crate) fn samples_in_turns(
    subjects: [&'static str; 2],
    what: &str,
    extent: Extent,
    mut transfer: impl FnMut(usize) -> Result<Sample>,
) -> [Vec<Sample>; 2] {
    let mut samples = [Vec::new(), Vec::new()];
    for round in 1..=extent.rounds {
        let Some(taken) = repeated(|| one_round(round, &mut transfer), &format!("{what}, round {round}"))
        else {
            continue;
        };
        for ((subject, sample), all) in subjects.iter().zip(taken).zip(&mut samples) {
            let (rate, work) = (sample.gigabits_per_second(), sample.megabytes_per_cpu_second());
            progress(&format!(
                "    {what}, round {round} of {}, {subject}: {rate:.2} Gbit/s, {work:.0} MB per CPU s",
                extent.rounds
            ));
            all.push(sample);
        }
    }
    samples
}

/// One sample of each subject; the order alternates.
fn one_round(round: usize, transfer: &mut impl FnMut(usize) -> Result<Sample>) -> Result<[Sample; 2]> {
    if round.is_multiple_of(2) {
        let second = transfer(1)?;
        return Ok([transfer(0)?, second]);
    }
    Ok([transfer(0)?, transfer(1)?])
}

/// Repeats work that fails, up to [`ATTEMPTS`] times in all; `None` if it fails every time.
pub(crate) fn repeated<T>(mut work: impl FnMut() -> Result<T>, what: &str) -> Option<T> {
    (1..=ATTEMPTS).find_map(|attempt| {
        work()
            .map_err(|error| progress(&format!("    {what}, attempt {attempt} of {ATTEMPTS}: {error:#}")))
            .ok()
    })
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    const EXTENT: Extent = Extent { rounds: 1, seconds: 1 };

    #[test]
    fn a_round_that_fails_is_repeated_and_then_left_out() {
        let mut failures = 2;
        let value = repeated(
            || {
                failures -= 1;
                if failures >= 0 { bail!("the server is busy") } else { Ok(7) }
            },
            "a round",
        );
        assert_eq!(value, Some(7));
        let flow = path::FLOWS[0];
        let left_out = in_turns([OURS, "other"], flow, EXTENT, |_| bail!("the server is busy")).unwrap();
        assert!(left_out.is_empty());
    }

    #[test]
    fn the_order_of_the_subjects_alternates() {
        let sample = Sample { bytes: 1.0, bits_per_second: 1.0, cpu_seconds: 1.0 };
        let order = |round| {
            let mut order = Vec::new();
            one_round(round, &mut |subject| {
                order.push(subject);
                Ok(sample)
            })
            .unwrap();
            order
        };
        assert_eq!([order(1), order(2)], [[0, 1], [1, 0]]);
    }

    /// Traffic flows in each case. A debug build is used, whose figures say nothing.
    #[test]
    fn packets_go_through_the_gateway_and_the_plain_way() {
        let measurements = path::run(EXTENT).unwrap();
        println!("{}", crate::report::table(&measurements));
        assert_eq!(measurements.len(), 4 * path::FLOWS.len());
        assert!(measurements.iter().all(|measurement| measurement.value > 0.0));
    }
}

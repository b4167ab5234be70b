//! Two nodes behind NATs find a path: ours, and two endpoints of iroh on hosts beside them.
//!
//! The lab is that of the test of the NAT matrix. Of each pair of kinds two sites are measured, alone, first by one subject and then by the
//! other. Ours are real node programs without any state, with a real API server; time begins when both know each other, which is before STUN
//! servers have answered. Endpoints of iroh have had 3 s with their relay to learn their addresses; time begins when one connects to the ID of
//! the other. Both have one relay and servers that tell addresses, all on the lab's Internet, without delay
//! or with that of `--rtt`.

mod iroh;
mod nodes;

use std::time::Duration;

use anyhow::{Context, Result};
use fairlead_demo::World;
use fairlead_demo::nat_matrix::{self, KINDS, Place};
use testbed_lab::Progress;

use crate::report::{Measurement, milliseconds};
use crate::statistics::percentile;
use crate::{Effort, Options, progress};
use iroh::Iroh;
use nodes::Nodes;

pub(crate) const CASE: &str = "nat";
const OURS: &str = "fairlead";
const PEER: &str = "iroh";
/// Longest time in which a direct path must be found.
const LIMIT: Duration = Duration::from_secs(10);
/// Kinds that are measured with each other in a quick run.
const QUICK: [&str; 4] = ["open", "port", "random", "no-udp"];

/// Times of one pair; each is `None` if it did not come to that.
#[derive(Debug, Clone, Copy, Default)]
struct Outcome {
    /// Time until a packet of one was answered by the other.
    answer: Option<Duration>,
    /// Time until packets take a direct path; `None` if there was none within [`LIMIT`].
    direct: Option<Duration>,
}

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let places = nat_matrix::places();
    let pairs = pairs(&places, options.effort);
    let mut world = World::start(&nat_matrix::topology(&places), &Progress::default())?;
    let _delay = match options.rtt {
        Some(milliseconds) => {
            Some(world.lab().delay(Duration::from_millis(u64::try_from(milliseconds)?) / 2)?)
        }
        None => None,
    };
    let iroh = Iroh::start(&world)?;
    let nodes = Nodes::prepare(&mut world)?;
    let mut outcomes = Vec::new();
    for (number, (one, other)) in pairs.iter().enumerate() {
        let context = || format!("{} and {}", one.node, other.node);
        // The order alternates.
        let (ours, peers) = if number % 2 == 0 {
            let ours = nodes.measure(&mut world, one, other).with_context(context)?;
            (ours, iroh.measure(one, other).with_context(context)?)
        } else {
            let peers = iroh.measure(one, other).with_context(context)?;
            (nodes.measure(&mut world, one, other).with_context(context)?, peers)
        };
        progress(&format!(
            "    {} of {}, {} and {}: {OURS} {}, {PEER} {}",
            number + 1,
            pairs.len(),
            one.kind.name,
            other.kind.name,
            text(ours),
            text(peers)
        ));
        outcomes.push((ours, peers));
    }
    report(&outcomes)
}

/// Two hosts at different sites for each pair of kinds.
fn pairs(places: &[Place], effort: Effort) -> Vec<(Place, Place)> {
    let is_chosen = |name: &str| effort == Effort::Full || QUICK.contains(&name);
    let names: Vec<&str> = KINDS.iter().map(|kind| kind.name).filter(|name| is_chosen(name)).collect();
    let of = |name: &str, site: &str| {
        let found = places.iter().find(|place| place.kind.name == name && place.site.ends_with(site));
        found.copied()
    };
    let mut pairs = Vec::new();
    for (index, one) in names.iter().enumerate() {
        for other in names.get(index..).unwrap_or_default() {
            pairs.extend(of(one, "-a").zip(of(other, "-b")));
        }
    }
    pairs
}

fn text(outcome: Outcome) -> String {
    let time =
        |time: Option<Duration>| time.map_or("-".to_owned(), |time| format!("{:.0} ms", milliseconds(time)));
    format!("answer {}, direct {}", time(outcome.answer), time(outcome.direct))
}

/// Takes one of the times.
type Take = fn(&Outcome) -> Option<Duration>;

fn report(outcomes: &[(Outcome, Outcome)]) -> Result<Vec<Measurement>> {
    let mut measurements = Vec::new();
    let both = |take: Take| -> [Vec<f64>; 2] {
        let taken = outcomes.iter().filter_map(|(ours, peers)| take(ours).zip(take(peers)));
        let (ours, peers) = taken.map(|(ours, peers)| (milliseconds(ours), milliseconds(peers))).unzip();
        [ours, peers]
    };
    let metrics: [(&str, Take); 2] = [
        ("first answer", |outcome| outcome.answer),
        ("direct path, where both find one", |outcome| outcome.direct),
    ];
    for (metric, take) in metrics {
        for (subject, samples) in [OURS, PEER].into_iter().zip(both(take)) {
            let most = percentile(&samples, 0.99).context("no pair was measured with both")?;
            measurements.push(Measurement::new(CASE, subject, metric, "ms", samples)?.against(PEER));
            measurements.push(
                Measurement::new(CASE, subject, format!("{metric}, p99"), "ms", vec![most])?.against(PEER),
            );
        }
    }
    let counts: [(&str, Take); 2] =
        [("answers", |outcome| outcome.answer), ("direct paths", |outcome| outcome.direct)];
    for (what, take) in counts {
        let metric = format!("{what} of {} pairs", outcomes.len());
        let ours = outcomes.iter().filter(|pair| take(&pair.0).is_some()).count() as f64;
        let peers = outcomes.iter().filter(|pair| take(&pair.1).is_some()).count() as f64;
        for (subject, count) in [(OURS, ours), (PEER, peers)] {
            measurements
                .push(Measurement::new(CASE, subject, metric.clone(), "", vec![count])?.against(PEER));
        }
    }
    Ok(measurements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_kinds_is_measured_once_between_two_sites() {
        let places = nat_matrix::places();
        let all = pairs(&places, Effort::Full);
        assert_eq!(all.len(), KINDS.len() * (KINDS.len() + 1) / 2);
        assert!(all.iter().all(|(one, other)| one.site != other.site), "{all:?}");
        assert_eq!(pairs(&places, Effort::Quick).len(), 10);
    }

    #[test]
    fn only_pairs_that_both_measured_are_compared_and_direct_paths_are_counted() {
        let milliseconds = |time: u64| Some(Duration::from_millis(time));
        let outcome = |answer, direct| Outcome { answer, direct };
        let both = (outcome(milliseconds(10), milliseconds(20)), outcome(milliseconds(30), milliseconds(80)));
        let ours = (outcome(milliseconds(10), milliseconds(500)), outcome(milliseconds(30), None));
        let measured = report(&[both, ours]).unwrap();
        let find = |subject: &str, metric: &str| {
            let found = measured.iter().find(|one| one.subject == subject && one.metric == metric).unwrap();
            found.samples.clone()
        };
        assert_eq!(find(OURS, "direct path, where both find one"), [20.0]);
        assert_eq!(find(PEER, "first answer, p99"), [30.0]);
        assert_eq!(
            (find(OURS, "direct paths of 2 pairs"), find(PEER, "direct paths of 2 pairs")),
            (vec![2.0], vec![1.0])
        );
    }
}

//! Starting and ending pods: our plugin, node program, controller and a real API server beside the CNI project's `ptp`
//! with `host-local`, which needs none of them.
//!
//! Each has a network namespace as its node, and each pod is a network namespace that was made before. Plugins are
//! started as a container runtime starts them; from that to the end of the process is one sample. Both subjects use
//! the same pods in turns.

pub(crate) mod bed;
pub(crate) mod breakdown;
pub(crate) mod load;
pub(crate) mod subject;

use anyhow::{Context, Result};

use crate::report::Measurement;
use crate::statistics::percentile;
use crate::{Effort, Options, progress};
use bed::Bed;
use load::Load;
use subject::Family;

pub(crate) const CASE: &str = "cni";
const OURS: &str = "fairlead";
const PEER: &str = "ptp";

/// Number of pods that are started at the same time, and number of pods in all.
#[derive(Debug, Clone, Copy)]
struct Level {
    parallel: usize,
    pods: usize,
    /// Number of pods of the peer where it waits for duplicate address detection: 1.6 s a pod.
    patient_pods: usize,
}

const LEVELS: [Level; 3] = [
    Level { parallel: 1, pods: 50, patient_pods: 3 },
    Level { parallel: 10, pods: 100, patient_pods: 20 },
    Level { parallel: 100, pods: 100, patient_pods: 100 },
];

fn rounds(effort: Effort) -> usize {
    match effort {
        Effort::Full => 5,
        Effort::Quick => 2,
    }
}

pub(crate) fn run(Options { effort, .. }: Options) -> Result<Vec<Measurement>> {
    let rounds = rounds(effort);
    let bed = Bed::start(rounds)?;
    let mut measurements = cold(&bed, rounds)?;
    for family in Family::ALL {
        // Not counted: first use of programs, links and blocks.
        for plugin in [bed.ours(family), bed.peer(family)] {
            bed.attach_and_detach(&plugin, 4, 4)?;
        }
        for level in LEVELS {
            measurements.extend(measure(&bed, family, level, rounds)?);
        }
    }
    measurements.extend(breakdown::measure(&bed, effort)?);
    bed.end()?;
    Ok(measurements)
}

/// The samples of one subject: one figure a round each.
#[derive(Debug, Default)]
struct Samples {
    half: Vec<f64>,
    most: Vec<f64>,
    rate: Vec<f64>,
}

impl Samples {
    fn push(&mut self, load: &Load) -> Result<()> {
        self.half.push(percentile(&load.milliseconds, 0.5).context("no pod was started")?);
        self.most.push(percentile(&load.milliseconds, 0.99).context("no pod was started")?);
        self.rate.push(load.pods_per_second());
        Ok(())
    }

    fn measurements(self, subject: &'static str, what: &str) -> Result<[Measurement; 3]> {
        let new = |metric: &str, unit, samples| {
            Measurement::new(CASE, subject, format!("{what}, {metric}"), unit, samples)
        };
        Ok([new("p50", "ms", self.half)?, new("p99", "ms", self.most)?, new("rate", "pods/s", self.rate)?])
    }
}

fn measure(bed: &Bed, family: Family, level: Level, rounds: usize) -> Result<Vec<Measurement>> {
    let [mut adds, mut peer_adds, mut dels, mut peer_dels] =
        [const { Samples { half: vec![], most: vec![], rate: vec![] } }; 4];
    let parallel = level.parallel;
    for round in 1..=rounds {
        let patient = if family == Family::Ipv4 { level.pods } else { level.patient_pods };
        let mut turns = [
            (OURS, bed.ours(family), level.pods, &mut adds, &mut dels),
            (PEER, bed.peer(family), patient, &mut peer_adds, &mut peer_dels),
        ];
        // The order alternates.
        if round.is_multiple_of(2) {
            turns.reverse();
        }
        for (subject, plugin, pods, adds, dels) in turns {
            let (add, del) = bed
                .attach_and_detach(&plugin, parallel, pods)
                .with_context(|| format!("{subject}, {family}, {parallel} at once"))?;
            adds.push(&add)?;
            dels.push(&del)?;
            progress(&format!(
                "    {family}, {parallel} at once, round {round} of {rounds}, {subject}: ADD {add}, DEL {del}"
            ));
        }
    }
    let add = format!("ADD {family}, {parallel} at once");
    let del = format!("DEL {family}, {parallel} at once");
    let mut all = Vec::new();
    for (what, ours, peer) in [(add, adds, peer_adds), (del, dels, peer_dels)] {
        let ours = ours.measurements(OURS, &what)?.map(|one| one.against(PEER));
        let peer = peer.measurements(PEER, &what)?;
        all.extend(ours.into_iter().zip(peer).flat_map(|(ours, peer)| [ours, peer]));
    }
    Ok(all)
}

/// 100 pods at once on a node that has no block of their pool yet: four have to be granted meanwhile. The peer has no
/// blocks.
fn cold(bed: &Bed, rounds: usize) -> Result<Vec<Measurement>> {
    let mut samples = Samples::default();
    for round in 0..rounds {
        let (add, _) = bed.attach_and_detach(&bed.cold(round), 100, 100)?;
        samples.push(&add)?;
        progress(&format!(
            "    first pods of a pool, 100 at once, round {} of {rounds}: ADD {add}",
            round + 1
        ));
    }
    Ok(samples.measurements(OURS, "ADD ipv4, 100 at once, no block yet")?.into())
}

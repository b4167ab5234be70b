//! A large cluster against a real API server: how fast the real controller grants blocks, what that costs the API
//! server, and how much memory the controller and one real node program take.
//!
//! The nodes are simulated in this process with the node program's own code ([`fairlead_pods::ipam`] and
//! [`fairlead_pods::ipam::requests`]): the same decisions, the same requests, the same waiting. What they do not have is a
//! kernel, and instead of a watch each they share one. One more node is real, with real pods.

pub(crate) mod cluster;
mod memory;
mod simulated;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cluster::Cluster;
use fairlead_demo::World;
use memory::Memory;
use testbed_lab::Progress;
use tokio::runtime::Runtime;

use crate::cni;
use crate::cpu;
use crate::report::Measurement;
use crate::statistics::percentile;
use crate::{Effort, Options, progress};

pub(crate) const CASE: &str = "ipam";
const OURS: &str = "fairlead";
/// Slices of the run, each one sample of the rate.
const SLICES: usize = 10;

/// After the last pod, until memory is read.
const SETTLE: Duration = Duration::from_secs(5);

/// Size of the cluster.
#[derive(Debug, Clone, Copy)]
struct Size {
    nodes: usize,
    /// Number of pods to which each simulated node gives an address.
    pods: usize,
    /// Pod objects in the API server.
    objects: usize,
    /// Pods of the real node.
    real_pods: usize,
}

impl Size {
    fn of(effort: Effort) -> Self {
        match effort {
            Effort::Full => Self { nodes: 1_000, pods: 100, objects: 20_000, real_pods: 250 },
            Effort::Quick => Self { nodes: 100, pods: 100, objects: 2_000, real_pods: 50 },
        }
    }
}

pub(crate) fn run(Options { effort, .. }: Options) -> Result<Vec<Measurement>> {
    let size = Size::of(effort);
    let world = World::start(&cni::bed::topology()?, &Progress::default())?;
    let host = world.plane_host().clone();
    // The runtime's threads are started inside, where the API server is.
    host.run(|| {
        let runtime = Runtime::new().context("cannot start the runtime")?;
        measure(&world, size, &runtime)
    })?
}

fn measure(world: &World, size: Size, runtime: &Runtime) -> Result<Vec<Measurement>> {
    let step = |what: &str| progress(&format!("    {what}"));
    let mut measurements = Memory::read(world)?.measurements("at the start")?.to_vec();
    let cluster = runtime.block_on(Cluster::create(world, size))?;
    step(&format!("made {} Nodes and {} Pods in the API server", size.nodes, size.objects));

    let before = runtime.block_on(cluster.requests_served())?;
    let processor = Processor::of(world)?;
    let start = Instant::now();
    let nodes = runtime.block_on(simulated::run(&cluster, size, start))?;
    let elapsed = start.elapsed();
    let spent = processor.since()?;
    let requests = runtime.block_on(cluster.requests_served())? - before;
    let blocks = runtime.block_on(cluster.granted())?;
    let pods = size.nodes * size.pods;
    ensure!(distinct(&nodes) == pods, "two pods have one address");
    step(&format!("{pods} pods have addresses from {blocks} blocks after {:.1} s", elapsed.as_secs_f64()));
    measurements.extend(granting(&nodes, size, blocks)?);
    let one = |metric: &str, unit, value: f64| Measurement::new(CASE, OURS, metric, unit, vec![value]);
    measurements.push(one("API requests per block", "requests", requests / blocks as f64)?);
    measurements.push(one("API requests per pod", "requests", requests / pods as f64)?);
    for (what, seconds) in spent {
        let metric = format!("CPU of {what} per block");
        measurements.push(one(&metric, "ms", seconds * 1000.0 / blocks as f64)?);
    }

    let before = memory::node_requests(world)?;
    let real = memory::real_pods(world, size.real_pods)?;
    step(&format!("the real node has {} pods", size.real_pods));
    std::thread::sleep(SETTLE);
    let requests = memory::node_requests(world)? - before;
    let per_pod = requests / size.real_pods as f64;
    measurements.push(one("API requests of a real node program per pod", "requests", per_pod)?);
    measurements.extend(Memory::read(world)?.measurements("with the cluster full")?);
    drop(real);
    Ok(measurements)
}

fn distinct(nodes: &[simulated::Done]) -> usize {
    nodes.iter().flat_map(|node| &node.addresses).collect::<BTreeSet<&Ipv4Addr>>().len()
}

/// CPU seconds that the programs of the cluster have spent so far.
struct Processor {
    of: [(&'static str, Vec<u32>); 3],
    before: Vec<f64>,
}

impl Processor {
    fn of(world: &World) -> Result<Self> {
        let of = [
            ("API server and etcd", cpu::descendants(&["kubebed", "kube-apiserver", "etcd"])?),
            ("the controller", vec![world.controller_id()?]),
            ("the simulated nodes", vec![std::process::id()]),
        ];
        let before = Self::read(&of)?;
        Ok(Self { of, before })
    }

    fn read(of: &[(&str, Vec<u32>)]) -> Result<Vec<f64>> {
        of.iter().map(|(_, ids)| ids.iter().map(|id| cpu::seconds_of(*id)).sum()).collect()
    }

    /// CPU seconds that each program has spent since the start.
    fn since(&self) -> Result<Vec<(&'static str, f64)>> {
        let names = self.of.iter().map(|(name, _)| *name);
        let spent = Self::read(&self.of)?.into_iter().zip(&self.before).map(|(now, before)| now - before);
        Ok(names.zip(spent).collect())
    }
}

/// Rates by slices of nodes in the order they were served, and how long pods waited.
fn granting(nodes: &[simulated::Done], size: Size, blocks: usize) -> Result<Vec<Measurement>> {
    let mut ends: Vec<Duration> = nodes.iter().map(|node| node.at).collect();
    ends.sort();
    let per_node = blocks as f64 / size.nodes as f64;
    let mut rates = Vec::new();
    let mut since = Duration::ZERO;
    for slice in ends.chunks(size.nodes.div_ceil(SLICES)) {
        let Some(last) = slice.last() else { continue };
        rates.push(slice.len() as f64 * per_node / last.saturating_sub(since).as_secs_f64());
        since = *last;
    }
    let waits: Vec<f64> = nodes.iter().flat_map(|node| node.waits.iter().copied()).collect();
    let wait = |share| percentile(&waits, share).context("no pod got an address");
    Ok(vec![
        Measurement::new(CASE, OURS, "block grants", "blocks/s", rates)?,
        Measurement::new(CASE, OURS, "pod's wait for its address, p50", "ms", vec![wait(0.5)?])?,
        Measurement::new(CASE, OURS, "pod's wait for its address, p99", "ms", vec![wait(0.99)?])?,
    ])
}

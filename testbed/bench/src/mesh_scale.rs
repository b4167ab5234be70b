//! A large mesh: peers and blocks in a real API server, and one real node program. The other nodes are objects only, so
//! none of them answers: for paths that is the worst case.
//!
//! The writes of all nodes together when one of them fails follow from the code that decides them, called for each node.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_api::resources::{AddressBlock, WireKubePeer};
use fairlead_demo::World;
use fairlead_demo::node::Node;
use fairlead_keys::PublicKey;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use testbed_lab::Progress;
use tokio::runtime::Runtime;

use crate::ipam::cluster::{client, create, node as simulated_node};
use crate::report::Measurement;
use crate::statistics::percentile;
use crate::{Effort, Options, cni, cpu, progress};

mod flap;

pub(crate) use flap::report_of;

pub(crate) const CASE: &str = "mesh-scale";
const OURS: &str = "fairlead";
/// Time for which the node is watched at rest.
const REST: Duration = Duration::from_secs(60);
/// Only bounds what hangs.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Longest time the kernel may take to show all objects that were made.
const SETTLE: Duration = Duration::from_secs(30);

/// A mesh to be measured.
struct Size {
    peers: usize,
    blocks: usize,
    /// Changes whose way to the kernel is timed.
    changes: usize,
}

/// Runs each size in a cluster of its own.
pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let sizes = match (options.peers, options.effort) {
        (Some(peers), _) => {
            let blocks = options.blocks.unwrap_or(peers.saturating_mul(2));
            vec![Size { peers, blocks, changes: 100 }]
        }
        (None, Effort::Full) => vec![
            Size { peers: 1_000, blocks: 2_000, changes: 100 },
            Size { peers: 5_000, blocks: 10_000, changes: 100 },
            Size { peers: 1_000, blocks: options.blocks.unwrap_or(100_000), changes: 50 },
        ],
        (None, Effort::Quick) => {
            vec![Size { peers: 200, blocks: options.blocks.unwrap_or(400), changes: 10 }]
        }
    };
    let mut measurements = Vec::new();
    for size in sizes {
        let world = World::start(&cni::bed::topology()?, &Progress::default())?;
        let host = world.plane_host().clone();
        let measured = host.run(|| {
            let runtime = Runtime::new().context("cannot start the runtime")?;
            measure(&world, &size, &runtime)
        })?;
        measurements.extend(measured?);
    }
    Ok(measurements)
}

fn measure(world: &World, size: &Size, runtime: &Runtime) -> Result<Vec<Measurement>> {
    let node = world.nodes.first().context("the cluster has no real node")?;
    let of = format!("{} peers, {} blocks", size.peers, size.blocks);
    let one = |metric: &str, unit, samples: Vec<f64>| {
        let measurement = Measurement::new(CASE, OURS, format!("{of}: {metric}"), unit, samples)?;
        progress(&format!("    {}: {:.1} {unit}", measurement.metric, measurement.value));
        anyhow::Ok(measurement)
    };
    world.plane.apply(
        "apiVersion: wirekube.io/v1alpha1\nkind: WireKubeMesh\nmetadata: {name: default}\nspec: {}\n",
    )?;
    let client = runtime.block_on(client(world.plane.kubeconfig()))?;
    let before = Instant::now();
    runtime.block_on(make(&client, size))?;
    wait_for(node, last_block(size))?;
    progress(&format!("    {of}: in the kernel after {:.1} s", before.elapsed().as_secs_f64()));
    std::thread::sleep(SETTLE);
    let [of_node, of_controller] = at_rest([node.program_id()?, world.controller_id()?], REST)?;
    let mut measurements = vec![
        one("CPU at rest, no peer answers", "% of a core", vec![of_node])?,
        one("CPU of the controller at rest", "% of a core", vec![of_controller])?,
    ];
    let before = cpu::seconds_of(world.controller_id()?)?;
    let (waits, busy) = changes(node, &client, size, runtime)?;
    let controller = cpu::seconds_of(world.controller_id()?)? - before;
    let per_change = |seconds: f64| vec![seconds * 1000.0 / size.changes as f64];
    let p99 = percentile(&waits, 0.99).context("nothing was changed")?;
    measurements.push(one("CPU per change", "ms", per_change(busy))?);
    measurements.push(one("CPU of the controller per change", "ms", per_change(controller))?);
    measurements.push(one("from change to kernel", "ms", waits)?);
    measurements.push(one("from change to kernel, p99", "ms", vec![p99])?);
    measurements.push(one("memory of the node program", "MiB", vec![node.resident_mib()?])?);
    measurements.push(one("memory of the controller", "MiB", vec![world.controller_resident_mib()?])?);
    let flap = flap::of(size.peers);
    measurements.push(one("nodes that write when one fails", "nodes", vec![flap.nodes as f64])?);
    measurements.push(one("bytes they write", "bytes", vec![flap.bytes as f64])?);
    measurements.push(one("largest status", "bytes", vec![flap.largest as f64])?);
    Ok(measurements)
}

async fn make(client: &Client, size: &Size) -> Result<()> {
    // Blocks of Nodes that do not exist would be released.
    let nodes = Api::<k8s_openapi::api::core::v1::Node>::all(client.clone());
    create(&nodes, (0..size.peers).map(|number| simulated_node(&name(number))))
        .await
        .context("cannot create Nodes")?;
    let peers = Api::<WireKubePeer>::all(client.clone());
    create(&peers, (0..size.peers).map(|number| peer(number, key(number))))
        .await
        .context("cannot create WireKubePeers")?;
    let blocks = Api::<AddressBlock>::all(client.clone());
    create(&blocks, (0..size.blocks).map(|number| block(number, size.peers)))
        .await
        .context("cannot create AddressBlocks")
}

fn key(number: usize) -> PublicKey {
    let mut key = [1; 32];
    key[..8].copy_from_slice(&(number as u64).to_be_bytes());
    PublicKey(key)
}

/// A WireKubePeer.
pub(crate) fn peer(number: usize, key: PublicKey) -> Value {
    let address = address([100, 64, 0, 0], number);
    json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": name(number) },
        "spec": {
            "publicKey": key.to_string(), "allowedIPs": [format!("{address}/32")],
            "endpoint": format!("{address}:51820"), "persistentKeepalive": 25,
        },
    })
}

/// The name of a node.
pub(crate) fn name(number: usize) -> String {
    format!("simulated-{number}")
}

fn address([a, b, c, d]: [u8; 4], number: usize) -> Ipv4Addr {
    let base = u32::from_be_bytes([a, b, c, d]);
    Ipv4Addr::from_bits(base.saturating_add(u32::try_from(number).unwrap_or(u32::MAX)))
}

/// Blocks of 8 addresses, none next to another: neighbours would become one element of the set.
fn block(number: usize, peers: usize) -> Value {
    let prefix = format!("{}/29", block_address(number));
    json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock",
        "metadata": {
            "name": format!("simulated-{number}"),
            "labels": { "coil.cybozu.com/pool": "simulated", "coil.cybozu.com/node": name(number.checked_rem(peers).unwrap_or_default()) },
        },
        "index": number, "ipv4": prefix,
    })
}

fn block_address(number: usize) -> Ipv4Addr {
    address([10, 128, 0, 0], number.saturating_mul(16))
}

fn last_block(size: &Size) -> Ipv4Addr {
    block_address(size.blocks.saturating_sub(1))
}

fn is_target(node: &Node, target: Ipv4Addr) -> Result<bool> {
    let element = format!("{{ {target} }}");
    let words = ["nft", "get", "element", "inet", "talos_kubespan", "kubespan_targets_ipv4", &element];
    Ok(node
        .host
        .command(words.first().context("no program")?)?
        .args(words.get(1..).unwrap_or_default())
        .output()?
        .status
        .success())
}

fn wait_for(node: &Node, target: Ipv4Addr) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !is_target(node, target)? {
        ensure!(Instant::now() < deadline, "{target} did not become a target");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Adds blocks one by one; returns how long each took to become a target, and the seconds of CPU time of the node program.
fn changes(node: &Node, client: &Client, size: &Size, runtime: &Runtime) -> Result<(Vec<f64>, f64)> {
    let blocks = Api::<AddressBlock>::all(client.clone());
    let before = cpu::seconds_of(node.program_id()?)?;
    let mut waits = Vec::new();
    for number in size.blocks..size.blocks.saturating_add(size.changes) {
        let object: AddressBlock = serde_json::from_value(block(number, size.peers))?;
        let start = Instant::now();
        runtime.block_on(blocks.create(&PostParams::default(), &object))?;
        wait_for(node, block_address(number))?;
        waits.push(start.elapsed().as_secs_f64() * 1000.0);
        std::thread::sleep(Duration::from_millis(200));
    }
    let busy = cpu::seconds_of(node.program_id()?)? - before;
    for number in size.blocks..size.blocks.saturating_add(size.changes) {
        runtime.block_on(blocks.delete(&format!("simulated-{number}"), &DeleteParams::default()))?;
    }
    Ok((waits, busy))
}

/// Percent of a core that each process uses.
fn at_rest<const N: usize>(processes: [u32; N], during: Duration) -> Result<[f64; N]> {
    let read = || processes.map(cpu::seconds_of).into_iter().collect::<Result<Vec<f64>>>();
    let before = read()?;
    std::thread::sleep(during);
    let spent = read()?.into_iter().zip(before).map(|(now, before)| now - before);
    let percent: Vec<f64> = spent.map(|spent| spent / during.as_secs_f64() * 100.0).collect();
    percent.try_into().ok().context("not one figure for each process")
}

//! The demo's outcome, for people and for programs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use serde::Serialize;
use serde_json::Value;

use crate::World;
use crate::cni::Pod;
use crate::objects;
use crate::probe::{self, Pair};
use crate::topology::Topology;

/// Longest the pairs may take before the demo gives up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Report that `--json` prints.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether every pair works in both directions, with TCP and ICMP, in both families.
    pub ok: bool,
    /// Every ordered pair in each family.
    pub pairs: Vec<Pair>,
    /// Seconds from `kubectl apply` of mesh and pool to the last pair.
    pub seconds_to_all_reachable: f64,
    /// Resident memory of the largest node program.
    pub node_rss_mib: f64,
    /// Names of the nodes.
    pub nodes: Vec<String>,
    /// Names of the sites.
    pub sites: Vec<String>,
    /// Problems of the mesh that the nodes report, by node.
    pub problems: BTreeMap<String, Vec<String>>,
}

/// Applies mesh and pool, starts the pods and tries all pairs.
///
/// # Errors
/// Something could not be done at all; pairs that do not work are in the report.
pub fn run(world: &mut World, topology: &Topology) -> anyhow::Result<Report> {
    let start = Instant::now();
    // The one thing a user does.
    world.plane.apply(objects::MESH_AND_POOL)?;
    world.start_pods()?;
    let (mut pairs, done) = probe::all_pairs(&world.pods, start + TIMEOUT, |_, _| String::new())?;
    let status: BTreeMap<String, Value> = world
        .nodes
        .iter()
        .map(|node| Ok((node.name.clone(), node.status()?)))
        .collect::<anyhow::Result<_>>()?;
    for pair in &mut pairs {
        pair.path = path(&world.pods, &status, pair);
    }
    let memory = world.nodes.iter().map(|node| node.resident_mib()).collect::<anyhow::Result<Vec<f64>>>()?;
    Ok(Report {
        ok: pairs.iter().all(|pair| pair.tcp && pair.icmp) && both_families(&world.pods),
        pairs,
        seconds_to_all_reachable: done.duration_since(start).as_secs_f64(),
        node_rss_mib: memory.into_iter().fold(0.0, f64::max),
        nodes: world.nodes.iter().map(|node| node.name.clone()).collect(),
        sites: topology.sites.iter().map(|site| site.name.to_owned()).collect(),
        problems: status.iter().map(|(node, status)| (node.clone(), strings(status, "problems"))).collect(),
    })
}

/// A pair that was never tried must not count as one that works.
fn both_families(pods: &[Pod]) -> bool {
    let has = |pod: &Pod, ipv4: bool| pod.addresses.iter().any(|address| address.is_ipv4() == ipv4);
    pods.iter().all(|pod| has(pod, true) && has(pod, false))
}

fn strings(value: &Value, key: &str) -> Vec<String> {
    let listed = value.get(key).and_then(Value::as_array).into_iter().flatten();
    listed.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The path to the receiver's node, as the sender's node reports it.
fn path(pods: &[Pod], status: &BTreeMap<String, Value>, pair: &Pair) -> String {
    let node = |pod: &str| pods.iter().find(|p| p.name == pod).map(|p| p.node.clone()).unwrap_or_default();
    let (from, to) = (node(&pair.from), node(&pair.to));
    if from == to {
        return "same node".to_owned();
    }
    let peers = status.get(&from).and_then(|status| status.get("peers")).and_then(Value::as_array);
    let peer = peers.into_iter().flatten().find(|peer| peer.get("name").and_then(Value::as_str) == Some(&to));
    let text =
        |key: &str| peer.and_then(|peer| peer.get(key)).and_then(Value::as_str).unwrap_or("?").to_owned();
    format!("direct {} ({})", text("endpoint"), text("endpointSource"))
}

impl Report {
    /// For people: a row for each ordered pair, and what was measured.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table
            .load_style(UTF8_FULL_CONDENSED)
            .set_header(["from", "to", "path", "v4 tcp", "v4 icmp", "v6 tcp", "v6 icmp"]);
        let mut rows: BTreeMap<(&str, &str), BTreeMap<&str, &Pair>> = BTreeMap::new();
        for pair in &self.pairs {
            rows.entry((&pair.from, &pair.to)).or_default().insert(pair.family, pair);
        }
        for ((from, to), families) in rows {
            let tcp = |family| {
                families.get(family).map_or("-", |pair| if pair.tcp { "ok" } else { "FAILED" }).to_owned()
            };
            let icmp = |family| {
                let pair = families.get(family);
                pair.map_or("-".to_owned(), |pair| {
                    pair.rtt_ms.map_or("FAILED".to_owned(), |rtt| format!("{rtt:.2} ms"))
                })
            };
            let path = families.values().next().map(|pair| pair.path.clone()).unwrap_or_default();
            table.add_row([
                from.to_owned(),
                to.to_owned(),
                path,
                tcp("ipv4"),
                icmp("ipv4"),
                tcp("ipv6"),
                icmp("ipv6"),
            ]);
        }
        let working = self.pairs.iter().filter(|pair| pair.tcp && pair.icmp).count();
        let mut text = format!("{table}\n{working} of {} directions work", self.pairs.len());
        text.push_str(&format!(
            "; all reachable {:.1} s after kubectl apply (budget 10 s); largest node program {:.1} MiB (goal 30 MiB)\n",
            self.seconds_to_all_reachable, self.node_rss_mib
        ));
        let problems: std::collections::BTreeSet<&String> = self.problems.values().flatten().collect();
        for problem in problems {
            text.push_str(&format!("reported by the nodes: {problem}\n"));
        }
        text
    }
}

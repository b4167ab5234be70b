//! Resident memory of the real programs.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use fairlead_demo::World;
use fairlead_demo::node::executable;
use fairlead_demo::objects::NAMESPACE;
use fairlead_netlink::netns::Netns;

use super::{CASE, OURS};
use crate::cni::breakdown::scrape;
use crate::cni::load::Load;
use crate::cni::subject::{Family, Plugin};
use crate::report::Measurement;

/// Readings, a second apart.
const READINGS: usize = 5;
/// Pods of the real node that start at the same time.
const AT_ONCE: usize = 10;

/// MiB of each program.
pub(super) struct Memory {
    controller: Vec<f64>,
    node: Vec<f64>,
}

impl Memory {
    pub(super) fn read(world: &World) -> Result<Self> {
        let (mut controller, mut node) = (Vec::new(), Vec::new());
        for _ in 0..READINGS {
            controller.push(world.controller_resident_mib()?);
            node.push(world.nodes.first().context("the cluster has no real node")?.resident_mib()?);
            std::thread::sleep(Duration::from_secs(1));
        }
        Ok(Self { controller, node })
    }

    pub(super) fn measurements(self, when: &str) -> Result<[Measurement; 2]> {
        let new = |what: &str, samples| {
            Measurement::new(CASE, OURS, format!("memory of the {what} {when}"), "MiB", samples)
        };
        Ok([new("controller", self.controller)?, new("node program", self.node)?])
    }
}

/// Requests that the real node program has sent to the API server so far, by its own count.
pub(super) fn node_requests(world: &World) -> Result<f64> {
    let node = world.nodes.first().context("the cluster has no real node")?;
    let text = node.host.run(scrape)??;
    Ok(text
        .lines()
        .filter_map(|line| line.strip_prefix("fairlead_api_requests_total{"))
        .filter_map(last)
        .sum())
}

fn last(line: &str) -> Option<f64> {
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Attaches pods to the real node through the plugin, and holds their namespaces.
pub(super) fn real_pods(world: &World, pods: usize) -> Result<Vec<Netns>> {
    let node = world.nodes.first().context("the cluster has no real node")?;
    let sandboxes =
        (0..pods).map(|_| Ok(Netns::create()?)).collect::<Result<Vec<_>>>().context("cannot create pods")?;
    let paths: Vec<PathBuf> = sandboxes
        .iter()
        .map(|netns| format!("/proc/{}/fd/{}", std::process::id(), netns.as_fd().as_raw_fd()).into())
        .collect();
    let plugin =
        Plugin::ours(&executable("fairlead-cni")?, &node.socket(), NAMESPACE.to_owned(), Family::Dual);
    node.host.run(|| {
        Load::run(AT_ONCE, pods, |number| {
            plugin.add(&format!("{number:064x}"), paths.get(number).context("no such pod")?)
        })
    })??;
    Ok(sandboxes)
}

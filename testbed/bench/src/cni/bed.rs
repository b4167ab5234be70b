//! The place where pods are started: a cluster of one node, a second namespace for the peer, and empty pods.

use std::fmt::Write as _;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::World;
use fairlead_demo::node::executable;
use fairlead_demo::topology::{SitePlan, Topology};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::RouteSocket;
use ipnet::Ipv4Net;
use tempfile::TempDir;
use testbed_kube::CNI_PLUGINS;
use testbed_lab::{Host, Ipv6, Nat, Progress};

use super::load::Load;
use super::subject::{Family, POD_UID, Plugin};

/// Pods that can be there at the same time.
const SANDBOXES: usize = 100;
/// Longest time until the links are gone after the last DEL.
const TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct Bed {
    pub(super) world: World,
    peer_host: Host,
    peer_programs: PathBuf,
    peer_data: TempDir,
    own_plugin: PathBuf,
    sandboxes: Vec<Netns>,
    containers: AtomicU64,
}

/// One node on a network of its own; no mesh, since there is no other node.
pub(crate) fn topology() -> Result<Topology> {
    let lan: Ipv4Net = "198.51.100.0/24".parse()?;
    let site = SitePlan {
        name: "rack",
        nat: Nat::None,
        lan,
        nodes: vec!["198.51.100.11".parse()?],
        ipv6: Ipv6::Off,
        uplink_mtu: None,
        carrier: None,
    };
    Ok(Topology {
        name: "bench",
        about: "one node",
        sites: vec![site],
        // What a node logs in production.
        node_arguments: &["--log-level", "info"],
    })
}

impl Bed {
    /// Starts everything; there will be pools for `cold` rounds on an unprepared node.
    pub(super) fn start(cold: usize) -> Result<Self> {
        let peer_programs = CNI_PLUGINS.programs()?;
        let world = World::start(&topology()?, &Progress::default())?;
        let node = world.nodes.first().context("the cluster has no node")?;
        world.plane.apply(&objects(cold, &node.name))?;
        let site = world.sites.first().context("the cluster has no site")?;
        let peer_host = site.host("peer")?;
        let sandboxes = (0..SANDBOXES)
            .map(|_| Ok(Netns::create()?))
            .collect::<Result<Vec<_>>>()
            .context("cannot create the pods")?;
        Ok(Self {
            own_plugin: executable("fairlead-cni")?,
            peer_data: tempfile::tempdir().context("cannot create a directory for host-local")?,
            peer_host,
            peer_programs,
            world,
            sandboxes,
            containers: AtomicU64::new(0),
        })
    }

    fn node(&self) -> Result<&fairlead_demo::node::Node> {
        self.world.nodes.first().context("the cluster has no node")
    }

    pub(super) fn own_host(&self) -> Result<&Host> {
        Ok(&self.node()?.host)
    }

    pub(super) fn ours(&self, family: Family) -> Plugin {
        self.own(format!("bench-{family}"), family)
    }

    /// Plugin for pods of the pool that no pod has used yet.
    pub(super) fn cold(&self, round: usize) -> Plugin {
        self.own(format!("bench-cold-{round}"), Family::Ipv4)
    }

    fn own(&self, namespace: String, family: Family) -> Plugin {
        let socket = self.node().map(fairlead_demo::node::Node::socket).unwrap_or_default();
        Plugin::ours(&self.own_plugin, &socket, namespace, family)
    }

    pub(super) fn peer(&self, family: Family) -> Plugin {
        Plugin::ptp(&self.peer_programs.join("ptp"), self.peer_data.path(), family)
    }

    /// Starts `pods` pods, `parallel` at a time, then ends them in the same way.
    pub(super) fn attach_and_detach(
        &self,
        plugin: &Plugin,
        parallel: usize,
        pods: usize,
    ) -> Result<(Load, Load)> {
        ensure!(pods <= self.sandboxes.len(), "more pods than sandboxes");
        let host = if plugin.is_in(&self.peer_programs) { &self.peer_host } else { self.own_host()? };
        let first = self.containers.fetch_add(pods as u64, Ordering::Relaxed);
        let containers: Vec<(String, PathBuf)> =
            (first..).take(pods).map(container_id).zip(self.sandboxes.iter().map(path)).collect();
        let each = |call: &(dyn Fn(&str, &PathBuf) -> Result<()> + Sync)| {
            // Threads started inside stay inside, and so do the plugins they start.
            host.run(|| {
                Load::run(parallel, pods, |number| {
                    let (id, netns) = containers.get(number).context("no such container")?;
                    call(id, netns)
                })
            })?
        };
        let before = links(host)?;
        let add = each(&|id, netns| plugin.add(id, netns))?;
        ensure!(links(host)? == before + pods, "not every pod has a link");
        let del = each(&|id, netns| plugin.del(id, netns))?;
        let start = Instant::now();
        while links(host)? != before {
            ensure!(start.elapsed() < TIMEOUT, "links remain after DEL");
        }
        Ok((add, del))
    }

    /// A pod's namespace for work inside this process.
    pub(super) fn sandbox(&self) -> Result<PathBuf> {
        self.sandboxes.first().map(path).context("there are no sandboxes")
    }

    /// Checks that the node program still reports a status, and removes the bed.
    pub(super) fn end(self) -> Result<()> {
        let problems = self.node()?.status()?;
        drop(self);
        ensure!(problems.is_object(), "the node program has no status: {problems}");
        Ok(())
    }
}

fn links(host: &Host) -> Result<usize> {
    Ok(host.run(|| RouteSocket::open().and_then(|mut socket| socket.links_of_kind("veth")))??.len())
}

/// As containerd's: 64 hexadecimal digits.
fn container_id(number: u64) -> String {
    format!("{number:064x}")
}

/// Path by which other processes can open the namespace while this one lives.
fn path(netns: &Netns) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), netns.as_fd().as_raw_fd()))
}

/// Pools and namespaces, each with the pod that all containers are of: one of each family, and IPv4 ones that are used only
/// once. Kubelet's own UID of a static pod is known before the object is made.
fn objects(cold: usize, node: &str) -> String {
    let mut yaml = String::new();
    let mut add = |name: &str, subnet: &str| {
        // Writing to a string cannot fail.
        let _ = write!(
            yaml,
            "---\napiVersion: coil.cybozu.com/v2\nkind: AddressPool\nmetadata: {{name: bench-{name}}}\n\
             spec: {{blockSizeBits: 5, subnets: [{{{subnet}}}]}}\n\
             ---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: bench-{name}\n  \
             annotations: {{coil.cybozu.com/pool: bench-{name}}}\n\
             ---\napiVersion: v1\nkind: Pod\n\
             metadata: {{name: pod, namespace: bench-{name}, annotations: {{kubernetes.io/config.hash: {POD_UID}}}}}\n\
             spec: {{nodeName: {node}, automountServiceAccountToken: false, containers: [{{name: main, image: none}}]}}\n"
        );
    };
    add("ipv4", "ipv4: 10.64.0.0/16");
    add("ipv6", "ipv6: \"fd02:fa1e:6::/112\"");
    add("dual", "ipv4: 10.65.0.0/16, ipv6: \"fd02:fa1e:d::/112\"");
    for round in 0..cold {
        add(&format!("cold-{round}"), &format!("ipv4: 10.66.{}.0/22", round * 4));
    }
    yaml
}

//! Fairlead on real nodes: two on one network, the third behind a NAT router, joined by the mesh; IPv4 and IPv6.
//!
//! Real: kubelet, containerd, runc, kube-proxy (nftables), the API server with its controllers and scheduler, CoreDNS, and
//! everything of `deploy/`. Shared: one kernel, which has no WireGuard, so tunnels run inside the node programs.
//!
//! All tests share one cluster. Those that break something run alone.

#![cfg(test)]

#[path = "../bed/mod.rs"]
mod bed;
mod kernel;
mod membership;
mod nodes;
mod operators;
mod pools;
mod restarts;
mod restore;
mod services;
mod uninstall;
mod upgrade;
mod workloads;

use anyhow::{Context, Result};
use testbed_lab::Progress;
use testbed_nodes::Cluster;
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{Families, Network, two_and_one_behind_nat};

static BED: bed::Bed = bed::Bed::new(build);

fn build() -> Result<Cluster> {
    let topology = two_and_one_behind_nat(Families::Dual, Network::Installed { pods: POOL_RANGES });
    let cluster = Cluster::start(topology, &test_images()?, Progress::default())?;
    // Its router drops incoming IPv6 otherwise.
    cluster.sites().first().context("no network")?.router().set_ipv6_firewall(false)?;
    cluster.install_fairlead(Mode::Mesh)?;
    cluster.install_dns()?;
    Ok(cluster)
}

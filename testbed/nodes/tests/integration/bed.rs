//! Common parts of the tests of a program: one cluster, rooms in it, and traffic between its pods.

mod operator;
pub(crate) mod outside;
mod room;
mod traffic;

use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;
use testbed_lab::{Progress, eventually};
use testbed_nodes::Cluster;
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{Families, Network, two_and_one_behind_nat};

pub(crate) use operator::{fairlead, overlap_is_refused};
pub(crate) use room::{Pod, Room, all_different, server};
pub(crate) use traffic::{Running, Traffic, network};

/// Only bounds a test that would hang.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// Manifest of an AddressPool whose blocks have 2^`bits` addresses.
pub(crate) fn pool(name: &str, ipv4: &str, bits: u8) -> String {
    format!(
        "\
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {{name: {name}}}
spec: {{blockSizeBits: {bits}, subnets: [{{ipv4: {ipv4}}}]}}
"
    )
}

/// Two nodes on one network and one behind a NAT router, IPv4 and IPv6, with Fairlead and CoreDNS.
pub(crate) fn three_nodes_in_a_mesh() -> Result<Cluster> {
    let topology = two_and_one_behind_nat(Families::Dual, Network::Installed { pods: POOL_RANGES });
    let cluster = Cluster::start(topology, &test_images()?, Progress::default())?;
    // Its router drops incoming IPv6 otherwise.
    cluster.sites().first().context("no network")?.router().set_ipv6_firewall(false)?;
    cluster.install_fairlead(Mode::Mesh)?;
    cluster.install_dns()?;
    Ok(cluster)
}

/// The cluster of a test program. It is made by the first test that asks, and ends with the program.
pub(crate) struct Bed {
    build: fn() -> Result<Cluster>,
    cluster: OnceLock<Result<RwLock<Cluster>, String>>,
}

impl Bed {
    pub(crate) const fn new(build: fn() -> Result<Cluster>) -> Self {
        Self { build, cluster: OnceLock::new() }
    }

    /// Cluster for tests that disturb no other test; they run concurrently.
    pub(crate) fn shared(&'static self) -> RwLockReadGuard<'static, Cluster> {
        let cluster = self.lock().read().unwrap_or_else(PoisonError::into_inner);
        cluster.wait_ready().unwrap();
        cluster
    }

    /// Cluster for tests that break something: no other runs meanwhile. Damage by an earlier one is mended first.
    pub(crate) fn alone(&'static self) -> RwLockWriteGuard<'static, Cluster> {
        let mut cluster = self.lock().write().unwrap_or_else(PoisonError::into_inner);
        let names: Vec<String> = cluster.nodes().iter().map(|node| node.name().to_owned()).collect();
        for name in names {
            if !cluster.node(&name).unwrap().is_on() {
                cluster.node_mut(&name).unwrap().power_on().unwrap();
            }
            cluster.kubectl(&["uncordon", &name]).unwrap();
        }
        cluster.wait_ready().unwrap();
        cluster.wait_fairlead().unwrap();
        cluster
    }

    fn lock(&self) -> &RwLock<Cluster> {
        let built = self
            .cluster
            .get_or_init(|| (self.build)().map(RwLock::new).map_err(|error| format!("{error:#}")));
        match built {
            Ok(cluster) => cluster,
            Err(error) => panic!("there is no cluster to test on: {error}"),
        }
    }
}

/// Kernel, blocks, pods and pools agree, on each node and in the whole cluster. Looks again for a while: the address of a
/// pod that was killed with its node's memory is only freed after two looks.
pub(crate) fn addresses_agree(cluster: &Cluster) {
    let programs = eventually(TIMEOUT, || node_programs(cluster)).unwrap();
    let check = |program: &str, more: &[&str]| {
        let words = ["-n", "kube-system", "exec", program, "-c", "coild", "--", "fairlead", "ipam", "check"];
        eventually(2 * TIMEOUT, || cluster.kubectl(&[&words[..], more].concat()))
            .with_context(|| cluster.kubectl(&["get", "pods", "-A", "-o", "wide"]).unwrap_or_default())
            .unwrap();
    };
    programs.iter().for_each(|program| check(program, &[]));
    check(&programs[0], &["--cluster"]);
}

/// The prefixes of all blocks that the API server shows for a node.
pub(crate) fn blocks_of(cluster: &Cluster, node: &str) -> Result<Vec<IpNet>> {
    let selector = format!("coil.cybozu.com/node={node}");
    let path = "jsonpath={range .items[*]}{.ipv4} {.ipv6} {end}";
    let blocks = cluster.kubectl(&["get", "addressblocks", "-l", &selector, "-o", path])?;
    Ok(blocks.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
}

/// One pod a node; in an upgrade there are two for a moment.
fn node_programs(cluster: &Cluster) -> Result<Vec<String>> {
    let selector = "app.kubernetes.io/component=coild";
    let living = "{range .items[*]}{.metadata.deletionTimestamp}/{.metadata.name} {end}";
    let path = format!("jsonpath={living}");
    let listed = cluster.kubectl(&["-n", "kube-system", "get", "pods", "-l", selector, "-o", &path])?;
    let pods: Vec<String> =
        listed.split_whitespace().filter_map(|pod| pod.strip_prefix('/')).map(str::to_owned).collect();
    ensure!(pods.len() == cluster.nodes().len(), "one program a node: {listed}");
    Ok(pods)
}

//! `cargo xtask test conformance`: Kubernetes's own network tests on real nodes with Fairlead.
//!
//! For each choice of address families a cluster of three nodes (`testbed-nodes`), Fairlead installed from `deploy/` with the image
//! that `fairlead-image` makes, CoreDNS, and then upstream's suite as upstream runs it. Nothing in the suite is changed or
//! left out.

mod output;
mod suite;

use std::io::Write;
use std::num::NonZeroU8;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use testbed_lab::Progress;
use testbed_nodes::Cluster;
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{self, each_behind_symmetric_nat, one_network, two_and_one_behind_nat};

use crate::output::Counts;
use crate::suite::Suite;

/// Number of nodes; some tests require two, and the third is behind a router.
const NODES: usize = 3;

/// Kubernetes's network conformance tests on three real nodes.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask test conformance", args_override_self = true)]
struct Arguments {
    /// Address families of nodes and pods; each choice is a cluster of its own
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["ipv4", "dual"])]
    families: Vec<Families>,
    /// Network plugin of the pods
    #[arg(long, value_enum, default_value = "mesh")]
    network: Network,
    /// Regular expression of the tests to run
    #[arg(long, default_value = r"\[sig-network\].*\[Conformance\]")]
    focus: String,
    /// Regular expression of tests to leave out
    #[arg(long)]
    skip: Option<String>,
    /// Number of tests that run concurrently
    #[arg(long, default_value = "3")]
    procs: NonZeroU8,
    /// Directory of junit.xml and ginkgo.log, with a subdirectory for each choice of families
    #[arg(long, default_value = "target/conformance")]
    report_dir: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Families {
    /// IPv4 alone
    Ipv4,
    /// IPv4 and IPv6
    Dual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Network {
    /// Fairlead with its mesh: two nodes on one network, the third behind a NAT router
    Mesh,
    /// Fairlead with its mesh and a relay outside: each node behind a symmetric NAT router of its own
    Relay,
    /// Fairlead without a mesh: all nodes on one network
    Router,
    /// The reference plugins ptp, host-local and portmap, all nodes on one network: a baseline without Fairlead
    Stock,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // There is no other place for the message when stderr is closed.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every test passed, everywhere.
fn run(arguments: &Arguments) -> Result<bool> {
    let progress = Progress::default();
    let mut total = Counts::default();
    let mut good = true;
    for families in &arguments.families {
        let counts = judge(arguments, *families, progress)?;
        good &= counts.all_passed();
        total.add(counts);
    }
    // A reader that went away (`| head`) is no failure.
    let _ = writeln!(
        std::io::stdout(),
        "{} passed, {} failed, {} skipped",
        total.passed,
        total.failed,
        total.skipped
    );
    Ok(good)
}

fn judge(arguments: &Arguments, families: Families, progress: Progress) -> Result<Counts> {
    let name = match families {
        Families::Ipv4 => "ipv4",
        Families::Dual => "dual",
    };
    let reports = arguments.report_dir.join(name);
    std::fs::create_dir_all(&reports).with_context(|| format!("cannot create {}", reports.display()))?;
    let reports =
        reports.canonicalize().with_context(|| format!("cannot find {}", arguments.report_dir.display()))?;
    progress.step(&format!("{name}: a cluster of {NODES} nodes"));
    let cluster = Cluster::start(topology(arguments.network, families), &test_images()?, progress)?;
    let mut relay = None;
    match arguments.network {
        Network::Mesh => cluster.install_fairlead(Mode::Mesh)?,
        Network::Relay => {
            cluster.install_fairlead(Mode::Mesh)?;
            relay = Some(cluster.install_relay()?);
        }
        Network::Router => cluster.install_fairlead(Mode::Router)?,
        Network::Stock => cluster.wait_ready()?,
    }
    cluster.install_dns()?;
    let suite = Suite { focus: &arguments.focus, skip: arguments.skip.as_deref(), procs: arguments.procs };
    let counts = suite.run(&cluster, &reports)?;
    drop(relay);
    progress.step(&format!(
        "{name}: {} of {} passed, {} failed, {} skipped; reports in {}",
        counts.passed,
        counts.wanted,
        counts.failed,
        counts.skipped,
        reports.display()
    ));
    if !counts.all_passed() {
        let state = reports.join("cluster.txt");
        std::fs::write(&state, cluster.explain())
            .with_context(|| format!("cannot write {}", state.display()))?;
        progress.step(&format!("{name}: what the cluster says is in {}", state.display()));
    }
    Ok(counts)
}

fn topology(network: Network, families: Families) -> topology::Topology {
    let families = match families {
        Families::Ipv4 => topology::Families::Ipv4,
        Families::Dual => topology::Families::Dual,
    };
    let installed = topology::Network::Installed { pods: POOL_RANGES };
    match network {
        Network::Mesh => two_and_one_behind_nat(families, installed),
        Network::Relay => each_behind_symmetric_nat(families, installed),
        Network::Router => one_network(NODES, families, installed),
        Network::Stock => one_network(NODES, families, topology::Network::Stock),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_arguments_it_is_what_upstream_calls_conformance_on_both_kinds_of_clusters() {
        let arguments = Arguments::try_parse_from(["conformance"]).unwrap();
        assert_eq!(arguments.families, [Families::Ipv4, Families::Dual]);
        assert_eq!(
            (arguments.network, arguments.focus.as_str()),
            (Network::Mesh, r"\[sig-network\].*\[Conformance\]")
        );
        assert_eq!(arguments.skip, None);
        let arguments = Arguments::try_parse_from(["conformance", "--families=dual"]).unwrap();
        assert_eq!(arguments.families, [Families::Dual]);
    }

    #[test]
    fn every_topology_has_the_nodes() {
        for network in [Network::Mesh, Network::Router, Network::Stock] {
            let nodes: usize = topology(network, Families::Dual).sites.iter().map(|site| site.nodes).sum();
            assert_eq!(nodes, NODES, "{network:?}");
        }
    }
}

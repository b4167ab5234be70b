//! `cargo xtask nodes`: a cluster of real nodes to inspect.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use nix::sys::signal::{SigSet, Signal};
use testbed_lab::Progress;
use testbed_nodes::Cluster;
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{Families, Network, Topology, one_network, two_and_one_behind_nat};

/// Real nodes: kubelet, containerd and kube-proxy, until Ctrl-C.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask nodes")]
struct Arguments {
    /// Network plugin of the pods
    #[arg(long, value_enum, default_value = "mesh")]
    network: Choice,
    /// IPv4 alone instead of both families
    #[arg(long)]
    ipv4_only: bool,
    /// Archives of further images to import into every node
    #[arg(long = "image")]
    images: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Choice {
    /// Fairlead with its mesh: two nodes on one network, the third behind a NAT router
    Mesh,
    /// Fairlead without a mesh: three nodes on one network
    Router,
    /// The reference plugins: two nodes on one network
    Stock,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    // Before any thread is made, so that Ctrl-C waits for us in all of them.
    stop_signals().thread_block()?;
    let mut images = test_images()?;
    images.extend(arguments.images.iter().cloned());
    let cluster = Cluster::start(topology(arguments), &images, Progress::default())?;
    match arguments.network {
        Choice::Mesh => cluster.install_fairlead(Mode::Mesh)?,
        Choice::Router => cluster.install_fairlead(Mode::Router)?,
        Choice::Stock => cluster.wait_ready()?,
    }
    cluster.install_dns()?;
    complain(&look_around(&cluster)?);
    stop_signals().wait()?;
    Ok(())
}

fn topology(arguments: &Arguments) -> Topology {
    let families = if arguments.ipv4_only { Families::Ipv4 } else { Families::Dual };
    let installed = Network::Installed { pods: POOL_RANGES };
    match arguments.network {
        Choice::Mesh => two_and_one_behind_nat(families, installed),
        Choice::Router => one_network(3, families, installed),
        Choice::Stock => one_network(2, families, Network::Stock),
    }
}

fn complain(text: &str) {
    // There is no other place for the message when stderr is closed.
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn stop_signals() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM].into_iter().collect()
}

fn look_around(cluster: &Cluster) -> anyhow::Result<String> {
    let kubectl = testbed_kube::binary()?;
    let mut lines = vec![
        "\nIt runs until Ctrl-C. Each line below enters its namespaces.".to_owned(),
        "\n# kubectl (the API server listens on the first node only)".to_owned(),
        format!("export KUBECONFIG={}", cluster.plane().kubeconfig().display()),
        format!("{} {} kubectl get pods -A -o wide", cluster.plane_host().enter_command(), kubectl.display()),
        "\n# a shell on a node; then: export CONTAINERD_ADDRESS=/run/containerd/containerd.sock; ctr -n k8s.io containers ls"
            .to_owned(),
    ];
    lines.extend(cluster.nodes().iter().map(|node| format!("{}    # {}", node.enter_command(), node.name())));
    lines.push(format!("\nlogs and files: {}", cluster.directory().display()));
    Ok(lines.join("\n"))
}

//! `cargo xtask demo`: shows the main job working on this machine.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use fairlead_demo::progress::Progress;
use fairlead_demo::{World, report, topology};
use nix::sys::signal::{SigSet, Signal};

/// Pods on nodes in different networks reach each other.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask demo")]
struct Arguments {
    /// Leave it running until Ctrl-C and say how to look around
    #[arg(long)]
    keep: bool,
    /// Print one JSON object on stdout instead of the table
    #[arg(long)]
    json: bool,
    /// Which networks to build: three-sites or rough-edges
    #[arg(long, default_value = "three-sites")]
    topology: String,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn complain(text: &str) {
    // Nobody is left to tell when stderr is closed.
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let progress = Progress::default();
    let all = topology::all();
    let names: Vec<&str> = all.iter().map(|topology| topology.name).collect();
    let Some(topology) = all.iter().find(|topology| topology.name == arguments.topology) else {
        anyhow::bail!("there is no topology {:?}; there are: {}", arguments.topology, names.join(", "));
    };
    if arguments.keep {
        // Before any thread is made, so that Ctrl-C waits for us in all of them.
        stop_signals().thread_block()?;
    }
    let mut world = World::start(topology, &progress)?;
    progress.step("kubectl apply: a mesh and a pool; then one pod on each node; then every pair");
    let report = report::run(&mut world, topology)?;
    progress.step(if report.ok { "every pair works" } else { "NOT every pair works" });
    let text = if arguments.json { format!("{}\n", serde_json::to_string(&report)?) } else { report.table() };
    // A reader that went away (`| head`) is no failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
    if arguments.keep {
        complain(&look_around(&world)?);
        stop_signals().wait()?;
        progress.step("removing everything");
    }
    Ok(report.ok)
}

fn stop_signals() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM].into_iter().collect()
}

fn look_around(world: &World) -> anyhow::Result<String> {
    let api = testbed_kube::binary()?;
    let mut text = format!(
        "\nIt runs until Ctrl-C. The API server is in the lab's network, so enter a node first:\n\n\
         export KUBECONFIG={}\n",
        world.plane.kubeconfig().display()
    );
    for node in &world.nodes {
        text.push_str(&format!(
            "\n# node {} ({})\n{}\n",
            node.name,
            node.host.address(),
            node.host.enter_command()
        ));
        text.push_str(&format!("    fairlead status --socket {}\n", node.socket().display()));
    }
    for pod in &world.pods {
        text.push_str(&format!(
            "\n# pod {} {:?}\n{}\n",
            pod.name,
            pod.addresses,
            pod.namespace.enter_command()
        ));
    }
    text.push_str(&format!(
        "\nOn a node: wg show; nft list table inet talos_kubespan; ip rule; ip route show table 116\n\
         kubectl: {} kubectl get wirekubepeers,addressblocks\n\
         Logs, keys and sockets: {}\n",
        api.display(),
        world.directory().display()
    ));
    Ok(text)
}

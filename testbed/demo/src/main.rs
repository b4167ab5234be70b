//! `cargo xtask demo`: shows the main job working on this machine.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use fairlead_demo::node::executable;
use fairlead_demo::{World, report, topology};
use nix::sys::signal::{SigSet, Signal};
use testbed_lab::Progress;

/// Pods on nodes in different networks reach each other.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask demo")]
struct Arguments {
    /// Leave it running until Ctrl-C and print how to inspect it
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
    // There is no other place for the message when stderr is closed.
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

/// Lines to paste: the API server, the nodes, the pods.
fn look_around(world: &World) -> anyhow::Result<String> {
    let kubectl = testbed_kube::binary()?;
    let fairlead = executable("fairlead")?;
    let mut lines = vec![
        String::new(),
        "It runs until Ctrl-C. Everything is inside network namespaces; each line below enters one."
            .to_owned(),
        String::new(),
        "# kubectl (the API server listens in the cloud site only)".to_owned(),
        format!("export KUBECONFIG={}", world.plane.kubeconfig().display()),
        format!(
            "{} {} kubectl get wirekubepeers,addresspools,addressblocks",
            world.plane_host().enter_command(),
            kubectl.display()
        ),
        String::new(),
        "# what each node says".to_owned(),
    ];
    for node in &world.nodes {
        let enter = node.host.enter_command();
        lines.push(format!("{enter} {} status --socket {}", fairlead.display(), node.socket().display()));
    }
    lines.extend([
        String::new(),
        "# a shell on a node; then: wg show, nft list ruleset, ip rule, ip route show table 116".to_owned(),
    ]);
    lines.extend(
        world.nodes.iter().map(|node| format!("{} sh    # {}", node.host.enter_command(), node.name)),
    );
    lines.extend([String::new(), "# a shell in a pod; then: ping an address of another".to_owned()]);
    for pod in &world.pods {
        let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
        lines.push(format!("{} sh    # {} {}", pod.namespace.enter_command(), pod.name, addresses.join(" ")));
    }
    lines.push(format!("\nlogs, keys and sockets: {}", world.directory().display()));
    Ok(lines.join("\n"))
}

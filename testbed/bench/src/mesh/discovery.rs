//! `fairlead discovery` under load, in a process of its own; the load is another one.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use testbed_lab::{Lab, Namespace, Process};

use super::load::Load;
use super::ours;
use crate::report::Measurement;
use crate::{Effort, cpu, progress, relay};

const ADDRESS: &str = "127.0.0.1:3000";
/// Bounds every wait for the server.
const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time after the last affiliate is published or watch begun.
const SETTLE: Duration = Duration::from_secs(3);

pub(super) fn measure(effort: Effort) -> Result<Vec<Measurement>> {
    let load =
        |clusters, affiliates, watches| Load { address: ADDRESS.to_owned(), clusters, affiliates, watches };
    let loads = match effort {
        Effort::Full => vec![load(10, 1_000, 20), load(1, 10_000, 20)],
        Effort::Quick => vec![load(2, 200, 20)],
    };
    let seconds = match effort {
        Effort::Full => 10,
        Effort::Quick => 2,
    };
    loads.into_iter().map(|load| under(&load, seconds)).collect::<Result<Vec<_>>>().map(|all| all.concat())
}

fn under(load: &Load, seconds: u64) -> Result<Vec<Measurement>> {
    progress(&format!("    load: {load}"));
    let lab = Lab::new()?;
    let namespace = lab.bare_namespace("discovery")?;
    namespace.shell("ip link set lo up")?;
    let outputs = tempfile::tempdir().context("cannot create a directory for output")?;
    let server = serve(&namespace, load, outputs.path())?;
    let of = format!("{} x {} affiliates", load.clusters, load.affiliates);
    let empty = cpu::resident_mib(server.id())?;
    let mut process = load_process(&namespace, load)?;
    let [published, took] = numbers(&process.order("publish")?)?;
    thread::sleep(SETTLE);
    let full = cpu::resident_mib(server.id())?;
    let cpu_before = cpu::seconds_of(server.id())?;
    let [updates, took_updates] = numbers(&process.order(&format!("update {seconds}"))?)?;
    let busy = cpu::seconds_of(server.id())? - cpu_before;
    let [watches] = numbers(&process.order("watch")?)?;
    thread::sleep(SETTLE);
    let [paced, seen, missing, p50, p99] = numbers(&process.order(&format!("pace {seconds}"))?)?;
    let watched = cpu::resident_mib(server.id())?;
    ensure!(missing <= 0.0, "{missing} of {paced} updates did not come to all watches");
    progress(&format!("    {of}: {watches} watches saw {seen} changes of {paced} updates"));
    Ok(vec![
        ours(format!("{of}: publications"), "updates/s", vec![published / took])?,
        ours(format!("{of}: updates, no watch"), "updates/s", vec![updates / took_updates])?,
        ours(format!("{of}: CPU of the server per update"), "µs", vec![busy * 1e6 / updates])?,
        ours(format!("{of}: fan-out to {} watches of a cluster, p50", load.watches), "ms", vec![p50])?,
        ours(format!("{of}: fan-out to {} watches of a cluster, p99", load.watches), "ms", vec![p99])?,
        ours(format!("{of}: memory of the empty server"), "MiB", vec![empty])?,
        ours(format!("{of}: memory with all affiliates"), "MiB", vec![full])?,
        ours(format!("{of}: memory with watches"), "MiB", vec![watched])?,
    ])
}

fn serve(namespace: &Namespace, load: &Load, outputs: &std::path::Path) -> Result<Process> {
    let mut command = Command::new(testbed_lab::executable("fairlead")?);
    command.args([
        "discovery",
        "--addr",
        ADDRESS,
        "--metrics-addr",
        "[::]:0",
        "--health-addr",
        "127.0.0.1:9391",
    ]);
    let most = load.clusters.saturating_mul(load.affiliates).saturating_mul(2).to_string();
    for limit in ["affiliates", "affiliates-per-address", "watches", "connections-per-address"] {
        command.arg(format!("--max-{limit}")).arg(&most);
    }
    command.args(["--address-rate", "0"]);
    let mut server = namespace.spawn(&mut command, outputs.join("server"))?;
    let start = Instant::now();
    while !namespace.shell("ss -Hltn")?.contains(ADDRESS) {
        ensure!(server.status()?.is_none(), "the server ended: {}", server.output()?);
        ensure!(start.elapsed() < TIMEOUT, "the server does not listen: {}", server.output()?);
        thread::sleep(POLL_INTERVAL);
    }
    Ok(server)
}

fn load_process(namespace: &Namespace, load: &Load) -> Result<relay::LoadProcess> {
    let program = std::env::current_exe().context("cannot find out where this program is")?;
    let mut command = namespace.command(program)?;
    command.arg(super::LOAD_COMMAND).args(load.arguments());
    relay::LoadProcess::start(command)
}

fn numbers<const N: usize>(answer: &str) -> Result<[f64; N]> {
    let numbers: Vec<f64> = answer.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match <[f64; N]>::try_from(numbers) {
        Ok(numbers) => Ok(numbers),
        Err(_) => bail!("the load answered {answer:?}"),
    }
}

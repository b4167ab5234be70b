//! `fairlead discovery` under load, in a process of its own; the load is another one.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use testbed_lab::{Lab, Namespace, Process};

use super::load::Load;
use super::ours;
use super::paced::{Paced, Saturated};
use crate::report::Measurement;
use crate::{Effort, cpu, progress, relay};

const ADDRESS: &str = "127.0.0.1:3000";
/// Bounds every wait for the server.
const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Samples of what is measured while watches are open.
const ROUNDS: usize = 3;
/// Time after the last affiliate is published or watch begun.
const SETTLE: Duration = Duration::from_secs(3);
/// Changes a second of all clusters: one at a time, and as many as if each of 10,000 members changed every 17 minutes.
const RATES: [u32; 2] = [1, 10];

pub(super) fn measure(effort: Effort) -> Result<Vec<Measurement>> {
    let load = |clusters, affiliates, connections| Load {
        address: ADDRESS.to_owned(),
        clusters,
        affiliates,
        // Each member watches.
        watches: affiliates,
        connections,
    };
    // Few connections, as behind a proxy, and one for each member.
    let loads = match effort {
        Effort::Full => [(10, 1_000), (1, 10_000)]
            .into_iter()
            .flat_map(|(clusters, affiliates)| {
                [100, 10_000].map(|connections| load(clusters, affiliates, connections))
            })
            .collect(),
        Effort::Quick => vec![load(2, 200, 10)],
    };
    let seconds = match effort {
        Effort::Full => 5,
        Effort::Quick => 1,
    };
    loads.into_iter().map(|load| under(&load, seconds)).collect::<Result<Vec<_>>>().map(|all| all.concat())
}

/// A server and its load.
struct Bed {
    of: String,
    // Ends before the server.
    load: relay::LoadProcess,
    server: Process,
    /// Duration of each sample.
    seconds: u64,
    samples: Vec<(String, &'static str, Vec<f64>)>,
}

impl Bed {
    /// A sample of a metric.
    fn note(&mut self, metric: &str, unit: &'static str, value: f64) {
        match self.samples.iter_mut().find(|(known, ..)| known == metric) {
            Some((_, _, samples)) => samples.push(value),
            None => self.samples.push((metric.to_owned(), unit, vec![value])),
        }
    }

    fn memory(&mut self, when: &str) -> Result<()> {
        let memory = cpu::resident_mib(self.server.id())?;
        self.note(&format!("memory {when}"), "MiB", memory);
        Ok(())
    }

    /// Figures that the load answers to an order, and CPU seconds of the server meanwhile.
    fn order<const N: usize>(&mut self, order: &str) -> Result<([f64; N], f64)> {
        let before = cpu::seconds_of(self.server.id())?;
        let answer = numbers(&self.load.order(order)?)?;
        Ok((answer, cpu::seconds_of(self.server.id())? - before))
    }

    fn publish(&mut self) -> Result<()> {
        let ([published, took], _) = self.order("publish")?;
        self.note("publications", "updates/s", published / took);
        thread::sleep(SETTLE);
        self.memory("with all affiliates")?;
        let ([updates, took], busy) = self.order(&format!("update {}", self.seconds))?;
        self.note("updates, no watch", "updates/s", updates / took);
        self.note("CPU of the server per update, no watch", "µs", busy * 1e6 / updates);
        Ok(())
    }

    fn watch(&mut self) -> Result<()> {
        let ([watches, took, mebibytes], busy) = self.order("watch")?;
        progress(&format!(
            "    {}: {watches} watches were told {mebibytes:.0} MiB in {took:.1} s, with {busy:.1} s of CPU of the server",
            self.of
        ));
        thread::sleep(SETTLE);
        self.memory("with all watches")
    }

    fn pace(&mut self, rate: u32) -> Result<()> {
        let (answer, busy) = self.order(&format!("pace {} {rate}", self.seconds))?;
        let paced = Paced::from(answer);
        let Paced { changes, seen, missing, seconds, .. } = paced;
        ensure!(missing <= 0.0, "watches lack {missing} changes, of {changes}");
        progress(&format!("    {}: watches saw {seen} changes, of {changes}, in {seconds:.1} s", self.of));
        let at = format!("{rate} changes/s");
        self.note(&format!("{at}: fan-out, p50"), "ms", paced.p50);
        self.note(&format!("{at}: fan-out, p99"), "ms", paced.p99);
        self.note(&format!("{at}: until the last watch, median"), "ms", paced.last_p50);
        self.note(&format!("{at}: until the last watch, longest"), "ms", paced.last_max);
        self.note(&format!("{at}: CPU of the server"), "% of a core", 100.0 * busy / seconds);
        self.note(&format!("{at}: CPU of the load"), "% of a core", 100.0 * paced.cpu_seconds / seconds);
        Ok(())
    }

    fn saturate(&mut self) -> Result<()> {
        let (answer, busy) = self.order(&format!("saturate {}", self.seconds))?;
        let all = Saturated::from(answer);
        let behind = all.behind;
        ensure!(behind <= 0.0, "{behind} watches lack the last change of their cluster");
        let length = all.seconds + all.drain_seconds;
        self.note("saturated: updates", "updates/s", all.updates / all.seconds);
        self.note("saturated: deliveries", "changes/s", all.deliveries / all.seconds);
        self.note("saturated: messages to watches", "messages/s", all.messages / all.seconds);
        self.note("saturated: until all watches have the last change", "s", all.drain_seconds);
        self.note("saturated: CPU of the server", "% of a core", 100.0 * busy / length);
        self.note("saturated: CPU of the load", "% of a core", 100.0 * all.cpu_seconds / length);
        Ok(())
    }
}

fn under(load: &Load, seconds: u64) -> Result<Vec<Measurement>> {
    progress(&format!("    load: {load}"));
    let lab = Lab::new()?;
    let namespace = lab.bare_namespace("discovery")?;
    namespace.shell("ip link set lo up\nsysctl -qw net.ipv4.ip_local_port_range='1024 65535'")?;
    let outputs = tempfile::tempdir().context("cannot create a directory for output")?;
    let server = serve(&namespace, load, outputs.path())?;
    let of = format!("{} x {}, {} connections", load.clusters, load.affiliates, load.connections);
    let empty = cpu::resident_mib(server.id())?;
    let load = load_process(&namespace, load)?;
    let mut bed = Bed { of, load, server, seconds, samples: Vec::new() };
    bed.note("memory of the empty server", "MiB", empty);
    bed.publish()?;
    bed.watch()?;
    for rate in RATES {
        (0..ROUNDS).try_for_each(|_| bed.pace(rate))?;
    }
    bed.memory("after paced changes")?;
    (0..ROUNDS).try_for_each(|_| bed.saturate())?;
    thread::sleep(SETTLE);
    bed.memory("after saturation")?;
    let peak = cpu::peak_mib(bed.server.id())?;
    bed.note("memory, peak", "MiB", peak);
    let Bed { of, samples, .. } = bed;
    samples
        .into_iter()
        .map(|(metric, unit, samples)| ours(format!("{of}: {metric}"), unit, samples))
        .collect()
}

fn serve(namespace: &Namespace, load: &Load, outputs: &Path) -> Result<Process> {
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
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
    progress(&format!("    server: fairlead {}", arguments.join(" ")));
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

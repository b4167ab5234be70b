//! Namespaces, processes and orders.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;
use testbed_lab::{Lab, Namespace, Process};

use super::peers::Peers;
use super::subject::{Files, RELAY_ADDRESS, Subject, TOKEN};
use super::{INTERVAL, WINDOW};
use crate::cpu;

const LOAD_ADDRESS: &str = "192.0.2.2";
/// Clients, and some more for files and what serves metrics.
const SPARE_DESCRIPTORS: usize = 1000;
/// Bounds every wait.
const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Two namespaces joined by a cable, for relays and for their clients.
pub(super) struct Bed {
    relays: Namespace,
    clients: Namespace,
    peers: Peers,
    directory: TempDir,
    _lab: Lab,
}

/// A relay and its load.
pub(super) struct Running {
    subject: Subject,
    // Ends before the relay, whose end it would report as a failure.
    load: Load,
    relay: Process,
}

/// Figures of one order.
pub(super) struct Outcome {
    pub(super) packets: f64,
    pub(super) lost: f64,
    seconds: f64,
    /// CPU time of the relay.
    cpu_seconds: f64,
    /// Microseconds.
    pub(super) p50: f64,
    pub(super) p99: f64,
}

impl Bed {
    pub(super) fn new(peers: Peers) -> Result<Self> {
        let lab = Lab::new()?;
        let (relays, clients) = (lab.bare_namespace("relays")?, lab.bare_namespace("clients")?);
        relays.shell(&format!(
            "ip link add cable type veth peer name cable netns {}\n\
             ip addr add {RELAY_ADDRESS}/24 dev cable\nip link set cable up",
            clients.holder_pid()
        ))?;
        // Ten thousand clients have an address.
        clients.shell(&format!("ip addr add {LOAD_ADDRESS}/24 dev cable\nip link set cable up"))?;
        clients.set_sysctls(&[("net/ipv4/ip_local_port_range", "1024 65535")])?;
        let directory = tempfile::tempdir().context("cannot create a directory for files of relays")?;
        write_files(&Files { directory: directory.path() })?;
        Ok(Self { relays, clients, peers, directory, _lab: lab })
    }

    fn files(&self) -> Files<'_> {
        Files { directory: self.directory.path() }
    }

    /// Starts a relay, and load whose clients are registered.
    pub(super) fn start(&self, subject: Subject, pairs: usize) -> Result<Running> {
        let context = || format!("cannot start {subject}");
        let relay = self.serve(subject, pairs).with_context(context)?;
        let load = self
            .load(subject, pairs)
            .with_context(|| format!("{subject} wrote: {}", relay.output().unwrap_or_default().trim_end()))?;
        Ok(Running { subject, relay, load })
    }

    /// MiB by which a relay grows for idle clients.
    pub(super) fn idle_memory(&self, subject: Subject, pairs: usize, settle: Duration) -> Result<f64> {
        let relay = self.serve(subject, pairs)?;
        thread::sleep(Duration::from_secs(1));
        let before = cpu::resident_mib(relay.id())?;
        let _load = self.load(subject, pairs)?;
        thread::sleep(settle);
        Ok(cpu::resident_mib(relay.id())? - before)
    }

    fn serve(&self, subject: Subject, pairs: usize) -> Result<Process> {
        let clients = pairs.saturating_mul(2);
        let mut command = with_descriptors(&subject.serve(&self.peers, &self.files(), clients), clients);
        let output = self.directory.path().join(subject.name());
        let mut relay = self.relays.spawn(&mut command, output)?;
        let port = subject.address().replace(RELAY_ADDRESS, "");
        let start = Instant::now();
        while !self.relays.shell("ss -Hltn")?.contains(&format!("{port} ")) {
            ensure!(relay.status()?.is_none(), "{subject} ended: {}", relay.output()?);
            ensure!(start.elapsed() < TIMEOUT, "{subject} does not listen: {}", relay.output()?);
            thread::sleep(POLL_INTERVAL);
        }
        Ok(relay)
    }

    fn load(&self, subject: Subject, pairs: usize) -> Result<Load> {
        let clients = pairs.saturating_mul(2);
        let program = with_descriptors(&subject.load(&self.peers, &self.files(), pairs), clients);
        let mut command = self.clients.command(program.get_program())?;
        command.args(program.get_args());
        for (name, value) in program.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        Load::start(command)
    }
}

impl Running {
    /// Sends as many packets as the window allows.
    pub(super) fn saturate(&mut self, size: usize, length: Duration) -> Result<Outcome> {
        self.order(size, Duration::ZERO, length)
    }

    /// A packet of each pair at every [`INTERVAL`].
    pub(super) fn pace(&mut self, size: usize, length: Duration) -> Result<Outcome> {
        self.order(size, INTERVAL, length)
    }

    fn order(&mut self, size: usize, interval: Duration, length: Duration) -> Result<Outcome> {
        let before = cpu::seconds_of(self.relay.id())?;
        let order = format!("{size} {WINDOW} {} {}", interval.as_micros(), length.as_millis());
        let answer = self.load.order(&order).with_context(|| format!("load for {}", self.subject))?;
        let cpu_seconds = cpu::seconds_of(self.relay.id())? - before;
        let numbers: Vec<f64> = answer.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        let [packets, lost, nanoseconds, p50, p99] = *numbers.as_slice() else {
            anyhow::bail!("the load for {} answered {answer:?}", self.subject);
        };
        Ok(Outcome { packets, lost, seconds: nanoseconds / 1e9, cpu_seconds, p50, p99 })
    }
}

impl Outcome {
    pub(super) fn megabits_per_second(&self, size: usize) -> f64 {
        self.packets * size as f64 * 8.0 / 1e6 / self.seconds
    }

    pub(super) fn cpu_per_gigabyte(&self, size: usize) -> f64 {
        self.cpu_seconds / (self.packets * size as f64 / 1e9)
    }
}

/// A load program, which takes orders in lines and answers each with a line: see [`super::flow`].
pub(crate) struct Load {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Load {
    /// Starts it and waits until it is ready.
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let orders = child.stdin.take().context("the load has no input")?;
        let answers = BufReader::new(child.stdout.take().context("the load has no output")?);
        let mut load = Self { child, orders, answers };
        let first = load.answer()?;
        ensure!(first == "ready", "the load wrote {first:?}");
        Ok(load)
    }

    /// Sends an order to the load, and waits for its answer.
    pub(crate) fn order(&mut self, order: &str) -> Result<String> {
        writeln!(self.orders, "{order}").context("it takes no order")?;
        self.answer()
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        let length = self.answers.read_line(&mut line).context("cannot read its answer")?;
        ensure!(length > 0, "it has ended; its messages are above");
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Each client needs a descriptor; prlimit(1) executes the program.
fn with_descriptors(program: &Command, clients: usize) -> Command {
    let limit = clients.saturating_add(SPARE_DESCRIPTORS);
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={limit}:{limit}")).arg("--").arg(program.get_program());
    command.args(program.get_args());
    for (name, value) in program.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command
}

/// A certificate that every load trusts, its key, and the token of `fairlead relay`.
fn write_files(files: &Files<'_>) -> Result<()> {
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(vec![RELAY_ADDRESS.to_owned()])?.self_signed(&key)?;
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write(&files.certificate(), &certificate.pem())?;
    write(&files.key(), &key.serialize_pem())?;
    write(&files.tokens(), TOKEN)
}

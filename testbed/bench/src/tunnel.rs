//! WireGuard in user space: the embedded one beside wireguard-go and the devices of gotatun and boringtun, the cable without a tunnel, and the
//! cipher alone.
//!
//! Each implementation has two network namespaces with a cable (veth, MTU 1500) between them and a device process in either. All are
//! configured by the same lines of `wg(8)` and `ip(8)`. They are set up together and measured in turns; the others are idle meanwhile.

mod cipher;
pub(crate) mod handover;
pub(crate) mod iperf;
pub(crate) mod kernel;
mod latency;
mod load;
mod memory;
mod pair;
mod plots;
mod subject;
mod turns;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result};
use fairlead_tunnel::{Device, Settings};
use testbed_lab::Lab;

use crate::report::Measurement;
use crate::{Effort, Options, print, progress};
use latency::RoundTrips;
use load::{Load, SMALL, Transfer};
use pair::{MTU, Pair};
use plots::Chart;
use subject::{Programs, Subject};
use turns::{Quantity, Series, in_turns, rows};

pub(crate) const CASE: &str = "tunnel";
/// The word that makes this program one end of a tunnel.
pub(crate) const DEVICE_COMMAND: &str = "device";
/// The word that makes this program measure the cipher alone, once.
pub(crate) const CIPHER_COMMAND: &str = "cipher";
const OURS: &str = "fairlead";

const CHARTS: [Chart; 3] = [
    Chart {
        file: "tunnel-throughput.svg",
        title: "WireGuard in user space: what arrives",
        unit: "Gbit/s",
        metric: "",
        highlighted: OURS,
    },
    Chart {
        file: "tunnel-cpu.svg",
        title: "WireGuard in user space: CPU time of both ends",
        unit: "s/GB",
        metric: "",
        highlighted: OURS,
    },
    Chart {
        file: "tunnel-latency.svg",
        title: "WireGuard in user space: added to a round trip",
        unit: "µs",
        metric: "added latency",
        highlighted: OURS,
    },
];

/// Pairs that could be set up, by subject.
struct Bed {
    pairs: BTreeMap<Subject, Pair>,
}

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let (rounds, memory_rounds) = if options.effort == Effort::Quick { (2, 1) } else { (5, 3) };
    iperf::check_installed()?;
    let programs = Programs::build()?;
    let lab = Lab::new()?;
    let mut bed = Bed::start(&lab, &programs);
    let mut measurements = Vec::new();
    for load in Load::ALL {
        measurements.extend(bed.throughput(load, rounds)?);
    }
    measurements.extend(bed.latency("idle", Pair::idle_latency, rounds)?);
    measurements.extend(bed.latency("beside TCP", Pair::loaded_latency, rounds)?);
    drop(bed);
    measurements.extend(memory::run(&lab, &programs, memory_rounds)?);
    plots::write(CASE, &CHARTS, &measurements);
    Ok(measurements)
}

impl Bed {
    /// Sets up all pairs. A pair that cannot be set up is left out, and its error is reported.
    fn start(lab: &Lab, programs: &Programs) -> Self {
        let mut pairs = BTreeMap::new();
        for subject in Subject::ALL.into_iter().filter(|subject| subject.is_path()) {
            match Pair::start(lab, subject, || programs.device(subject)) {
                Ok(pair) => drop(pairs.insert(subject, pair)),
                Err(error) => progress(&format!("    error: {subject} is left out: {error:#}")),
            }
        }
        let mut bed = Self { pairs };
        // Not counted: the first handshake, and buffers that are allocated on first use.
        in_turns("first transfer", 1, &bed.subjects(), |subject| bed.pair(subject)?.transfer(Load::Tcp(1)));
        bed
    }

    fn subjects(&self) -> Vec<Subject> {
        self.pairs.keys().copied().collect()
    }

    fn pair(&mut self, subject: Subject) -> Result<&mut Pair> {
        self.pairs.get_mut(&subject).with_context(|| format!("{subject} is not set up"))
    }

    fn throughput(&mut self, load: Load, rounds: usize) -> Result<Vec<Measurement>> {
        let mut subjects = self.subjects();
        // In the rounds of the others, so that what else the machine does disturbs it as much.
        if matches!(load, Load::Tcp(_)) {
            subjects.push(Subject::Cipher);
        }
        let series = in_turns(&load.to_string(), rounds, &subjects, |subject| match subject {
            Subject::Cipher => cipher::measure(),
            path => self.pair(path)?.transfer(load),
        });
        let mut measurements = Vec::new();
        for quantity in quantities(load) {
            measurements.extend(rows(&series, &quantity)?);
        }
        Ok(measurements)
    }

    /// Percentiles of round trips under a condition, also as the time that each subject adds to those of the cable.
    fn latency(
        &mut self,
        condition: &str,
        measure: impl Fn(&mut Pair) -> Result<RoundTrips>,
        rounds: usize,
    ) -> Result<Vec<Measurement>> {
        let what = format!("round trip, {condition}");
        let series = in_turns(&what, rounds, &self.subjects(), |subject| measure(self.pair(subject)?));
        let mut measurements = percentiles(&what, Subject::is_path, &series)?;
        if let Some(cable) = series.iter().find(|series| series.subject == Subject::PlainVeth) {
            let added: Vec<_> =
                series.iter().map(|series| series.combined(cable, RoundTrips::above)).collect();
            let what = format!("added latency, {condition}");
            measurements.extend(percentiles(&what, Subject::is_tunnel, &added)?);
        }
        Ok(measurements)
    }
}

/// Quantities that a kind of transfer shows.
fn quantities(load: Load) -> Vec<Quantity<Transfer>> {
    let of = Subject::is_path;
    let rate = Quantity::new(load.to_string(), "Gbit/s", of, Transfer::gigabits_per_second);
    let packets = Quantity::new(load.to_string(), "packets/s", of, |transfer: &Transfer| {
        transfer.packets_per_second(SMALL)
    });
    let lost =
        Quantity::new(format!("{load}, lost"), "%", of, |transfer: &Transfer| transfer.arrived.lost_percent);
    let has_cpu = |subject| subject != Subject::PlainVeth;
    let cpu = Quantity::new(format!("CPU, {load}"), "s/GB", has_cpu, Transfer::cpu_seconds_per_gigabyte);
    match load {
        Load::Tcp(_) => vec![rate, cpu],
        Load::Udp(SMALL) => vec![packets, lost],
        Load::Udp(_) => vec![rate, lost, cpu],
    }
}

fn percentiles(
    what: &str,
    of: fn(Subject) -> bool,
    series: &[Series<RoundTrips>],
) -> Result<Vec<Measurement>> {
    let p50 = Quantity::new(format!("{what}, p50"), "µs", of, |times: &RoundTrips| times.p50);
    let p99 = Quantity::new(format!("{what}, p99"), "µs", of, |times: &RoundTrips| times.p99);
    let mut measurements = rows(series, &p50)?;
    measurements.extend(rows(series, &p99)?);
    Ok(measurements)
}

/// Measures the cipher alone and prints the seconds of CPU for 10⁹ bytes of payload.
pub(crate) fn run_cipher() -> Result<()> {
    print(&cipher::measure()?.cpu_seconds_per_gigabyte().to_string())
}

/// Runs the embedded WireGuard in this process until it is killed; `wg(8)` configures it. With the path of a socket it takes over from the
/// process that hands over there, if one does, and on SIGTERM hands over to the next one.
pub(crate) fn run_device(interface: &str, handover_socket: Option<PathBuf>) -> Result<()> {
    let settings = Settings { handover_socket: handover_socket.clone(), ..Settings::new(interface, MTU) };
    let device =
        Device::start(settings).with_context(|| format!("cannot start the WireGuard device {interface}"))?;
    if let Some(path) = handover_socket {
        return handover::serve(device, path);
    }
    loop {
        thread::park();
    }
}

//! Relays over TCP and TLS 1.3: `fairlead relay`, Tailscale's derper and iroh-relay, each with load by its own client; and `fairlead
//! relay` with a UDP port for each pair, which the others do not have.
//!
//! A relay and its load are processes in two network namespaces with a cable (veth, MTU 1500) between them. All are started together and
//! measured in turns; the others are idle meanwhile.

mod bed;
mod flow;
mod load;
mod peers;
mod subject;
mod udp;

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::report::Measurement;
use crate::{Effort, Options, progress};
use bed::{Bed, Running};
use peers::Peers;
use subject::Subject;

pub(crate) use bed::Load as LoadProcess;
pub(crate) use load::run as run_load;

pub(crate) const CASE: &str = "relay";
/// The word that makes this program load for `fairlead relay`.
pub(crate) const LOAD_COMMAND: &str = "relay-load";
/// The word after its other arguments that makes it use UDP ports.
pub(crate) const UDP: &str = "udp";
/// Subject by whose figures those of the others are divided.
const REFERENCE: Subject = Subject::Derper;
const PAIRS: usize = 10;
/// A packet of WireGuard that is as long as most links allow, and one that carries an acknowledgement.
const SIZES: [usize; 2] = [1400, 100];
/// Packets on their way in a pair: as many as derper queues for a client, so that no relay has to drop any.
const WINDOW: u32 = 32;
/// Time from one packet of a pair to the next where latency is measured: 5,000 a second in all.
const INTERVAL: Duration = Duration::from_millis(2);
/// Time after the last of many clients has registered: garbage collectors run once more.
const SETTLE: Duration = Duration::from_secs(10);

/// Size of the measurement.
struct Plan {
    rounds: usize,
    length: Duration,
    memory_rounds: usize,
    idle_pairs: usize,
}

const FULL: Plan = Plan { rounds: 7, length: Duration::from_secs(3), memory_rounds: 3, idle_pairs: 5000 };
const QUICK: Plan = Plan { rounds: 2, length: Duration::from_secs(1), memory_rounds: 1, idle_pairs: 500 };

/// Samples of one subject and one quantity.
type Samples = Vec<(Subject, Vec<f64>)>;

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    let plan = match options.effort {
        Effort::Full => FULL,
        Effort::Quick => QUICK,
    };
    let peers = Peers::build()?;
    let bed = Bed::new(peers)?;
    let mut measurements = traffic(&bed, &plan)?;
    measurements.extend(memory(&bed, &plan)?);
    Ok(measurements)
}

fn traffic(bed: &Bed, plan: &Plan) -> Result<Vec<Measurement>> {
    let start = |subject| Ok((subject, bed.start(subject, PAIRS)?));
    let mut running: Vec<(Subject, Running)> = Subject::ALL.into_iter().map(start).collect::<Result<_>>()?;
    let mut measurements = Vec::new();
    for size in SIZES {
        // Not counted: buffers that are allocated on first use.
        for (subject, relay) in &mut running {
            relay.saturate(size, Duration::from_millis(500)).with_context(|| format!("{subject}"))?;
        }
        let [mut rate, mut cpu, mut p50, mut p99]: [Samples; 4] = Default::default();
        for round in 0..plan.rounds {
            for (subject, relay) in in_turn(&mut running, round) {
                let full = relay.saturate(size, plan.length)?;
                let paced = relay.pace(size, plan.length)?;
                ensure!(full.packets > 0.0 && paced.packets > 0.0, "nothing came through {subject}");
                ensure!(
                    full.lost + paced.lost <= full.packets / 100.0,
                    "{subject} lost {} packets of {}",
                    full.lost + paced.lost,
                    full.packets
                );
                progress(&format!(
                    "    {size} bytes, round {} of {}, {subject}: {:.0} Mbit/s, {:.2} CPU s/GB, p50 {:.0} µs, p99 {:.0} µs",
                    round + 1,
                    plan.rounds,
                    full.megabits_per_second(size),
                    full.cpu_per_gigabyte(size),
                    paced.p50,
                    paced.p99
                ));
                add(&mut rate, *subject, full.megabits_per_second(size));
                add(&mut cpu, *subject, full.cpu_per_gigabyte(size));
                add(&mut p50, *subject, paced.p50);
                add(&mut p99, *subject, paced.p99);
            }
        }
        measurements.extend(report(&format!("throughput, {size} bytes"), "Mbit/s", rate)?);
        measurements.extend(report(&format!("CPU, {size} bytes"), "s/GB", cpu)?);
        measurements.extend(report(&format!("added latency, {size} bytes, p50"), "µs", p50)?);
        measurements.extend(report(&format!("added latency, {size} bytes, p99"), "µs", p99)?);
    }
    Ok(measurements)
}

fn memory(bed: &Bed, plan: &Plan) -> Result<Vec<Measurement>> {
    let mut samples = Samples::new();
    for round in 0..plan.memory_rounds {
        for (subject, ()) in in_turn(&mut Subject::OVER_TCP.map(|subject| (subject, ())), round) {
            let growth = bed.idle_memory(*subject, plan.idle_pairs, SETTLE)?;
            let clients = plan.idle_pairs * 2;
            let per_10_000 = growth * 10_000.0 / clients as f64;
            progress(&format!(
                "    {clients} idle clients, round {} of {}, {subject}: {per_10_000:.0} MiB per 10,000",
                round + 1,
                plan.memory_rounds
            ));
            add(&mut samples, *subject, per_10_000);
        }
    }
    report("memory of 10,000 idle clients", "MiB", samples)
}

/// The order alternates.
fn in_turn<T>(subjects: &mut [(Subject, T)], round: usize) -> Vec<&mut (Subject, T)> {
    let mut turns: Vec<_> = subjects.iter_mut().collect();
    let first = round % turns.len().max(1);
    turns.rotate_left(first);
    turns
}

fn add(samples: &mut Samples, subject: Subject, value: f64) {
    match samples.iter_mut().find(|(each, _)| *each == subject) {
        Some((_, values)) => values.push(value),
        None => samples.push((subject, vec![value])),
    }
}

fn report(metric: &str, unit: &'static str, mut samples: Samples) -> Result<Vec<Measurement>> {
    samples.sort_by_key(|(subject, _)| *subject);
    let measurement = |(subject, values): (Subject, Vec<f64>)| {
        let measurement = Measurement::new(CASE, subject.name(), metric, unit, values)?;
        Ok(if subject == REFERENCE { measurement } else { measurement.against(REFERENCE.name()) })
    };
    samples.into_iter().map(measurement).collect()
}

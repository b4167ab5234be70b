//! TCP through WireGuard in user space: the embedded one beside wireguard-go.
//!
//! Each implementation has two network namespaces with a cable (veth, MTU 1500) between them, a device process in
//! either, and an iperf3 server behind the tunnel. Both are configured by the same lines of `wg(8)` and `ip(8)`. They
//! are set up together and measured in turns; the others are idle meanwhile.

pub(crate) mod iperf;
mod pair;

use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use fairlead_tunnel::{Device, Settings};
use testbed_kube::Published;
use testbed_lab::Lab;

use crate::report::Measurement;
use crate::{Options, progress};
use pair::{INTERFACE, MTU, Pair};

pub(crate) const CASE: &str = "tunnel";
/// The word that makes this program one end of a tunnel.
pub(crate) const DEVICE_COMMAND: &str = "device";
const STREAMS: [u8; 2] = [1, 4];
const ROUNDS: usize = 3;
const OURS: &str = "fairlead";
const PEER: &str = "wireguard-go";
/// The same that judges the embedded WireGuard in the tests of `fairlead-tunnel`; they share the built program, which
/// is named by the last part of the module's path.
const WIREGUARD_GO: Published = Published {
    name: PEER,
    version: "v0.0.0-20260522210424-ecfc5a8d5446",
    packages: &["golang.zx2c4.com/wireguard"],
};

/// What one subject did with one number of streams.
#[derive(Debug, Default)]
struct Samples {
    /// Mbit/s of TCP payload.
    throughput: Vec<f64>,
    /// Seconds of both device processes per 10⁹ bytes of TCP payload.
    cpu: Vec<f64>,
}

pub(crate) fn run(_: Options) -> Result<Vec<Measurement>> {
    iperf::check_installed()?;
    let peer_program = WIREGUARD_GO.programs()?.join("wireguard");
    let own_program = std::env::current_exe().context("cannot find out where this program is")?;
    let mut peer_command = Command::new(peer_program);
    peer_command.args(["-f", INTERFACE]);
    let mut own_command = Command::new(own_program);
    own_command.args([DEVICE_COMMAND, INTERFACE]);

    let lab = Lab::new()?;
    let ours = Pair::start(&lab, OURS, &mut own_command)?;
    let peer = Pair::start(&lab, PEER, &mut peer_command)?;
    // Not counted: the first handshake, and buffers that are allocated on first use.
    for pair in [&ours, &peer] {
        pair.transfer(1)?;
    }
    let mut measurements = Vec::new();
    for streams in STREAMS {
        measurements.extend(measure(&ours, &peer, streams)?);
    }
    Ok(measurements)
}

fn measure(ours: &Pair, peer: &Pair, streams: u8) -> Result<Vec<Measurement>> {
    let (mut own_samples, mut peer_samples) = (Samples::default(), Samples::default());
    for round in 1..=ROUNDS {
        let mut turns = [(OURS, ours, &mut own_samples), (PEER, peer, &mut peer_samples)];
        // The order alternates.
        if round.is_multiple_of(2) {
            turns.reverse();
        }
        for (subject, pair, samples) in turns {
            let sample = pair.transfer(streams).with_context(|| format!("{subject}, streams: {streams}"))?;
            ensure!(sample.bytes > 0.0, "nothing came through the tunnel of {subject}");
            let (throughput, cpu) = (sample.megabits_per_second, sample.cpu_seconds_per_gigabyte());
            progress(&format!(
                "    streams: {streams}, round {round} of {ROUNDS}, {subject}: {throughput:.0} Mbit/s, {cpu:.2} CPU s/GB"
            ));
            samples.throughput.push(throughput);
            samples.cpu.push(cpu);
        }
    }
    let throughput = format!("TCP, streams: {streams}");
    let cpu = format!("CPU, streams: {streams}");
    Ok(vec![
        Measurement::new(CASE, OURS, &throughput, "Mbit/s", own_samples.throughput)?.against(PEER),
        Measurement::new(CASE, PEER, &throughput, "Mbit/s", peer_samples.throughput)?,
        Measurement::new(CASE, OURS, &cpu, "s/GB", own_samples.cpu)?.against(PEER),
        Measurement::new(CASE, PEER, &cpu, "s/GB", peer_samples.cpu)?,
    ])
}

/// Runs the embedded WireGuard in this process until it is killed; `wg(8)` configures it.
pub(crate) fn run_device(interface: &str) -> Result<()> {
    let _device = Device::start(Settings::new(interface, MTU))
        .with_context(|| format!("cannot start the WireGuard device {interface}"))?;
    loop {
        thread::park();
    }
}

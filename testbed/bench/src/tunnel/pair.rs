//! Two namespaces joined by a link, a device at each end, and the measured traffic.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_api::wireguard::PrivateKey;
use tempfile::TempDir;
use testbed_lab::{Lab, Namespace, Process};

use super::iperf;
use crate::cpu;

/// The name of every WireGuard interface; namespaces keep them apart.
pub(super) const INTERFACE: &str = "wg0";
/// Of the WireGuard interfaces, in bytes: a cable of 1500 less 60 to 80 of overhead.
pub(super) const MTU: u32 = 1420;
const PORT: u16 = 51_820;
/// Bounds every wait.
const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// One transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) bytes: f64,
    pub(super) megabits_per_second: f64,
    /// Of both device processes together.
    cpu_seconds: f64,
}

impl Sample {
    pub(super) fn cpu_seconds_per_gigabyte(&self) -> f64 {
        self.cpu_seconds / (self.bytes / 1e9)
    }
}

/// A tunnel between two namespaces with an iperf3 server at its right end.
pub(super) struct Pair {
    left: End,
    right: End,
    _server: Process,
    outputs: TempDir,
}

/// One end of it.
struct End {
    namespace: Namespace,
    device: Process,
    number: u8,
}

impl Pair {
    /// Starts `device` at both ends and waits until they reach each other.
    pub(super) fn start(lab: &Lab, subject: &str, device: &mut Command) -> Result<Self> {
        let outputs = tempfile::tempdir().context("cannot create a directory for outputs")?;
        let [left, right] = [(1, "left"), (2, "right")].map(|(number, side)| -> Result<(u8, Namespace)> {
            Ok((number, lab.bare_namespace(&format!("{subject}-{side}"))?))
        });
        let (left, right) = (left?, right?);
        left.1
            .shell(&format!("ip link add cable type veth peer name cable netns {}", right.1.holder_pid()))?;
        let mut start = |(number, namespace): (u8, Namespace)| -> Result<End> {
            let output = outputs.path().join(format!("device-{number}"));
            let device = namespace.spawn(device, output)?;
            let mut end = End { namespace, device, number };
            end.configure()
                .with_context(|| format!("cannot configure {subject} in {}", end.namespace.name()))?;
            Ok(end)
        };
        let (left, right) = (start(left)?, start(right)?);
        let target = right.inner_address();
        wait_until(&format!("an answer through the tunnel of {subject}"), || {
            left.namespace.shell(&format!("ping -q -n -c 1 -W 1 {target}")).is_ok()
        })?;
        let output = outputs.path().join("server");
        let mut server = right.namespace.spawn(&mut iperf::server(&target), output)?;
        server.wait_for_output("Server listening", TIMEOUT)?;
        Ok(Self { left, right, _server: server, outputs })
    }

    /// Sends for a second from left to right.
    pub(super) fn transfer(&self, streams: u8) -> Result<Sample> {
        let before = self.cpu_seconds()?;
        let mut command = iperf::client(&self.right.inner_address(), streams);
        let mut client = self.left.namespace.spawn(&mut command, self.outputs.path().join("client"))?;
        client.wait(TIMEOUT)?;
        let arrived = iperf::parse(&client.output()?)?;
        Ok(Sample {
            bytes: arrived.bytes,
            megabits_per_second: arrived.bits_per_second / 1e6,
            cpu_seconds: self.cpu_seconds()? - before,
        })
    }

    fn cpu_seconds(&self) -> Result<f64> {
        Ok(cpu::seconds_of(self.left.device.id())? + cpu::seconds_of(self.right.device.id())?)
    }
}

impl End {
    fn configure(&mut self) -> Result<()> {
        let Self { namespace, device, number } = self;
        wait_until("the device to answer wg(8)", || {
            namespace.shell(&format!("wg show {INTERFACE}")).is_ok() || !matches!(device.status(), Ok(None))
        })?;
        ensure!(matches!(device.status(), Ok(None)), "it ended: {}", device.output()?);
        let inner = inner_address(*number);
        namespace.shell(&format!(
            "ip addr add {}/30 dev cable\nip link set cable up\n\
             cat > /run/wireguard/configuration <<END\n{}END\n\
             wg setconf {INTERFACE} /run/wireguard/configuration\n\
             ip addr add {inner}/30 dev {INTERFACE}\nip link set {INTERFACE} mtu {MTU} up",
            outer_address(*number),
            configuration(*number)
        ))?;
        Ok(())
    }

    fn inner_address(&self) -> String {
        inner_address(self.number)
    }
}

fn inner_address(number: u8) -> String {
    format!("10.8.0.{number}")
}

fn outer_address(number: u8) -> String {
    format!("192.0.2.{number}")
}

/// For `wg setconf`. The keys protect nothing: traffic of a benchmark, in namespaces.
fn configuration(number: u8) -> String {
    let private = |number| PrivateKey([number; 32]);
    let other = 3_u8.saturating_sub(number);
    format!(
        "[Interface]\nPrivateKey = {}\nListenPort = {PORT}\n\
         [Peer]\nPublicKey = {}\nEndpoint = {}:{PORT}\nAllowedIPs = {}/32\n",
        private(number).to_base64(),
        fairlead_tunnel::public_key(&private(other)),
        outer_address(other),
        inner_address(other)
    )
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !condition() {
        ensure!(start.elapsed() < TIMEOUT, "waited {TIMEOUT:?} in vain for {what}");
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_names_the_other() {
        let lines = configuration(1);
        assert!(lines.contains("Endpoint = 192.0.2.2:51820\nAllowedIPs = 10.8.0.2/32\n"), "{lines}");
        assert!(configuration(2).contains("Endpoint = 192.0.2.1:51820\nAllowedIPs = 10.8.0.1/32\n"));
        let key = fairlead_tunnel::public_key(&PrivateKey([2; 32]));
        assert!(lines.contains(&format!("PublicKey = {key}\n")), "{lines}");
    }

    #[test]
    fn cpu_time_is_counted_per_decimal_gigabyte() {
        let sample = Sample { bytes: 2.5e8, megabits_per_second: 2000.0, cpu_seconds: 1.5 };
        assert!((sample.cpu_seconds_per_gigabyte() - 6.0).abs() < 1e-9);
    }
}

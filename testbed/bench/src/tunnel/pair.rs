//! Two namespaces joined by a link, a device at each end, and the measured traffic.

use std::net::Ipv4Addr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fairlead_keys::PrivateKey;
use tempfile::TempDir;
use testbed_lab::{Lab, Namespace, Process};

use super::iperf::{self, Arrived};
use super::latency::{self, RoundTrips};
use super::load::{Load, Transfer};
use super::subject::Subject;
use crate::cpu;

/// The name of every WireGuard interface; namespaces keep them apart.
pub(super) const INTERFACE: &str = "wg0";
/// MTU of the WireGuard interfaces in bytes: a cable of 1500 less 60 to 80 of overhead. Also that of the cable, where there is no tunnel.
pub(super) const MTU: u32 = 1420;
pub(super) const PORT: u16 = 51_820;
/// The file for `wg setconf`, in the namespace of either end.
pub(super) const CONFIGURATION: &str = "/run/wireguard/configuration";
/// Numbers of the two ends.
pub(super) const LEFT: u8 = 1;
pub(super) const RIGHT: u8 = 2;
/// Seconds of a transfer whose throughput is measured, and of one that goes on while latency is.
const SECONDS: u8 = 1;
const LOAD_SECONDS: u8 = 3;
/// TCP's start, before latency is measured.
const LOAD_START: Duration = Duration::from_millis(500);
/// Bounds every wait.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Two namespaces with a cable between them, and with a tunnel unless the cable itself is measured.
pub(super) struct Pair {
    /// Left and right.
    pub(super) ends: [End; 2],
    /// Address to which traffic is sent.
    pub(super) target: Ipv4Addr,
    outputs: TempDir,
}

/// One of them.
pub(super) struct End {
    pub(super) namespace: Namespace,
    pub(super) device: Option<Process>,
}

/// A client of iperf3 that runs.
pub(super) struct Client(Process);

impl Pair {
    /// Starts a device at both ends, if the subject has one, and waits until they reach each other.
    pub(super) fn start(lab: &Lab, subject: Subject, device: impl Fn() -> Option<Command>) -> Result<Self> {
        let outputs = tempfile::tempdir().context("cannot create a directory for outputs")?;
        let name = subject.name().replace(' ', "-");
        let left = lab.bare_namespace(&format!("{name}-left"))?;
        let right = lab.bare_namespace(&format!("{name}-right"))?;
        left.shell(&format!("ip link add cable type veth peer name cable netns {}", right.holder_pid()))?;
        let start = |number, namespace: Namespace| -> Result<End> {
            let cable = format!("ip addr add {}/30 dev cable\nip link set cable up", outer_address(number));
            namespace.shell(&cable)?;
            let Some(mut command) = device() else {
                namespace.shell(&format!("ip link set cable mtu {MTU}"))?;
                return Ok(End { namespace, device: None });
            };
            let device = namespace.spawn(&mut command, outputs.path().join(format!("device-{number}")))?;
            let mut end = End { namespace, device: Some(device) };
            end.configure(number)
                .with_context(|| format!("cannot configure {subject} in {}", end.namespace.name()))?;
            Ok(end)
        };
        let ends = [start(LEFT, left)?, start(RIGHT, right)?];
        let target = if subject.is_tunnel() { inner_address(RIGHT) } else { outer_address(RIGHT) };
        let mut pair = Self { ends, target, outputs };
        let ping = format!("ping -q -n -c 1 -W 1 {target}");
        let [left, _] = &pair.ends;
        wait_until(&format!("an answer through {subject}"), || left.namespace.shell(&ping).is_ok())?;
        pair.check_devices()?;
        Ok(pair)
    }

    /// Sends for a second from left to right.
    pub(super) fn transfer(&mut self, load: Load) -> Result<Transfer> {
        self.check_devices()?;
        let _server = self.serve()?;
        let before = self.cpu_seconds()?;
        let arrived = self.client(load, SECONDS)?.finish()?;
        Ok(Transfer { arrived, cpu_seconds: self.cpu_seconds()? - before })
    }

    /// Times of small datagrams from left to right and back, while nothing else is sent.
    pub(super) fn idle_latency(&mut self) -> Result<RoundTrips> {
        self.check_devices()?;
        let [left, right] = &self.ends;
        latency::measure(&left.namespace, &right.namespace, self.target)
    }

    /// The same beside one TCP connection from left to right.
    pub(super) fn loaded_latency(&mut self) -> Result<RoundTrips> {
        self.check_devices()?;
        let _server = self.serve()?;
        let client = self.client(Load::Tcp(1), LOAD_SECONDS)?;
        thread::sleep(LOAD_START);
        let times = self.idle_latency()?;
        client.finish()?;
        Ok(times)
    }

    /// A server at the right end, for one transfer.
    pub(super) fn serve(&self) -> Result<Process> {
        let [_, right] = &self.ends;
        let mut command = iperf::server(&self.target.to_string());
        let mut server = right.namespace.spawn(&mut command, self.outputs.path().join("server"))?;
        server.wait_for_output("Server listening", TIMEOUT)?;
        Ok(server)
    }

    /// Starts to send from left to right.
    pub(super) fn client(&self, load: Load, seconds: u8) -> Result<Client> {
        let [left, _] = &self.ends;
        let mut command = iperf::client(&self.target.to_string(), load, seconds);
        Ok(Client(left.namespace.spawn(&mut command, self.outputs.path().join("client"))?))
    }

    /// # Errors
    /// A device has ended; its output.
    fn check_devices(&mut self) -> Result<()> {
        self.ends.iter_mut().filter_map(|end| end.device.as_mut()).try_for_each(check_runs)
    }

    fn cpu_seconds(&self) -> Result<f64> {
        self.ends
            .iter()
            .filter_map(|end| end.device.as_ref())
            .map(|device| cpu::seconds_of(device.id()))
            .sum()
    }
}

impl End {
    fn configure(&mut self, number: u8) -> Result<()> {
        if let Some(device) = &mut self.device {
            wait_for_device(&self.namespace, device)?;
        }
        let inner = inner_address(number);
        self.namespace.shell(&format!(
            "cat > {CONFIGURATION} <<END\n{}END\n\
             wg setconf {INTERFACE} {CONFIGURATION}\n\
             ip addr add {inner}/30 dev {INTERFACE}\nip link set {INTERFACE} mtu {MTU} up",
            configuration(number)
        ))?;
        Ok(())
    }
}

impl Client {
    /// Whether it still sends.
    pub(super) fn is_running(&mut self) -> Result<bool> {
        Ok(self.0.status()?.is_none())
    }

    /// Waits for its end.
    pub(super) fn finish(mut self) -> Result<Arrived> {
        self.0.wait(TIMEOUT)?;
        let arrived = iperf::parse(&self.0.output()?)?;
        ensure!(arrived.bytes > 0.0, "nothing arrived");
        Ok(arrived)
    }
}

/// Waits until `wg(8)` reaches a device.
///
/// # Errors
/// It ended, or does not answer in time.
pub(super) fn wait_for_device(namespace: &Namespace, device: &mut Process) -> Result<()> {
    wait_until("the device to answer wg(8)", || {
        namespace.shell(&format!("wg show {INTERFACE}")).is_ok() || !matches!(device.status(), Ok(None))
    })?;
    check_runs(device)
}

fn check_runs(device: &mut Process) -> Result<()> {
    if let Some(status) = device.status()? {
        bail!("the device ended ({status}): {}", device.output()?);
    }
    Ok(())
}

/// Address of an end in the tunnel.
pub(super) fn inner_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 8, 0, number)
}

/// Address of an end on the cable.
pub(super) fn outer_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, number)
}

/// Configuration of an end for `wg setconf`. The keys protect nothing: traffic of a benchmark, in namespaces.
pub(super) fn configuration(number: u8) -> String {
    let private = |number| PrivateKey([number; 32]);
    let other = if number == LEFT { RIGHT } else { LEFT };
    format!(
        "[Interface]\nPrivateKey = {}\nListenPort = {PORT}\n\
         [Peer]\nPublicKey = {}\nEndpoint = {}:{PORT}\nAllowedIPs = {}/32\n",
        private(number).to_base64(),
        private(other).public_key(),
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

    /// Traffic crosses the cable; the figures of a debug build say nothing.
    #[test]
    fn everything_that_is_sent_crosses_the_cable() {
        let lab = Lab::new().unwrap();
        let mut pair = Pair::start(&lab, Subject::PlainVeth, || None).unwrap();
        for load in Load::ALL {
            let transfer = pair.transfer(load).unwrap();
            assert!(transfer.arrived.bytes > 0.0 && transfer.cpu_seconds == 0.0, "{load}: {transfer}");
        }
        assert!(pair.idle_latency().unwrap().p50 > 0.0 && pair.loaded_latency().unwrap().p50 > 0.0);
    }

    #[test]
    fn a_device_that_ends_is_an_error_with_its_output() {
        let lab = Lab::new().unwrap();
        let device = || {
            let mut command = Command::new("sh");
            command.args(["-c", "echo no such interface; exit 3"]);
            Some(command)
        };
        let error = Pair::start(&lab, Subject::Boringtun, device).err().unwrap();
        assert!(format!("{error:#}").contains("no such interface"), "{error:#}");
    }

    #[test]
    fn each_end_names_the_other() {
        let lines = configuration(1);
        assert!(lines.contains("Endpoint = 192.0.2.2:51820\nAllowedIPs = 10.8.0.2/32\n"), "{lines}");
        assert!(configuration(2).contains("Endpoint = 192.0.2.1:51820\nAllowedIPs = 10.8.0.1/32\n"));
        let key = PrivateKey([2; 32]).public_key();
        assert!(lines.contains(&format!("PublicKey = {key}\n")), "{lines}");
    }
}

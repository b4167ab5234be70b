//! A device that is handed over, and pings that show whether packets were lost or had to wait.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use fairlead_keys::{DeviceChange, PublicKey};
use fairlead_tunnel::{Device, Error, PendingHandover, Settings};
use tempfile::TempDir;

use super::{NAME, Namespace, Node, PORT, TIMEOUT, set_peer};

/// A hand-over between two devices of one node.
pub(crate) struct Handover {
    _directory: TempDir,
    pub(crate) path: PathBuf,
}

impl Handover {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { path: directory.path().join("handover.sock"), _directory: directory }
    }

    /// The old process starts to listen.
    pub(crate) fn start(&self, node: &mut Node) -> PendingHandover {
        node.device.take().unwrap().hand_over(self.path.clone()).unwrap()
    }

    /// The device of the new process, not configured yet.
    pub(crate) fn new_device(&self, node: &Node) -> Result<Device, Error> {
        let settings = Settings { handover_socket: Some(self.path.clone()), ..Settings::new(NAME, 1420) };
        node.namespace.run(|| Device::start(settings))
    }

    /// The new device is configured as the old one was, and takes over everything.
    pub(crate) fn complete(
        &self,
        node: &mut Node,
        peer: PublicKey,
        endpoint: Option<&str>,
        allowed: &[impl AsRef<str>],
    ) {
        let pending = self.start(node);
        let waiting = thread::spawn(move || pending.wait(TIMEOUT));
        node.device = Some(self.new_device(node).unwrap());
        node.change(&DeviceChange {
            private_key: Some(node.private.clone()),
            listen_port: Some(PORT),
            ..set_peer(peer, endpoint, allowed)
        });
        assert!(waiting.join().unwrap(), "the hand-over did not finish");
    }
}

/// A ping every 5 ms until [`Self::finish`].
pub(crate) struct Pings(Option<Child>);

/// Packets that `ping` sent, and the answers to them.
#[derive(Debug)]
pub(crate) struct PingReport {
    sent: usize,
    /// Round-trip times in milliseconds by sequence number.
    answered: BTreeMap<usize, f64>,
}

impl Pings {
    pub(crate) fn start(from: &Namespace, to: IpAddr) -> Self {
        let mut ping = Command::new("ping");
        ping.args(["-n", "-i", "0.005", &to.to_string()]).stdout(Stdio::piped());
        Self(Some(from.run(|| ping.spawn().unwrap())))
    }

    pub(crate) fn finish(mut self) -> PingReport {
        let ping = self.0.take().unwrap();
        // A break at the very end needs time to be seen.
        thread::sleep(Duration::from_millis(500));
        Command::new("kill").args(["-INT", &ping.id().to_string()]).status().unwrap();
        let output = ping.wait_with_output().unwrap();
        PingReport::parse(&String::from_utf8(output.stdout).unwrap())
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        if let Some(mut ping) = self.0.take() {
            let _ = ping.kill();
            let _ = ping.wait();
        }
    }
}

impl PingReport {
    /// Lines such as `64 bytes from 10.8.0.2: icmp_seq=7 ttl=64 time=0.412 ms`, and the summary.
    fn parse(text: &str) -> Self {
        let field = |line: &str, name: &str| Some(line.split_once(name)?.1.split(' ').next()?.to_owned());
        let answer = |line: &str| {
            let sequence = field(line, "icmp_seq=")?.parse().unwrap();
            Some((sequence, field(line, " time=")?.parse().unwrap()))
        };
        let summary = text.lines().find(|line| line.contains("packets transmitted")).unwrap();
        let sent = summary.split(' ').next().unwrap().parse().unwrap();
        Self { sent, answered: text.lines().filter_map(answer).collect() }
    }
}

/// Fewer pings than this show nothing.
const MIN_PINGS: usize = 200;
/// Pings that may be on their way at the end: a quarter of a second's.
const MAX_OUTSTANDING: usize = 50;
/// The longest round trip, in milliseconds. The queue of a TUN that no process reads holds 1,000 packets, so a break of
/// 5 s would lose none of them.
const MAX_ROUND_TRIP: f64 = 2_000.0;

/// Each ping was answered, and none had to wait for long.
pub(crate) fn assert_lossless(report: PingReport) {
    let PingReport { sent, answered } = &report;
    assert!(*sent > MIN_PINGS, "{sent} pings show nothing");
    let last = answered.last_key_value().map_or(0, |(sequence, _)| *sequence);
    assert!(sent - last <= MAX_OUTSTANDING, "no answer after ping {last} of {sent}");
    let lost: Vec<usize> = (1..last).filter(|sequence| !answered.contains_key(sequence)).collect();
    assert!(lost.is_empty(), "{} of {sent} pings were lost: {lost:?}", lost.len());
    let slowest = answered.values().copied().fold(0.0, f64::max);
    println!("{sent} pings were answered, the slowest after {slowest} ms");
    assert!(slowest < MAX_ROUND_TRIP, "an answer took {slowest} ms");
}

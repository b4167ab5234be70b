//! A device that is handed over, and traffic that shows whether anything was lost.

#![allow(clippy::print_stdout, reason = "helpers of tests say what they found")]

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use fairlead_api::wireguard::{DeviceChange, PublicKey};
use fairlead_tunnel::{Device, Error, Retiring, Settings};
use tempfile::TempDir;

use super::{NAME, Namespace, Node, PATIENCE, PORT, set_peer};

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

    pub(crate) fn retire(&self, node: &mut Node) -> Retiring {
        node.device.take().unwrap().retire(self.path.clone()).unwrap()
    }

    pub(crate) fn successor(&self, node: &Node) -> Result<Device, Error> {
        let settings = Settings { predecessor: Some(self.path.clone()), ..Settings::new(NAME, 1420) };
        node.namespace.run(|| Device::start(settings))
    }

    /// The successor starts, is configured as its predecessor was, and gets everything.
    pub(crate) fn complete(
        &self,
        node: &mut Node,
        peer: PublicKey,
        endpoint: Option<&str>,
        allowed: &[impl AsRef<str>],
    ) {
        let retiring = self.retire(node);
        let waiting = thread::spawn(move || retiring.wait(PATIENCE));
        node.device = Some(self.successor(node).unwrap());
        node.change(&DeviceChange {
            private_key: Some(node.private.clone()),
            listen_port: Some(PORT),
            ..set_peer(peer, endpoint, allowed)
        });
        assert!(waiting.join().unwrap(), "the old device was not let go");
    }
}

/// A ping every few milliseconds until it is asked how many were lost.
pub(crate) struct Pings(Child);

impl Pings {
    pub(crate) fn start(from: &Namespace, to: IpAddr) -> Self {
        let mut ping = Command::new("ping");
        ping.args(["-n", "-q", "-i", "0.005", "-W", "5", &to.to_string()]).stdout(Stdio::piped());
        Self(from.run(|| ping.spawn().unwrap()))
    }

    /// How many were sent and answered.
    pub(crate) fn finish(self) -> (u64, u64) {
        // Answers that are on their way are to be counted.
        thread::sleep(Duration::from_millis(500));
        Command::new("kill").args(["-INT", &self.0.id().to_string()]).status().unwrap();
        let output = self.0.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let summary = text.lines().find(|line| line.contains("packets transmitted")).unwrap().to_owned();
        let mut numbers = summary.split(", ").map(|part| part.split(' ').next().unwrap().parse().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    }
}

/// At the end one may be on its way.
pub(crate) fn assert_lossless((sent, answered): (u64, u64)) {
    println!("{answered} of {sent} pings were answered");
    assert!(sent > 200, "{sent} is no traffic");
    assert!(sent - answered <= 1, "{} of {sent} pings were lost", sent - answered);
}

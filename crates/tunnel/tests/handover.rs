//! One process hands its device to the next: what an upgrade of a node is to the traffic of its pods.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests fail, and say what they found"
)]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use common::{NAME, Node, PATIENCE, PORT, cable, pair, set_peer, until};
use fairlead_api::wireguard::DeviceChange;
use fairlead_tunnel::{Device, Error, Retiring, Settings};
use tempfile::TempDir;

/// A hand-over between two devices of one node.
struct Change {
    _directory: TempDir,
    path: PathBuf,
}

impl Change {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { path: directory.path().join("handover.sock"), _directory: directory }
    }

    fn retire(&self, node: &mut Node) -> Retiring {
        node.device.take().unwrap().retire(self.path.clone()).unwrap()
    }

    fn successor(&self, node: &Node) -> Result<Device, Error> {
        let settings = Settings { predecessor: Some(self.path.clone()), ..Settings::new(NAME, 1420) };
        node.namespace.run(|| Device::start(settings))
    }

    /// The successor starts, is configured as its predecessor was, and gets everything.
    fn complete(&self, node: &mut Node, other: &Node, endpoint: Option<&str>) {
        let retiring = self.retire(node);
        let waiting = thread::spawn(move || retiring.wait(PATIENCE));
        node.device = Some(self.successor(node).unwrap());
        node.change(&DeviceChange {
            private_key: Some(node.private.clone()),
            listen_port: Some(PORT),
            ..set_peer(other.public, endpoint, &other.inner_prefixes())
        });
        assert!(waiting.join().unwrap(), "the old device was not let go");
    }
}

/// A ping every few milliseconds until it is asked how many were lost.
struct Pings(Child);

impl Pings {
    fn start(from: &Node, to: &Node) -> Self {
        let mut ping = Command::new("ping");
        ping.args(["-n", "-q", "-i", "0.005", "-W", "5", &to.inner()[0].to_string()]).stdout(Stdio::piped());
        Self(from.namespace.run(|| ping.spawn().unwrap()))
    }

    /// How many were sent and answered.
    fn finish(self) -> (u64, u64) {
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
fn assert_lossless((sent, answered): (u64, u64)) {
    println!("{answered} of {sent} pings were answered");
    assert!(sent > 200, "{sent} is no traffic");
    assert!(sent - answered <= 1, "{} of {sent} pings were lost", sent - answered);
}

#[test]
fn no_packet_is_lost_when_either_end_is_handed_over() {
    let (mut a, mut b) = pair();
    let pings = [Pings::start(&a, &b), Pings::start(&b, &a)];
    for _ in 0..3 {
        let change = Change::new();
        change.complete(&mut a, &b, Some("192.0.2.2:51820"));
        change.complete(&mut b, &a, None);
        assert!(!change.path.exists(), "what was listened at is left behind");
    }
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
}

/// Behind a NAT nobody knows its address but the device that hears of it.
#[test]
fn a_successor_knows_where_a_peer_without_an_endpoint_is() {
    let (a, mut b) = pair();
    Change::new().complete(&mut b, &a, None);
    assert!(b.pings(a.inner()[0]), "the first ping finds its way");
    assert_eq!(b.peer(&a.public).config.endpoint, Some("192.0.2.1:51820".parse().unwrap()));
}

#[test]
fn a_working_address_is_kept_although_another_is_configured() {
    let (mut a, b) = pair();
    Change::new().complete(&mut a, &b, Some("192.0.2.77:51820"));
    assert!(a.pings(b.inner()[0]));
    assert_eq!(a.peer(&b.public).config.endpoint, Some("192.0.2.2:51820".parse().unwrap()));
}

#[test]
fn a_successor_that_dies_half_way_leaves_the_device_working() {
    let (mut a, b) = pair();
    let (change, pings) = (Change::new(), Pings::start(&a, &b));
    let retiring = change.retire(&mut a);
    drop(change.successor(&a).unwrap());
    assert!(!retiring.wait(Duration::from_secs(1)), "nobody took over");
    // Ended with its patience; another one starts as after any restart.
    a.restart();
    a.peer_with(&b, Some("192.0.2.2:51820"));
    a.reaches(b.inner()[0]);
    let (sent, answered) = pings.finish();
    // It worked on for the whole second.
    assert!(answered > 150, "{answered} of {sent}");
}

#[test]
fn a_predecessor_that_dies_half_way_leaves_everything_to_its_successor() {
    let (mut a, b) = pair();
    let change = Change::new();
    let retiring = change.retire(&mut a);
    let successor = change.successor(&a).unwrap();
    drop(retiring);
    a.device = Some(successor);
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    });
    a.reaches(b.inner()[0]);
}

#[test]
fn with_another_port_the_successor_starts_afresh() {
    let (mut a, b) = pair();
    let change = Change::new();
    let retiring = change.retire(&mut a);
    let waiting = thread::spawn(move || retiring.wait(PATIENCE));
    a.device = Some(change.successor(&a).unwrap());
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT + 1),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    });
    assert!(waiting.join().unwrap());
    a.reaches(b.inner()[0]);
    until("the peer follows", || b.peer(&a.public).config.endpoint.unwrap().port() == PORT + 1);
}

#[test]
fn without_a_predecessor_a_device_starts_as_ever() {
    let (namespace, _other) = cable();
    let path = Path::new("/nonexistent/handover.sock");
    let settings = Settings { predecessor: Some(path.to_owned()), ..Settings::new(NAME, 1420) };
    namespace.run(|| Device::start(settings)).unwrap();
}

#[test]
fn where_nobody_can_listen_is_named() {
    let (namespace, _other) = cable();
    let device = namespace.run(|| Device::start(Settings::new(NAME, 1420))).unwrap();
    let error = device.retire("/nonexistent/handover.sock".into()).err().unwrap().to_string();
    assert!(error.contains("/nonexistent/handover.sock"), "{error}");
}

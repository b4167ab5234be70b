//! Namespaces of their own for tests. What is in one vanishes with the value.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::os::fd::{AsFd, AsRawFd};
use std::process::{self, Command};
use std::thread;

use fairlead_netlink::netns::Netns;
use ipnet::IpNet;
use nix::sched::{CloneFlags, unshare};

/// A network namespace with loopback up, held by a descriptor only.
pub(crate) struct Namespace(Netns);

impl Namespace {
    pub(crate) fn new() -> Self {
        let made = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("tests make network namespaces: run them as root");
            Netns::current().unwrap()
        });
        let namespace = Self(made.join().unwrap());
        namespace.sh("ip link set lo up");
        namespace
    }

    /// Runs code on a thread inside.
    pub(crate) fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.0.run(work).unwrap()
    }

    /// Runs a shell command inside.
    pub(crate) fn sh(&self, command: &str) -> String {
        self.within(|| run(command))
    }

    /// For `ip link set LINK netns PATH`.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.0.as_fd().as_raw_fd())
    }

    /// A veth pair from here to there; both ends up.
    pub(crate) fn veth(&self, name: &str, other: &Self, other_name: &str) {
        self.sh(&format!(
            "ip link add {name} type veth peer name {other_name} netns {} && ip link set {name} up",
            other.path()
        ));
        other.sh(&format!("ip link set {other_name} up"));
    }
}

/// Runs a test on a thread in a network namespace of its own, with loopback up.
pub(crate) fn in_namespace<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    Namespace::new().within(test)
}

/// Runs a shell command in the calling thread's namespace; panics with its words if it fails.
pub(crate) fn run(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().expect("sh starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command}: {}{text}", String::from_utf8_lossy(&output.stderr));
    text
}

/// That many prefixes of each family, none next to another.
pub(crate) fn targets(count: u32) -> (Vec<IpNet>, Vec<IpNet>) {
    let v4 = (0..count)
        .map(|n| IpNet::new(std::net::Ipv4Addr::from_bits(0x0a00_0000 + n * 512).into(), 24).unwrap());
    let v6 = (0..count).map(|n| {
        let bits = (0xfd00_u128 << 112) + (u128::from(n) << 65);
        IpNet::new(std::net::Ipv6Addr::from_bits(bits).into(), 64).unwrap()
    });
    (v4.collect(), v6.collect())
}

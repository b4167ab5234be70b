//! Changes that the kernel reports, read from `ip monitor` and `nft monitor`: judges that count nothing of ours.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};

use crate::{on_own_thread, sh_in};

/// Bounds a test that fails.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time in which a monitor that starts reports a marker; then it is made again.
const START: Duration = Duration::from_millis(200);
/// Time without reports after which the kernel counts as idle.
const IDLE: Duration = Duration::from_millis(300);

/// A running monitor of one network namespace.
///
/// It separates what came before a call from what comes after by changes of its own, which it does not return.
#[derive(Debug)]
pub struct Monitor {
    network: OwnedFd,
    child: Child,
    reported: Receiver<String>,
    marker: Marker,
    count: u8,
}

/// A change that only a monitor makes.
#[derive(Debug, Clone, Copy)]
enum Marker {
    /// Another loopback address.
    Address,
    /// Another nftables table.
    Table,
}

impl Marker {
    /// Word that is in all lines about the marker.
    const fn word(self) -> &'static str {
        match self {
            Self::Address => "127.7.7.",
            Self::Table => "inet monitor_marker_",
        }
    }

    fn script(self, count: u8) -> String {
        let word = self.word();
        match self {
            Self::Address => format!("ip addr add {word}{count}/32 dev lo"),
            Self::Table => format!("nft add table {word}{count}"),
        }
    }

    /// Whether the line is of a marker. `nft monitor` also names the program of each transaction.
    fn is_of(self, line: &str) -> bool {
        line.contains(self.word()) || matches!(self, Self::Table) && line.ends_with("(nft)")
    }
}

impl Monitor {
    /// Links, addresses, routes and rules.
    pub fn ip(network: &impl AsFd) -> Self {
        Self::start(network, &["ip", "-o", "monitor", "link", "address", "route", "rule"], Marker::Address)
    }

    /// Everything in nftables.
    pub fn nft(network: &impl AsFd) -> Self {
        Self::start(network, &["nft", "monitor"], Marker::Table)
    }

    fn start(network: &impl AsFd, command: &[&str], marker: Marker) -> Self {
        let network = network.as_fd().try_clone_to_owned().expect("descriptors are left");
        let mut child = on_own_thread(|| {
            setns(&network, CloneFlags::CLONE_NEWNET).expect("root may enter a network namespace");
            // A pipe would be written in blocks.
            let line_by_line = Command::new("stdbuf").arg("-oL").args(command).stdout(Stdio::piped()).spawn();
            line_by_line.expect("iproute2, nftables and coreutils are installed")
        });
        let output = BufReader::new(child.stdout.take().expect("the output is a pipe"));
        let (sender, reported) = channel();
        thread::spawn(move || {
            let lines = output.lines().map_while(Result::ok);
            lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        let mut monitor = Self { network, child, reported, marker, count: 0 };
        assert!((0..100).any(|_| monitor.mark(START).is_some()), "{command:?} reports nothing");
        monitor
    }

    /// Lines that were reported since the last call.
    pub fn reported(&mut self) -> Vec<String> {
        self.mark(TIMEOUT).unwrap_or_else(|| panic!("the monitor ended: {:?}", self.child.try_wait()))
    }

    /// Waits until the kernel has no more to report of earlier changes.
    pub fn wait_idle(&mut self) {
        while self.reported.recv_timeout(IDLE).is_ok() || !self.reported().is_empty() {}
    }

    /// Lines that are reported before a new marker; `None` if the marker does not appear.
    fn mark(&mut self, timeout: Duration) -> Option<Vec<String>> {
        self.count = self.count.checked_add(1).expect("few markers are made");
        sh_in(&self.network, &self.marker.script(self.count));
        let last = format!("{}{}", self.marker.word(), self.count);
        let mut lines = Vec::new();
        loop {
            let line = self.reported.recv_timeout(timeout).ok()?;
            if line.contains(&last) {
                return Some(lines);
            }
            if !self.marker.is_of(&line) {
                lines.push(line);
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Namespace;

    #[test]
    fn changes_are_reported_once_and_markers_never() {
        let namespace = Namespace::new();
        let (mut ip, mut nft) = (Monitor::ip(&namespace), Monitor::nft(&namespace));
        ip.wait_idle();
        assert_eq!((ip.reported(), nft.reported()), (vec![], vec![]));
        namespace.sh("ip rule add priority 7 lookup 7; nft add table inet other");
        let rule = ip.reported();
        assert!(matches!(&rule[..], [line] if line.contains("lookup 7")), "{rule:?}");
        assert!(nft.reported().iter().any(|line| line.contains("add table inet other")));
        assert_eq!((ip.reported(), nft.reported()), (vec![], vec![]));
    }
}

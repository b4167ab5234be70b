//! `ip monitor` and `nft monitor` on a node: the kernel's own notifications of changes, of every program.

use std::time::Duration;

use fairlead_demo::World;
use fairlead_demo::node::Node;
use testbed_lab::{Host, Process};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time until the kernel's messages about the monitors' own marks are printed.
const SETTLE: Duration = Duration::from_secs(1);

/// Both monitors of a node.
pub(crate) struct Monitors {
    name: String,
    host: Host,
    of_ip: Monitor,
    of_nft: Monitor,
}

/// A program that prints every change, and what it had printed when the quiet began.
struct Monitor {
    process: Process,
    before: String,
}

impl Monitors {
    /// Starts both, and returns when both have shown that they report changes.
    pub(crate) fn start(world: &World, node: &Node) -> Self {
        let start = |name: &str, command: &[&str]| {
            let log = world.directory().join(format!("{}-{name}-monitor.log", node.name));
            let mut stdbuf = node.host.command("stdbuf").unwrap();
            let process = node.host.spawn(stdbuf.arg("-oL").args(command), log).unwrap();
            Monitor { process, before: String::new() }
        };
        let of_ip = start("ip", &["ip", "monitor", "link", "address", "route", "rule"]);
        let of_nft = start("nft", &["nft", "monitor"]);
        let mut monitors = Self { name: node.name.clone(), host: node.host.clone(), of_ip, of_nft };
        monitors.mark("begin");
        std::thread::sleep(SETTLE);
        for monitor in [&mut monitors.of_ip, &mut monitors.of_nft] {
            monitor.before = monitor.process.output().unwrap();
        }
        monitors
    }

    /// Nothing changed since the start; and both still report changes.
    pub(crate) fn saw_nothing(&mut self) {
        for monitor in [&self.of_ip, &self.of_nft] {
            let now = monitor.process.output().unwrap();
            let seen = now.strip_prefix(&monitor.before).unwrap();
            assert_eq!(seen, "", "{}: something changed in a quiet mesh", self.name);
        }
        self.mark("end");
    }

    /// Makes a change of each kind, takes it back, and waits until both have printed it. A monitor listens some time after
    /// its start, so the change is made again until it is seen.
    fn mark(&mut self, name: &str) {
        let routes = if name == "begin" { "192.0.2.1" } else { "192.0.2.2" };
        let script = format!(
            "ip route add blackhole {routes} table 4242; ip route del blackhole {routes} table 4242
             nft add table inet {name}; nft delete table inet {name}"
        );
        let seen = |monitor: &Monitor, text: &str| monitor.process.output().unwrap().contains(text);
        let (route, table) = (format!("Deleted blackhole {routes}"), format!("delete table inet {name}"));
        let deadline = std::time::Instant::now() + TIMEOUT;
        while !(seen(&self.of_ip, &route) && seen(&self.of_nft, &table)) {
            assert!(std::time::Instant::now() < deadline, "{}: the monitors print nothing", self.name);
            self.host.shell(&script).unwrap();
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

//! Behaviour of each kind of NAT (RFC 5780) as coturn's client finds it, beside what the node behind it publishes.

use std::process::Command;

use anyhow::{Result, ensure};
use fairlead_demo::World;
use fairlead_demo::nat_matrix::Place;
use testbed_lab::{Host, Nat, Process};

use crate::outage::node;

/// Public addresses of a server that has two.
const LAN: &str = "198.18.5.0/24";
/// The client waits 3 s for each answer that does not come.
const LIMIT_SECONDS: u32 = 60;

/// coturn with two addresses, as RFC 5780 demands.
struct Server {
    addresses: [String; 2],
    host: Host,
    _process: Process,
}

/// Behaviour that the client found, in its words; `None` without an answer.
struct Behaviour {
    mapping: Option<String>,
    filtering: Option<String>,
}

impl Server {
    fn start(world: &World) -> Result<Self> {
        let site = world.lab().nat_site("behaviour", Nat::None, LAN.parse()?)?;
        let host = site.host("behaviour-1")?;
        // The lab has given it the first one.
        let second = "198.18.5.200".to_owned();
        host.shell(&format!("ip address add {second}/24 dev eth0"))?;
        let addresses = [host.address().to_string(), second];
        let mut command = Command::new("turnserver");
        command.args(["-n", "--stun-only", "--no-cli", "--no-tls", "--no-dtls", "--log-file=stdout"]);
        for address in &addresses {
            command.args(["--listening-ip", address]);
        }
        command.args(["--listening-port=3478", "--pidfile"]).arg(world.directory().join("behaviour.pid"));
        let process = host.spawn(&mut command, world.directory().join("behaviour.log"))?;
        Ok(Self { addresses, host, _process: process })
    }
}

impl Behaviour {
    fn ask(from: &Host, server: &str) -> Result<Self> {
        let address = from.address();
        let said = from.shell(&format!(
            "timeout {LIMIT_SECONDS} turnutils_natdiscovery -m -f -L {address} {server} 2>&1 || true"
        ))?;
        let last = |word: &str| {
            let mut lines = said.lines().filter(|line| line.contains("NAT") && line.contains(word));
            lines.next_back().map(|line| line.trim_end_matches('!').to_owned())
        };
        Ok(Self { mapping: last("Mapping"), filtering: last("Filtering") })
    }

    /// The same as WireKube's `natType`.
    fn nat_type(&self) -> Option<&'static str> {
        let (mapping, filtering) = (self.mapping.as_deref()?, self.filtering.as_deref()?);
        Some(if mapping.starts_with("No NAT") {
            "open"
        } else if !mapping.contains("Endpoint Independent") {
            "symmetric"
        } else if filtering.contains("Port Dependent") {
            "port-restricted-cone"
        } else {
            "cone"
        })
    }
}

/// Compares what the client says behind each kind of NAT with the `natType` of the node there, as a table in Markdown.
pub(crate) fn compare(world: &World, places: &[Place]) -> Result<String> {
    let server = Server::start(world)?;
    testbed_lab::eventually(crate::nat::TIMEOUT, || {
        server.host.shell(&format!("timeout 2 turnutils_stunclient {}", server.addresses[0])).map(drop)
    })?;
    let mut kinds: Vec<&Place> = Vec::new();
    for place in places {
        if !kinds.iter().any(|known| known.kind.name == place.kind.name) {
            kinds.push(place);
        }
    }
    let asked: Vec<Result<Behaviour>> = std::thread::scope(|scope| {
        let server = &server.addresses[0];
        let asking: Vec<_> = kinds
            .iter()
            .map(|place| scope.spawn(|| Behaviour::ask(&node(world, place.node).host, server)))
            .collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut table =
        "| | natType | turnutils_natdiscovery: mapping | filtering |\n|---|---|---|---|\n".to_owned();
    let mut differing = Vec::new();
    for (place, behaviour) in kinds.into_iter().zip(asked) {
        let (name, behaviour) = (place.kind.name, behaviour?);
        let status = node(world, place.node).status()?;
        let ours = status["natType"].as_str().unwrap_or_default();
        let said = |text: &Option<String>| text.clone().unwrap_or_else(|| "no answer".to_owned());
        table +=
            &format!("| {name} | {ours} | {} | {} |\n", said(&behaviour.mapping), said(&behaviour.filtering));
        if behaviour.nat_type().unwrap_or_default() != ours {
            differing.push(name);
        }
    }
    ensure!(differing.is_empty(), "{differing:?} differ:\n{table}");
    Ok(table)
}

//! Traffic from a client pod by way of a gateway to a server: through the tunnel of one of our gateways, and by plain routing through one
//! that only translates addresses.
//!
//! ```text
//! client ---------+          +-- gateway
//! plain client ---+- router -+-- plain gateway
//!                      |
//!                    server (has routes to the gateways' addresses only)
//! ```
//!
//! Packets of both ways pass the same links and namespaces in the same order; the router sends those of the plain client to the plain
//! gateway.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fairlead_address::IpFamily;
use tempfile::TempDir;
use testbed_lab::{Lab, Namespace, Process};

use super::flow::{self, Flow, Load, Sample};
use super::{End, Extent, OURS, in_turns, repeated};
use crate::report::Measurement;

const PLAIN: &str = "routed SNAT";
const TIMEOUT: Duration = Duration::from_secs(20);
/// MTU of the pods' links in bytes, as the node program has it on a network of 1500 with a mesh.
const MTU: u32 = 1450;

pub(super) const FLOWS: [Flow; 5] = [
    Flow { family: IpFamily::V4, load: Load::Tcp(1) },
    Flow { family: IpFamily::V4, load: Load::Tcp(4) },
    Flow { family: IpFamily::V4, load: Load::Tcp(16) },
    Flow { family: IpFamily::V4, load: Load::Udp },
    Flow { family: IpFamily::V6, load: Load::Tcp(4) },
];

/// A pod, and its addresses.
#[derive(Debug, Clone, Copy)]
struct Pod {
    name: &'static str,
    addresses: [&'static str; 2],
}

const CLIENT: Pod = Pod { name: "client", addresses: ["10.20.30.40", "fd00:20::40"] };
const PLAIN_CLIENT: Pod = Pod { name: "plainclient", addresses: ["10.20.30.41", "fd00:20::41"] };
const GATEWAY: Pod = Pod { name: "gateway", addresses: ["10.20.50.1", "fd00:50::1"] };
const PLAIN_GATEWAY: Pod = Pod { name: "plaingateway", addresses: ["10.20.50.2", "fd00:50::2"] };
const SERVICE: [&str; 2] = ["10.68.12.49", "fd00:68::49"];
const SERVER: [&str; 2] = ["203.0.113.10", "2001:db8:113::10"];

pub(super) fn run(extent: Extent) -> Result<Vec<Measurement>> {
    let lab = Lab::new()?;
    let bed = Bed::new(&lab)?;
    let mut measurements = Vec::new();
    for flow in FLOWS {
        // Not counted: neighbours, flows and buffers that are made on first use.
        for subject in [0, 1] {
            repeated(|| bed.transfer(subject, flow, 1), &format!("{flow}, first transfer"));
        }
        measurements.extend(in_turns([OURS, PLAIN], flow, extent, |subject| {
            bed.transfer(subject, flow, extent.seconds)
        })?);
    }
    Ok(measurements)
}

struct Bed {
    /// The client of our gateway, and of the plain one.
    clients: [Namespace; 2],
    _server: Process,
    _outputs: TempDir,
}

impl Bed {
    fn new(lab: &Lab) -> Result<Self> {
        let router = lab.bare_namespace("router")?;
        router.shell(HOST)?;
        router.shell("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")?;
        let pod = |of: Pod| pod(lab, &router, of);
        let (client, plain_client) = (pod(CLIENT)?, pod(PLAIN_CLIENT)?);
        let (gateway, plain_gateway) = (pod(GATEWAY)?, pod(PLAIN_GATEWAY)?);
        let server = server(lab, &router)?;
        let [ipv4, ipv6] = PLAIN_GATEWAY.addresses;
        router.shell(&format!(
            "ip route add default via {ipv4} dev plaingateway table 200 onlink
             ip -6 route add default via {ipv6} dev plaingateway table 200 onlink
             ip rule add iif plainclient lookup 200 pref 100; ip -6 rule add iif plainclient lookup 200 pref 100"
        ))?;
        plain_gateway.shell(&format!(
            "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
             nft 'table inet plain {{
                 chain leaving {{ type nat hook postrouting priority srcnat;
                     oifname eth0 ip saddr != {ipv4} masquerade
                     oifname eth0 ip6 saddr != {ipv6} masquerade
                 }}
             }}'"
        ))?;
        let (own, service) = (addresses(GATEWAY.addresses)?, addresses(SERVICE)?);
        let pod = addresses(CLIENT.addresses)?;
        set_up(&gateway, &End::Gateway { own, client: pod })?;
        set_up(&client, &End::Client { own: pod, service, gateway: own })?;
        let outputs = tempfile::tempdir().context("cannot create a directory for outputs")?;
        let mut command = Command::new("iperf3");
        command.args(["--server", "--forceflush"]);
        let mut process = server.spawn(&mut command, outputs.path().join("server"))?;
        process.wait_for_output("Server listening", TIMEOUT)?;
        Ok(Self { clients: [client, plain_client], _server: process, _outputs: outputs })
    }

    /// Sends from a client to the server.
    fn transfer(&self, subject: usize, flow: Flow, seconds: usize) -> Result<Sample> {
        let [ipv4, ipv6] = SERVER;
        let server = if flow.family == IpFamily::V4 { ipv4 } else { ipv6 };
        let client = self.clients.get(subject).context("there are two subjects")?;
        flow::parse(&client.shell(&flow::script(flow, server, seconds))?)
    }
}

const HOST: &str = "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
    sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0";

fn pod(lab: &Lab, router: &Namespace, pod: Pod) -> Result<Namespace> {
    let Pod { name, addresses: [ipv4, ipv6] } = pod;
    let namespace = lab.bare_namespace(name)?;
    namespace.shell(HOST)?;
    namespace.shell(&format!(
        "ip link add eth0 mtu {MTU} type veth peer name {name} mtu {MTU} netns {}
         ip link set eth0 up
         ip addr add {ipv4}/32 dev eth0; ip addr add {ipv6}/128 dev eth0 nodad",
        router.holder_pid()
    ))?;
    router.shell(&format!(
        "ip link set {name} up; ip addr add fe80::1/64 dev {name} nodad; ip addr add 169.254.1.1/32 dev {name}
         ip route add {ipv4}/32 dev {name}; ip -6 route add {ipv6}/128 dev {name}"
    ))?;
    namespace.shell(
        "ip route add 169.254.1.1 dev eth0; ip route add default via 169.254.1.1 dev eth0
         ip -6 route add default via fe80::1 dev eth0",
    )?;
    Ok(namespace)
}

fn server(lab: &Lab, router: &Namespace) -> Result<Namespace> {
    let namespace = lab.bare_namespace("server")?;
    namespace.shell(HOST)?;
    let [ipv4, ipv6] = SERVER;
    namespace.shell(&format!(
        "ip link add eth0 type veth peer name server netns {}
         ip link set eth0 up; ip addr add {ipv4}/24 dev eth0; ip addr add {ipv6}/64 dev eth0 nodad
         ip route add 10.20.50.0/24 via 203.0.113.1; ip -6 route add fd00:50::/64 via 2001:db8:113::1",
        router.holder_pid()
    ))?;
    router.shell(
        "ip link set server up; ip addr add 203.0.113.1/24 dev server
         ip addr add 2001:db8:113::1/64 dev server nodad",
    )?;
    Ok(namespace)
}

fn addresses(texts: [&str; 2]) -> Result<[std::net::IpAddr; 2]> {
    let [ipv4, ipv6] = texts;
    Ok([ipv4.parse()?, ipv6.parse()?])
}

/// Sets up an end in a namespace of the lab.
fn set_up(namespace: &Namespace, end: &End) -> Result<()> {
    namespace.run(|| end.set_up())?.with_context(|| format!("cannot set up {}", namespace.name()))?;
    ensure!(!namespace.shell("ip -br link | grep fou")?.is_empty(), "{} has no tunnel", namespace.name());
    Ok(())
}

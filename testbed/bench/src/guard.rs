//! Cost of what keeps packets in the mesh: packets that a node forwards and sends, with the table `inet fairlead_guard`, the rules 100 to 105
//! and their tables, and without them, in turns.
//!
//! ```text
//! pod --- node --- member (a veth pair in the place of the WireGuard device; all else is what the node program makes)
//!          |
//!        uplink
//! ```
//!
//! One thread sends short datagrams as fast as it can, and the kernel takes each of them through the node before the call returns. They are
//! counted where they arrive, and dropped there at once.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_address::IpFamily;
use fairlead_api::names::{
    NFT_TABLE_GUARD, RULE_PRIORITIES_MESH_GUARD, TABLE_MESH_GUARD, TABLE_PODS, TABLES_MESH_GUARD,
};
use fairlead_dataplane::mesh::{Applier, Bypass, MeshState, OwnSource};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use testbed_lab::{Lab, Namespace};

use crate::cpu;
use crate::egress::{Extent, repeated};
use crate::report::Measurement;
use crate::{Options, progress};

pub(crate) const CASE: &str = "guard";
const OURS: &str = "fairlead";
const WITHOUT: &str = "no guard";
/// Other members of the mesh without options, and at most.
const MEMBERS: usize = 1_000;
const MOST_MEMBERS: u16 = 10_000;
/// Rounds and seconds without options.
const FULL: Extent = Extent { rounds: 11, seconds: 1 };
/// The kernel frees what was deleted in the background; that must not fall into the next sample.
const REST: Duration = Duration::from_millis(100);
const WARM_UP: Duration = Duration::from_millis(200);
/// The discard port (RFC 863).
const PORT: u16 = 9;
/// Bytes of payload.
const LENGTH: usize = 64;
/// Datagrams between two looks at the clock.
const BURST: usize = 64;
const DEVICE: &str = "mesh0";
const UPLINK: &str = "up0";
/// Addresses of the node and of the pod, of the node on its uplink and of the router there, in IPv4 and IPv6.
const GATEWAY: [&str; 2] = ["10.200.0.1", "fd00:c8::1"];
const POD: [&str; 2] = ["10.200.0.2", "fd00:c8::2"];
const NODE: [&str; 2] = ["192.0.2.1", "2001:db8:2::1"];
const ROUTER: [&str; 2] = ["192.0.2.2", "2001:db8:2::2"];
/// Pods of the first member, and hosts outside of the mesh.
const IN_MESH: [&str; 2] = ["10.64.0.9", "fd00:64::9"];
const OUTSIDE: [&str; 2] = ["198.51.100.9", "2001:db8:9::9"];

/// Way of a packet through the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From a pod to a pod of another node.
    Forwarded,
    /// From a pod to a host outside of the mesh: of all packets, most rules look at these.
    ForwardedPast,
    /// From the node to a pod of another node.
    Sent,
}

/// Kind of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flow {
    way: Way,
    family: IpFamily,
}

const FLOWS: [Flow; 6] = [
    Flow { way: Way::Forwarded, family: IpFamily::V4 },
    Flow { way: Way::Forwarded, family: IpFamily::V6 },
    Flow { way: Way::ForwardedPast, family: IpFamily::V4 },
    Flow { way: Way::ForwardedPast, family: IpFamily::V6 },
    Flow { way: Way::Sent, family: IpFamily::V4 },
    Flow { way: Way::Sent, family: IpFamily::V6 },
];

impl fmt::Display for Flow {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::Forwarded => "forwarded into the mesh",
            Way::ForwardedPast => "forwarded past the mesh",
            Way::Sent => "sent into the mesh",
        };
        write!(out, "{way}, {}", if self.family == IpFamily::V4 { "IPv4" } else { "IPv6" })
    }
}

/// Packets that arrived, and what that took.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    packets: f64,
    seconds: f64,
    /// Time of all processors of the machine.
    cpu_seconds: f64,
}

impl Sample {
    fn packets_per_second(&self) -> f64 {
        self.packets / self.seconds
    }

    fn nanoseconds_per_packet(&self) -> f64 {
        self.cpu_seconds * 1e9 / self.packets
    }
}

pub(crate) fn run(options: Options) -> Result<Vec<Measurement>> {
    measure(options.peers.unwrap_or(MEMBERS), Extent::of(options, FULL))
}

fn measure(members: usize, extent: Extent) -> Result<Vec<Measurement>> {
    let lab = Lab::new()?;
    let bed = Bed::new(&lab, members)?;
    let mut measurements = Vec::new();
    for flow in FLOWS {
        bed.set_guard(true)?;
        // Not counted: neighbours that are found.
        repeated(|| bed.transfer(flow, WARM_UP), &format!("{flow}, first packets"));
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for round in 1..=extent.rounds {
            let what = format!("{flow}, round {round} of {}", extent.rounds);
            let Some([ours, peer]) = repeated(|| bed.one_round(flow, round, extent.seconds), &what) else {
                continue;
            };
            for (subject, sample) in [(OURS, ours), (WITHOUT, peer)] {
                let (rate, cost) = (sample.packets_per_second(), sample.nanoseconds_per_packet());
                progress(&format!("    {what}, {subject}: {rate:.0} packets/s, {cost:.0} ns of CPU each"));
            }
            with.push(ours);
            without.push(peer);
        }
        measurements.extend(rows(flow, &with, &without)?);
    }
    Ok(measurements)
}

fn rows(flow: Flow, with: &[Sample], without: &[Sample]) -> Result<Vec<Measurement>> {
    let mut rows = Vec::new();
    for (metric, unit, value) in [
        (format!("{flow}"), "packets/s", Sample::packets_per_second as fn(&Sample) -> f64),
        (format!("{flow}, CPU"), "ns/packet", Sample::nanoseconds_per_packet),
    ] {
        let values = |samples: &[Sample]| samples.iter().map(value).collect();
        rows.push(Measurement::new(CASE, OURS, &metric, unit, values(with))?.against(WITHOUT));
        rows.push(Measurement::new(CASE, WITHOUT, &metric, unit, values(without))?);
    }
    Ok(rows)
}

struct Bed {
    pod: Namespace,
    node: Namespace,
    member: Namespace,
    uplink: Namespace,
    state: MeshState,
}

impl Bed {
    fn new(lab: &Lab, members: usize) -> Result<Self> {
        let bed = Self {
            pod: lab.bare_namespace("pod")?,
            node: lab.bare_namespace("node")?,
            member: lab.bare_namespace("member")?,
            uplink: lab.bare_namespace("uplink")?,
            state: state(members)?,
        };
        bed.node.shell(
            "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0 \
             net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
        )?;
        bed.join(&bed.pod, "pod0", Some((GATEWAY, POD)))?;
        bed.join(&bed.member, DEVICE, None)?;
        bed.join(&bed.uplink, UPLINK, Some((NODE, ROUTER)))?;
        let ([gateway4, gateway6], [router4, router6]) = (GATEWAY, ROUTER);
        bed.pod
            .shell(&format!("ip route add default via {gateway4}; ip -6 route add default via {gateway6}"))?;
        let [pod4, pod6] = POD;
        bed.node.shell(&format!(
            "ip route add default via {router4}; ip -6 route add default via {router6}
             ip route add {pod4} dev pod0 table {TABLE_PODS}; ip -6 route add {pod6} dev pod0 table {TABLE_PODS}"
        ))?;
        // A mesh device has no neighbours to ask; a veth has.
        let mac = bed.member.shell("cat /sys/class/net/eth0/address")?;
        for address in IN_MESH {
            let neighbour =
                format!("ip neigh replace {address} lladdr {} dev {DEVICE} nud permanent", mac.trim());
            bed.node.shell(&neighbour)?;
        }
        for end in [&bed.member, &bed.uplink] {
            end.shell(&format!(
                "nft 'table netdev count {{ chain in {{ type filter hook ingress device eth0 priority 0; \
                 udp dport {PORT} counter drop; }}; }}'"
            ))?;
        }
        Ok(bed)
    }

    /// Joins a namespace with the node by a link of this name, with addresses of the node and of the namespace.
    fn join(&self, other: &Namespace, link: &str, addresses: Option<([&str; 2], [&str; 2])>) -> Result<()> {
        let pid = self.node.holder_pid();
        other.shell(&format!(
            "ip link add eth0 type veth peer name {link} netns {pid}; ip link set eth0 up"
        ))?;
        self.node.shell(&format!("ip link set {link} up"))?;
        if let Some((own, its)) = addresses {
            for (namespace, link, [ipv4, ipv6]) in [(&self.node, link, own), (other, "eth0", its)] {
                namespace.shell(&format!(
                    "ip addr add {ipv4}/24 dev {link}; ip addr add {ipv6}/64 dev {link} nodad"
                ))?;
            }
        }
        Ok(())
    }

    /// One sample with the guard and one without; the order alternates.
    fn one_round(&self, flow: Flow, round: usize, seconds: usize) -> Result<[Sample; 2]> {
        let duration = Duration::from_secs(u64::try_from(seconds)?);
        let sample = |has_guard| {
            self.set_guard(has_guard)?;
            self.transfer(flow, duration)
        };
        if round.is_multiple_of(2) {
            let without = sample(false)?;
            return Ok([sample(true)?, without]);
        }
        Ok([sample(true)?, sample(false)?])
    }

    /// Makes the whole mesh, or takes the guard away from it.
    fn set_guard(&self, is_wanted: bool) -> Result<()> {
        if is_wanted {
            let applied = self.node.run(|| Applier::beside_pods(TABLE_PODS).apply(&self.state))?;
            applied.context("cannot make the mesh")?;
        } else {
            self.node.shell(&without_guard())?;
        }
        thread::sleep(REST);
        let rules = self.node.shell("ip rule; ip -6 rule")?;
        let tables = self.node.shell("nft list tables")?;
        let is_there =
            [rules.contains(&format!("lookup {TABLE_MESH_GUARD}")), tables.contains(NFT_TABLE_GUARD)];
        ensure!(is_there == [is_wanted; 2], "the guard should be there: {is_wanted}; it is: {rules}{tables}");
        Ok(())
    }

    /// Sends for a while, and counts what arrives.
    fn transfer(&self, flow: Flow, duration: Duration) -> Result<Sample> {
        let (from, end, to) = match flow.way {
            Way::Forwarded => (&self.pod, &self.member, IN_MESH),
            Way::ForwardedPast => (&self.pod, &self.uplink, OUTSIDE),
            Way::Sent => (&self.node, &self.member, IN_MESH),
        };
        let [ipv4, ipv6] = to;
        let address = if flow.family == IpFamily::V4 { ipv4 } else { ipv6 };
        let to = SocketAddr::new(address.parse()?, PORT);
        let packets = counted(end)?;
        let cpu = cpu::machine_seconds()?;
        let seconds = from.run(|| send(to, duration))??;
        let cpu_seconds = cpu::machine_seconds()? - cpu;
        let packets = counted(end)?.saturating_sub(packets) as f64;
        ensure!(packets > 0.0, "no packet arrived");
        ensure!(cpu_seconds > 0.0, "that was too short to measure its CPU time");
        Ok(Sample { packets, seconds, cpu_seconds })
    }
}

/// Packets that have arrived in a namespace.
fn counted(end: &Namespace) -> Result<u64> {
    let rules = end.shell("nft list table netdev count")?;
    let packets = rules.split("packets ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
    packets.with_context(|| format!("no counter in {rules:?}"))
}

/// Sends until the time has passed, and returns how many seconds that were.
fn send(to: SocketAddr, duration: Duration) -> Result<f64> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).context("cannot open a socket")?;
    socket.connect(to).with_context(|| format!("no route to {to}"))?;
    let start = Instant::now();
    while start.elapsed() < duration {
        for _ in 0..BURST {
            // A full queue is no failure: what arrives is counted.
            let _ = socket.send(&[0; LENGTH]);
        }
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Shell script that deletes the guard's table, rules and routes.
fn without_guard() -> String {
    let priorities: Vec<String> = RULE_PRIORITIES_MESH_GUARD.map(|priority| priority.to_string()).collect();
    let tables = TABLES_MESH_GUARD.map(|table| table.to_string());
    format!(
        "nft delete table inet {NFT_TABLE_GUARD} 2>/dev/null || true
         for family in -4 -6; do
             for priority in {}; do while ip $family rule del pref $priority 2>/dev/null; do :; done; done
             for table in {}; do ip $family route flush table $table 2>/dev/null || true; done
         done",
        priorities.join(" "),
        tables.join(" ")
    )
}

/// A mesh with so many other members, each of which has a node and pods in both families.
fn state(members: usize) -> Result<MeshState> {
    let members = u16::try_from(members).ok().filter(|members| (1..=MOST_MEMBERS).contains(members));
    let members = members.with_context(|| format!("guard has 1 to {MOST_MEMBERS} peers"))?;
    let (mut targets_v4, mut targets_v6, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..members {
        let Member { pods: (pods4, pods6), node: (node4, node6) } = member(number)?;
        targets_v4.extend([IpNet::from(pods4), IpNet::from(IpAddr::from(node4))]);
        targets_v6.extend([IpNet::from(pods6), IpNet::from(IpAddr::from(node6))]);
        nodes.extend([IpAddr::from(node4), IpAddr::from(node6)]);
    }
    let sources: Vec<IpAddr> =
        NODE.iter().map(|address| address.parse::<IpAddr>()).collect::<Result<_, _>>()?;
    let pods = ["10.200.0.0/24", "fd00:c8::/64"].map(str::parse::<IpNet>);
    let own = sources.iter().map(|address| Ok(IpNet::from(*address))).chain(pods);
    Ok(MeshState {
        interface: DEVICE.to_owned(),
        mtu: 1420,
        addresses: Vec::new(),
        targets_v4,
        targets_v6,
        bypass: Bypass {
            servers: vec![SocketAddr::new("192.0.2.7".parse()?, 6443)],
            nodes,
            own: own.collect::<Result<_, _>>()?,
            ..Bypass::default()
        },
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: Vec::new(),
        without_default: Vec::new(),
        listen_port: 51820,
        sources: sources.into_iter().map(|address| OwnSource { address, is_on_host: true }).collect(),
        uplinks: vec![UPLINK.to_owned()],
    })
}

/// Prefixes and addresses of another node, none beside those of another one.
struct Member {
    pods: (Ipv4Net, Ipv6Net),
    node: (Ipv4Addr, Ipv6Addr),
}

fn member(number: u16) -> Result<Member> {
    let step = number * 2;
    let ipv4 = |base: [u8; 4], step: u32| Ipv4Addr::from_bits(Ipv4Addr::from(base).to_bits() + step);
    let pods4 = Ipv4Net::new(ipv4([10, 64, 0, 0], u32::from(step) * 256), 24)?;
    let pods6 = Ipv6Net::new(Ipv6Addr::from([0xfd00, 0x64, step, 0, 0, 0, 0, 0]), 64)?;
    let node = (ipv4([100, 64, 0, 0], u32::from(step)), Ipv6Addr::from([0xfd00, 0x65, 0, 0, 0, 0, 0, step]));
    Ok(Member { pods: (pods4, pods6), node })
}

#[cfg(test)]
mod tests {
    use fairlead_address::IntervalSet;

    use super::*;

    #[test]
    fn no_prefix_of_a_member_can_be_merged_with_another() {
        let state = state(usize::from(MOST_MEMBERS)).unwrap();
        for (family, targets) in [(IpFamily::V4, &state.targets_v4), (IpFamily::V6, &state.targets_v6)] {
            let set = IntervalSet::from_prefixes(family, targets);
            assert_eq!(set.len(), targets.len());
        }
        let is_target = |address: &str| {
            let address: IpAddr = address.parse().unwrap();
            state.targets_v4.iter().chain(&state.targets_v6).any(|target| target.contains(&address))
        };
        assert_eq!(IN_MESH.map(is_target), [true; 2]);
        for others in [POD, NODE, ROUTER, OUTSIDE] {
            assert_eq!(others.map(is_target), [false; 2], "{others:?}");
        }
        assert!(super::state(0).is_err() && super::state(usize::from(MOST_MEMBERS) + 1).is_err());
    }

    #[test]
    fn the_figure_with_the_guard_is_divided_by_the_one_without() {
        let sample = |packets| Sample { packets, seconds: 2.0, cpu_seconds: 2.5 };
        let rows = rows(FLOWS[0], &[sample(800_000.0)], &[sample(1_000_000.0)]).unwrap();
        let shown: Vec<_> =
            rows.iter().map(|row| (row.metric.as_str(), row.subject, row.value, row.peer)).collect();
        assert_eq!(
            shown,
            [
                ("forwarded into the mesh, IPv4", OURS, 400_000.0, Some(WITHOUT)),
                ("forwarded into the mesh, IPv4", WITHOUT, 500_000.0, None),
                ("forwarded into the mesh, IPv4, CPU", OURS, 3125.0, Some(WITHOUT)),
                ("forwarded into the mesh, IPv4, CPU", WITHOUT, 2500.0, None),
            ]
        );
    }

    /// A debug build is used, whose figures say nothing.
    #[test]
    fn packets_take_each_way_with_the_guard_and_without() {
        let measurements = measure(20, Extent { rounds: 1, seconds: 1 }).unwrap();
        println!("{}", crate::report::table(&measurements));
        assert_eq!(measurements.len(), 4 * FLOWS.len());
        assert!(measurements.iter().all(|measurement| measurement.value > 0.0));
    }
}

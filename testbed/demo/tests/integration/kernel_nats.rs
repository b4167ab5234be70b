//! Paths of the kernel's WireGuard through pairs of NATs: two nodes in VMs, among each other and with nodes that have the embedded
//! WireGuard, one of each kind. All nodes start at the same moment, several times, with routers and kernels that have forgotten everything.
//! Prints for each pair how long it took beside the goal, and what was lost. Nothing is fake but the kubelet. `cargo xtask test demo --
//! --ignored kernel_s_wireguard` runs it; `FAIRLEAD_KERNEL_ROUNDS` says how often all start (3).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fairlead_demo::judge::{count_tunnel_packets, counted_tunnel_packets};
use fairlead_demo::node::Node;
use fairlead_demo::times::{Course, PairTimes, courses};
use fairlead_demo::topology::{self, SitePlan};
use fairlead_demo::vm_node::VmNode;
use fairlead_demo::vm_pings::VmPings;
use fairlead_demo::{World, servers};
use serde_json::{Value, json};
use testbed_lab::relay::{Relay, TOKEN};
use testbed_lab::{Host, Ipv6, Nat, NatSite, Process, Progress, eventually};

/// Only bounds a test that would hang; everything in the VMs is emulated and slow.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Asking a VM takes its processors from what it is asked for.
const PAUSE: Duration = Duration::from_secs(1);
/// Time afterwards for which all stays as it is.
const AFTERWARDS: Duration = Duration::from_secs(3);
const PING: Duration = Duration::from_millis(100);
const FAST_PING: Duration = Duration::from_millis(50);
/// Times of the embedded WireGuard on a kernel that is not emulated, in seconds, and the factor by which emulated machines may take longer:
/// until the first packet is answered, until half of the pairs with a direct path use it, until all do, until all that need a birthday
/// attempt do, and until traffic is back after its path has failed. Only printed: other programs may have the processors.
const FIRST: f64 = 0.3;
const HALF_DIRECT: f64 = 0.5;
const ALL_DIRECT: f64 = 2.0;
const BIRTHDAY: f64 = 5.0;
const OTHER_PATH: f64 = 1.5;
const EMULATED: f64 = 3.0;
/// The NATs of the two VMs, one pair after the other.
const PAIRS: [[Kind; 2]; 4] = [
    [Kind::Open, Kind::Port],
    [Kind::Port, Kind::Port],
    [Kind::Symmetric, Kind::Port],
    [Kind::Symmetric, Kind::Symmetric],
];
/// The nodes with the embedded WireGuard.
const EMBEDDED: [(&str, Kind); 3] =
    [("cloud-1", Kind::Open), ("hotel-1", Kind::Symmetric), ("office-1", Kind::Port)];

/// Kind of NAT in front of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Open,
    Port,
    Symmetric,
}

/// Expected way of packets between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Path {
    Birthday,
    Direct,
    Relay,
}

/// A node in a VM.
struct Machine {
    vm: VmNode,
    kind: Kind,
    site: NatSite,
    /// Address of the machine's pod.
    address: IpAddr,
}

/// One pair in one round.
struct Row {
    path: Path,
    pair: String,
    /// Time since both knew each other, until the first answer to a ping.
    first: Duration,
    times: PairTimes,
    lost: u64,
}

struct Bed {
    world: World,
    _servers: (Relay, [(Host, Process); 2]),
}

#[test]
#[ignore = "two emulated machines, four times: minutes of both cores: cargo xtask test soak"]
fn the_kernel_s_wireguard_gets_the_paths_that_its_nats_allow() {
    let rounds = std::env::var("FAIRLEAD_KERNEL_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap());
    let mut bed = Bed::start();
    let (mut rows, mut gaps) = (Vec::new(), Vec::new());
    for (number, kinds) in PAIRS.into_iter().enumerate() {
        let mut machines = bed.boot(number, kinds);
        for round in 1..=rounds {
            let of_round = bed.round(&mut machines);
            of_round.iter().for_each(|row| println!("round {round}: {row}"));
            rows.extend(of_round);
        }
        if kinds == [Kind::Port; 2] {
            gaps = bed.becomes_a_black_hole(&mut machines);
        }
        bed.leave(machines);
    }
    print_table(&rows);
    print_goals(&rows, &gaps);
    assert_eq!(gaps.len(), 2, "{gaps:?}");
}

impl Kind {
    fn site(self, world: &World, name: &str, number: usize) -> NatSite {
        let private = format!("192.168.{}.0/24", 20 + number);
        let (nat, lan) = match self {
            Self::Open => (Nat::None, format!("198.51.{}.0/24", 101 + number)),
            Self::Port => (Nat::PortRestricted, private),
            Self::Symmetric => (Nat::SymmetricRandom, private),
        };
        world.lab().nat_site(name, nat, lan.parse().unwrap()).unwrap()
    }

    fn path_to(self, other: Self) -> Path {
        match (self, other) {
            (Self::Open, _) | (_, Self::Open) | (Self::Port, Self::Port) => Path::Direct,
            (Self::Port, Self::Symmetric) | (Self::Symmetric, Self::Port) => Path::Birthday,
            (Self::Symmetric, Self::Symmetric) => Path::Relay,
        }
    }
}

impl Bed {
    fn start() -> Self {
        let mut topology = topology::two_sites();
        topology.sites.push(SitePlan {
            name: "hotel",
            nat: Nat::SymmetricRandom,
            lan: "10.0.0.0/24".parse().unwrap(),
            nodes: vec![Ipv4Addr::new(10, 0, 0, 20)],
            ipv6: Ipv6::Off,
            uplink_mtu: None,
            carrier: None,
        });
        let mut world = World::start(&topology, &Progress::default()).unwrap();
        let relay = servers::relay(&world).unwrap();
        let servers = ["stun-1", "stun-2"].map(|name| servers::stun_server(&world, name).unwrap());
        let stun = servers.each_ref().map(|(host, _)| format!("stun:{}", host.address()));
        world.apply_pool().unwrap();
        servers::apply_token(&world, TOKEN).unwrap();
        servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto"), "stunServers": stun })).unwrap();
        world.start_pods().unwrap();
        Self { world, _servers: (relay, servers) }
    }

    /// Two new nodes, with a pod each.
    fn boot(&self, number: usize, kinds: [Kind; 2]) -> [Machine; 2] {
        let [one, other] = kinds;
        let places = [(one, 2 * number, "a"), (other, 2 * number + 1, "b")];
        in_both(places, |(kind, index, letter)| {
            let name = format!("{letter}-{}", number + 1);
            let site = kind.site(&self.world, &name, index);
            let mut vm = VmNode::boot(&self.world, &site, &format!("{name}-vm"), "").unwrap();
            vm.start(TIMEOUT).unwrap();
            let pod = pod(&vm);
            let address = vm.start_pod(&self.world, &pod).unwrap()[0];
            Machine { vm, kind, site, address }
        })
    }

    /// All nodes start, with nothing that they, their kernels or their routers know of paths.
    fn round(&mut self, machines: &mut [Machine; 2]) -> Vec<Row> {
        self.forget(machines);
        let pings = self.pings(machines);
        self.start_all(machines);
        let settled = || {
            std::thread::sleep(PAUSE);
            self.is_settled(machines)
        };
        eventually(TIMEOUT, settled).unwrap();
        self.judge(machines);
        self.is_settled(machines).unwrap();
        let mut known: BTreeMap<String, BTreeMap<String, Course>> =
            self.world.nodes.iter().map(|node| (node.name.clone(), courses(node).unwrap())).collect();
        let behind = machines.each_mut().map(|machine| machine.vm.clock_behind().unwrap());
        for Machine { vm, .. } in machines.iter_mut() {
            known.insert(vm.node.name.clone(), vm.courses().unwrap());
        }
        let row = |(from, to, kind, pings): (usize, String, Kind, VmPings)| {
            let Machine { vm, kind: own, .. } = &mut machines[from];
            let answers = pings.end(vm).unwrap();
            let name = &vm.node.name;
            let times = PairTimes::of(known[name][&to], known[&to][name]);
            let answered = answers.first().unwrap().checked_add(behind[from]).unwrap();
            let first = Duration::try_from(answered.duration_since(times.known)).unwrap_or_default();
            let backend = if to.ends_with("-vm") { "kernel" } else { "embedded" };
            let pair = format!("kernel {own} × {backend} {kind}");
            Row { path: own.path_to(kind), pair, first, times, lost: answers.lost().unwrap() }
        };
        pings.into_iter().map(row).collect()
    }

    fn node(&self, name: &str) -> Result<&Node> {
        self.world.nodes.iter().find(|node| node.name == name).with_context(|| format!("no node {name}"))
    }

    fn forget(&mut self, machines: &mut [Machine; 2]) {
        self.world.nodes.iter_mut().for_each(|node| node.kill().unwrap());
        for Machine { vm, .. } in machines.iter_mut() {
            vm.kill().unwrap();
            vm.shell("ip link delete wire_kube\nnft flush ruleset\nconntrack -F 2>/dev/null || true")
                .unwrap();
        }
        let sites = machines.iter().map(|machine| &machine.site).chain(&self.world.sites);
        sites.for_each(|site| site.router().lose_mappings().unwrap());
    }

    fn pod_of(&self, node: &str) -> IpAddr {
        self.world.pods.iter().find(|pod| pod.node == node).unwrap().addresses[0]
    }

    /// Pings from the first VM to the second, and from both to all other nodes.
    fn pings(&self, machines: &mut [Machine; 2]) -> Vec<(usize, String, Kind, VmPings)> {
        let second = (machines[1].vm.node.name.clone(), machines[1].kind, machines[1].address);
        let others = EMBEDDED.map(|(name, kind)| (name.to_owned(), kind, self.pod_of(name)));
        let from_both = [0, 1].into_iter().flat_map(|from| others.iter().map(move |to| (from, to)));
        let start = |(from, (name, kind, address)): (usize, &(String, Kind, IpAddr))| {
            let vm = &mut machines[from].vm;
            let inside = pod(vm);
            (from, name.clone(), *kind, VmPings::start(vm, &inside, *address, PING).unwrap())
        };
        std::iter::once((0, &second)).chain(from_both).map(start).collect()
    }

    fn start_all(&mut self, machines: &mut [Machine; 2]) {
        std::thread::scope(|scope| {
            for Machine { vm, .. } in machines {
                scope.spawn(move || vm.start(TIMEOUT).unwrap());
            }
            for node in &mut self.world.nodes {
                scope.spawn(move || {
                    node.start().unwrap();
                    node.wait_ready(TIMEOUT).unwrap();
                });
            }
        });
    }

    /// Both ends of all pairs use the path that they should.
    fn is_settled(&self, machines: &mut [Machine; 2]) -> Result<()> {
        let ends = machines.each_ref().map(|machine| (machine.vm.node.name.clone(), machine.kind));
        for (machine, (other, other_kind)) in machines.iter_mut().zip(ends.iter().rev()) {
            let status = machine.vm.status()?;
            ensure!(status["wireguard"] == "kernel" && has_no_problems(&status), "{status:#}");
            EMBEDDED.iter().try_for_each(|(name, kind)| uses(&status, name, machine.kind.path_to(*kind)))?;
            uses(&status, other, machine.kind.path_to(*other_kind))?;
            pins_ports(machine, *other_kind)?;
        }
        for (name, kind) in EMBEDDED {
            let status = self.node(name)?.status()?;
            ends.iter().try_for_each(|(vm, other)| uses(&status, vm, kind.path_to(*other)))?;
        }
        Ok(())
    }

    /// WireGuard's packets pass directly between the VMs' networks, or none does.
    fn judge(&self, machines: &[Machine; 2]) {
        let [a, b] = machines.each_ref().map(|machine| machine.vm.node.public_address());
        count_tunnel_packets(&self.world, a, b).unwrap();
        std::thread::sleep(AFTERWARDS);
        let counted = counted_tunnel_packets(&self.world).unwrap();
        self.world.lab().internet().shell("nft delete table ip judge").unwrap();
        let is_direct = machines[0].kind.path_to(machines[1].kind) != Path::Relay;
        assert!(counted.len() == 2 && counted.iter().all(|count| (*count > 0) == is_direct), "{counted:?}");
    }

    /// Nothing passes any more between the first VM and two others, but by way of the relay. How long nothing arrived, in seconds.
    fn becomes_a_black_hole(&self, machines: &mut [Machine; 2]) -> Vec<(String, f64)> {
        let office = self.node("office-1").unwrap().public_address();
        let [a, b] = machines.each_ref().map(|machine| machine.vm.node.public_address());
        let to = [
            ("office-1".to_owned(), self.pod_of("office-1")),
            (machines[1].vm.node.name.clone(), machines[1].address),
        ];
        let vm = &mut machines[0].vm;
        let inside = pod(vm);
        let pings = to.map(|(name, to)| (name, VmPings::start(vm, &inside, to, FAST_PING).unwrap()));
        answered(vm, &pings, 60);
        let internet = self.world.lab().internet();
        let all = format!("{{ {a}, {b}, {office} }}");
        internet
            .shell(&format!(
                "nft -f - <<'END'\ntable inet hole {{ chain forward {{ type filter hook forward priority 0; \
                 ip saddr {all} ip daddr {all} drop; }}; }}\nEND"
            ))
            .unwrap();
        let relayed = || {
            let status = vm.status()?;
            pings.iter().try_for_each(|(name, _)| {
                let peer = peer(&status, name)?;
                ensure!(is_relayed(peer), "{peer:#}");
                Ok(())
            })
        };
        eventually(TIMEOUT, relayed).unwrap();
        answered(vm, &pings, 60);
        let ended = pings.map(|(name, pings)| (name, pings.end(vm).unwrap().longest_gap()));
        internet.shell("nft delete table inet hole").unwrap();
        ended.into()
    }

    /// Both VMs are gone, and the cluster has forgotten their nodes.
    fn leave(&self, machines: [Machine; 2]) {
        for Machine { vm, .. } in machines {
            let (name, pod) = (vm.node.name.clone(), pod(&vm));
            drop(vm);
            let kubectl = |arguments: &[&str]| self.world.plane.kubectl(arguments).map(drop).unwrap();
            kubectl(&["delete", "pod", "-n", "demo", &pod, "--force", "--grace-period=0"]);
            kubectl(&["delete", "node", &name]);
            kubectl(&["delete", "wirekubepeer", &name, "--ignore-not-found"]);
        }
    }
}

/// Waits until each was answered so many times more.
fn answered(vm: &mut VmNode, pings: &[(String, VmPings); 2], more: usize) {
    let count = |vm: &mut VmNode| -> Result<Vec<usize>> {
        pings.iter().map(|(_, pings)| Ok(pings.so_far(vm)?.count())).collect()
    };
    let before = count(vm).unwrap();
    let are_there = || {
        let now = count(vm)?;
        ensure!(now.iter().zip(&before).all(|(now, before)| now - before >= more), "{before:?} {now:?}");
        Ok(())
    };
    eventually(TIMEOUT, are_there).unwrap();
}

/// The ports of a symmetric NAT that birthday attempts found are pinned in the kernel, and no others.
fn pins_ports(machine: &mut Machine, other: Kind) -> Result<()> {
    let name = machine.vm.node.name.clone();
    // The node in the office is behind a port-restricted NAT, too.
    let of_symmetric = 1 + usize::from(other == Kind::Port);
    let wanted = if machine.kind == Kind::Symmetric { of_symmetric } else { 0 };
    let list = "nft -j list map inet fairlead_path_socket pinned_ports 2>/dev/null || echo '{}'";
    let shown: Value = serde_json::from_str(&machine.vm.shell(list)?)?;
    let maps = shown["nftables"].as_array().into_iter().flatten();
    let pinned = maps.filter_map(|it| it["map"]["elem"].as_array()).flatten().count();
    ensure!(pinned == wanted, "{name} pins {pinned} ports, not {wanted}: {shown}");
    Ok(())
}

fn peer<'a>(status: &'a Value, name: &str) -> Result<&'a Value> {
    let peers = status["peers"].as_array().context("no peers")?;
    peers.iter().find(|peer| peer["name"] == name).with_context(|| format!("no peer {name}"))
}

/// But for the blocks of nodes that have left, which the controller keeps for five minutes.
fn has_no_problems(status: &Value) -> bool {
    let is_of_the_left =
        |problem: &Value| problem.as_str().is_some_and(|text| text.contains("no WireKubePeer"));
    status["problems"].as_array().is_some_and(|problems| problems.iter().all(is_of_the_left))
}

fn is_relayed(peer: &Value) -> bool {
    peer["endpoint"].as_str().is_some_and(|endpoint| endpoint.contains("://"))
}

fn uses(status: &Value, name: &str, path: Path) -> Result<()> {
    let peer = peer(status, name)?;
    let is_so = match path {
        Path::Birthday | Path::Direct => !is_relayed(peer) && peer["roundTripSeconds"].as_f64().is_some(),
        Path::Relay => is_relayed(peer) && peer["relayReason"] == "both symmetric NAT",
    };
    ensure!(peer["state"] == "up" && is_so, "not {path}: {peer:#}");
    Ok(())
}

/// Name of the pod in a VM.
fn pod(vm: &VmNode) -> String {
    format!("in-{}", vm.node.name)
}

fn in_both<T: Send, U: Send>(each: [T; 2], work: impl Fn(T) -> U + Sync) -> [U; 2] {
    let work = &work;
    std::thread::scope(|scope| {
        let working = each.map(|it| scope.spawn(move || work(it)));
        working.map(|thread| thread.join().unwrap())
    })
}

/// Times until both ends of the pairs with such a path used it, in seconds, the shortest first. Where neither has left another path for it,
/// the session began there.
fn direct_times<'a>(rows: impl IntoIterator<Item = &'a Row>, path: Path) -> Vec<f64> {
    let of_path = rows.into_iter().filter(|row| row.path == path);
    let direct = |row: &Row| row.times.direct.or(row.times.session).unwrap().as_secs_f64();
    let mut times: Vec<f64> = of_path.map(direct).collect();
    times.sort_unstable_by(f64::total_cmp);
    times
}

/// Times until the first packet was answered, in seconds, the shortest first.
fn first_times<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Vec<f64> {
    let mut times: Vec<f64> = rows.into_iter().map(|row| row.first.as_secs_f64()).collect();
    times.sort_unstable_by(f64::total_cmp);
    times
}

/// Half of them are not longer, and none is.
fn half_and_all(times: &[f64]) -> (f64, f64) {
    (times[times.len() / 2], times[times.len() - 1])
}

/// A line for each kind of pair.
fn print_table(rows: &[Row]) {
    let mut pairs: BTreeMap<(Path, &str), Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|row| pairs.entry((row.path, &row.pair)).or_default().push(row));
    println!("| pair | path | times | first packet: median, longest | direct: median, longest | lost |");
    println!("|---|---|---|---|---|---|");
    for ((path, pair), rows) in pairs {
        let (count, lost) = (rows.len(), rows.iter().map(|row| row.lost).sum::<u64>());
        let (half, all) = half_and_all(&first_times(rows.iter().copied()));
        print!("| {pair} | {path} | {count} | {half:.2} s, {all:.2} s | ");
        if path != Path::Relay {
            let (half, all) = half_and_all(&direct_times(rows, path));
            print!("{half:.2} s, {all:.2} s ");
        }
        println!("| {lost} |");
    }
}

fn print_goals(rows: &[Row], gaps: &[(String, f64)]) {
    let goal = |what: &str, goal: f64, measured: f64| {
        println!("{what}: goal {:.1} s in an emulated machine, measured {measured:.2} s", goal * EMULATED);
    };
    let (half, all) = half_and_all(&first_times(rows));
    goal("first packet, half", FIRST, half);
    goal("first packet, all", FIRST, all);
    let (half, all) = half_and_all(&direct_times(rows, Path::Direct));
    goal("direct, half", HALF_DIRECT, half);
    goal("direct, all", ALL_DIRECT, all);
    goal("birthday attempt, all", BIRTHDAY, half_and_all(&direct_times(rows, Path::Birthday)).1);
    gaps.iter().for_each(|(peer, gap)| goal(&format!("black hole to {peer}"), OTHER_PATH, *gap));
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Port => "port",
            Self::Symmetric => "random",
        })
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Birthday => "direct, birthday attempt",
            Self::Direct => "direct",
            Self::Relay => "relay",
        })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, pair, first, times: PairTimes { session, direct, .. }, lost } = self;
        write!(
            f,
            "{pair}: {path}, first packet {first:.2?}, session {session:.2?}, direct {direct:.2?}, {lost} lost"
        )
    }
}

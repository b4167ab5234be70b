//! A mesh in which only gateways have tunnels between locations: three locations of three nodes each.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::clear_text;
use crate::outage::{TIMEOUT, gaps_are_within, loses_nothing, node, pod, resumes, tcp, udp};
use crate::site::{Beside, reached};
use anyhow::{Result, ensure};
use fairlead_demo::judge::counters;
use fairlead_demo::topology::Topology;
use fairlead_demo::{World, probe, topology};
use testbed_lab::traffic::Flow;
use testbed_lab::{NatSite, Progress, Router, eventually};

const LOCATIONS: [&str; 3] = ["cloud", "home", "farm"];
/// Bounds what takes no time, for a busy machine.
const WITHIN: Duration = Duration::from_secs(50);
/// Longest pause of packets while the granularity changes.
const PAUSE: Duration = Duration::from_secs(1);

fn set_granularity(world: &World, granularity: &str) {
    let patch = format!(r#"{{"spec": {{"topology": {{"granularity": "{granularity}"}}}}}}"#);
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
}

fn peers(world: &World, name: &str) -> Result<BTreeSet<String>> {
    let status = node(world, name).status()?;
    let peers = status["peers"].as_array().cloned().unwrap_or_default();
    Ok(peers.iter().filter_map(|peer| peer["name"].as_str().map(str::to_owned)).collect())
}

/// The first two of each location are gateways, or these two of a location.
fn has_gateways(world: &World, location: &str, gateways: [u8; 2]) -> Result<()> {
    let gateways_of = |other: &str| if other == location { gateways } else { [1, 2] };
    for own in LOCATIONS {
        for number in 1..=3 {
            let name = format!("{own}-{number}");
            let near = [1, 2, 3].map(|other| format!("{own}-{other}"));
            let mut expected: BTreeSet<String> = near.into_iter().filter(|other| *other != name).collect();
            if gateways_of(own).contains(&number) {
                let others = LOCATIONS.into_iter().filter(|other| *other != own);
                expected
                    .extend(others.flat_map(|other| gateways_of(other).map(|it| format!("{other}-{it}"))));
            }
            let found = peers(world, &name)?;
            ensure!(found == expected, "peers of {name}: {found:?}, not {expected:?}");
        }
    }
    Ok(())
}

fn all_pods_reach_each_other(world: &World) {
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// Three locations with a pod on every node, each of which reaches every other.
fn mesh() -> World {
    mesh_of(&topology::three_by_three())
}

fn mesh_of(topology: &Topology) -> World {
    let mut world = World::start(topology, &Progress::default()).unwrap();
    for location in LOCATIONS {
        let annotation = format!("kilo.squat.ai/location={location}");
        let [a, b, c] = [1, 2, 3].map(|number| format!("{location}-{number}"));
        world.plane.kubectl(&["annotate", "node", &a, &b, &c, &annotation]).unwrap();
    }
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    all_pods_reach_each_other(&world);
    world
}

/// Counts what a node sends to WireGuard ports of another location.
fn count_tunnels(world: &World, name: &str, prefix: &str) {
    let script = format!(
        "nft add table inet judge\n\
         nft 'add chain inet judge out {{ type filter hook postrouting priority 300; }}'\n\
         nft add rule inet judge out ip daddr {prefix} udp dport 51820 counter\n"
    );
    node(world, name).host.shell(&script).unwrap();
}

fn counted(world: &World, name: &str) -> u64 {
    let listed = node(world, name).host.shell("nft -j list chain inet judge out").unwrap();
    counters(&listed).unwrap().iter().sum()
}

fn flows(world: &World) -> [Flow; 5] {
    [
        udp(world, "cloud-3", "home-3"),
        tcp(world, "farm-3", "home-3"),
        udp(world, "farm-3", "cloud-3"),
        udp(world, "home-1", "cloud-3"),
        udp(world, "home-3", "home-2"),
    ]
}

#[test]
fn between_locations_packets_go_through_gateways() {
    let mut world = mesh();
    let flows = flows(&world);
    let (changed, from) = (Instant::now(), Instant::now());
    set_granularity(&world, "location");
    eventually(TIMEOUT, || has_gateways(&world, "", [1, 2])).unwrap();
    resumes("granularity: location", &flows, changed, from, WITHIN);
    gaps_are_within("granularity: location", &flows, changed, PAUSE);
    all_pods_reach_each_other(&world);

    count_tunnels(&world, "home-3", "198.51.100.0/24");
    count_tunnels(&world, "home-1", "198.51.100.0/24");
    let has_left_old_tunnels = || {
        let before = counted(&world, "home-3");
        std::thread::sleep(Duration::from_secs(3));
        let now = counted(&world, "home-3");
        ensure!(now == before, "home-3 sends to other locations itself: {before}, then {now}");
        Ok(())
    };
    let mark = Instant::now();
    eventually(TIMEOUT, has_left_old_tunnels).unwrap();
    loses_nothing("through gateways", &flows, mark);
    gaps_are_within("since granularity: location", &flows, changed, PAUSE);
    a_gateway_s_program_is_upgraded_and_killed(&mut world, &flows);

    // An administrator names a gateway: it and the first other one.
    let (mark, from) = (Instant::now(), Instant::now());
    world.plane.kubectl(&["annotate", "node", "home-3", "kilo.squat.ai/leader="]).unwrap();
    eventually(TIMEOUT, || has_gateways(&world, "home", [1, 3])).unwrap();
    resumes("another gateway", &flows, mark, from, WITHIN);
    all_pods_reach_each_other(&world);

    let (mark, from) = (Instant::now(), Instant::now());
    set_granularity(&world, "full");
    let is_full = || {
        let found = peers(&world, "home-3")?;
        ensure!(found.len() == 8, "{found:?}");
        Ok(())
    };
    eventually(TIMEOUT, is_full).unwrap();
    resumes("granularity: full", &flows, mark, from, WITHIN);
    gaps_are_within("granularity: full", &flows, mark, PAUSE);
    granularity_is_cross_for_a_while(&mut world, &flows);
}

/// Packets go through this gateway of home all the time.
fn a_gateway_s_program_is_upgraded_and_killed(world: &mut World, flows: &[Flow]) {
    let is_used = |world: &World| {
        let before = counted(world, "home-1");
        std::thread::sleep(Duration::from_secs(1));
        let sent = counted(world, "home-1").saturating_sub(before);
        println!("home-1 sends {sent} packets a second to the cloud");
        // Probes and requests are fewer.
        assert!(sent > 20, "{sent}");
    };
    is_used(world);
    let what = "a gateway's node program is upgraded";
    let mark = Instant::now();
    world.node("home-1").unwrap().upgrade(TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    loses_nothing(what, flows, mark);
    gaps_are_within(what, flows, mark, PAUSE);
    is_used(world);

    let what = "a gateway's node program is killed";
    let mark = Instant::now();
    let gateway = world.node("home-1").unwrap();
    gateway.kill().unwrap();
    gateway.start().unwrap();
    resumes(what, flows, mark, mark, WITHIN);
    world.node("home-1").unwrap().wait_ready(TIMEOUT).unwrap();
}

/// Whether packets to pods of the own location leave without the tunnel, everywhere, and those to another one do not.
fn are_plain(world: &World, plain: bool) -> Result<()> {
    let uses_tunnel = |from: &str, to: &str| {
        let to = pod(world, to).addresses[0];
        let way = node(world, from).host.shell(&format!("ip route get {to} mark 0x40"))?;
        anyhow::Ok(way.contains("dev wire_kube"))
    };
    for own in LOCATIONS {
        let [first, second, third] = [1, 2, 3].map(|number| format!("{own}-{number}"));
        for (from, to) in [(&first, &second), (&second, &third), (&third, &first)] {
            ensure!(uses_tunnel(from, to)? != plain, "{from} to {to} is not plain: {plain}");
        }
        for other in LOCATIONS.into_iter().filter(|other| *other != own) {
            ensure!(uses_tunnel(&third, &format!("{other}-3"))?, "{third} to {other}-3 has no tunnel");
        }
    }
    Ok(())
}

/// Changes the granularity from full to cross, and back.
fn granularity_is_cross_for_a_while(world: &mut World, flows: &[Flow]) {
    eventually(TIMEOUT, || are_plain(world, false)).unwrap();
    for (what, granularity, plain) in
        [("granularity: cross", "cross", true), ("granularity: full after cross", "full", false)]
    {
        let mark = Instant::now();
        set_granularity(world, granularity);
        eventually(TIMEOUT, || are_plain(world, plain)).unwrap();
        resumes(what, flows, mark, mark, WITHIN);
        loses_nothing(what, flows, mark);
        gaps_are_within(what, flows, mark, PAUSE);
        all_pods_reach_each_other(world);
        if plain {
            node_programs_are_replaced_and_one_is_killed(world, flows);
        }
    }
}

/// With granularity `cross`: at both ends of flows between locations, home-3 also at an end of one inside of its location.
fn node_programs_are_replaced_and_one_is_killed(world: &mut World, flows: &[Flow]) {
    for name in ["home-3", "cloud-3", "home-1"] {
        let what = format!("granularity: cross, the node program of {name} is upgraded");
        let mark = Instant::now();
        world.node(name).unwrap().upgrade(TIMEOUT).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        loses_nothing(&what, flows, mark);
        gaps_are_within(&what, flows, mark, PAUSE);
        are_plain(world, true).unwrap();
    }
    let what = "granularity: cross, the node program of home-3 is killed";
    let mark = Instant::now();
    let killed = world.node("home-3").unwrap();
    killed.kill().unwrap();
    killed.start().unwrap();
    resumes(what, flows, mark, mark, WITHIN);
    // These need no tunnel of home-3: the last one stays on the LAN.
    loses_nothing(what, &flows[2..], mark);
    world.node("home-3").unwrap().wait_ready(TIMEOUT).unwrap();
    eventually(TIMEOUT, || are_plain(world, true)).unwrap();
}

fn problems(world: &World, name: &str) -> Result<String> {
    Ok(node(world, name).status()?["problems"].to_string())
}

/// Gateways, and nodes that use them: of each other location and of the own one.
const HOME: (&str, [&str; 4]) = ("home-1", ["cloud-1", "cloud-2", "farm-2", "home-3"]);
const FARM: (&str, [&str; 4]) = ("farm-1", ["cloud-1", "cloud-2", "home-2", "farm-3"]);

/// Whether the nodes know that their gateway does not forward.
fn is_left(world: &World, (gateway, users): (&str, [&str; 4]), is_left: bool) -> Result<()> {
    for name in users {
        let problems = problems(world, name)?;
        let is_named = problems.contains(&format!("behind the gateway {gateway} "));
        ensure!(is_named == is_left, "{name}: {problems}");
    }
    Ok(())
}

#[test]
fn a_gateway_that_does_not_forward_or_is_dead_is_left_and_used_again() {
    let world = mesh();
    set_granularity(&world, "location");
    eventually(TIMEOUT, || has_gateways(&world, "", [1, 2])).unwrap();
    all_pods_reach_each_other(&world);
    let flows =
        [udp(&world, "cloud-3", "home-3"), tcp(&world, "farm-3", "home-3"), udp(&world, "home-2", "farm-3")];
    // Nodes behind gateways have answered.
    std::thread::sleep(Duration::from_secs(5));
    is_left(&world, HOME, false).unwrap();
    is_left(&world, FARM, false).unwrap();

    let (mark, from) = (Instant::now(), Instant::now());
    let broken = "nft add table inet broken\n\
                  nft 'add chain inet broken forward { type filter hook forward priority 0; policy drop; }'\n";
    node(&world, "home-1").host.shell(broken).unwrap();
    eventually(TIMEOUT, || is_left(&world, HOME, true)).unwrap();
    resumes("a gateway does not forward", &flows, mark, from, WITHIN);
    node(&world, "home-1").host.shell("nft delete table inet broken").unwrap();
    let forwards = Instant::now();

    // Until that gateway is used again, another one is dead.
    let farm = &node(&world, "farm-1").host;
    let (mark, from) = (Instant::now(), Instant::now());
    farm.shell("ip link set eth0 down").unwrap();
    eventually(TIMEOUT, || is_left(&world, FARM, true)).unwrap();
    resumes("a gateway is dead", &flows, mark, from, WITHIN);
    // Its routes went with the link.
    let router = farm.router().unwrap().lan_address();
    farm.shell(&format!("ip link set eth0 up; ip route add default via {router}")).unwrap();
    let returned = Instant::now();

    let world = &world;
    std::thread::scope(|scope| {
        for (what, gateway, since) in [("forwards", HOME, forwards), ("is there", FARM, returned)] {
            scope.spawn(move || {
                eventually(2 * TIMEOUT, || is_left(world, gateway, false)).unwrap();
                println!("a gateway that {what} again is used after {:.1} s", since.elapsed().as_secs_f64());
            });
        }
    });
    std::thread::sleep(Duration::from_secs(5));
    is_left(world, HOME, false).unwrap();
    is_left(world, FARM, false).unwrap();
    loses_nothing("both gateways are used again", &flows, returned);
}

/// Words of the problem `ForwardingDropped`.
const FORWARDING_DROPPED: &str = "drops packets that this host forwards";

#[test]
fn nodes_and_gateways_forward_although_iptables_drops_what_it_does_not_know() {
    let world = mesh();
    set_granularity(&world, "location");
    eventually(TIMEOUT, || has_gateways(&world, "", [1, 2])).unwrap();
    all_pods_reach_each_other(&world);
    let flows = flows(&world);
    let nodes =
        || LOCATIONS.into_iter().flat_map(|location| (1..=3).map(move |it| format!("{location}-{it}")));
    let everywhere = |commands: &str| {
        let commands = [commands, &commands.replace("iptables", "ip6tables")].join("; ");
        nodes().for_each(|name| drop(node(&world, &name).host.shell(&commands).unwrap()));
    };
    // As Docker does, and then as a firewall does that is loaded anew.
    for (what, commands) in
        [("policy DROP", "iptables-nft -P FORWARD DROP"), ("rules flushed", "iptables-nft -F FORWARD")]
    {
        let (mark, from) = (Instant::now(), Instant::now());
        everywhere(commands);
        resumes(what, &flows, mark, from, WITHIN);
        all_pods_reach_each_other(&world);
    }
    for name in nodes() {
        let rules = node(&world, &name).host.shell("iptables-nft -S FORWARD").unwrap();
        assert!(
            rules.starts_with("-P FORWARD DROP") && rules.matches("--mark 0x10/0x10").count() == 1,
            "{rules}"
        );
        let problems = problems(&world, &name).unwrap();
        assert!(!problems.contains(FORWARDING_DROPPED), "{name}: {problems}");
    }

    // A chain that belongs to an administrator is left alone and named.
    let host = &node(&world, "home-3").host;
    host.shell("nft add table inet mine").unwrap();
    host.shell("nft 'add chain inet mine through { type filter hook forward priority 0; policy drop; }'")
        .unwrap();
    let is_named = |named: bool| {
        let problems = problems(&world, "home-3")?;
        ensure!(problems.contains(FORWARDING_DROPPED) == named, "{problems}");
        Ok(())
    };
    eventually(TIMEOUT, || is_named(true)).unwrap();
    host.shell("nft add rule inet mine through 'meta mark & 0x10 == 0x10 accept'").unwrap();
    eventually(TIMEOUT, || is_named(false)).unwrap();
    all_pods_reach_each_other(&world);
}

/// Sends a packet as long as the pod's link takes, not to be fragmented, and 10 MB over TCP, in both families.
fn carries_long_packets(world: &World, from: &str, to: &str) {
    let (from, to) = (pod(world, from), pod(world, to));
    for address in &to.addresses {
        let (headers, flag) = if address.is_ipv4() { (28, "-4") } else { (48, "-6") };
        let script = format!(
            "mtu=$(cat /sys/class/net/eth0/mtu) && ping -n {flag} -M do -c 1 -W 1 -s $((mtu - {headers})) {address}"
        );
        eventually(TIMEOUT, || from.namespace.shell(&script).map(drop)).unwrap();
        probe::tcp(from, *address, 10_000_000).unwrap();
    }
}

#[test]
fn gateways_work_over_short_uplinks_and_with_a_strict_filter_and_differ_in_a_partition() {
    let mut topology = topology::three_by_three();
    topology.sites.iter_mut().skip(1).for_each(|site| site.uplink_mtu = Some(1492));
    let world = mesh_of(&topology);
    let routers: Vec<&Router> = world.sites.iter().skip(1).map(NatSite::router).collect();
    for router in &routers {
        router.shell(clear_text::WITH_PODS).unwrap();
    }
    world.lab().internet().shell(clear_text::INSIDE).unwrap();
    let mesh_addresses = r#"{"spec": {"meshCIDR": "100.100.0.0/24"}}"#;
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", mesh_addresses]).unwrap();
    for node in &world.nodes {
        let strict = ["all", "default", "eth0"].map(|link| format!("net/ipv4/conf/{link}/rp_filter"));
        node.host.set_sysctls(&strict.each_ref().map(|name| (name.as_str(), "1"))).unwrap();
    }
    set_granularity(&world, "location");
    eventually(TIMEOUT, || has_gateways(&world, "", [1, 2])).unwrap();
    all_pods_reach_each_other(&world);
    let servers = probe::Servers::start(&world.pods).unwrap();
    for (from, to) in
        [("home-3", "farm-3"), ("farm-3", "home-3"), ("home-3", "cloud-3"), ("cloud-3", "farm-3")]
    {
        carries_long_packets(&world, from, to);
    }
    drop(servers);
    clear_text::nodes_are_reached_at_their_inner_addresses(&world);

    let flows = [
        udp(&world, "cloud-3", "home-3"),
        udp(&world, "farm-3", "home-3"),
        tcp(&world, "home-3", "farm-3"),
        tcp(&world, "home-3", "cloud-3"),
    ];
    std::thread::sleep(Duration::from_secs(2));
    let mark = Instant::now();
    let api = world.plane_host().address();
    let partition = |from: String| {
        format!(
            "nft add table inet broken\n\
             nft 'add chain inet broken in {{ type filter hook input priority -200; }}'\n\
             nft 'add rule inet broken in {from} drop'\n"
        )
    };
    let cut = ["home-1", "farm-1"].map(|name| node(&world, name));
    for node in cut {
        node.host.shell(&partition(format!("meta l4proto tcp ip saddr {api}"))).unwrap();
    }
    std::thread::sleep(Duration::from_secs(10));
    loses_nothing("gateways without the API server", &flows, mark);
    for node in cut {
        node.host.shell("nft delete table inet broken").unwrap();
    }

    // The farm does not reach home-1 any more, neither directly nor over the other gateway: the cloud does.
    let (mark, from) = (Instant::now(), Instant::now());
    let farm = world.sites[2].router().public_address();
    node(&world, "home-1").host.shell(&partition(format!("ip saddr {farm}"))).unwrap();
    let halves = || {
        for (name, is_left) in [("farm-1", true), ("farm-2", true), ("cloud-1", false), ("cloud-2", false)] {
            let problems = problems(&world, name)?;
            ensure!(problems.contains("behind the gateway home-1") == is_left, "{name}: {problems}");
        }
        Ok(())
    };
    eventually(TIMEOUT, halves).unwrap();
    resumes("the farm uses home-2, the cloud home-1", &flows, mark, from, WITHIN);
    let mark = Instant::now();
    std::thread::sleep(Duration::from_secs(5));
    halves().unwrap();
    loses_nothing("halves of a partition", &flows, mark);

    clear_text::none_is_on_the_internet(&world);
    for router in routers {
        let (clear, tunnels) = clear_text::forwarded(router);
        assert!(
            clear == 0 && tunnels > 1000,
            "{}: {clear} in clear text, {tunnels} of WireGuard",
            router.name()
        );
    }
}

#[test]
fn hosts_beside_a_node_are_reached_from_all_locations_and_see_that_node() {
    let world = mesh();
    let printer = Beside::start(&world, "home-3");
    let annotation = "kilo.squat.ai/allowed-location-ips=10.77.0.0/24";
    world.plane.kubectl(&["annotate", "node", "home-3", annotation]).unwrap();
    let others = ["home-1", "home-2", "cloud-1", "cloud-3", "farm-3"];
    for granularity in ["full", "location"] {
        set_granularity(&world, granularity);
        others.iter().for_each(|from| reached(&world, from, "10.77.0.2"));
        let (from_node, from_others) = printer.requests(&world);
        println!("{granularity}: {from_node} echo requests came from home-3, {from_others} from others");
        assert!(from_node >= 10 && from_others == 0, "{from_node} {from_others}");
    }
    world.plane.kubectl(&["annotate", "node", "home-3", "kilo.squat.ai/allowed-location-ips-"]).unwrap();
    let pod = world.pods.iter().find(|pod| pod.node == "cloud-3").unwrap();
    let is_left = || {
        ensure!(probe::ping(pod, "10.77.0.2".parse()?).is_err(), "the host is still reached");
        Ok(())
    };
    eventually(TIMEOUT, is_left).unwrap();
}

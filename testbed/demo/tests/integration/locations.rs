//! A mesh that encrypts between locations only: nodes of one location reach each other's pods over their LAN.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, pod, resumes, tcp, udp};
use anyhow::{Result, ensure};
use fairlead_demo::{World, probe, topology};
use testbed_lab::traffic::Flow;
use testbed_lab::{Progress, eventually};

/// The locations of the topology, each with two nodes on one LAN.
const LOCATIONS: [&str; 3] = ["cloud", "cafe", "farm"];

fn set_granularity(world: &World, granularity: &str) {
    let patch = format!(r#"{{"spec": {{"topology": {{"granularity": "{granularity}"}}}}}}"#);
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
}

/// Route that the kernel of a node has for the mesh's packets to an address.
fn way(world: &World, from: &str, to: IpAddr) -> Result<String> {
    node(world, from).host.shell(&format!("ip route get {to} mark 0x40"))
}

/// Whether packets from the first node of a location to the pod of the second leave without the tunnel.
fn is_plain(world: &World, location: &str, address: usize) -> Result<bool> {
    let to = pod(world, &format!("{location}-2")).addresses[address];
    Ok(!way(world, &format!("{location}-1"), to)?.contains("dev wire_kube"))
}

fn all_are(world: &World, plain: bool) -> Result<()> {
    for location in LOCATIONS {
        ensure!(is_plain(world, location, 0)? == plain, "IPv4 in {location} is not plain: {plain}");
    }
    // The nodes of the cafe have IPv4 addresses only.
    for (location, has_ipv6) in [("cloud", true), ("cafe", false), ("farm", true)] {
        let found = is_plain(world, location, 1)?;
        ensure!(found == (plain && has_ipv6), "IPv6 in {location}: plain is {found}");
    }
    let elsewhere = way(world, "cloud-1", pod(world, "farm-1").addresses[0])?;
    ensure!(elsewhere.contains("dev wire_kube"), "between locations: {elsewhere}");
    Ok(())
}

fn all_pods_reach_each_other(world: &World) {
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// Number of packets of the other node's pod that have come to this node without a tunnel since [`count_from`].
fn clear_text(world: &World, name: &str) -> u64 {
    let listed = node(world, name).host.shell("nft list table inet judge").unwrap();
    let counts = listed
        .lines()
        .filter_map(|line| line.split_once("packets ")?.1.split(' ').next()?.parse::<u64>().ok());
    counts.sum()
}

fn count_from(world: &World, to: &str, from: &str) {
    let rule = |address: &IpAddr| {
        let family = if address.is_ipv4() { "ip" } else { "ip6" };
        format!("nft add rule inet judge in iifname != wire_kube {family} saddr {address} counter\n")
    };
    let rules: String = pod(world, from).addresses.iter().map(rule).collect();
    let chain = "nft add table inet judge\n\
                 nft 'add chain inet judge in { type filter hook prerouting priority -300; }'\n";
    node(world, to).host.shell(&format!("{chain}{rules}")).unwrap();
}

#[test]
fn inside_of_a_location_packets_take_the_lan_and_between_locations_the_tunnel() {
    let mut world = World::start(&topology::rough_edges(), &Progress::default()).unwrap();
    for location in LOCATIONS {
        let annotation = format!("kilo.squat.ai/location={location}");
        let nodes = [1, 2].map(|number| format!("{location}-{number}"));
        world.plane.kubectl(&["annotate", "node", &nodes[0], &nodes[1], &annotation]).unwrap();
    }
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    all_pods_reach_each_other(&world);
    let has_no_effect = || {
        let status = node(&world, "farm-1").status()?;
        let problems = status["problems"].to_string();
        ensure!(problems.contains("kilo.squat.ai/location have no effect"), "{problems}");
        all_are(&world, false)
    };
    eventually(TIMEOUT, has_no_effect).unwrap();

    count_from(&world, "cloud-2", "cloud-1");
    count_from(&world, "farm-2", "cloud-1");
    let flows = [
        udp(&world, "cloud-1", "cloud-2"),
        tcp(&world, "farm-1", "farm-2"),
        udp(&world, "cafe-1", "cafe-2"),
        udp(&world, "cloud-1", "farm-1"),
    ];
    let (mark, from) = (Instant::now(), Instant::now());
    set_granularity(&world, "cross");
    eventually(TIMEOUT, || all_are(&world, true)).unwrap();
    resumes("granularity: cross", &flows, mark, from, Duration::from_secs(30));
    loses_nothing("granularity: cross", &flows, mark);
    all_pods_reach_each_other(&world);
    assert!(clear_text(&world, "cloud-2") > 0, "in the cloud packets of pods are plain");
    assert_eq!(clear_text(&world, "farm-2"), 0, "between locations they are not");
    let problems = node(&world, "farm-1").status().unwrap()["problems"].to_string();
    assert!(!problems.contains("have no effect"), "{problems}");

    // Another program removes the routes. Until they are back, the tunnel carries the packets.
    let mark = Instant::now();
    node(&world, "cloud-1")
        .host
        .shell("ip route show table 180 | grep via | while read r; do ip route del table 180 $r; done")
        .unwrap();
    eventually(TIMEOUT, || all_are(&world, true)).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    loses_nothing("plain routes are removed", &flows, mark);

    ip_tunnels_that_this_kernel_lacks_are_replaced_by_the_encrypted_ones(&world, &flows);

    let (mark, from) = (Instant::now(), Instant::now());
    set_granularity(&world, "full");
    eventually(TIMEOUT, || all_are(&world, false)).unwrap();
    resumes("granularity: full", &flows, mark, from, Duration::from_secs(30));
    loses_nothing("granularity: full", &flows, mark);
}

/// IP tunnels are used where this machine's kernel has them; `kernel_encapsulation` shows them in any case.
fn ip_tunnels_that_this_kernel_lacks_are_replaced_by_the_encrypted_ones(world: &World, flows: &[Flow]) {
    let has_tunnels =
        node(world, "cloud-1").host.shell("ip link add judge type ipip local 192.0.2.1").is_ok();
    let encapsulate = |value: &str| {
        let patch = format!(r#"{{"spec": {{"topology": {{"encapsulation": "{value}"}}}}}}"#);
        world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
    };
    let mark = Instant::now();
    encapsulate("always");
    let wanted = if has_tunnels { "dev fairlead_ipip" } else { "dev wire_kube" };
    let takes_tunnel = || {
        for location in LOCATIONS {
            let to = pod(world, &format!("{location}-2")).addresses[0];
            let way = way(world, &format!("{location}-1"), to)?;
            ensure!(way.contains(wanted), "in {location}: {way}");
        }
        let status = node(world, "farm-1").status()?;
        let reported = status["problems"].to_string();
        let published = world.published("farm-1")?["status"]["problems"].to_string();
        let events = world.notes("")?;
        for (place, text) in [("status", &reported), ("WireKubePeer", &published), ("Events", &events)] {
            let says_so = text.contains("module ipip");
            ensure!(says_so != has_tunnels, "{place}: {text}");
        }
        Ok(())
    };
    eventually(TIMEOUT, takes_tunnel).unwrap();
    all_pods_reach_each_other(world);
    encapsulate("never");
    let is_plain_again = || {
        all_are(world, true)?;
        let problems = node(world, "farm-1").status()?["problems"].to_string();
        ensure!(!problems.contains("module ipip"), "{problems}");
        Ok(())
    };
    eventually(TIMEOUT, is_plain_again).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    loses_nothing("encapsulation: always, then never", flows, mark);
}

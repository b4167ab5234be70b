//! Packets to a node whose tunnel is down: dropped, or in clear text where the mesh says so. And a node beside another program that has the
//! numbers of the mesh: a tunnel with the name of KubeSpan's device stands for it, as there is no Talos here. Everything else is real.

use std::net::IpAddr;

use crate::outage::{TIMEOUT, node, peer};
use anyhow::{Context as _, Result, ensure};
use fairlead_demo::{World, servers, topology};
use serde_json::json;
use testbed_lab::{Progress, eventually};

const NODES: [&str; 3] = ["rack-1", "rack-2", "rack-3"];
/// The node whose tunnels go down.
const LOST: &str = "rack-2";

fn address(world: &World, name: &str) -> IpAddr {
    node(world, name).addresses()[0]
}

fn state(world: &World, own: &str, other: &str) -> Result<String> {
    Ok(peer(node(world, own), other).context("no such peer")?["state"]
        .as_str()
        .unwrap_or_default()
        .to_owned())
}

fn all_are_up(world: &World) -> Result<()> {
    for own in NODES {
        for other in NODES.iter().filter(|other| **other != own) {
            let state = state(world, own, other)?;
            ensure!(state == "up", "{own}: {other} is {state}");
        }
    }
    Ok(())
}

fn ping(world: &World, from: &str, to: &str) -> Result<()> {
    let to = address(world, to);
    node(world, from).host.shell(&format!("ping -n -c 1 -W 1 {to}")).map(drop)
}

/// Whether nftables leads packets to the lost node into the mesh, or nowhere, on all others; those to the others it does.
fn is_led(world: &World, expected: bool) -> Result<()> {
    for own in NODES.iter().filter(|own| **own != LOST) {
        let host = &node(world, own).host;
        let is_marked = |to: &str| {
            let element = format!("'{{ {} }}'", address(world, to));
            host.shell(&format!("nft get element inet talos_kubespan kubespan_targets_ipv4 {element}"))
                .is_ok()
        };
        ensure!(is_marked(LOST) == expected, "{own} has {LOST} as a target, or has not: {expected}");
        for other in NODES.iter().filter(|other| *other != own && **other != LOST) {
            ensure!(is_marked(other), "{own} has lost {other}");
        }
    }
    Ok(())
}

fn allow(world: &World, bypass: bool) {
    let patch = json!({ "spec": { "routing": { "allowDownPeerBypass": bypass } } }).to_string();
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
}

/// WireGuard's packets of the lost node, and nothing else, come no further.
fn block(world: &World) {
    node(world, LOST)
        .host
        .shell(
            "nft add table inet judge\n\
             nft 'add chain inet judge in { type filter hook prerouting priority -400; }'\n\
             nft 'add chain inet judge out { type filter hook postrouting priority 400; }'\n\
             nft add rule inet judge in udp dport 51820 drop\n\
             nft add rule inet judge out udp sport 51820 drop\n",
        )
        .unwrap();
}

#[test]
fn packets_to_a_node_that_is_down_are_dropped_or_leave_in_clear_text_as_the_mesh_says() {
    let world = World::start(&topology::one_network(&[]), &Progress::default()).unwrap();
    servers::apply_mesh(&world, &json!({})).unwrap();
    eventually(TIMEOUT, || all_are_up(&world)).unwrap();
    is_led(&world, true).unwrap();
    eventually(TIMEOUT, || ping(&world, "rack-1", LOST)).unwrap();

    block(&world);
    let is_down = || {
        for own in NODES.iter().filter(|own| **own != LOST) {
            let state = state(&world, own, LOST)?;
            ensure!(state == "down", "{own}: {state}");
        }
        Ok(())
    };
    eventually(TIMEOUT, is_down).unwrap();
    is_led(&world, true).unwrap();
    assert!(ping(&world, "rack-1", LOST).is_err(), "packets left without the tunnel");
    ping(&world, "rack-1", "rack-3").unwrap();

    allow(&world, true);
    eventually(TIMEOUT, || is_led(&world, false)).unwrap();
    // The other side bypasses, too, or its answers would be dropped.
    eventually(TIMEOUT, || ping(&world, "rack-1", LOST)).unwrap();
    let problems = node(&world, "rack-1").status().unwrap()["problems"].to_string();
    assert!(problems.contains("rack-2 is down, and packets to it leave IN CLEAR TEXT"), "{problems}");
    println!("packets to {LOST} leave in clear text");

    node(&world, LOST).host.shell("nft delete table inet judge").unwrap();
    eventually(TIMEOUT, || all_are_up(&world)).unwrap();
    eventually(TIMEOUT, || is_led(&world, true)).unwrap();
    eventually(TIMEOUT, || ping(&world, "rack-1", LOST)).unwrap();
    let problems = node(&world, "rack-1").status().unwrap()["problems"].to_string();
    assert!(!problems.contains("CLEAR TEXT"), "{problems}");
    println!("they take the tunnel again");
    a_kubespan_on_the_host_is_left_alone(&world);
}

fn a_kubespan_on_the_host_is_left_alone(world: &World) {
    let host = &node(world, "rack-3").host;
    let ours = || {
        host.shell("ip rule show priority 32500; ip route show table 180; nft list table inet talos_kubespan")
    };
    let before = ours().unwrap();
    host.shell("ip tuntap add kubespan mode tun && ip link set kubespan up").unwrap();
    let is_refused = || {
        let status = node(world, "rack-3").status()?.to_string();
        ensure!(status.contains("the device kubespan shows that KubeSpan runs here"), "{status}");
        let conditions = world.published("rack-3")?["status"]["conditions"].take();
        let mut conditions = conditions.as_array().context("no conditions")?.iter();
        ensure!(conditions.any(|condition| condition["reason"] == "NumbersTaken"), "not in the WireKubePeer");
        ensure!(!world.events("reason=NumbersTaken")?.is_empty(), "no Event");
        Ok(())
    };
    eventually(TIMEOUT, is_refused).unwrap();
    // KubeSpan takes the route: no program fights for it.
    host.shell("ip route replace default dev kubespan table 180 proto static").unwrap();
    std::thread::sleep(std::time::Duration::from_secs(7));
    assert!(host.shell("ip route show table 180").unwrap().contains("default dev kubespan"));
    host.shell("ip link del kubespan").unwrap();
    let is_back = || {
        ensure!(ours()? == before, "{}", ours()?);
        all_are_up(world)
    };
    eventually(TIMEOUT, is_back).unwrap();
    println!("the numbers are taken again after KubeSpan is gone");
}

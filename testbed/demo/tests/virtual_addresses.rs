//! An address that keepalived moves between nodes: the mesh never captures it. Everything is real.

#![cfg(test)]

mod outage;

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use fairlead_demo::{World, topology};
use nix::sys::signal::Signal;
use outage::{TIMEOUT, node, peer};
use testbed_lab::{Process, Progress, eventually};

/// The virtual address, in the network of the nodes.
const VIRTUAL: &str = "198.51.100.100";
/// The nodes between which it moves, the preferred one first, and a node that only uses it.
const SERVERS: [&str; 2] = ["rack-1", "rack-2"];
const CLIENT: &str = "rack-3";

/// Runs keepalived on a node (VRRP only).
fn keepalived(world: &World, name: &str, priority: u8) -> Process {
    let node = node(world, name);
    let file = |name: &str| node.directory.join(name).display().to_string();
    let configuration = format!(
        "vrrp_instance judge {{\n  interface eth0\n  state BACKUP\n  virtual_router_id 51\n  priority {priority}\n  \
         advert_int 1\n  virtual_ipaddress {{\n    {VIRTUAL}/32\n  }}\n}}\n"
    );
    fs::write(file("keepalived.conf"), configuration).unwrap();
    let mut command = node.host.command("keepalived").unwrap();
    command.args(["--dont-fork", "--log-console", "--vrrp", "--use-file", &file("keepalived.conf")]);
    command.args(["--pid", &file("keepalived.pid"), "--vrrp_pid", &file("vrrp.pid")]);
    let needs = "keepalived is missing: install the Debian package keepalived (`cargo xtask setup`)";
    node.host.spawn(&mut command, file("keepalived.log")).expect(needs)
}

fn has_address(world: &World, name: &str) -> Result<bool> {
    Ok(node(world, name).host.shell("ip -4 -o address show dev eth0")?.contains(VIRTUAL))
}

/// Waits until one of the servers has the address, the client reaches it there, and so do all pods.
fn is_served_by(world: &World, owner: &str) {
    let reached = || {
        for server in SERVERS {
            ensure!(has_address(world, server)? == (server == owner), "{server} has it, or {owner} has not");
        }
        let ping = format!("ping -c 1 -W 1 {VIRTUAL}");
        for name in SERVERS.iter().chain([&CLIENT]) {
            node(world, name).host.shell(&ping)?;
        }
        for pod in &world.pods {
            pod.namespace.shell(&ping)?;
        }
        Ok(())
    };
    eventually(TIMEOUT, reached).unwrap();
    is_not_captured(world, owner);
}

/// Neither in what leads packets into the tunnel, nor at a peer, nor published.
fn is_not_captured(world: &World, owner: &str) {
    for name in SERVERS.iter().chain([&CLIENT]) {
        let host = &node(world, name).host;
        let rules = host.shell("nft list table inet talos_kubespan").unwrap();
        assert!(!rules.contains(VIRTUAL), "{name}: {rules}");
        let tunnelled = host.shell("wg show wire_kube allowed-ips || true").unwrap();
        assert!(!tunnelled.contains(VIRTUAL), "{name}: {tunnelled}");
        for other in SERVERS.iter().chain([&CLIENT]).filter(|other| *other != name) {
            let peer = peer(node(world, name), other).unwrap();
            assert!(!peer["prefixes"].to_string().contains(VIRTUAL), "{peer:#}");
        }
        if *name != owner {
            let way = host.shell(&format!("ip route get {VIRTUAL}")).unwrap();
            assert!(way.contains("dev eth0"), "{name}: {way}");
        }
    }
    let counted = node(world, CLIENT).host.shell("nft list table inet judge").unwrap();
    assert!(counted.contains("packets 0 "), "packets to {VIRTUAL} went into the tunnel: {counted}");
}

#[test]
fn an_address_that_keepalived_moves_is_never_captured_by_the_mesh() {
    let mut world = World::start(&topology::one_network(&[]), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let all_up = || {
        for name in SERVERS.iter().chain([&CLIENT]) {
            for other in SERVERS.iter().chain([&CLIENT]).filter(|other| *other != name) {
                let peer = peer(node(&world, name), other);
                ensure!(peer.as_ref().is_some_and(|it| it["state"] == "up"), "{name}: {other} is {peer:?}");
            }
        }
        Ok(())
    };
    eventually(TIMEOUT, all_up).unwrap();
    let count = format!(
        "nft add table inet judge\n\
         nft 'add chain inet judge out {{ type filter hook postrouting priority 0; }}'\n\
         nft add rule inet judge out oifname wire_kube ip daddr {VIRTUAL} counter\n"
    );
    node(&world, CLIENT).host.shell(&count).unwrap();

    let mut first = keepalived(&world, SERVERS[0], 150);
    let _second = keepalived(&world, SERVERS[1], 100);
    is_served_by(&world, SERVERS[0]);
    first.signal(Signal::SIGTERM).unwrap();
    first.wait(Duration::from_secs(30)).unwrap();
    is_served_by(&world, SERVERS[1]);
    let _first = keepalived(&world, SERVERS[0], 150);
    is_served_by(&world, SERVERS[0]);
}

//! Addresses of nodes that their Node objects do not have: one that keepalived moves, which the mesh never captures, and one of a second
//! network card, which a grant brings into the mesh. Everything is real.

use std::fs;
use std::time::Duration;

use crate::outage::{TIMEOUT, node, peer};
use anyhow::{Result, ensure};
use fairlead_demo::{World, topology};
use nix::sys::signal::Signal;
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

/// A second address of a node, on an interface that leads nowhere: only the mesh reaches it.
const SECOND: [&str; 2] = ["172.30.0.5", "fd00:30::5"];

/// Whether all other nodes and their pods reach the second addresses.
fn is_second_reached(world: &World, reached: bool) -> Result<()> {
    for address in SECOND {
        let ping = format!("ping -c 1 -W 1 {address}");
        for name in [SERVERS[1], CLIENT] {
            let done = node(world, name).host.shell(&ping).is_ok();
            ensure!(done == reached, "{name} reaches {address}: {done}");
        }
        for pod in &world.pods {
            let done = pod.namespace.shell(&ping).is_ok();
            // A pod of the node itself needs no mesh.
            ensure!(done == reached || pod.node == SERVERS[0], "{} reaches {address}: {done}", pod.name);
        }
    }
    Ok(())
}

#[test]
fn a_second_address_of_a_node_is_in_the_mesh_once_it_is_granted_and_while_an_interface_has_it() {
    let mut world = World::start(&topology::one_network(&[]), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let host = &node(&world, SERVERS[0]).host;
    host.shell("ip link add second type veth peer name far && ip link set second up && ip link set far up")
        .unwrap();
    let set = |verb: &str, flags: &str| {
        for (address, length) in SECOND.iter().zip([24, 64]) {
            host.shell(&format!("ip addr {verb} {address}/{length} dev second {flags}")).unwrap();
        }
    };
    set("add", "nodad");
    std::thread::sleep(Duration::from_secs(6));
    is_second_reached(&world, false).unwrap();

    let grant = |node: &str| {
        let [ipv4, ipv6] = SECOND;
        let patch = format!(
            r#"{{"spec": {{"grants": [{{"node": "{node}", "cidrs": ["{ipv4}/32", "{ipv6}/128"]}}]}}}}"#
        );
        world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
    };
    // A grant to another node brings nothing, and neither does one without the address.
    grant(SERVERS[1]);
    std::thread::sleep(Duration::from_secs(6));
    is_second_reached(&world, false).unwrap();
    grant(SERVERS[0]);
    eventually(TIMEOUT, || is_second_reached(&world, true)).unwrap();
    let published = peer(node(&world, CLIENT), SERVERS[0]).unwrap()["prefixes"].to_string();
    assert!(SECOND.iter().all(|address| published.contains(address)), "{published}");

    set("del", "");
    let is_withdrawn = || {
        let prefixes = peer(node(&world, CLIENT), SERVERS[0]).unwrap()["prefixes"].to_string();
        ensure!(!SECOND.iter().any(|address| prefixes.contains(address)), "{prefixes}");
        Ok(())
    };
    eventually(TIMEOUT, is_withdrawn).unwrap();
    set("add", "nodad");
    eventually(TIMEOUT, || is_second_reached(&world, true)).unwrap();
    world
        .plane
        .kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", r#"{"spec": {"grants": []}}"#])
        .unwrap();
    eventually(TIMEOUT, || is_second_reached(&world, false)).unwrap();
}

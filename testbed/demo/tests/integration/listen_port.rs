//! A node behind a symmetric NAT whose router leads one port to it, as Kilo's users set it up: `kilo.squat.ai/force-endpoint` names the
//! port, and the node listens there. Real node programs, a real API server, and `ss` as judge.

use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, resumes, steady, udp};
use anyhow::{Context, Result, ensure};
use fairlead_demo::{World, topology};
use serde_json::Value;
use testbed_lab::{Dns, Progress, Router, eventually};

/// The node with a port of its own, and one behind another symmetric NAT that reaches it there alone.
const NODE: &str = "hotel-1";
const OTHER: &str = "club-1";
/// UDP ports that the router forwards to the node.
const FORWARDED: [u16; 3] = [51821, 51822, 51823];
/// Time for which nodes that cannot find each other are watched.
const WATCHED: Duration = Duration::from_secs(5);
/// Ten times what a change of the port takes.
const GAP: Duration = Duration::from_secs(10);
/// Twice what a change of the address behind a name may take.
const FOLLOWED: Duration = Duration::from_secs(60);
/// The name of the node's router, and one that does not exist.
const NAME: &str = "hotel.example";
const NO_NAME: &str = "nowhere.example";

/// Leads the ports to the node, each to the same port.
fn forward(world: &World, router: &Router) {
    let address = node(world, NODE).host.address();
    let rules: String = FORWARDED
        .iter()
        .map(|port| format!("iifname wan udp dport {port} counter dnat ip to {address}\n"))
        .collect();
    let script = format!(
        "nft -f - <<END
table inet home {{
chain prerouting {{
type nat hook prerouting priority -110;
{rules}}}
}}
insert rule ip lab forward iifname wan ct status dnat accept
END"
    );
    router.shell(&script).unwrap();
}

fn annotate(world: &World, annotation: &str) {
    annotate_node(world, NODE, annotation);
}

fn annotate_node(world: &World, name: &str, annotation: &str) {
    world.plane.kubectl(&["annotate", "--overwrite", "node", name, annotation]).unwrap();
}

fn published(world: &World) -> Result<Value> {
    published_of(world, NODE)
}

fn published_of(world: &World, name: &str) -> Result<Value> {
    world.published(name)
}

/// The other node has a direct path to this port of the router.
fn reached_at(world: &World, port: u16) -> Result<()> {
    let endpoint = format!("{}:{port}", node(world, NODE).public_address());
    let seen = peer(node(world, OTHER), NODE).context("no peer")?;
    ensure!(seen["state"] == "up" && seen["endpoint"] == endpoint, "{seen} is not at {endpoint}");
    Ok(())
}

/// The node listens on this port, of both families, and on no other port of this test.
fn listens_on(world: &World, port: u16) -> Result<()> {
    let sockets = node(world, NODE).host.shell("ss -lunH")?;
    for known in FORWARDED.iter().chain(&[51820]) {
        let found = sockets.lines().filter(|line| line.contains(&format!(":{known} "))).count();
        ensure!((found >= 1) == (*known == port), "listens on {known}, not on {port} alone:\n{sockets}");
    }
    let status = node(world, NODE).status()?;
    ensure!(status["listenPort"] == port, "{}", status["listenPort"]);
    Ok(())
}

#[test]
fn a_node_listens_where_its_router_leads_and_others_reach_it_there() {
    let mut world = World::start(&topology::relayed(), &Progress::default()).unwrap();
    forward(&world, &node(&world, NODE).host.router().unwrap());
    world.apply_pool().unwrap();
    let mesh = "{apiVersion: wirekube.io/v1alpha1, kind: WireKubeMesh, metadata: {name: default}, \
                spec: {natTraversal: {portMapping: disabled}}}";
    world.plane.apply(mesh).unwrap();
    world.start_pods().unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let seen = peer(node(world, NODE), "cloud-1").context("no peer")?;
            ensure!(seen["state"] == "up", "{seen}");
            Ok(())
        })
        .unwrap();
    std::thread::sleep(WATCHED);
    let seen = peer(node(&world, OTHER), NODE).unwrap();
    assert!(seen["state"] != "up", "two symmetric NATs: {seen}");
    listens_on(&world, 51820).unwrap();

    let address = node(&world, NODE).public_address();
    let flows = [udp(&world, OTHER, NODE), udp(&world, NODE, OTHER), udp(&world, NODE, "cloud-1")];
    let annotated = Instant::now();
    annotate(&world, &format!("kilo.squat.ai/force-endpoint={address}:51821"));
    world.wait_for(TIMEOUT, |world| reached_at(world, 51821)).unwrap();
    resumes("the node listens on its own port", &flows, annotated, annotated, TIMEOUT);
    listens_on(&world, 51821).unwrap();
    let own = format!("{}:51821", node(&world, NODE).host.address());
    eventually(TIMEOUT, || {
        let peer = published(&world)?;
        let candidates = peer["status"]["iceCandidates"].to_string();
        ensure!(candidates.contains(&own) && !candidates.contains(":51820\""), "{peer}");
        ensure!(peer["spec"]["endpoint"] == format!("{address}:51821"), "{peer}");
        Ok(())
    })
    .unwrap();

    let changed = Instant::now();
    annotate(&world, &format!("kilo.squat.ai/force-endpoint={address}:51822"));
    world.wait_for(TIMEOUT, |world| listens_on(world, 51822)).unwrap();
    resumes("the port is another one", &flows, changed, changed, GAP);
    world.wait_for(TIMEOUT, |world| reached_at(world, 51822)).unwrap();

    a_name_is_followed_to_another_address(&world);
    a_restart_keeps_the_port(&mut world);
    a_port_that_is_taken_is_told_and_the_old_one_stays(&world);

    // Without the annotation it is that of the mesh.
    annotate(&world, "kilo.squat.ai/force-endpoint-");
    world.wait_for(TIMEOUT, |world| listens_on(world, 51820)).unwrap();
    let cloud = [udp(&world, NODE, "cloud-1")];
    resumes("the port is that of the mesh again", &cloud, Instant::now(), Instant::now(), GAP);
}

/// The public address changes, and then the record. Two symmetric NATs are between the nodes, so that no path but that by the name is
/// there. Meanwhile another node has a name that does not exist.
fn a_name_is_followed_to_another_address(world: &World) {
    let mut dns =
        Dns::start(&world.lab().public_site("internet").host("dns").unwrap(), world.directory().join("dns"))
            .unwrap();
    let router = node(world, NODE).host.router().unwrap();
    dns.set(&[(NAME, IpAddr::from(router.public_address()))]).unwrap();
    world.nodes.iter().for_each(|node| dns.serve(&node.host).unwrap());
    let flows = [udp(world, OTHER, NODE), udp(world, NODE, OTHER), udp(world, NODE, "cloud-1")];
    let others = [udp(world, "cloud-1", OTHER), udp(world, OTHER, "cloud-1")];
    // Whatever the port before disturbs.
    steady(&flows);
    steady(&others);
    let names = [(NODE, format!("{NAME}:51822")), ("cloud-1", format!("{NO_NAME}:51820"))];
    let mark = Instant::now();
    for (name, endpoint) in &names {
        annotate_node(world, name, &format!("kilo.squat.ai/force-endpoint={endpoint}"));
    }
    let are_published = || {
        for (name, endpoint) in &names {
            let found = published_of(world, name)?["spec"]["endpoint"].clone();
            ensure!(found == endpoint.as_str(), "{name}: {found}");
        }
        reached_at(world, 51822)
    };
    eventually(TIMEOUT, are_published).unwrap();
    // Whatever the name that does not exist disturbs, and messages of the last second do not count.
    std::thread::sleep(WATCHED);
    loses_nothing("names instead of addresses, one of which does not exist", &flows, mark);
    loses_nothing("names instead of addresses, one of which does not exist", &others, mark);

    let mark = Instant::now();
    let address = router.change_address().unwrap();
    std::thread::sleep(WATCHED);
    let direct = flows[..2].iter().any(|flow| flow.flows_since(mark));
    assert!(!direct, "between two symmetric NATs only the name leads to the new address");
    let changed = Instant::now();
    dns.set(&[(NAME, IpAddr::from(address))]).unwrap();
    resumes("a name has another address", &flows, mark, changed, FOLLOWED);
    world.wait_for(TIMEOUT, |world| reached_at(world, 51822)).unwrap();
    loses_nothing("a name has another address", &others, mark);
    annotate_node(world, "cloud-1", "kilo.squat.ai/force-endpoint-");
    annotate(world, &format!("kilo.squat.ai/force-endpoint={address}:51822"));
}

fn a_restart_keeps_the_port(world: &mut World) {
    let running = world.node(NODE).unwrap();
    running.kill().unwrap();
    running.start().unwrap();
    running.wait_ready(TIMEOUT).unwrap();
    world.wait_for(TIMEOUT, |world| listens_on(world, 51822)).unwrap();
    let flows = [udp(world, OTHER, NODE)];
    resumes("a restart with a port of its own", &flows, Instant::now(), Instant::now(), GAP);
    // With the next program beside it.
    world.node(NODE).unwrap().upgrade(TIMEOUT).unwrap();
    world.wait_for(TIMEOUT, |world| listens_on(world, 51822)).unwrap();
}

fn a_port_that_is_taken_is_told_and_the_old_one_stays(world: &World) {
    let address = node(world, NODE).public_address();
    let taken = node(world, NODE).host.run(|| UdpSocket::bind("0.0.0.0:51823")).unwrap().unwrap();
    let flows = [udp(world, OTHER, NODE)];
    let mark = Instant::now();
    annotate(world, &format!("kilo.squat.ai/force-endpoint={address}:51823"));
    let words = "cannot listen on port 51823 of kilo.squat.ai/force-endpoint";
    world
        .wait_for(TIMEOUT, |world| {
            let status = node(world, NODE).status()?;
            ensure!(status["problems"].to_string().contains(words), "{}", status["problems"]);
            ensure!(status["listenPort"] == 51822, "{}", status["listenPort"]);
            let problems = published(world)?["status"]["problems"].to_string();
            ensure!(problems.contains(words), "{problems}");
            let notes = world.notes(&format!("regarding.name={NODE},reason=ListenPortUnavailable"))?;
            ensure!(notes.contains(words), "{notes}");
            Ok(())
        })
        .unwrap();
    resumes("a port that is taken", &flows, mark, mark, TIMEOUT);
    reached_at(world, 51822).unwrap();

    drop(taken);
    world.wait_for(TIMEOUT, |world| listens_on(world, 51823)).unwrap();
    world.wait_for(TIMEOUT, |world| reached_at(world, 51823)).unwrap();
    resumes("a port that is free again", &flows, Instant::now(), Instant::now(), GAP);
    let status = node(world, NODE).status().unwrap();
    assert!(!status["problems"].to_string().contains("51823"), "{}", status["problems"]);
}

//! A node replaces its WireGuard key while packets flow, with real node programs and a real API server; and what a stolen token of another
//! node can do about it.

use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, mesh, node, peer, report, resumes, udp};
use anyhow::{Context as _, Result, ensure};
use fairlead_demo::node::Node;
use fairlead_demo::{World, servers, topology};
use serde_json::{Value, json};
use testbed_lab::relay::TOKEN;
use testbed_lab::traffic::Flow;
use testbed_lab::{Progress, executable};

/// Ten times the goal.
const GAP: Duration = Duration::from_secs(10);
/// The node whose key is replaced, behind a NAT.
const ROTATING: &str = "office-1";

fn rotate(node: &Node, arguments: &[&str]) -> Result<String> {
    let mut command = node.host.command(executable("fairlead")?)?;
    let output =
        command.args(["key", "rotate"]).args(arguments).arg("--socket").arg(node.socket()).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

fn spec(world: &World, name: &str) -> Result<Value> {
    Ok(world.published(name)?["spec"].clone())
}

fn own_key(node: &Node) -> Result<String> {
    Ok(node.status()?["publicKey"].as_str().context("no key")?.to_owned())
}

/// Every other node has a tunnel with this key of the node, and no peer with another one.
fn all_have(world: &World, key: &str) -> Result<()> {
    for other in world.nodes.iter().filter(|node| node.name != ROTATING) {
        let seen = peer(other, ROTATING).with_context(|| format!("{} has no such peer", other.name))?;
        ensure!(seen["publicKey"] == key && seen["state"] == "up", "{}: {seen}", other.name);
    }
    Ok(())
}

fn flows(world: &World) -> Vec<Flow> {
    let others = ["cloud-1", "home-1", "office-2"];
    let both_ways = others.iter().flat_map(|other| [(ROTATING, *other), (*other, ROTATING)]);
    both_ways.map(|(from, to)| udp(world, from, to)).collect()
}

#[test]
fn a_key_is_replaced_while_packets_flow_and_every_step_outlives_a_crash() {
    let mut world = mesh();
    let before = own_key(node(&world, ROTATING)).unwrap();
    let flows = flows(&world);
    let floor = Instant::now();
    std::thread::sleep(Duration::from_secs(2));

    let mark = Instant::now();
    let said = rotate(node(&world, ROTATING), &["--wait", "2m"]).unwrap();
    println!("{said}");
    let after = own_key(node(&world, ROTATING)).unwrap();
    assert!(before != after && said.contains(&before) && said.contains(&after), "{said}");
    resumes("a key is replaced", &flows, mark, Instant::now(), GAP);
    let longest = flows.iter().map(|flow| flow.figures_since(floor).longest_gap).max().unwrap();
    println!("longest gap of all: {} ms", longest.as_millis());
    world.wait_for(TIMEOUT, |world| all_have(world, &after)).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let spec = spec(world, ROTATING)?;
            ensure!(spec["publicKey"] == after && spec["nextPublicKey"].is_null(), "{spec}");
            Ok(())
        })
        .unwrap();
    let state = node(&world, ROTATING).directory.join("state");
    let mode = std::fs::metadata(state.join("wireguard.key")).unwrap().permissions().mode();
    assert_eq!((mode & 0o777, state.join("wireguard.next.key").exists()), (0o600, false));
    drop(flows);

    // A node that is off meanwhile, and a crash after the key was announced.
    world.nodes.iter_mut().find(|node| node.name == "home-2").unwrap().kill().unwrap();
    rotate(node(&world, ROTATING), &[]).unwrap();
    let next = node(&world, ROTATING).status().unwrap()["nextPublicKey"].as_str().unwrap().to_owned();
    assert!(!next.is_empty());
    let rotating = world.nodes.iter_mut().find(|node| node.name == ROTATING).unwrap();
    rotating.kill().unwrap();
    rotating.start().unwrap();
    rotating.wait_ready(TIMEOUT).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let key = own_key(node(world, ROTATING))?;
            ensure!(key == next, "{key} is in use, not {next}");
            Ok(())
        })
        .unwrap();
    world.nodes.iter_mut().find(|node| node.name == "home-2").unwrap().start().unwrap();
    world.wait_for(TIMEOUT, |world| all_have(world, &next)).unwrap();

    // A crash after the key was replaced.
    let rotating = world.nodes.iter_mut().find(|node| node.name == ROTATING).unwrap();
    rotating.kill().unwrap();
    rotating.start().unwrap();
    rotating.wait_ready(TIMEOUT).unwrap();
    world.wait_for(TIMEOUT, |world| all_have(world, &next)).unwrap();
    assert_eq!(own_key(node(&world, ROTATING)).unwrap(), next);
}

/// Nothing is published at the moment of the switch: others follow the handshakes of the announced key.
#[test]
fn others_follow_while_the_api_server_is_away() {
    let world = mesh();
    let flows = flows(&world);
    rotate(node(&world, ROTATING), &[]).unwrap();
    let next = node(&world, ROTATING).status().unwrap()["nextPublicKey"].as_str().unwrap().to_owned();
    world
        .wait_for(TIMEOUT, |world| {
            let spec = spec(world, ROTATING)?;
            ensure!(spec["nextPublicKey"] == next, "{spec}");
            Ok(())
        })
        .unwrap();
    std::thread::sleep(Duration::from_secs(2));
    world.plane.stop_apiserver().unwrap();
    let mark = Instant::now();
    world
        .wait_for(TIMEOUT, |world| {
            let key = own_key(node(world, ROTATING))?;
            ensure!(key == next, "{key}");
            Ok(())
        })
        .unwrap();
    resumes("a key is replaced without the API server", &flows, mark, Instant::now(), GAP);
    world.wait_for(TIMEOUT, |world| all_have(world, &next)).unwrap();
    world.plane.start_apiserver().unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let spec = spec(world, ROTATING)?;
            ensure!(spec["publicKey"] == next && spec["nextPublicKey"].is_null(), "{spec}");
            Ok(())
        })
        .unwrap();
}

/// The relay lets in the next key before it is used. One of the nodes has TCP alone, the other one UDP through the relay, too.
#[test]
fn nodes_that_are_reached_by_a_relay_replace_their_keys() {
    let mut world = World::start(&topology::relayed(), &Progress::default()).unwrap();
    let relay = servers::relay(&world).unwrap();
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto") })).unwrap();
    world.start_pods().unwrap();
    for name in ["fort-1", "hotel-1"] {
        let others: Vec<&str> =
            ["cloud-1", "club-1", "fort-1"].into_iter().filter(|it| *it != name).collect();
        world
            .wait_for(TIMEOUT, |world| {
                for other in &others {
                    let seen = peer(node(world, name), other).context("no such peer")?;
                    ensure!(seen["state"] == "up", "{name}: {seen}");
                }
                Ok(())
            })
            .unwrap();
        let both_ways = others.iter().flat_map(|other| [(name, *other), (*other, name)]);
        let flows: Vec<Flow> = both_ways.map(|(from, to)| udp(&world, from, to)).collect();
        std::thread::sleep(Duration::from_secs(5));
        let mark = Instant::now();
        println!("{}", rotate(node(&world, name), &["--wait", "2m"]).unwrap());
        resumes(&format!("{name} replaces its key"), &flows, mark, Instant::now(), GAP);
        // Longer than the relay keeps the link with the old key.
        std::thread::sleep(Duration::from_secs(15));
        report(&format!("{name} replaces its key, 15 s later"), &flows, mark);
        let status = node(&world, name).status().unwrap();
        assert!(status["relay"]["connected"] == true && status["problems"] == json!([]), "{status}");
    }
}

/// The node program of the thief would take the announcement back, so it is dead.
#[test]
fn a_stolen_token_that_announces_the_key_of_another_node_takes_nothing() {
    let mut world = mesh();
    let victim = own_key(node(&world, ROTATING)).unwrap();
    let stolen = world.nodes.iter_mut().find(|node| node.name == "home-2").unwrap();
    stolen.kill().unwrap();
    let kubeconfig = stolen.kubeconfig();
    let flows: Vec<Flow> = [("cloud-1", ROTATING), (ROTATING, "cloud-1"), ("home-1", ROTATING)]
        .map(|(from, to)| udp(&world, from, to))
        .into();
    std::thread::sleep(Duration::from_secs(2));
    let mark = Instant::now();
    let patch = json!({ "spec": { "nextPublicKey": victim } }).to_string();
    let announce = |name: &str| {
        let kubeconfig = kubeconfig.to_str().unwrap();
        world.plane.kubectl(&[
            "--kubeconfig",
            kubeconfig,
            "patch",
            "wirekubepeer",
            name,
            "--type=merge",
            "-p",
            &patch,
        ])
    };
    let refused = announce("cloud-2").unwrap_err().to_string();
    assert!(refused.contains("may only write the WireKubePeer of its own name"), "{refused}");
    announce("home-2").unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let status = node(world, "cloud-1").status()?.to_string();
            ensure!(status.contains("home-2 announces as its next one is that of"), "{status}");
            Ok(())
        })
        .unwrap();
    std::thread::sleep(Duration::from_secs(3));
    loses_nothing("a stolen token announces a key", &flows, mark);
    report("a stolen token announces a key", &flows, mark);
    all_have_but(&world, &victim, "home-2").unwrap();
}

fn all_have_but(world: &World, key: &str, dead: &str) -> Result<()> {
    let living = |node: &&Node| node.name != ROTATING && node.name != dead;
    for other in world.nodes.iter().filter(living) {
        let seen = peer(other, ROTATING).context("no such peer")?;
        ensure!(seen["publicKey"] == key, "{}: {seen}", other.name);
    }
    Ok(())
}

//! Nodes of which none has a public address find each other with STUN servers: coturn on the lab's Internet.

use std::time::Duration;

use crate::outage::{TIMEOUT, node, pod};
use anyhow::{Context, Result, ensure};
use fairlead_demo::servers::{apply_mesh, stun_server};
use fairlead_demo::{World, probe, topology};
use serde_json::{Value, json};
use testbed_lab::{Host, Progress};

/// Time for which nodes that cannot find each other are watched.
const WATCHED: Duration = Duration::from_secs(5);

/// Checks the type of NAT that a node publishes, and that it was found by STUN; its WireKubePeer.
fn nat_of(world: &World, node: &str, expected: &str) -> Result<Value> {
    let peer = world.published(node)?;
    ensure!(peer["status"]["natType"] == expected, "{node}: {}", peer["status"]);
    ensure!(peer["status"]["endpointDiscoveryMethod"] == "stun", "{node}: {}", peer["status"]);
    Ok(peer)
}

/// The address that another client sees from the same host.
fn judged(world: &World, name: &str, server: &Host) -> String {
    let command = format!("turnutils_stunclient -p 3478 {}", server.address());
    let said = node(world, name).host.shell(&command).unwrap();
    let (_, address) = said.split_once("UDP reflexive addr: ").unwrap_or_else(|| panic!("{said}"));
    address.split(':').next().unwrap().to_owned()
}

#[test]
fn nodes_behind_nats_find_each_other_with_stun_servers() {
    let mut world = World::start(&topology::behind_nats(), &Progress::default()).unwrap();
    let servers = [stun_server(&world, "stun-1").unwrap(), stun_server(&world, "stun-2").unwrap()];
    let names: Vec<String> = servers.iter().map(|(host, _)| format!("stun:{}", host.address())).collect();
    apply_mesh(&world, &json!({})).unwrap();
    world.apply_pool().unwrap();
    world.start_pods().unwrap();
    std::thread::sleep(WATCHED);
    let before = world.published("home-1").unwrap();
    assert_eq!(before["status"]["peers"]["direct"], 0, "{before}");
    assert_eq!(before["status"]["natType"], Value::Null, "{before}");
    let (code, ping) = node(&world, "home-1").ask(&["ping", "office-1", "--count", "1"]).unwrap();
    assert!(code == Some(1) && ping["peer"] == "office-1", "nothing answers: {ping}");

    apply_mesh(&world, &json!({ "stunServers": names })).unwrap();
    for name in ["home-1", "office-1"] {
        let peer = world.wait_for(TIMEOUT, |world| nat_of(world, name, "cone")).unwrap();
        let candidates = peer["status"]["iceCandidates"].as_array().unwrap();
        let seen: Vec<&Value> = candidates.iter().filter(|candidate| candidate["type"] == "srflx").collect();
        let [seen] = seen[..] else { panic!("one mapping for both servers: {candidates:?}") };
        assert_eq!((&seen["address"], &seen["priority"]), (&peer["spec"]["endpoint"], &json!(200)));
        let public = judged(&world, name, &servers[0].0);
        assert!(
            seen["address"].as_str().unwrap().starts_with(&format!("{public}:")),
            "{seen} is not {public}"
        );
    }
    let hotel = world.wait_for(TIMEOUT, |world| nat_of(world, "hotel-1", "symmetric")).unwrap();
    let placeholder = format!("{}:51820", judged(&world, "hotel-1", &servers[0].0));
    assert_eq!(hotel["spec"]["endpoint"], placeholder.as_str());
    let (_, netcheck) = node(&world, "hotel-1").ask(&["netcheck"]).unwrap();
    println!("{netcheck:#}");
    assert_eq!((&netcheck["natType"], &netcheck["udp"]), (&json!("symmetric"), &json!("works")));
    let seen = netcheck["families"][0]["stun"].as_array().unwrap();
    assert!(seen.len() == 2 && seen[0]["mapped"] != seen[1]["mapped"], "{netcheck}");

    let pair = [pod(&world, "home-1").clone(), pod(&world, "office-1").clone()];
    let deadline = std::time::Instant::now() + TIMEOUT;
    let (pairs, _) = probe::all_pairs(&pair, deadline, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");

    // The servers are silent: the nodes keep what works and say what is wrong.
    for (_, process) in servers {
        process.stop(Duration::from_secs(10)).unwrap();
    }
    apply_mesh(&world, &json!({ "stunServers": ["203.0.113.250", "203.0.113.251"] })).unwrap();
    let problem = |world: &World| {
        let status = world.published("home-1")?["status"].clone();
        let problems = status["problems"].as_array().context("no problems")?;
        let is_named =
            |problem: &&Value| problem.as_str().is_some_and(|it| it.contains("no STUN server answers"));
        problems.iter().find(is_named).cloned().with_context(|| status.to_string())
    };
    println!("{}", world.wait_for(TIMEOUT, problem).unwrap());
    let (pairs, _) = probe::all_pairs(&pair, deadline + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
}

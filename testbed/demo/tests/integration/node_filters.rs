//! Settings of one Node that override those of the mesh: what it leaves out of the mesh, and at which of its endpoints it is known. Real
//! node programs, a real controller that copies them, and a real API server.

use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, steady, udp};
use anyhow::{Context, Result, ensure};
use fairlead_demo::{World, topology};
use serde_json::{Value, json};
use testbed_lab::Progress;

const NODE: &str = "office-1";
const OTHER: &str = "cloud-1";
/// Time for which flows are watched for losses after a change.
const WATCHED: Duration = Duration::from_secs(3);

fn annotate(world: &World, annotations: &[&str]) {
    let words = [&["annotate", "--overwrite", "node", NODE], annotations].concat();
    world.plane.kubectl(&words).unwrap();
}

/// Whether the other node leads packets to the private address of the node into the mesh, and gets an answer there.
fn is_reached_through_the_mesh(world: &World) -> Result<bool> {
    let address = node(world, NODE).host.address();
    let host = &node(world, OTHER).host;
    let targets = host.shell("nft list set inet talos_kubespan kubespan_targets_ipv4")?;
    let is_target = targets.contains(&address.to_string());
    let answers = host.shell(&format!("ping -n -c 1 -W 1 {address}")).is_ok();
    ensure!(is_target == answers, "a target: {is_target}, answers: {answers}");
    Ok(answers)
}

/// Endpoint at which the other node publishes that it sees the node.
fn sighting(world: &World) -> Result<Option<Value>> {
    Ok(world.published(OTHER)?["status"]["observedEndpoints"].get(NODE).cloned())
}

fn candidates(world: &World) -> Result<String> {
    Ok(world.published(NODE)?["status"]["iceCandidates"].to_string())
}

#[test]
fn a_node_leaves_out_of_the_mesh_and_keeps_to_itself_what_its_annotations_say() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let address = node(&world, NODE).host.address().to_string();
    world
        .wait_for(TIMEOUT, |world| {
            let seen = peer(node(world, OTHER), NODE).context("no peer")?;
            ensure!(seen["state"] == "up" && is_reached_through_the_mesh(world)?, "{seen}");
            ensure!(candidates(world)?.contains(&address) && sighting(world)?.is_some(), "not published yet");
            Ok(())
        })
        .unwrap();
    let flows = [udp(&world, OTHER, NODE), udp(&world, NODE, OTHER)];
    steady(&flows);
    let mark = Instant::now();

    // Its address is no part of the mesh any more; its pods are.
    let excluded = "networking.talos.dev/kubespan-exclude-advertised-networks";
    annotate(&world, &[&format!("{excluded}=192.168.0.0/16,nonsense")]);
    world
        .wait_for(TIMEOUT, |world| {
            ensure!(!is_reached_through_the_mesh(world)?, "it is still in the mesh");
            let claims = world.published(NODE)?["spec"]["allowedIPs"].to_string();
            ensure!(!claims.contains(&address), "{claims}");
            let problems = node(world, NODE).status()?["problems"].to_string();
            ensure!(problems.contains("nonsense") && problems.contains(excluded), "{problems}");
            Ok(())
        })
        .unwrap();
    std::thread::sleep(WATCHED);
    loses_nothing("an address leaves the mesh", &flows, mark);

    // The other node sees it at its router, and keeps that to itself as well.
    annotate(&world, &[&format!("{excluded}-"), "wirekube.io/endpoint-filters=192.168.0.0/16"]);
    world
        .wait_for(TIMEOUT, |world| {
            ensure!(is_reached_through_the_mesh(world)?, "it is not back");
            let facts = world.published(NODE)?["status"]["node"]["endpointFilters"].clone();
            ensure!(facts == json!(["192.168.0.0/16"]), "{facts}");
            let seen = sighting(world)?;
            ensure!(seen.is_none(), "{seen:?}");
            let router = node(world, NODE).public_address().to_string();
            let candidates = candidates(world)?;
            ensure!(candidates.contains(&address) && !candidates.contains(&router), "{candidates}");
            Ok(())
        })
        .unwrap();
    annotate(&world, &["wirekube.io/endpoint-filters=0.0.0.0/0,!192.168.0.0/16"]);
    world
        .wait_for(TIMEOUT, |world| {
            let candidates = candidates(world)?;
            ensure!(!candidates.contains(&address) && sighting(world)?.is_some(), "{candidates}");
            Ok(())
        })
        .unwrap();
    annotate(&world, &["wirekube.io/endpoint-filters-"]);
    world
        .wait_for(TIMEOUT, |world| {
            let facts = world.published(NODE)?["status"]["node"]["endpointFilters"].clone();
            ensure!(facts.is_null() && candidates(world)?.contains(&address), "{facts}");
            Ok(())
        })
        .unwrap();
    loses_nothing("filters of a node", &flows, mark);
}

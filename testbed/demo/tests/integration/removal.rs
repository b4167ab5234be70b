//! Nodes that are removed from the mesh, and nodes that are only missing: real node programs, a real API server, a discovery service.

use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, node, peer};
use fairlead_demo::{World, servers, topology};
use serde_json::{Value, json};
use testbed_lab::discovery::Discovery;
use testbed_lab::{Progress, executable};

const CLUSTER: &str = "removal";
const REMOVED: &str = "office-1";
/// Longest time until a node that was revoked has no tunnel any more.
const REVOKED: Duration = Duration::from_secs(5);

/// `fairlead peer revoke` ends the tunnels to a node at once. Neither the node program, which goes on, nor the discovery service, which
/// still tells of it, brings it back.
#[test]
fn a_node_that_is_revoked_is_gone_from_every_source_until_it_is_taken_back() {
    let (world, _server) = with_discovery();
    peer_command(&world, "revoke");
    let begun = Instant::now();
    world.wait_for(TIMEOUT, is_gone).unwrap();
    let took = begun.elapsed();
    println!("the tunnel was gone {:.2} s after the revocation", took.as_secs_f64());
    assert!(took <= REVOKED, "{took:?}");
    assert!(world.plane.kubectl(&["get", "wirekubepeer", REMOVED]).is_err());
    // Longer than a node takes to publish itself again.
    std::thread::sleep(Duration::from_secs(8));
    is_gone(&world).unwrap();
    tells(&world).unwrap();
    let status = node(&world, "cloud-1").status().unwrap();
    assert_eq!(status["problems"], json!([]), "it is not missing: {status}");
    let status = node(&world, REMOVED).status().unwrap().to_string();
    assert!(status.contains("this node was revoked"), "{status}");

    peer_command(&world, "unrevoke");
    let begun = Instant::now();
    world.wait_for(TIMEOUT, is_up).unwrap();
    println!("it was back {:.1} s after it was taken back", begun.elapsed().as_secs_f64());
}

/// The controller records the deletion: a node that was off then believes neither what it saved nor the discovery service, which still tells of
/// the node, and guards no address of it.
#[test]
fn a_node_that_was_off_learns_which_peers_were_deleted_meanwhile() {
    let (mut world, _server) = with_discovery();
    for node in &mut world.nodes {
        node.kill().unwrap();
    }
    world.plane.kubectl(&["delete", "wirekubepeer", REMOVED]).unwrap();
    let deleted =
        |world: &World| -> anyhow::Result<Value> { Ok(world.mesh()?["status"]["deletedPeers"].clone()) };
    world
        .wait_for(TIMEOUT, |world| {
            let deleted = deleted(world)?;
            anyhow::ensure!(deleted[0]["name"] == REMOVED && deleted[1].is_null(), "{deleted}");
            Ok(())
        })
        .unwrap();
    let start = |world: &mut World, name: &str| {
        let node = world.nodes.iter_mut().find(|node| node.name == name).unwrap();
        node.start().unwrap();
        node.wait_ready(TIMEOUT).unwrap();
    };
    start(&mut world, "cloud-1");
    world.wait_for(TIMEOUT, tells).unwrap();
    std::thread::sleep(Duration::from_secs(8));
    is_gone(&world).unwrap();
    let status = node(&world, "cloud-1").status().unwrap();
    assert_eq!(status["problems"], json!([]), "it is not missing: {status}");

    // It publishes itself again.
    start(&mut world, REMOVED);
    world.wait_for(TIMEOUT, is_up).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let deleted = deleted(world)?;
            anyhow::ensure!(deleted[0].is_null(), "{deleted}");
            Ok(())
        })
        .unwrap();
}

/// A cluster whose nodes reach each other, and a service that tells of them.
fn with_discovery() -> (World, Discovery) {
    let world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let host = world.lab().public_site("internet").host("discovery").unwrap();
    let server =
        Discovery::start(host, world.directory().join("discovery"), &format!("{CLUSTER} *")).unwrap();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": "fairlead-discovery", "namespace": "kube-system" },
        "stringData": { "clusterID": CLUSTER, "clusterSecret": "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=" },
    });
    world.plane.apply(&secret.to_string()).unwrap();
    servers::apply_mesh(&world, &json!({ "discovery": server.spec() })).unwrap();
    world.wait_for(TIMEOUT, is_up).unwrap();
    world.wait_for(TIMEOUT, tells).unwrap();
    (world, server)
}

fn peer_command(world: &World, word: &str) {
    let mut command = node(world, "cloud-1").host.command(executable("fairlead").unwrap()).unwrap();
    let command = command.args(["peer", word, REMOVED]).env("KUBECONFIG", world.plane.kubeconfig());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{word}: {output:?}");
}

fn is_up(world: &World) -> anyhow::Result<()> {
    let found = peer(node(world, "cloud-1"), REMOVED);
    anyhow::ensure!(found.as_ref().is_some_and(|peer| peer["state"] == "up"), "{found:?}");
    Ok(())
}

fn is_gone(world: &World) -> anyhow::Result<()> {
    let found = peer(node(world, "cloud-1"), REMOVED);
    anyhow::ensure!(found.is_none(), "it is a peer: {found:?}");
    Ok(())
}

/// The discovery service tells cloud-1 of the node.
fn tells(world: &World) -> anyhow::Result<()> {
    let status = node(world, "cloud-1").status()?;
    let service = &status["discoveryServices"][0];
    anyhow::ensure!(service["members"] == 1, "{service}");
    Ok(())
}

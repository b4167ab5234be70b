//! The mesh is deleted and made again; a key is copied.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testbed_lab::eventually;
use testbed_nodes::{Cluster, Node};

use crate::bed::{Pod, Room, TIMEOUT, Traffic, server};
use crate::mesh::BED;

/// "Within seconds"; ten times that, because a busy machine is no failure.
const REMOVED: Duration = Duration::from_secs(50);

fn on<'a>(pods: &'a [Pod], node: &str) -> &'a Pod {
    pods.iter().find(|pod| pod.node == node).unwrap()
}

/// Names what is left of the mesh in the kernel of a node.
fn nothing_is_left(node: &Node) -> Result<()> {
    let script = "ip -o link show wire_kube 2>/dev/null; nft list table inet talos_kubespan 2>/dev/null; \
                  ip rule; ip -6 rule; ip route show table 180 2>/dev/null; ip -6 route show table 180 2>/dev/null";
    let state = node.exec(&["sh", "-c", &format!("{{ {script}; true; }}")])?;
    for left in ["wire_kube", "talos_kubespan", "lookup 181", "32500:", "32800:", "unreachable default"] {
        ensure!(!state.contains(left), "{}: {left} is left: {state}", node.name());
    }
    Ok(())
}

fn peer(cluster: &Cluster, name: &str) -> Result<Value> {
    Ok(serde_json::from_str(&cluster.kubectl(&["get", "wirekubepeer", name, "-o", "json"])?)?)
}

/// Deletes the mesh, and waits until no node has anything of it and every node says so.
fn deletes_the_mesh(cluster: &Cluster) -> Result<()> {
    let deleted = Instant::now();
    cluster.kubectl(&["delete", "wirekubemesh", "--all"])?;
    for node in cluster.nodes() {
        eventually(REMOVED, || nothing_is_left(node))?;
    }
    println!(
        "nothing of the mesh is left on any node {:.1} s after it was deleted",
        deleted.elapsed().as_secs_f64()
    );
    for node in cluster.nodes() {
        let reported = || {
            let status = &peer(cluster, node.name())?["status"];
            let ready = &status["conditions"][0];
            ensure!(
                status["connected"] == false && ready["reason"] == "NoMesh",
                "{}: {status:#}",
                node.name()
            );
            Ok(())
        };
        eventually(TIMEOUT, reported)?;
    }
    Ok(())
}

#[test]
fn a_mesh_that_is_deleted_leaves_nothing_and_one_that_is_made_again_carries_traffic() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "mesh-deleted");
    let pods = room.run("deployment/web", &server("web", 3));
    let traffic = Traffic::between(&cluster, on(&pods, "cloud-1"), on(&pods, "home-1"));
    traffic.flows();
    let mesh: Value =
        serde_json::from_str(&cluster.kubectl(&["get", "wirekubemesh", "default", "-o", "json"]).unwrap())
            .unwrap();
    let gone = deletes_the_mesh(&cluster);
    let again = json!({
        "apiVersion": mesh["apiVersion"], "kind": mesh["kind"], "metadata": { "name": "default" }, "spec": mesh["spec"],
    });
    // After a failure, too: the tests that come later share the cluster.
    cluster.apply(&again.to_string()).unwrap();
    let made = Instant::now();
    gone.unwrap();
    traffic.flows();
    println!("pods reach each other {:.1} s after it was made again", made.elapsed().as_secs_f64());
    cluster.wait_fairlead().unwrap();
}

/// An attacker with the token of one node can write its own object, with the key and the address of another.
#[test]
fn a_copied_key_takes_no_packet_from_its_owner() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "copied-key");
    let pods = room.run("deployment/web", &server("web", 3));
    let traffic = Traffic::between(&cluster, on(&pods, "cloud-1"), on(&pods, "home-1"));
    traffic.flows();
    let victim = peer(&cluster, "home-1").unwrap();
    let mark = Instant::now();
    let thief = json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": "thief" },
        "spec": {
            "publicKey": victim["spec"]["publicKey"], "allowedIPs": victim["spec"]["allowedIPs"],
            "endpoint": "203.0.113.66:51820",
        },
    });
    cluster.apply(&thief.to_string()).unwrap();
    let reported = || {
        let problems = peer(&cluster, "home-1")?["status"]["problems"].to_string();
        ensure!(problems.contains("home-1 and thief publish the same WireGuard public key"), "{problems}");
        Ok(())
    };
    eventually(TIMEOUT, reported).unwrap();
    std::thread::sleep(Duration::from_secs(10));
    traffic.lost_nothing(mark);
    cluster.kubectl(&["delete", "wirekubepeer", "thief"]).unwrap();
    traffic.lost_nothing(mark);
    cluster.wait_fairlead().unwrap();
}

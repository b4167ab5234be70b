//! Failures to publish: an endpoint that is none, and a status that the API server refuses. All else goes on.

use std::time::Instant;

use crate::outage::TIMEOUT;
use anyhow::{Context, Result, ensure};
use fairlead_demo::node::Node;
use fairlead_demo::{World, probe, topology};
use serde_json::Value;
use testbed_lab::Progress;

/// The API server takes no status of `office-1`.
const REFUSAL: &str = "\
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-status}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - {apiGroups: [wirekube.io], apiVersions: ['*'], resources: [wirekubepeers/status], operations: [UPDATE]}
  validations: [{expression: \"object.metadata.name != 'office-1'\", message: no status today}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-status}
spec: {policyName: no-status, validationActions: [Deny]}
";

fn annotate(world: &World, node: &str, annotations: &[&str]) {
    let words = [&["annotate", "--overwrite", "node", node], annotations].concat();
    world.plane.kubectl(&words).unwrap();
}

fn reported(world: &World, node: &str, words: &str) {
    let reported = |world: &World| {
        let problems = world.published(node)?["status"]["problems"].to_string();
        ensure!(problems.contains(words), "{words} is not in {problems}");
        Ok(())
    };
    world.wait_for(TIMEOUT, reported).unwrap();
}

fn event(world: &World, node: &str, reason: &str, words: &str) {
    let selector = format!("regarding.name={node},reason={reason}");
    let noted = |world: &World| {
        let notes = world.notes(&selector)?;
        ensure!(notes.contains(words), "{words} is not in the Events {reason} on {node}: {notes}");
        Ok(())
    };
    world.wait_for(TIMEOUT, noted).unwrap();
}

/// Whether a node says that it is connected to so many others.
fn is_connected(world: &World, node: &str, others: u64) -> Result<()> {
    let status = node_status(world, node)?;
    let peers = status["peers"].as_array().context("no peers")?;
    let up = peers.iter().filter(|peer| peer["state"] == "up").count();
    ensure!(up as u64 == others, "{node}: {status:#}");
    Ok(())
}

fn node_status(world: &World, node: &str) -> Result<Value> {
    world.nodes.iter().find(|known| known.name == node).context("no node")?.status()
}

#[test]
fn bad_endpoints_and_a_refused_status_are_told_and_keep_no_node_out() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    let both = |world: &World| is_connected(world, "cloud-1", 1);
    world.wait_for(TIMEOUT, both).unwrap();

    // Refused before a bad endpoint is given, so that nothing of it was published by chance.
    world.plane.apply(REFUSAL).unwrap();
    let in_force = |world: &World| {
        let patch = r#"{"status": {"iceState": "unknown"}}"#;
        let words =
            ["patch", "wirekubepeer", "office-1", "--subresource=status", "--type=merge", "-p", patch];
        let answer = world.plane.kubectl(&[&words[..], &["--dry-run=server"]].concat());
        ensure!(answer.is_err(), "the policy is not in force");
        Ok(())
    };
    world.wait_for(TIMEOUT, in_force).unwrap();
    annotate(&world, "office-1", &["wirekube.io/endpoint=no-port", "kilo.squat.ai/force-endpoint=192.0.2.1"]);
    event(&world, "office-1", "PublishFailed", "no status today");
    let refused = |world: &World| {
        let problems = node_status(world, "office-1")?["problems"].to_string();
        ensure!(problems.contains("no status today"), "{problems}");
        Ok(())
    };
    world.wait_for(TIMEOUT, refused).unwrap();

    a_node_joins_with_bad_annotations(&mut world);

    world
        .plane
        .kubectl(&["delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", "no-status"])
        .unwrap();
    for words in
        ["wirekube.io/endpoint is \\\"no-port\\\"", "kilo.squat.ai/force-endpoint is \\\"192.0.2.1\\\""]
    {
        reported(&world, "office-1", words);
    }
    event(&world, "office-1", "InvalidEndpoint", "wirekube.io/endpoint is \"no-port\"");

    // Corrected, in a spelling that the CRD would refuse.
    let address = world.node("cloud-2").unwrap().public_address();
    annotate(
        &world,
        "cloud-2",
        &["kilo.squat.ai/force-endpoint-", &format!("wirekube.io/endpoint=[::ffff:{address}]:51820")],
    );
    let corrected = |world: &World| {
        let peer = world.published("cloud-2")?;
        let (endpoint, problems) = (&peer["spec"]["endpoint"], &peer["status"]["problems"]);
        ensure!(*endpoint == format!("{address}:51820"), "{endpoint}");
        ensure!(problems.as_array().is_none_or(Vec::is_empty), "{problems}");
        Ok(())
    };
    world.wait_for(TIMEOUT, corrected).unwrap();
    annotate(&world, "office-1", &["wirekube.io/endpoint-", "kilo.squat.ai/force-endpoint-"]);
    event(&world, "office-1", "MeshProblemsGone", "no problems any more");
    world.wait_for(TIMEOUT, |world| is_connected(world, "office-1", 2)).unwrap();
}

fn a_node_joins_with_bad_annotations(world: &mut World) {
    let host = world.sites[0].host("cloud-2").unwrap();
    let directory = world.directory().join("cloud-2");
    std::fs::create_dir(&directory).unwrap();
    let node = Node::new("cloud-2", "cloud", host, directory);
    world.join(&node).unwrap();
    world.nodes.push(node);
    annotate(world, "cloud-2", &["wirekube.io/endpoint=a b:1", "kilo.squat.ai/force-endpoint=192.0.2.1:0"]);
    world.node("cloud-2").unwrap().start().unwrap();
    world.node("cloud-2").unwrap().wait_ready(TIMEOUT).unwrap();
    for node in ["cloud-1", "cloud-2", "office-1"] {
        world.wait_for(TIMEOUT, |world| is_connected(world, node, 2)).unwrap();
    }
    reported(world, "cloud-2", "wirekube.io/endpoint is \\\"a b:1\\\"");
    reported(world, "cloud-2", "kilo.squat.ai/force-endpoint is \\\"192.0.2.1:0\\\"");
    world.start_pods().unwrap();
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(!pairs.is_empty() && failed.is_empty(), "{failed:?}");
}

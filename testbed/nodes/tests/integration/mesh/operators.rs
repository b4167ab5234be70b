//! Commands that operators run on their own machine, with a kubeconfig file.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use serde_json::Value;
use testbed_lab::eventually;
use testbed_nodes::Cluster;

use crate::bed::{TIMEOUT, fairlead};
use crate::mesh::BED;

/// Exit code of the connectivity test, and its connections.
fn connectivity(cluster: &Cluster) -> (Option<i32>, Vec<Value>) {
    let (code, text, _) = fairlead(cluster, &["connectivity", "test", "-o", "json"]).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    (code, answer["connections"].as_array().unwrap().clone())
}

fn words<'a>(connections: &'a [Value], key: &str) -> BTreeSet<&'a str> {
    connections.iter().map(|connection| connection[key].as_str().unwrap()).collect()
}

#[test]
fn the_connectivity_test_passes_names_a_node_that_drops_and_leaves_nothing() {
    let cluster = BED.alone();
    let names: BTreeSet<&str> = cluster.nodes().iter().map(|node| node.name()).collect();
    let (code, connections) = connectivity(&cluster);
    assert_eq!(code, Some(0), "{connections:?}");
    assert_eq!(words(&connections, "from"), names);
    let tests = ["name of a Service", "pod to API server", "pod to Service", "pod to node", "pod to pod"];
    assert_eq!(words(&connections, "test"), BTreeSet::from(tests));
    let pods = connections.iter().filter(|connection| connection["test"] == "pod to pod").count();
    assert_eq!(pods, names.len() * names.len() * 2, "every pair of nodes, IPv4 and IPv6");

    // Pods of one node answer only those of that node.
    let node = cluster.nodes().last().unwrap();
    let drop = "nft -f - <<'END'\ntable inet testdrop {\n chain forward {\n  type filter hook forward priority -300;\n  \
                tcp dport 8080 drop\n }\n}\nEND";
    node.host().shell(drop).unwrap();
    let (code, connections) = connectivity(&cluster);
    node.host().shell("nft delete table inet testdrop").unwrap();
    assert_eq!(code, Some(3), "{connections:?}");
    let failed = |from: &str, to: &str| {
        let mut pair = connections
            .iter()
            .filter(|it| it["test"] == "pod to pod" && it["from"] == from && it["to"] == to);
        pair.all(|it| it["error"] == "timed out")
    };
    let (first, second) = (cluster.nodes()[0].name(), cluster.nodes()[1].name());
    assert!(failed(first, node.name()) && !failed(first, second), "{connections:?}");

    // The namespace of a managed relay stays.
    let selector = "app.kubernetes.io/name=fairlead,app.kubernetes.io/component=connectivity-test";
    let left = cluster.kubectl(&["get", "namespaces", "-l", selector, "-o", "name"]).unwrap();
    assert_eq!(left, "", "the namespaces are removed");
}

#[test]
fn the_status_of_the_cluster_and_of_each_node_needs_no_pod() {
    let cluster = BED.shared();
    let connected = || {
        let (code, text, _) = fairlead(&cluster, &["status"])?;
        ensure!(code == Some(0), "{text}");
        Ok(text)
    };
    let text = eventually(TIMEOUT, connected).unwrap();
    for node in cluster.nodes() {
        assert!(text.contains(node.name()), "{text}");
        let (code, text, _) = fairlead(&cluster, &["status", "--node", node.name(), "-o", "yaml"]).unwrap();
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("publicKey"), "{text}");
        let (_, text, _) = fairlead(&cluster, &["status", "--node", node.name()]).unwrap();
        let program = text.lines().find(|line| line.contains(" exec coild-")).context("no hint").unwrap();
        assert!(program.ends_with("-- fairlead status"), "{program}");
    }
    let (code, ..) = fairlead(&cluster, &["status", "--node", "nowhere"]).unwrap();
    assert_eq!(code, Some(1));
}

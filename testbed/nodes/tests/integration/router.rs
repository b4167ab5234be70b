//! Fairlead on real nodes of one network, without a mesh: `deploy/overlays/router`.
//!
//! Packets of pods go through the kernel alone, so nothing may be lost whatever happens to Fairlead.

mod beyond;

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use testbed_lab::{Progress, eventually};
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{Families, Network, one_network};
use testbed_nodes::{Cluster, Node};

use crate::bed;
use crate::bed::{Room, Running, TIMEOUT, addresses_agree};
use beyond::Beyond;

static BED: bed::Bed = bed::Bed::new(build);

fn build() -> Result<Cluster> {
    let topology = one_network(2, Families::Dual, Network::Installed { pods: POOL_RANGES });
    let cluster = Cluster::start(topology, &test_images()?, Progress::default())?;
    cluster.install_fairlead(Mode::Router)?;
    // The machine outside has no routes to pods.
    let patch = r#"{"spec": {"masquerade": true}}"#;
    cluster.kubectl(&["patch", "addresspool", "default", "--type=merge", "-p", patch])?;
    Ok(cluster)
}

#[test]
fn neither_an_upgrade_nor_kill_9_of_node_programs_loses_a_packet_of_running_pods() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "upgrade");
    let running = Running::start(&room);
    let beyond = Beyond::start(&cluster, &running.pods);
    let nothing_is_lost = |mark: Instant, what: &str| {
        println!("{what}:");
        running.all().for_each(|traffic| traffic.lost_nothing(mark));
        beyond.lost_nothing(mark);
        running.untouched(&room);
    };
    let mark = Instant::now();
    cluster.upgrade_fairlead(Mode::Router, "upgraded").unwrap();
    nothing_is_lost(mark, "upgrade");
    let mark = Instant::now();
    cluster.nodes().iter().for_each(|node| kill_node_program(&cluster, node));
    cluster.wait_fairlead().unwrap();
    nothing_is_lost(mark, "kill -9 of the node programs");
    running.more_start(&room);
    addresses_agree(&cluster);
}

/// Kills the node program without a word, and waits until the next one is ready, which kubelet starts.
fn kill_node_program(cluster: &Cluster, node: &Node) {
    let (before, _) = eventually(TIMEOUT, || node_program(cluster, node)).unwrap();
    node.exec(&["ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", &before]).unwrap();
    let is_back = || {
        let (now, is_ready) = node_program(cluster, node)?;
        ensure!(now != before && is_ready, "{before} was killed on {}, ready is not {now}", node.name());
        Ok(())
    };
    eventually(TIMEOUT, is_back).with_context(|| cluster.explain()).unwrap();
}

/// The container of the node program, and whether it is ready.
fn node_program(cluster: &Cluster, node: &Node) -> Result<(String, bool)> {
    let container = "{.status.containerStatuses[0].containerID}|{.status.containerStatuses[0].ready}";
    let path = format!("jsonpath={{range .items[*]}}{{.metadata.deletionTimestamp}}|{container} {{end}}");
    let field = format!("spec.nodeName={}", node.name());
    let selector = "app.kubernetes.io/component=coild";
    let words = ["-n", "kube-system", "get", "pods", "-l", selector, "--field-selector", &field, "-o", &path];
    let listed = cluster.kubectl(&words)?;
    let living: Vec<&str> = listed.split_whitespace().filter_map(|pod| pod.strip_prefix('|')).collect();
    ensure!(living.len() == 1, "one program a node: {listed}");
    let (id, ready) = living[0].split_once('|').with_context(|| format!("incomplete: {listed}"))?;
    let id = id.strip_prefix("containerd://").with_context(|| format!("no container ID: {listed}"))?;
    Ok((id.to_owned(), ready == "true"))
}

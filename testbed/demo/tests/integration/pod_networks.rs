//! Pods of another plugin in the mesh: the CNI project's `ptp` makes them, and `host-local` gives them addresses of `spec.podCIDRs` of their
//! Nodes. Fairlead is no CNI plugin here. There is no kubelet and no controller-manager: the test gives Nodes their networks. Everything
//! else is real.

use std::net::IpAddr;
use std::time::Instant;

use crate::outage::{TIMEOUT, node, peer, pod};
use anyhow::{Context as _, Result, ensure};
use fairlead_demo::cni::{self, Plugin, Pod};
use fairlead_demo::topology::{self, SitePlan, Topology};
use fairlead_demo::{World, probe, servers};
use serde_json::{Value, json};
use testbed_kube::CNI_PLUGINS;
use testbed_lab::{Progress, eventually};

/// A node each in three sites, with the networks that a controller-manager would give them.
const NODES: [(&str, [&str; 2]); 3] = [
    ("cloud-1", ["10.244.0.0/24", "fd00:244::/64"]),
    ("office-1", ["10.244.1.0/24", "fd00:244:0:1::/64"]),
    ("home-1", ["10.244.2.0/24", "fd00:244:0:2::/64"]),
];

fn three_sites() -> Topology {
    let two = topology::two_sites();
    let office = two.sites[1].clone();
    let home = SitePlan { name: "home", nodes: vec!["192.168.1.11".parse().unwrap()], ..office };
    let sites = two.sites.into_iter().chain([home]).collect();
    Topology { sites, node_arguments: &["--enable-ipam=false"], ..topology::two_sites() }
}

fn networks(world: &World, name: &str) -> Result<Vec<String>> {
    let listed = world.plane.kubectl(&["get", "node", name, "-o", "jsonpath={.spec.podCIDRs}"])?;
    Ok(serde_json::from_str(&listed)?)
}

/// A pod as a container runtime with ptp and host-local makes it.
fn start_pod(world: &World, name: &str) -> Result<Pod> {
    let node = node(world, name);
    let ranges: Vec<Value> =
        networks(world, name)?.iter().map(|subnet| json!([{ "subnet": subnet }])).collect();
    let configuration = json!({
        "cniVersion": "1.0.0", "name": "pods", "type": "ptp",
        "ipam": {
            "type": "host-local", "dataDir": node.directory.join("host-local"), "ranges": ranges,
            "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
        },
    });
    let plugin = Plugin {
        executable: CNI_PLUGINS.programs()?.join("ptp"),
        socket: node.socket(),
        host: node.host.clone(),
    };
    let namespace = world.lab().bare_namespace(&format!("pod-{name}"))?;
    let container = cni::container(&format!("pod-{name}"), &namespace);
    let output = plugin.call("ADD", &container, &configuration.to_string())?;
    let said =
        || format!("{} {}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "ptp on {name}: {}", said());
    let addresses = cni::addresses(&serde_json::from_slice(&output.stdout).with_context(said)?)?;
    let (name, node, site) = (format!("pod-{name}"), node.name.clone(), node.site.clone());
    Ok(Pod { name, node, site, namespace, container, addresses })
}

fn switch(world: &World, on: bool) {
    let prefixes = json!({ "includeNodeInternalIP": true, "includePodCIDRs": on });
    let patch = json!({ "spec": { "autoAllowedIPs": prefixes } }).to_string();
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
}

fn all_pods_reach_each_other(world: &World) {
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(pairs.len(), 12, "three pods, two families");
}

/// Whether each node has the networks of all others at their peers and in nftables, and its own nowhere.
fn are_in_the_mesh(world: &World, expected: bool) -> Result<()> {
    for (own, own_networks) in NODES {
        let set = |family: &str| {
            let shown = format!("nft list set inet talos_kubespan kubespan_targets_{family}");
            node(world, own).host.shell(&shown)
        };
        let targets = format!("{}{}", set("ipv4")?, set("ipv6")?);
        for (other, networks) in NODES.iter().filter(|(other, _)| *other != own) {
            let allowed = peer(node(world, own), other).context("no such peer")?["prefixes"].to_string();
            for network in networks {
                ensure!(allowed.contains(network) == expected, "{own} has at {other}: {allowed}");
            }
            for network in own_networks {
                ensure!(!allowed.contains(network), "{own} has its own pods at {other}: {allowed}");
            }
        }
        for network in ["10.244.", "fd00:244"] {
            ensure!(targets.contains(network) == expected, "{own}: {targets}");
        }
    }
    Ok(())
}

fn none_reach_each_other(world: &World) -> Result<()> {
    for (from, to) in NODES.iter().flat_map(|from| NODES.iter().map(move |to| (from.0, to.0))) {
        if from == to {
            continue;
        }
        for address in &pod(world, to).addresses {
            ensure!(probe::ping(pod(world, from), *address).is_err(), "{from} reaches the pod at {address}");
        }
    }
    Ok(())
}

/// The ways to pods are no ways to nodes.
fn no_node_is_reached_at_an_address_of_pods(world: &World) {
    for (name, _) in NODES {
        let published = world.plane.kubectl(&["get", "wkpeer", name, "-o", "json"]).unwrap();
        let published: Value = serde_json::from_str(&published).unwrap();
        let candidates = published["status"]["iceCandidates"].to_string();
        assert!(!candidates.contains("10.244.") && !candidates.contains("fd00:244"), "{name}: {candidates}");
        assert_eq!(published["spec"]["allowedIPs"].as_array().map(Vec::len), Some(1), "only its own address");
        for (other, _) in NODES.iter().filter(|(other, _)| *other != name) {
            let endpoint = peer(node(world, name), other).unwrap()["endpoint"].to_string();
            assert!(!endpoint.contains("10.244.") && !endpoint.contains("fd00:244"), "{name}: {endpoint}");
        }
    }
}

#[test]
fn pods_of_another_plugin_reach_each_other_across_the_mesh_while_it_is_switched_on() {
    let mut world = World::start(&three_sites(), &Progress::default()).unwrap();
    for (name, networks) in NODES {
        let patch = json!({ "spec": { "podCIDR": networks[0], "podCIDRs": networks } }).to_string();
        world.plane.kubectl(&["patch", "node", name, "--type=merge", "-p", &patch]).unwrap();
    }
    servers::apply_mesh(&world, &json!({})).unwrap();
    let pods: Vec<Pod> = NODES.iter().map(|(name, _)| start_pod(&world, name).unwrap()).collect();
    world.pods = pods;
    let all_up = || {
        for (own, _) in NODES {
            for (other, _) in NODES.iter().filter(|(other, _)| *other != own) {
                let state = peer(node(&world, own), other).context("no such peer")?["state"].clone();
                ensure!(state == "up", "{own}: {other} is {state}");
            }
        }
        Ok(())
    };
    eventually(TIMEOUT, all_up).unwrap();
    are_in_the_mesh(&world, false).unwrap();
    none_reach_each_other(&world).unwrap();
    let alone = r#"{"spec": {"autoAllowedIPs": {"includePodCIDRs": true}}}"#;
    let refused =
        world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", alone]).unwrap_err();
    assert!(format!("{refused:#}").contains("say includeNodeInternalIP too"), "{refused:#}");

    switch(&world, true);
    eventually(TIMEOUT, || are_in_the_mesh(&world, true)).unwrap();
    all_pods_reach_each_other(&world);
    for (from, to) in [("cloud-1", "home-1"), ("home-1", "cloud-1"), ("office-1", "home-1")] {
        let address: IpAddr = pod(&world, to).addresses[0];
        node(&world, from).host.shell(&format!("ping -n -c 1 -W 2 {address}")).unwrap();
        let gateway = NODES.iter().find(|(name, _)| *name == to).unwrap().1[0].replace("0/24", "1");
        // The host answers at the address of its pods' gateway, too.
        probe::ping(pod(&world, from), gateway.parse().unwrap()).unwrap();
    }
    no_node_is_reached_at_an_address_of_pods(&world);
    println!("pods of ptp reach each other across three sites");

    switch(&world, false);
    eventually(TIMEOUT, || are_in_the_mesh(&world, false)).unwrap();
    none_reach_each_other(&world).unwrap();
    println!("switched off: no pod reaches another");

    switch(&world, true);
    all_pods_reach_each_other(&world);
    world.node("home-1").unwrap().kill().unwrap();
    world.node("home-1").unwrap().start().unwrap();
    world.node("home-1").unwrap().wait_ready(TIMEOUT).unwrap();
    all_pods_reach_each_other(&world);
    println!("switched on again: they do, also after a crash of a node program");
}

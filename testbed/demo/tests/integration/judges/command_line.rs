//! Output of `kubectl get` and `fairlead status`.

use std::fs;
use std::process::{Command, Output};

use anyhow::{Context as _, ensure};
use fairlead_demo::World;
use fairlead_demo::node::{Node, executable};
use serde_json::{Value, json};

use crate::outage::{TIMEOUT, node};

/// The cells of `kubectl get`, header first. Columns are at least two spaces apart.
fn columns(world: &World, kind: &str) -> Vec<Vec<String>> {
    let table = world.plane.kubectl(&["get", kind, "-A"]).unwrap();
    println!("--- kubectl get {kind}\n{table}");
    let cells = |line: &str| {
        let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
        cells.map(str::to_owned).collect::<Vec<_>>()
    };
    table.lines().map(cells).collect()
}

pub(crate) fn kubectl_shows_columns(world: &World) {
    world
        .plane
        .apply(
            "apiVersion: coil.cybozu.com/v2\nkind: Egress\nmetadata: {name: internet, namespace: demo}\n\
             spec: {destinations: [0.0.0.0/0], replicas: 2}\n---\n\
             apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata: {name: laptop}\n\
             spec: {allowedIPs: [10.5.0.1/32], publicKey: xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=}\n",
        )
        .unwrap();
    let pools = columns(world, "addresspools");
    assert_eq!(
        pools[0],
        ["NAME", "BLOCKSIZE BITS", "BLOCKS", "CAPACITY", "FREE", "NODES", "READY", "REASON", "AGE"]
    );
    assert_eq!(pools[1][..8], ["default", "5", "6", "65536", "65344", "6", "True", "Available"]);

    let blocks = columns(world, "addressblocks");
    assert_eq!(blocks[0], ["NAME", "NODE", "POOL", "IPV4", "IPV6", "AGE"]);
    assert_eq!(blocks.len(), 7);
    for row in &blocks[1..] {
        assert!(world.nodes.iter().any(|node| node.name == row[1]), "{row:?}");
        assert!(row[2] == "default" && row[3].ends_with("/27") && row[4].ends_with("/123"), "{row:?}");
    }
    // Nodes delete requests that have brought a block.
    assert_eq!(world.plane.kubectl(&["get", "blockrequests", "-o", "name"]).unwrap(), "");
    let mesh = columns(world, "wirekubemeshes");
    assert_eq!(mesh[0], ["NAME", "PORT", "INTERFACE", "READY", "TOTAL", "AGE"]);
    assert_eq!(mesh[1][..3], ["default", "51820", "wire_kube"]);
    let peers = columns(world, "wirekubepeers");
    assert_eq!(peers[0], ["NAME", "ENDPOINT", "ALLOWEDIP", "CONNECTED", "NAT", "MODE", "AGE"]);
    assert_eq!(peers.len(), 7);
    assert_eq!(peers[1][..4], ["cloud-1", "198.51.100.11:51820", "198.51.100.11/32", "true"]);
    let egresses = columns(world, "egresses");
    assert_eq!(egresses[0], ["NAMESPACE", "NAME", "DESTINATION", "DESIRED", "AVAILABLE", "AGE"]);
    assert_eq!(egresses[1][..4], ["demo", "internet", "0.0.0.0/0", "2"]);
    let external = columns(world, "peers.kilo.squat.ai");
    assert_eq!(external[0], ["NAME", "PUBLIC KEY", "ALLOWEDIP", "AGE"]);
    assert_eq!(external[1][2], "10.5.0.1/32");
}

fn fairlead(world: &World, node: &Node, arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = node
        .host
        .command(executable("fairlead").unwrap())
        .unwrap()
        .args(arguments)
        .env("KUBECONFIG", world.plane.kubeconfig())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (status.code().unwrap(), text(&stdout), text(&stderr))
}

/// Graphviz reads the picture and sees each node and the Peer once, and a line between any two nodes.
pub(crate) fn the_graph_is_one_for_graphviz(world: &World) {
    let from = node(world, "home-2");
    let paths = || {
        let (code, text, error) = fairlead(world, from, &["graph", "-o", "json"]);
        ensure!(code == 0, "{error}");
        let graph: Value = serde_json::from_str(&text)?;
        let paths = graph["paths"].as_array().context("no paths")?;
        let is_direct = |path: &&Value| path["transports"] == json!(["direct", "direct"]);
        ensure!(graph["nodes"].as_array().is_some_and(|nodes| nodes.len() == 6), "{graph}");
        ensure!(paths.len() == 15 && paths.iter().filter(is_direct).count() == 15, "{graph}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, paths).unwrap();
    let (code, picture, _) = fairlead(world, from, &["graph"]);
    let file = world.directory().join("mesh.dot");
    fs::write(&file, picture).unwrap();
    let Output { stdout, stderr, .. } = Command::new("dot").arg("-Tplain").arg(&file).output().unwrap();
    let [plain, error] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    let count = |word: &str| plain.lines().filter(|line| line.starts_with(word)).count();
    let counted = (count("node "), count("node \"peer/laptop\""), count("edge "));
    assert_eq!((code, counted, error.as_str()), (0, (7, 1, 15), ""), "{plain}");
}

/// 0 no problem, 1 no answer, 2 wrong arguments, 3 at least one problem.
pub(crate) fn status_exits_with_its_codes(world: &World) {
    let node = node(world, "home-2");
    let socket = node.socket().to_string_lossy().into_owned();
    let here = ["status", "--socket", &socket];
    a_node_tells_its_problem(world, node, &here);
    the_cluster_tells_every_nodes_problem(world, node);

    let (code, out, error) = fairlead(world, node, &["status", "--socket", "/run/no-server.sock"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(error.contains("/run/no-server.sock") && error.contains("fairlead node"), "{error}");
    let (code, out, error) = fairlead(world, node, &["status", "--sockets", "x"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(error.contains("--sockets"), "{error}");

    // What the problem says can be done about it.
    let patch = r#"{"spec": {"routing": {"excludeCIDRs": ["192.168.1.10/32"]}}}"#;
    world.plane.kubectl(&["patch", "wirekubemesh", "default", "--type=merge", "-p", patch]).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            for query in [&here[..], &["status", "--cluster"]] {
                let (code, table, error) = fairlead(world, node, query);
                ensure!(code == 0, "{query:?} exits with {code}: {table}{error}");
            }
            Ok(())
        })
        .unwrap();
}

fn a_node_tells_its_problem(world: &World, node: &Node, query: &[&str]) {
    let (code, table, _) = fairlead(world, node, query);
    println!("--- fairlead status\n{table}");
    assert_eq!(code, 3, "{table}");
    let status = node.status().unwrap();
    let [wireguard, access] = ["wireguard", "portAccess"].map(|field| status[field].as_str().unwrap());
    let head = format!("node home-2  wireguard {wireguard}  interface wire_kube  port 51820 ({access})  ");
    assert!(table.starts_with(&head), "{table}");
    assert!(table.contains("problem: 192.168.1.10/32 is claimed by nodes home-1 and office-1"), "{table}");
    let header = table.lines().find(|line| line.trim_start().starts_with("PEER")).unwrap();
    let names: Vec<&str> = header.split_whitespace().collect();
    let expected = "PEER STATE ENDPOINT SOURCE HANDSHAKE RECEIVED SENT REASON KNOWN FROM";
    assert_eq!(names.join(" "), expected);
    for peer in ["cloud-1", "cloud-2", "home-1", "office-1", "office-2"] {
        let row = table.lines().find(|line| line.trim_start().starts_with(peer)).expect(peer);
        let columns: Vec<&str> = row.split_whitespace().collect();
        assert!(columns[1] == "up" && columns[4].ends_with('s'), "{row}");
    }
    let (code, json, _) = fairlead(world, node, &[query, &["-o", "json"]].concat());
    let status: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, &status["node"]), (3, &"home-2".into()));
}

fn the_cluster_tells_every_nodes_problem(world: &World, from: &Node) {
    let (code, table, _) = fairlead(world, from, &["status", "--cluster"]);
    println!("--- fairlead status --cluster\n{table}");
    assert_eq!(code, 3, "{table}");
    for node in &world.nodes {
        let row = table.lines().find(|line| line.trim_start().starts_with(&node.name)).expect("a row");
        let nat = if node.site == "cloud" { "open" } else { "cone" };
        assert!(["yes", nat].iter().all(|word| row.contains(word)), "{row}");
    }
    for node in ["home-1", "office-1"] {
        let sentence = format!("node {node}: 192.168.1.10/32 is claimed by nodes home-1 and office-1");
        assert!(table.contains(&sentence), "{table}");
    }
    let (code, json, _) = fairlead(world, from, &["status", "--cluster", "-o", "json"]);
    let all: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((code, all["nodes"].as_array().unwrap().len()), (3, 6));
}

//! Nodes without Kubernetes: `fairlead node --standalone`, which finds others through a discovery service or a file.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use fairlead_demo::node::Node;
use serde_json::json;
use testbed_lab::discovery::Discovery;
use testbed_lab::{Lab, Nat, eventually, executable};

/// Only bounds what would hang.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A node in the cloud, and one at home behind a NAT, whose private address only the mesh reaches.
fn nodes(lab: &Lab, directory: &Path) -> [Node; 2] {
    let cloud = lab.public_site("cloud").host("cloud-1").unwrap();
    let site = lab.nat_site("home", Nat::PortRestricted, "192.168.1.0/24".parse().unwrap()).unwrap();
    let home = site.host("home-1").unwrap();
    [("cloud-1", "cloud", cloud), ("home-1", "home", home)].map(|(name, site, host)| {
        let directory = directory.join(name);
        fs::create_dir(&directory).unwrap();
        let mut node = Node::new(name, site, host, directory);
        node.arguments.push("--standalone".to_owned());
        node
    })
}

/// Both reach each other at the address of the node at home.
fn reach_each_other([cloud, home]: &[Node; 2], what: &str) {
    let begun = Instant::now();
    let reached = eventually(TIMEOUT, || {
        cloud.host.shell(&format!("ping -n -c 1 -W 1 {}", home.host.address()))?;
        home.host.shell(&format!("ping -n -c 1 -W 1 {}", cloud.host.address()))
    });
    if let Err(error) = reached {
        let status = [cloud, home].map(|node| node.status().map(|status| status.to_string()));
        panic!("{what}: {error:#}\n{status:?}");
    }
    println!("{what}: reached after {:.1} s", begun.elapsed().as_secs_f64());
}

/// The sources of the first peer of a node.
fn sources(node: &Node) -> anyhow::Result<Vec<(String, f64)>> {
    let status = node.status()?;
    let sources = status["peers"][0]["sources"].as_array().with_context(|| format!("no peer: {status}"))?;
    let of = |it: &serde_json::Value| Some((it["source"].as_str()?.to_owned(), it["ageSeconds"].as_f64()?));
    sources.iter().map(|it| of(it).with_context(|| format!("{it}"))).collect()
}

/// A discovery service, and nodes that find each other by it.
fn discovered(lab: &Lab, directory: &Path) -> (Discovery, [Node; 2]) {
    let host = lab.public_site("internet").host("discovery").unwrap();
    let files = directory.join("discovery");
    let server = Discovery::start(host, files.clone(), "standalone *").unwrap();
    let mut nodes = nodes(lab, directory);
    let file = |name: &str, content: &str| {
        let path = directory.join(name);
        fs::write(&path, content).unwrap();
        path.to_string_lossy().into_owned()
    };
    let endpoint = server.spec()["endpoints"][0].as_str().unwrap().to_owned();
    for node in &mut nodes {
        node.arguments.extend([
            format!("--discovery-endpoint={endpoint}"),
            format!("--discovery-ca-file={}", files.join("tls.crt").display()),
            format!("--cluster-id-file={}", file("id", "standalone\n")),
            format!(
                "--cluster-secret-file={}",
                file("secret", "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\n")
            ),
        ]);
        node.start().unwrap();
    }
    nodes.iter_mut().for_each(|node| node.wait_ready(TIMEOUT).unwrap());
    reach_each_other(&nodes, "discovery");
    (server, nodes)
}

#[test]
fn nodes_without_kubernetes_find_each_other_by_discovery_and_come_back_from_what_they_saved() {
    let lab = Lab::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (mut server, mut nodes) = discovered(&lab, directory.path());
    let status = nodes[0].status().unwrap();
    assert_eq!(status["problems"], json!([]), "{status}");
    let [(source, age)] = &sources(&nodes[0]).unwrap()[..] else { panic!("{status}") };
    assert!(source.starts_with("discovery https://") && *age < 120.0, "{source} {age}");

    // What is saved was written when the first member was told of.
    let saved = nodes.each_ref().map(|node| node.directory.join("state/discovery.json"));
    eventually(TIMEOUT, || Ok(saved.iter().try_for_each(|path| fs::metadata(path).map(drop))?)).unwrap();
    server.kill().unwrap();
    for node in &mut nodes {
        node.kill().unwrap();
        node.start().unwrap();
        node.wait_ready(TIMEOUT).unwrap();
    }
    reach_each_other(&nodes, "restarted while the service is gone");
    let [(source, age)] = &sources(&nodes[0]).unwrap()[..] else { panic!("{}", nodes[0].status().unwrap()) };
    assert!(source == "saved discovery" && *age > 0.0, "{source} {age}");
}

/// The service keeps what it was told for half an hour after a program has ended, much longer than this test waits.
#[test]
fn a_node_that_is_cleaned_up_is_deleted_at_its_discovery_service() {
    let lab = Lab::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (_server, [cloud, mut home]) = discovered(&lab, directory.path());
    home.kill().unwrap();
    let told = || -> anyhow::Result<u64> {
        let status = cloud.status()?;
        status["discoveryServices"][0]["members"].as_u64().with_context(|| format!("no members: {status}"))
    };
    assert_eq!(told().unwrap(), 1, "a program that ends may come back");

    let empty = directory.path().join("cni");
    let mut cleanup = home.host.command(executable("fairlead").unwrap()).unwrap();
    cleanup.args(["cleanup", "--conf-dir"]).arg(&empty).arg("--bin-dir").arg(&empty);
    cleanup.arg("--socket").arg(home.socket()).arg("--state-dir").arg(home.directory.join("state"));
    let begun = Instant::now();
    let output = cleanup.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("deleted this node at a discovery service"), "{said}");
    let forgotten = || {
        let status = cloud.status()?;
        ensure!(told()? == 0 && status["peers"].as_array().is_none_or(Vec::is_empty), "{status}");
        Ok(())
    };
    eventually(TIMEOUT, forgotten).unwrap();
    println!("forgotten after {:.1} s", begun.elapsed().as_secs_f64());
    assert_eq!(fs::read_dir(home.directory.join("state")).unwrap().count(), 0);
}

#[test]
fn nodes_without_kubernetes_follow_a_file_of_peers() {
    let lab = Lab::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut nodes = nodes(&lab, directory.path());
    let files = nodes.each_ref().map(|node| node.directory.join("peers.yaml"));
    for (node, file) in nodes.iter_mut().zip(&files) {
        fs::write(file, "peers: []\n").unwrap();
        node.arguments.push(format!("--peers={}", file.display()));
        node.start().unwrap();
        node.wait_ready(TIMEOUT).unwrap();
    }
    let entry = |node: &Node| {
        let key =
            eventually(TIMEOUT, || Ok(node.status()?["publicKey"].as_str().unwrap_or_default().to_owned()));
        let address = node.host.address();
        json!({ "name": node.name, "publicKey": key.unwrap(), "allowedIPs": [format!("{address}/32")] })
    };
    let mut cloud = entry(&nodes[0]);
    cloud["endpoint"] = format!("{}:51820", nodes[0].host.address()).into();
    fs::write(&files[0], json!({ "peers": [entry(&nodes[1])] }).to_string()).unwrap();
    fs::write(&files[1], json!({ "peers": [cloud] }).to_string()).unwrap();
    reach_each_other(&nodes, "files");

    fs::write(&files[0], "peers: [{name: home-1}]").unwrap();
    let problem = eventually(TIMEOUT, || {
        let status = nodes[0].status()?;
        let problems =
            status["problems"].as_array().into_iter().flatten().filter_map(|problem| problem.as_str());
        let named = problems.filter(|problem| problem.contains("peers.yaml")).map(str::to_owned).next();
        named.ok_or_else(|| std::io::Error::other(format!("not named: {status}")).into())
    });
    assert!(problem.unwrap().contains("publicKey"));
    reach_each_other(&nodes, "a malformed file");
    let named = sources(&nodes[0]).unwrap();
    assert!(named[0].0 == "static file" && named[0].1 > 0.0, "{named:?}");
    let named = sources(&nodes[1]).unwrap();
    assert_eq!(named, [("static file".to_owned(), 0.0)], "its file is good");
}

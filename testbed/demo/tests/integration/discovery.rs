//! Nodes find each other through a discovery service: real node programs, a real API server, `fairlead discovery`.

use std::fs;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, steady, udp};
use fairlead_demo::node::executable;
use fairlead_demo::{World, servers, topology};
use serde_json::json;
use testbed_lab::Progress;
use testbed_lab::discovery::Discovery;
use testbed_lab::traffic::Flow;

/// The cluster of this test; no other is accepted.
const CLUSTER: &str = "test-cluster";
/// 32 bytes of 2, and of 3.
const SECRET: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";
const OTHER_SECRET: &str = "AwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwM=";
const NODES: [&str; 3] = ["cloud-1", "cloud-2", UNPUBLISHED];
/// The API server takes no WireKubePeer of this node, so that only discovery tells of it.
const UNPUBLISHED: &str = "office-1";
const POLICY: &str = r#"
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: unpublished}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - {apiGroups: [wirekube.io], apiVersions: [v1alpha1], resources: [wirekubepeers], operations: [CREATE, UPDATE]}
  validations:
    - {expression: "object.metadata.name != 'office-1'", message: refused by the test}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: unpublished}
spec: {policyName: unpublished, validationActions: [Deny]}
"#;

/// A node that others learn of by discovery alone is reached, survives failures of the service and of the API server, and is gone when the
/// service deletes it. Members that the cluster knows lose nothing by anything that the service does.
#[test]
fn a_member_that_only_discovery_knows_is_reached_and_a_liar_harms_no_other() {
    let mut topology = topology::two_sites();
    topology.sites[0].nodes.push(Ipv4Addr::new(198, 51, 100, 12));
    let mut world = World::start(&topology, &Progress::default()).unwrap();
    let host = world.lab().public_site("internet").host("discovery").unwrap();
    let mut server =
        Discovery::start(host, world.directory().join("discovery"), &format!("{CLUSTER} *")).unwrap();
    leave_one_unpublished(&world);
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": "fairlead-discovery", "namespace": "kube-system" },
        "stringData": { "clusterID": CLUSTER, "clusterSecret": SECRET },
    });
    world.plane.apply(&secret.to_string()).unwrap();
    servers::apply_mesh(&world, &json!({ "discovery": server.spec() })).unwrap();
    world.apply_pool().unwrap();
    for name in ["cloud-1", "cloud-2"] {
        world.start_pod(&format!("pod-{name}"), name).unwrap();
    }
    is_reached(&world, "discovery alone tells of the node");
    let status = node(&world, "cloud-1").status().unwrap();
    let service = &status["discoveryServices"][0];
    assert_eq!((&service["connected"], &service["members"]), (&json!(true), &json!(2)), "{status}");
    assert_eq!(status["problems"], json!([]), "{status}");
    assert!(world.plane.kubectl(&["get", "wirekubepeer", UNPUBLISHED]).is_err());
    has_its_sources(&world);

    let flows = [udp(&world, "cloud-1", "cloud-2"), udp(&world, "cloud-2", "cloud-1")];
    steady(&flows);
    let mark = Instant::now();
    server.kill().unwrap();
    is_reached(&world, "the service is gone");
    server.run().unwrap();
    world.wait_for(TIMEOUT, |world| tells(world, "cloud-1", 2)).unwrap();
    is_reached(&world, "the service has forgotten everything, and been told again");

    stays_when_what_it_published_has_expired(&world, &mut server);

    // As a service that lies would say: all nodes were deleted.
    server.admit(&format!("{CLUSTER} another-node")).unwrap();
    world
        .wait_for(TIMEOUT, |world| match peer(node(world, "cloud-1"), UNPUBLISHED) {
            Some(peer) => anyhow::bail!("it is still a peer: {peer}"),
            None => Ok(()),
        })
        .unwrap();
    only_listed_nodes_are_accepted(&world, &server);
    std::thread::sleep(Duration::from_secs(2));
    loses_nothing("the service lost, then deleted all nodes, and accepts two", &flows, mark);
    server.admit(&lines(&world, SECRET, &NODES)).unwrap();
    is_reached(&world, "the node is listed");
    drop(flows);
    nothing_is_lost_while_the_secret_changes(&world, &server);

    // What was known is used by a program that starts without the API server and without the service. The file is written after
    // 30 s at the latest.
    std::thread::sleep(Duration::from_secs(35));
    world.plane.stop_apiserver().unwrap();
    server.kill().unwrap();
    let restarted = world.node("cloud-1").unwrap();
    restarted.kill().unwrap();
    restarted.start().unwrap();
    restarted.wait_ready(TIMEOUT).unwrap();
    is_reached(&world, "restarted without the API server and without the service");
}

/// The list has the nodes' own IDs: those that it names are told of each other again, and the third is told why it is not.
fn only_listed_nodes_are_accepted(world: &World, server: &Discovery) {
    let all = lines(world, SECRET, &NODES);
    for name in NODES {
        let status = node(world, name).status().unwrap();
        let id = status["discoveryAffiliateID"].as_str().unwrap();
        assert!(all.contains(&format!("# {name}\n{CLUSTER} {id}\n")), "{name} is {id}, but:\n{all}");
    }
    server.admit(&lines(world, SECRET, &NODES[..2])).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            tells(world, "cloud-1", 1)?;
            tells(world, "cloud-2", 1)?;
            let status = node(world, UNPUBLISHED).status()?;
            let service = &status["discoveryServices"][0];
            let is_refused = service["published"] == false
                && service["error"].as_str().is_some_and(|error| error.contains("not listed"));
            anyhow::ensure!(is_refused, "{service}");
            Ok(())
        })
        .unwrap();
    let status = node(world, UNPUBLISHED).status().unwrap();
    println!("not listed: {}", status["discoveryServices"][0]);
    assert!(peer(node(world, "cloud-1"), UNPUBLISHED).is_none());
}

/// Output of `fairlead discovery id` for these nodes.
fn lines(world: &World, secret: &str, nodes: &[&str]) -> String {
    let mut program = world.plane_host().command(executable("fairlead").unwrap()).unwrap();
    program.args(["discovery", "id"]);
    for (option, text) in [("cluster-id", CLUSTER), ("cluster-secret", secret)] {
        let file = world.directory().join(option);
        fs::write(&file, text).unwrap();
        program.arg(format!("--{option}-file={}", file.display()));
    }
    let output = program.args(nodes).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Each node reads its Secret once a minute: for that long some have the one and some the other. The way to the node that only discovery
/// tells of is used all the time.
fn nothing_is_lost_while_the_secret_changes(world: &World, server: &Discovery) {
    let between = |from: &str, to: &str| {
        let (from, to) = (&node(world, from).host, &node(world, to).host);
        Flow::udp(&**from, &**to, to.address().into()).unwrap()
    };
    let flows = [
        between("cloud-1", UNPUBLISHED),
        between("cloud-2", UNPUBLISHED),
        udp(world, "cloud-1", "cloud-2"),
        udp(world, "cloud-2", "cloud-1"),
    ];
    let (old, new) = (lines(world, SECRET, &NODES), lines(world, OTHER_SECRET, &NODES));
    steady(&flows);
    let mark = Instant::now();
    server.admit(&format!("{old}{new}")).unwrap();
    let patch = json!({ "stringData": { "clusterSecret": OTHER_SECRET } }).to_string();
    let secret = ["-n", "kube-system", "patch", "secret", "fairlead-discovery", "--type=merge", "-p", &patch];
    world.plane.kubectl(&secret).unwrap();
    let have_changed = |world: &World| {
        for name in NODES {
            let status = node(world, name).status()?;
            let id = status["discoveryAffiliateID"].as_str().unwrap_or_default();
            anyhow::ensure!(!id.is_empty() && new.contains(id), "{name} is {id}");
            let log = fs::read_to_string(node(world, name).log())?;
            let is_left = log.contains("all members have changed to the present secret");
            anyhow::ensure!(is_left, "{name} has not left the secret of before");
            tells(world, name, 2)?;
        }
        Ok(())
    };
    world.wait_for(TIMEOUT, have_changed).unwrap();
    println!("all nodes have left the old secret after {:.1} s", mark.elapsed().as_secs_f64());
    // The server does not accept the old IDs any more.
    server.admit(&new).unwrap();
    std::thread::sleep(Duration::from_secs(5));
    loses_nothing("the secret of the cluster changes", &flows, mark);
    is_reached(world, "the secret of the cluster has changed");
}

/// The service was away for longer than the half hour for which it keeps what it is told: it comes back without the node, which does not
/// reach it. The tunnels work, so the node stays, and loses nothing.
fn stays_when_what_it_published_has_expired(world: &World, server: &mut Discovery) {
    let unpublished = node(world, UNPUBLISHED);
    let cut = "nft add table inet cut\n\
               nft 'add chain inet cut out { type filter hook output priority 0; }'\n\
               nft add rule inet cut out tcp dport 3000 drop\n";
    unpublished.host.shell(cut).unwrap();
    server.kill().unwrap();
    server.run().unwrap();
    world.wait_for(TIMEOUT, |world| tells(world, "cloud-1", 1)).unwrap();
    let ping = format!("ping -n -q -i 0.1 -c 50 -w 6 {}", unpublished.host.address());
    let said = node(world, "cloud-1").host.shell(&ping).unwrap();
    assert!(said.contains(" 0% packet loss"), "{said}");
    let found = peer(node(world, "cloud-1"), UNPUBLISHED).unwrap();
    assert_eq!(
        (&found["state"], &found["sources"][0]["source"]),
        (&json!("up"), &json!("discovery")),
        "{found}"
    );
    assert!(found["sources"][0]["ageSeconds"].as_f64().is_some_and(|age| age > 0.0), "{found}");
    unpublished.host.shell("nft delete table inet cut").unwrap();
    world.wait_for(TIMEOUT, |world| tells(world, "cloud-1", 2)).unwrap();
    println!("what it had published expired: {}", said.lines().nth_back(1).unwrap_or_default());
}

/// Every lie of a service about nodes that the cluster knows, and its return to honesty. It does not know the secret, but has all
/// that was ever encrypted with it.
#[test]
fn a_service_that_lies_costs_no_packet_between_members_that_the_cluster_knows() {
    let mut topology = topology::two_sites();
    topology.sites[0].nodes.push(Ipv4Addr::new(198, 51, 100, 12));
    let mut world = World::start(&topology, &Progress::default()).unwrap();
    let host = world.lab().public_site("internet").host("discovery").unwrap();
    let mut server =
        Discovery::start(host, world.directory().join("discovery"), &format!("{CLUSTER} *")).unwrap();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": "fairlead-discovery", "namespace": "kube-system" },
        "stringData": { "clusterID": CLUSTER, "clusterSecret": SECRET },
    });
    world.plane.apply(&secret.to_string()).unwrap();
    servers::apply_mesh(&world, &json!({ "discovery": server.spec() })).unwrap();
    world.apply_pool().unwrap();
    world.start_pods().unwrap();
    world.wait_for(TIMEOUT, |world| tells(world, "cloud-1", 2)).unwrap();
    let known = ["cloud-1", "cloud-2", "office-1"];
    let pairs = known.iter().flat_map(|from| known.iter().map(move |to| (from, to)));
    let flows: Vec<_> =
        pairs.filter(|(from, to)| from != to).map(|(from, to)| udp(&world, from, to)).collect();
    steady(&flows);

    let mark = Instant::now();
    server.replace_by_liar("honest").unwrap();
    world.wait_for(TIMEOUT, |world| tells(world, "cloud-1", 2)).unwrap();
    for word in ["swapped", "replayed", "endpoints", "expired", "garbage", "deleted", "honest"] {
        let lied = Instant::now();
        server.lie(word).unwrap();
        // Tens of lies.
        std::thread::sleep(Duration::from_secs(8));
        loses_nothing(word, &flows, lied);
        // The lies are heard.
        if word == "deleted" {
            known.iter().for_each(|name| tells(&world, name, 0).unwrap());
        }
        for name in known {
            let others = known.iter().filter(|other| **other != name);
            for other in others {
                let found = peer(node(&world, name), other);
                let is_up = found.as_ref().is_some_and(|peer| peer["state"] == "up");
                assert!(is_up, "{word}: on {name}: {found:?}");
            }
        }
    }
    world.wait_for(TIMEOUT, |world| tells(world, "cloud-1", 2)).unwrap();
    loses_nothing("all lies", &flows, mark);
}

/// The sources of each peer are shown: the cluster has a watch, which has no age.
fn has_its_sources(world: &World) {
    let sources = |name| {
        let found = peer(node(world, "cloud-1"), name).unwrap();
        let sources = found["sources"].as_array().unwrap().iter();
        sources.map(|it| it["source"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let unpublished = sources(UNPUBLISHED);
    assert!(unpublished.len() == 1 && unpublished[0].starts_with("discovery https://"), "{unpublished:?}");
    let published = sources("cloud-2");
    assert!(published.len() == 2 && published[0] == "Kubernetes", "{published:?}");
    assert_eq!(published[1], unpublished[0]);
}

/// Waits until the API server refuses its WireKubePeer.
fn leave_one_unpublished(world: &World) {
    world.plane.apply(POLICY).unwrap();
    let object = json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": UNPUBLISHED },
        "spec": { "publicKey": "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=" },
    });
    let file = world.directory().join("refused.json");
    std::fs::write(&file, object.to_string()).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let path = file.to_string_lossy();
            match world.plane.kubectl(&["create", "--dry-run=server", "-f", &path]) {
                Ok(_) => anyhow::bail!("the policy is not in force"),
                Err(error) if format!("{error:#}").contains("refused by the test") => Ok(()),
                Err(error) => Err(error),
            }
        })
        .unwrap();
}

/// The service tells a node of this number of members.
fn tells(world: &World, name: &str, members: u64) -> anyhow::Result<()> {
    let status = node(world, name).status()?;
    let service = &status["discoveryServices"][0];
    let is_there = service["connected"] == true && service["members"] == members;
    anyhow::ensure!(is_there, "{service}");
    Ok(())
}

/// Both nodes of the cloud reach the node by its own address, which is no public one, and it reaches them.
fn is_reached(world: &World, what: &str) {
    let begun = Instant::now();
    let unpublished = node(world, UNPUBLISHED).host.address();
    world
        .wait_for(TIMEOUT, |world| {
            for name in ["cloud-1", "cloud-2"] {
                let found = peer(node(world, name), UNPUBLISHED);
                anyhow::ensure!(
                    found.as_ref().is_some_and(|peer| peer["state"] == "up"),
                    "on {name}: {found:?}"
                );
                let address = node(world, name).host.address();
                node(world, name).host.shell(&format!("ping -n -c 2 -W 1 {unpublished}"))?;
                node(world, UNPUBLISHED).host.shell(&format!("ping -n -c 2 -W 1 {address}"))?;
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{what}: {error:#}"));
    println!("{what}: reached after {:.1} s", begun.elapsed().as_secs_f64());
}

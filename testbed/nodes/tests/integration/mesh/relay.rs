//! A relay that the controller runs, on real nodes, under traffic.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed_lab::eventually;
use testbed_nodes::Cluster;

use crate::bed::{Pod, Room, TIMEOUT, Traffic, server};
use crate::mesh::BED;

const NAMESPACE: &str = "fairlead-relay";

fn get(cluster: &Cluster, words: &[&str]) -> Result<Value> {
    Ok(serde_json::from_str(&cluster.kubectl(&[&["get", "-o", "json"], words].concat())?)?)
}

fn patch(cluster: &Cluster, relay: &Value) {
    let patch = json!({ "spec": { "relay": relay } }).to_string();
    cluster.kubectl(&["patch", "wirekubemesh", "default", "--type=merge", "-p", &patch]).unwrap();
}

fn on<'a>(pods: &'a [Pod], node: &str) -> &'a Pod {
    pods.iter().find(|pod| pod.node == node).unwrap()
}

/// Waits until this many pods of the relay run and no other, with this limit, and the mesh says where it is.
fn serves(cluster: &Cluster, count: usize, limit: &str) -> String {
    let ready = || {
        let pods = get(cluster, &["pods", "-n", NAMESPACE])?;
        let pods = pods["items"].as_array().context("no list")?;
        let is_new = |pod: &&Value| pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == limit;
        ensure!(pods.len() == count && pods.iter().filter(is_new).count() == count, "{} pods", pods.len());
        let status = get(cluster, &["wirekubemesh", "default"])?["status"].clone();
        let conditions = status["conditions"].as_array().context("no conditions")?;
        let found = conditions.iter().find(|it| it["type"] == "RelayReady").context("no condition")?;
        ensure!(found["status"] == "True", "{found}");
        status["relayEndpoint"].as_str().map(str::to_owned).context("no endpoint")
    };
    eventually(2 * TIMEOUT, ready).with_context(|| explain(cluster)).unwrap()
}

fn explain(cluster: &Cluster) -> String {
    let pods = cluster.kubectl(&["describe", "pods", "-n", NAMESPACE]).unwrap_or_default();
    let selector = "app.kubernetes.io/component=relay";
    let logs = cluster.kubectl(&["logs", "-n", NAMESPACE, "--prefix", "--tail=30", "-l", selector]);
    format!("{pods}\n{}", logs.unwrap_or_default())
}

fn transports(cluster: &Cluster, node: &str, expected: &Value) {
    let is_so = || {
        let transports = &get(cluster, &["wirekubepeer", node])?["status"]["peerTransports"];
        ensure!(transports == expected, "{node}: {transports}");
        Ok(())
    };
    eventually(TIMEOUT, is_so).with_context(|| explain(cluster)).unwrap();
}

/// Two pods behind node ports, with a third node that reaches the others only by way of them.
#[test]
#[ignore = "two minutes, for changes of the managed relay: cargo xtask test soak"]
fn a_managed_relay_is_rolled_out_under_traffic() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "managed-relay");
    let pods = room.run("deployment/web", &server("web", 3));
    let home = cluster.node("home-1").unwrap();
    // Nodes do not reach a pod that runs there.
    cluster.kubectl(&["cordon", "home-1"]).unwrap();
    let managed = |limit: &str| {
        let resources = json!({ "memoryLimit": limit });
        json!({ "provider": "managed", "managed": { "serviceType": "NodePort", "replicas": 2, "resources": resources } })
    };
    patch(&cluster, &managed("256Mi"));
    println!("the relay is at {}", serves(&cluster, 2, "256Mi"));
    home.host().set_faults(|faults| faults.blackholed_udp = [51820].into()).unwrap();
    transports(&cluster, "home-1", &json!({ "cloud-1": "relay", "cloud-2": "relay" }));
    let traffic =
        ["cloud-1", "cloud-2"].map(|node| Traffic::between(&cluster, on(&pods, node), on(&pods, "home-1")));
    traffic.iter().for_each(Traffic::flows);

    let mark = Instant::now();
    patch(&cluster, &managed("257Mi"));
    println!("the new relay is at {}", serves(&cluster, 2, "257Mi"));
    let lost: usize = traffic.iter().map(|traffic| traffic.lost_since(mark)).sum();
    println!("rolled out in {:.1} s, {lost} messages lost", mark.elapsed().as_secs_f64());
    transports(&cluster, "home-1", &json!({ "cloud-1": "relay", "cloud-2": "relay" }));

    home.host().set_faults(|faults| faults.blackholed_udp.clear()).unwrap();
    patch(&cluster, &Value::Null);
    transports(&cluster, "home-1", &json!({ "cloud-1": "direct", "cloud-2": "direct" }));
    cluster.kubectl(&["uncordon", "home-1"]).unwrap();
    assert_eq!(lost, 0);
}

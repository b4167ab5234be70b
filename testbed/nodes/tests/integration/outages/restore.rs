//! etcd is restored from a backup under running pods.

use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Result, ensure};
use testbed_lab::eventually;
use testbed_nodes::Cluster;

use crate::bed::{Pod, Room, TIMEOUT, Traffic, addresses_agree, all_different, blocks_of, network, server};
use crate::outages::BED;

/// Each pod has a block of its own; those that the backup does not know are the first that look free.
const POOL: &str = "\
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: restored}
spec: {blockSizeBits: 0, subnets: [{ipv4: 10.94.0.0/27, ipv6: 'fd02:fa1f::/123'}]}
";

fn on<'a>(pods: &'a [Pod], node: &str) -> &'a Pod {
    pods.iter().find(|pod| pod.node == node).unwrap()
}

fn has_its_block(cluster: &Cluster, pod: &Pod) -> Result<()> {
    let blocks = blocks_of(cluster, &pod.node)?;
    let is_in = |address: &IpAddr| blocks.iter().any(|block| block.contains(address));
    ensure!(pod.addresses.iter().all(is_in), "{pod:?} is in none of {blocks:?}");
    Ok(())
}

/// Restarts what operators restart after a restore (Kubernetes, "Restoring an etcd cluster"): not Fairlead.
fn restart_kubernetes(cluster: &Cluster, nodes: &[&str]) {
    for node in nodes {
        let node = cluster.node(node).unwrap();
        node.restart_kubelet().unwrap();
        node.restart_kube_proxy().unwrap();
    }
}

/// Many writes: the resource version is soon higher than it was before the restoration and shows nothing of it any more.
fn overtake(room: &Room<'_>) {
    let items: String = (0..400)
        .map(|number| {
            format!("- {{apiVersion: v1, kind: ConfigMap, metadata: {{name: written-{number}}}}}\n")
        })
        .collect();
    room.apply(&format!("apiVersion: v1\nkind: List\nitems:\n{items}")).unwrap();
}

/// The kubelet of `home-1` is the last that is restarted: until then it runs a pod that only this node knows.
#[test]
fn nothing_is_granted_twice_after_etcd_is_restored_and_no_program_needs_a_restart() {
    let cluster = BED.alone();
    cluster.apply(POOL).unwrap();
    let room = Room::of_pool(&cluster, "restored", Some("restored"));
    let before = room.run("deployment/web", &server("web", 3));
    let backup = cluster.directory().join("etcd-backup");
    cluster.plane().back_up_etcd(&backup).unwrap();
    room.kubectl("scale deployment web --replicas=6").unwrap();
    room.rolled_out("deployment/web");
    let mut late = room.pods("web").unwrap();
    late.retain(|pod| before.iter().all(|known| known.name != pod.name));
    let unknown = on(&late, "home-1");
    let traffic = [
        Traffic::between(&cluster, on(&before, "cloud-1"), unknown),
        Traffic::between(&cluster, on(&before, "cloud-2"), on(&before, "home-1")),
    ];
    traffic.iter().for_each(Traffic::flows);

    let mark = Instant::now();
    cluster.plane().restore_etcd(&backup).unwrap();
    let restored = Instant::now();
    overtake(&room);
    for pod in &late {
        eventually(TIMEOUT, || has_its_block(&cluster, pod)).unwrap();
    }
    println!(
        "restore: all blocks in use are claimed {:.1?} after the API server is back",
        restored.elapsed()
    );

    cluster.kubectl(&["cordon", "home-1"]).unwrap();
    restart_kubernetes(&cluster, &["cloud-1", "cloud-2"]);
    let later = Room::of_pool(&cluster, "restored-later", Some("restored"));
    let mut running = later.run("deployment/later", &server("later", 6));
    println!("restore: pods of a new namespace run {:.1?} after the API server is back", restored.elapsed());
    // Each node has learned of the others' new blocks.
    for (one, other) in [("cloud-1", "cloud-2"), ("cloud-2", "cloud-1")] {
        Traffic::between(&cluster, on(&running, one), on(&running, other)).flows();
        Traffic::between(&cluster, unknown, on(&running, one)).flows();
    }
    network(&cluster, unknown);
    running.extend(before.iter().chain([unknown]).cloned());
    all_different(&running);
    for traffic in &traffic {
        traffic.lost_since(mark);
    }

    restart_kubernetes(&cluster, &["home-1"]);
    cluster.kubectl(&["uncordon", "home-1"]).unwrap();
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "deployment/coredns"]).unwrap();
    room.kubectl("scale deployment web --replicas=9").unwrap();
    room.rolled_out("deployment/web");
    all_different(&[room.pods("web").unwrap(), later.pods("later").unwrap()].concat());
    cluster.wait_fairlead().unwrap();
    addresses_agree(&cluster);
}

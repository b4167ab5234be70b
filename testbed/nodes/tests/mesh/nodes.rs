//! Nodes lose power, are drained, and leave the cluster.

use std::time::{Duration, Instant};

use anyhow::ensure;
use testbed_lab::eventually;
use testbed_nodes::Cluster;

use crate::BED;
use crate::bed::{Pod, Room, TIMEOUT, Traffic, addresses_agree, all_different, server};

/// Ten times what docs/outages.md says.
const BLOCKS_FREED: Duration = Duration::from_secs(5);

/// Between one pod on each of two nodes.
fn traffic(cluster: &Cluster, pods: &[Pod], one: &str, other: &str) -> Traffic {
    let on = |node: &str| pods.iter().find(|pod| pod.node == node).unwrap();
    let traffic = Traffic::between(cluster, on(one), on(other));
    traffic.flows();
    traffic
}

fn blocks_of(cluster: &Cluster, node: &str) -> String {
    let selector = format!("coil.cybozu.com/node={node}");
    cluster.kubectl(&["get", "addressblocks", "-l", &selector, "-o", "name"]).unwrap()
}

#[test]
fn a_node_that_lost_power_comes_back_with_its_pods_and_no_address_is_given_twice() {
    let mut cluster = BED.alone();
    let pods = {
        let room = Room::new(&cluster, "power");
        let pods = room.run("deployment/web", &server("web", 6));
        room.keep();
        pods
    };
    let lost: Vec<_> = pods.iter().filter(|pod| pod.node == "cloud-2").collect();
    assert_eq!(lost.len(), 2, "{pods:#?}");
    let elsewhere = traffic(&cluster, &pods, "cloud-1", "home-1");
    let mark = Instant::now();
    cluster.node_mut("cloud-2").unwrap().power_cut().unwrap();
    cluster.kubectl(&["wait", "--for=condition=Ready=Unknown", "node", "cloud-2", "--timeout=120s"]).unwrap();
    cluster.progress().step("cloud-2 is off and not Ready");
    {
        let room = Room::again(&cluster, "power");
        // Others get addresses meanwhile.
        room.kubectl("scale deployment web --replicas=8").unwrap();
        let more = || {
            let ready = room.pods("web")?.iter().filter(|pod| pod.node != "cloud-2" && pod.ready).count();
            ensure!(ready >= 6, "{ready} pods elsewhere");
            Ok(())
        };
        eventually(TIMEOUT, more).unwrap();
        room.keep();
    }
    cluster.node_mut("cloud-2").unwrap().power_on().unwrap();
    cluster.wait_ready().unwrap();
    cluster.wait_fairlead().unwrap();
    let room = Room::again(&cluster, "power");
    let back = || {
        let now = room.pods("web")?;
        let same = lost.iter().all(|old| {
            now.iter().any(|pod| pod.name == old.name && pod.ready && pod.restarts > old.restarts)
        });
        ensure!(same && now.len() == 8 && now.iter().all(|pod| pod.ready), "{now:#?}");
        Ok(now)
    };
    let now = eventually(TIMEOUT, back).unwrap();
    elsewhere.lost_nothing(mark);
    all_different(&now);
    for pod in &now {
        let to: Vec<String> = now.iter().map(|pod| pod.addresses[0].to_string()).collect();
        let script = format!(
            "for to in {}; do curl -sS -m 5 -o /dev/null http://$to:8080/ || exit 1; done",
            to.join(" ")
        );
        eventually(TIMEOUT, || room.shell(&pod.name, &script)).unwrap();
    }
    addresses_agree(&cluster);
}

#[test]
fn a_drained_node_has_no_pods_and_takes_new_ones_afterwards() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "drain");
    room.run("deployment/web", &server("web", 6));
    let drain =
        ["drain", "home-1", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s"];
    cluster.kubectl(&drain).unwrap();
    let elsewhere = || {
        let pods = room.pods("web")?;
        ensure!(pods.len() == 6 && pods.iter().all(|pod| pod.ready && pod.node != "home-1"), "{pods:#?}");
        Ok(pods)
    };
    all_different(&eventually(TIMEOUT, elsewhere).unwrap());
    addresses_agree(&cluster);
    cluster.kubectl(&["uncordon", "home-1"]).unwrap();
    room.kubectl("rollout restart deployment web").unwrap();
    room.rolled_out("deployment/web");
    let pods = room.pods("web").unwrap();
    assert!(pods.iter().any(|pod| pod.node == "home-1"), "{pods:#?}");
    all_different(&pods);
}

#[test]
fn blocks_of_a_deleted_node_are_free_at_once_and_the_others_do_not_notice() {
    let mut cluster = BED.alone();
    let room = Room::new(&cluster, "leave");
    let pods = room.run("deployment/web", &server("web", 6));
    assert!(!blocks_of(&cluster, "home-1").is_empty());
    let others = traffic(&cluster, &pods, "cloud-1", "cloud-2");
    let mark = Instant::now();
    room.keep();
    let drain =
        ["drain", "home-1", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s"];
    cluster.kubectl(&drain).unwrap();
    cluster.node_mut("home-1").unwrap().power_cut().unwrap();
    let deleted = Instant::now();
    cluster.kubectl(&["delete", "node", "home-1"]).unwrap();
    let free = || {
        let left = blocks_of(&cluster, "home-1");
        ensure!(left.is_empty(), "still there: {left}");
        Ok(())
    };
    eventually(TIMEOUT, free).unwrap();
    let took = deleted.elapsed();
    println!("blocks of the deleted node were free after {:.1} s", took.as_secs_f64());
    assert!(took <= BLOCKS_FREED, "{took:.1?}");
    let peer = || {
        let gone = cluster.kubectl(&["get", "wirekubepeer", "home-1"]);
        ensure!(gone.is_err(), "its peer is still there");
        Ok(())
    };
    eventually(TIMEOUT, peer).unwrap();
    cluster.node_mut("home-1").unwrap().power_on().unwrap();
    eventually(TIMEOUT, || cluster.kubectl(&["get", "node", "home-1"])).unwrap();
    cluster.wait_ready().unwrap();
    cluster.wait_fairlead().unwrap();
    others.lost_nothing(mark);
    let room = Room::again(&cluster, "leave");
    room.kubectl("rollout restart deployment web").unwrap();
    room.rolled_out("deployment/web");
    all_different(&room.pods("web").unwrap());
    assert!(!blocks_of(&cluster, "home-1").is_empty(), "it has blocks again");
    addresses_agree(&cluster);
}

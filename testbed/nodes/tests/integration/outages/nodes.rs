//! Nodes lose power, are drained, and leave the cluster.

use std::time::{Duration, Instant};

use anyhow::ensure;
use testbed_lab::eventually;
use testbed_nodes::Cluster;

use crate::bed::{Pod, Room, TIMEOUT, Traffic, addresses_agree, all_different, pool, server};
use crate::outages::BED;

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

/// Longer than the controller would need if it freed the blocks of a deleted Node at once.
const ABSENCE: Duration = Duration::from_secs(20);

/// `kubectl delete node`, and the kubelet registers again when it is restarted. No pod notices, and no other pod gets one
/// of their addresses: not while the Node is gone, and not afterwards.
#[test]
fn a_node_that_is_deleted_and_registers_again_keeps_its_blocks_and_pods() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "register");
    let pods = room.run("deployment/web", &server("web", 6));
    let there: Vec<_> = pods.iter().filter(|pod| pod.node == "cloud-2").collect();
    assert!(!there.is_empty(), "{pods:#?}");
    let blocks = blocks_of(&cluster, "cloud-2");
    let own = there[0].addresses[0];
    cluster.kubectl(&["delete", "node", "cloud-2"]).unwrap();
    std::thread::sleep(ABSENCE);
    assert_eq!(blocks_of(&cluster, "cloud-2"), blocks, "its blocks stay");
    // What runs on the machine answers to its neighbours there.
    let here = cluster.node("cloud-2").unwrap();
    here.exec(&["curl", "-sS", "-m", "5", "-o", "/dev/null", &format!("http://{own}:8080/")]).unwrap();
    here.restart_kubelet().unwrap();
    eventually(TIMEOUT, || cluster.kubectl(&["get", "node", "cloud-2"])).unwrap();
    cluster.wait_ready().unwrap();
    cluster.wait_fairlead().unwrap();
    assert_eq!(blocks_of(&cluster, "cloud-2"), blocks, "it has them as before");
    room.kubectl("scale deployment web --replicas=9").unwrap();
    room.rolled_out("deployment/web");
    all_different(&room.pods("web").unwrap());
    addresses_agree(&cluster);
}

#[test]
fn blocks_of_a_deleted_node_wait_for_it_and_the_others_do_not_notice() {
    let mut cluster = BED.alone();
    let room = Room::new(&cluster, "leave");
    let pods = room.run("deployment/web", &server("web", 6));
    let blocks = blocks_of(&cluster, "home-1");
    assert!(!blocks.is_empty());
    let others = traffic(&cluster, &pods, "cloud-1", "cloud-2");
    let mark = Instant::now();
    room.keep();
    let drain =
        ["drain", "home-1", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s"];
    cluster.kubectl(&drain).unwrap();
    cluster.node_mut("home-1").unwrap().power_cut().unwrap();
    cluster.kubectl(&["delete", "node", "home-1"]).unwrap();
    let peer = || {
        let gone = cluster.kubectl(&["get", "wirekubepeer", "home-1"]);
        ensure!(gone.is_err(), "its peer is still there");
        Ok(())
    };
    eventually(TIMEOUT, peer).unwrap();
    assert_eq!(blocks_of(&cluster, "home-1"), blocks, "they stay for minutes");
    cluster.node_mut("home-1").unwrap().power_on().unwrap();
    eventually(TIMEOUT, || cluster.kubectl(&["get", "node", "home-1"])).unwrap();
    cluster.wait_ready().unwrap();
    cluster.wait_fairlead().unwrap();
    others.lost_nothing(mark);
    let room = Room::again(&cluster, "leave");
    room.kubectl("rollout restart deployment web").unwrap();
    room.rolled_out("deployment/web");
    all_different(&room.pods("web").unwrap());
    assert!(!blocks_of(&cluster, "home-1").is_empty(), "it has blocks");
    addresses_agree(&cluster);
}

/// An attacker who has the token of a node can make requests: the node's own pods and those of others get their blocks all the same.
#[test]
fn hostile_requests_with_the_token_of_a_node_harm_no_other_node() {
    let cluster = BED.alone();
    cluster.apply(&pool("hostile", "10.95.0.0/20", 0)).unwrap();
    let plane = cluster.plane();
    let token = plane.token("fairlead-node", "kube-system", Some("cloud-2")).unwrap();
    let kubeconfig = cluster.directory().join("stolen.kubeconfig");
    plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
    let stolen = kubeconfig.to_str().unwrap();
    let request = |number: usize, pool: &str, node: &str, more: &str| {
        format!(
            "---\napiVersion: coil.cybozu.com/v2\nkind: BlockRequest\nmetadata: {{name: stolen-{number}}}\n\
             spec: {{nodeName: {node}, poolName: {pool}{more}}}\n"
        )
    };
    let create = |yaml: &str| plane.kubectl_stdin(&["--kubeconfig", stolen, "create", "-f", "-"], yaml);
    assert!(create(&request(0, "\"hostile?\"", "cloud-2", "")).is_err(), "no such name of a pool");
    assert!(create(&request(0, "hostile", "cloud-1", "")).is_err(), "only for itself");
    // Far more than a node may have, each for a certain block, so that they come before all others.
    let many: String = (0..400)
        .map(|number| {
            let net = format!("10.95.{}.{}/32", number / 256, number % 256);
            request(number, "hostile", "cloud-2", &format!(", inUse: {{index: {number}, ipv4: {net}}}"))
        })
        .collect();
    create(&many).unwrap();
    let room = Room::of_pool(&cluster, "hostile", Some("hostile"));
    let pods = room.run("deployment/web", &server("web", 4));
    assert!(pods.iter().any(|pod| pod.node == "cloud-1"), "{pods:#?}");
    all_different(&pods);
    let refused = || {
        let limited = "jsonpath={.status.conditions[?(@.type=='BlockLimitReached')].message}";
        let message = cluster.kubectl(&["get", "addresspool", "hostile", "-o", limited])?;
        ensure!(message.starts_with("cloud-2"), "the pool does not say who: {message}");
        Ok(())
    };
    eventually(TIMEOUT, refused).unwrap();
    let held = blocks_of(&cluster, "cloud-2").lines().filter(|name| name.contains("/hostile-")).count();
    assert!(held <= 224, "{held} blocks for 110 pods");
    plane.kubectl(&["delete", "blockrequests", "--all"]).unwrap();
}

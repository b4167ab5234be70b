//! Programs of a node end and come back while its pods run.

use std::time::Instant;

use anyhow::ensure;
use testbed_kube::images::AGNHOST;
use testbed_lab::eventually;
use testbed_nodes::{Cluster, Node};

use crate::bed::{Room, Running, TIMEOUT, addresses_agree, all_different, pool};
use crate::mesh::BED;

fn nothing_happens_to_pods(name: &str, restart: impl Fn(&Node)) {
    let cluster = BED.alone();
    let room = Room::new(&cluster, name);
    let running = Running::start(&room);
    let mark = Instant::now();
    for node in cluster.nodes() {
        restart(node);
    }
    cluster.wait_ready().unwrap();
    running.more_start(&room);
    let lossy: Vec<&str> = running
        .all()
        .filter(|traffic| traffic.lost_since(mark) > 0)
        .map(|traffic| traffic.between.as_str())
        .collect();
    assert!(lossy.is_empty(), "{lossy:?} lost messages\n{}", cluster.explain());
    let now = room.pods("web").unwrap();
    let gone: Vec<_> = running.pods.iter().filter(|pod| !now.contains(pod)).collect();
    assert!(gone.is_empty(), "{gone:?} are not what they were: {now:?}");
    addresses_agree(&cluster);
}

#[test]
fn pods_go_on_while_every_containerd_is_killed() {
    nothing_happens_to_pods("containerd-restart", |node| node.restart_containerd().unwrap());
}

#[test]
fn pods_go_on_while_every_kubelet_is_killed() {
    nothing_happens_to_pods("kubelet-restart", |node| node.restart_kubelet().unwrap());
}

fn leader(cluster: &Cluster) -> anyhow::Result<String> {
    let path = "jsonpath={.spec.holderIdentity}";
    cluster.kubectl(&["-n", "kube-system", "get", "lease", "coil-ipam-leader", "-o", path])
}

/// Kills its container without a word, and takes the pod away, so that another copy must be elected.
fn kill_leader(cluster: &Cluster, pod: &str) {
    let ask = |path: &str| cluster.kubectl(&["-n", "kube-system", "get", "pod", pod, "-o", path]).unwrap();
    let container = ask("jsonpath={.status.containerStatuses[0].containerID}");
    let node = cluster.node(&ask("jsonpath={.spec.nodeName}")).unwrap();
    let container = container.trim_start_matches("containerd://");
    node.exec(&["ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", container]).unwrap();
    cluster.kubectl(&["-n", "kube-system", "delete", "pod", pod, "--force", "--grace-period=0"]).unwrap();
}

/// Every pod needs a block of its own, so the controller is needed for each.
#[test]
fn pods_start_although_the_controller_is_killed_meanwhile() {
    let cluster = BED.alone();
    cluster.apply(&pool("single", "10.94.128.0/26", 0)).unwrap();
    let room = Room::of_pool(&cluster, "failover", Some("single"));
    let before = leader(&cluster).unwrap();
    let manifest = format!(
        "\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: many}}
spec:
  replicas: 3
  selector: {{matchLabels: {{app: many}}}}
  template:
    metadata: {{labels: {{app: many}}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{{name: main, image: '{AGNHOST}', args: [pause]}}]
"
    );
    room.apply(&manifest).unwrap();
    room.rolled_out("deployment/many");
    room.kubectl("scale deployment many --replicas=8").unwrap();
    kill_leader(&cluster, &before);
    let killed = Instant::now();
    room.kubectl("scale deployment many --replicas=15").unwrap();
    room.rolled_out("deployment/many");
    let pods = room.pods("many").unwrap();
    assert_eq!(pods.len(), 15);
    all_different(&pods);
    let another = || {
        let after = leader(&cluster)?;
        ensure!(after != before, "{before} was killed and still leads");
        Ok(after)
    };
    let after = eventually(TIMEOUT, another).unwrap();
    let seconds = killed.elapsed().as_secs_f64();
    println!("controller failover: {before} was killed, {after} leads; all pods run {seconds:.1} s later");
    // Ten times what docs/outages.md says.
    assert!(seconds <= 226.0, "{seconds:.1} s");
    cluster.wait_fairlead().unwrap();
    addresses_agree(&cluster);
}

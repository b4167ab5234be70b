//! Pods, Services and names, from every node.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::ensure;
use testbed_kube::images::AGNHOST;
use testbed_lab::eventually;

use crate::bed::{Pod, Room, TIMEOUT, all_different, server};
use crate::mesh::BED;

/// As a URL has it.
fn host(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    }
}

fn nodes_of(pods: &[Pod]) -> BTreeSet<&str> {
    pods.iter().map(|pod| pod.node.as_str()).collect()
}

#[test]
fn pods_of_every_pair_reach_each_other_with_their_own_addresses() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "pairs");
    let pods = room.run("deployment/web", &server("web", 6));
    assert_eq!((pods.len(), nodes_of(&pods).len()), (6, 3), "{pods:#?}");
    all_different(&pods);
    for from in &pods {
        assert_eq!(from.addresses.len(), 2, "{from:?}");
        let targets = pods.iter().flat_map(|to| to.addresses.iter().map(|address| host(*address)));
        let targets: Vec<String> = targets.collect();
        let script = format!(
            "for to in {}; do curl -gsS -m 5 http://$to:8080/clientip || exit 1; echo; done",
            targets.join(" ")
        );
        // One may be lost while the mesh finds a better endpoint, and curl does not repeat a lost SYN at once.
        let seen = eventually(TIMEOUT, || room.shell(&from.name, &script)).unwrap();
        let lines: Vec<&str> = seen.lines().collect();
        assert_eq!(lines.len(), targets.len(), "{seen}");
        for (target, line) in targets.iter().zip(lines) {
            let source: std::net::SocketAddr = line.parse().unwrap();
            assert!(from.addresses.contains(&source.ip()), "{from:?} came to {target} as {line}");
        }
    }
}

fn service(name: &str, app: &str, more: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {{app: {app}}}
  ports: [{{port: 80, targetPort: 8080}}]
  {more}
"
    )
}

fn cluster_addresses(room: &Room<'_>, name: &str) -> Vec<IpAddr> {
    let text = room.kubectl(&format!("get service {name} -o jsonpath={{.spec.clusterIPs[*]}}")).unwrap();
    text.split_whitespace().map(|address| address.parse().unwrap()).collect()
}

/// Names of the pods that answer, when asked often enough to meet all.
const ASK: &str = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do \
     curl -gsS -m 5 http://TARGET/hostname || exit 1; echo; done";

#[test]
fn services_answer_in_both_families_from_pods_and_hosts_of_every_node() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "services");
    let pods = room.run("deployment/web", &server("web", 3));
    room.apply(&service("web", "web", "type: NodePort")).unwrap();
    let names: BTreeSet<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
    let addresses = cluster_addresses(&room, "web");
    assert_eq!(addresses.len(), 2, "{addresses:?}");
    for address in addresses {
        let script = ASK.replace("TARGET", &host(address));
        let meets_all = |answers: &str| {
            let answered: BTreeSet<&str> = answers.split_whitespace().collect();
            ensure!(answered == names, "of {names:?} only {answered:?} answered at {address}");
            Ok(())
        };
        for pod in &pods {
            // A pod meets itself, too.
            eventually(TIMEOUT, || meets_all(&room.shell(&pod.name, &script)?)).unwrap();
        }
        for node in cluster.nodes() {
            eventually(TIMEOUT, || meets_all(&node.exec(&["sh", "-c", &script])?)).unwrap();
        }
    }
    node_port(&room);
}

/// Connections from outside the cluster, to a node where one of the pods is and to one where none needs to be.
fn node_port(room: &Room<'_>) {
    let port = room.kubectl("get service web -o jsonpath={.spec.ports[0].nodePort}").unwrap();
    let cloud: Vec<_> = room.cluster.nodes().iter().filter(|node| node.name() != "home-1").collect();
    for address in cloud.iter().flat_map(|node| node.addresses()) {
        let script = ASK.replace("TARGET", &format!("{}:{port}", host(*address)));
        eventually(TIMEOUT, || room.cluster.lab().internet().shell(&script)).unwrap();
    }
}

#[test]
fn names_of_services_and_of_their_pods_are_found_from_every_node() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "names");
    let pods = room.run("deployment/web", &server("web", 3));
    room.apply(&service("web", "web", "")).unwrap();
    room.apply(&service("headless", "web", "clusterIP: None")).unwrap();
    let of_pods: BTreeSet<IpAddr> = pods.iter().flat_map(|pod| pod.addresses.clone()).collect();
    let of_service: BTreeSet<IpAddr> = cluster_addresses(&room, "web").into_iter().collect();
    for pod in &pods {
        for (name, expected) in [("headless", &of_pods), ("web", &of_service)] {
            let full = format!("{name}.names.svc.cluster.local");
            let script = format!("dig +short +tries=5 {full} A {full} AAAA");
            let found = || {
                let text = room.shell(&pod.name, &script)?;
                let found: BTreeSet<IpAddr> = text.lines().filter_map(|line| line.parse().ok()).collect();
                ensure!(found == *expected, "{name} from {}: {found:?}, not {expected:?}", pod.node);
                Ok(())
            };
            eventually(TIMEOUT, found).unwrap();
        }
        // By the short name, as programs do it.
        room.shell(&pod.name, "curl -sS -m 20 http://web/hostname").unwrap();
    }
}

#[test]
fn a_port_of_the_node_leads_to_the_pod() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "hostport");
    room.apply(&format!(
        "\
apiVersion: v1
kind: Pod
metadata: {{name: web, labels: {{app: web}}}}
spec:
  nodeSelector: {{kubernetes.io/hostname: cloud-2}}
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: {AGNHOST}
      args: [netexec]
      ports: [{{containerPort: 8080, hostPort: 18080}}]
"
    ))
    .unwrap();
    room.ready_pod("web");
    let at = cluster.node("cloud-2").unwrap();
    for address in at.addresses() {
        let ask = format!("curl -gsS -m 5 http://{}:18080/hostname", host(*address));
        let from_outside = eventually(TIMEOUT, || cluster.lab().internet().shell(&ask)).unwrap();
        assert_eq!(from_outside.trim(), "web");
        let other = cluster.node("cloud-1").unwrap();
        assert_eq!(eventually(TIMEOUT, || other.exec(&["sh", "-c", &ask])).unwrap().trim(), "web");
    }
    room.kubectl("delete pod web --wait=true").unwrap();
    let rules = at.host().shell("iptables-save -t nat").unwrap();
    assert!(!rules.contains("18080"), "the chain of plugins took its rules away again: {rules}");
}

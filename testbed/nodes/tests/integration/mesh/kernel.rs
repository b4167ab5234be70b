//! Other programs change a node's network while its pods run, and pods try what they may not.

use std::net::{IpAddr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed_kube::images::AGNHOST;
use testbed_lab::{ForeignNetwork, Place, eventually};
use testbed_nodes::{Cluster, Node};

use crate::bed::{Pod, Room, Running, TIMEOUT, addresses_agree, network, server};
use crate::mesh::BED;

/// Changes that a restart of systemd-networkd and `sysctl --system` make, and worse ones. A flush fails when a pod of an earlier test ends
/// meanwhile.
const BREAK: &str = "
    ip rule del priority 2000
    ip -6 rule del priority 2000
    sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0
    ip route flush table 116 || ip route flush table 116
    ip -6 route flush table 116 || ip -6 route flush table 116
    nft delete table inet fairlead_source_check
";

fn everything_flows(running: &Running, room: &Room<'_>) {
    running.all().for_each(|traffic| traffic.flows());
    running.untouched(room);
}

#[test]
fn rules_forwarding_and_routes_that_other_programs_delete_come_back() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "flush");
    let running = Running::start(&room);
    let mark = Instant::now();
    for node in cluster.nodes() {
        node.exec(&["sh", "-ec", BREAK]).unwrap();
    }
    let broken = Instant::now();
    running.all().for_each(|traffic| traffic.flows());
    let back = broken.elapsed();
    running.untouched(&room);
    println!("flush of the pods' network: everything flows {:.1} s later", back.as_secs_f64());
    for traffic in running.all() {
        traffic.lost_since(mark);
    }
    // Ten times what docs/outages.md says.
    assert!(back <= Duration::from_secs(20), "{back:.1?}");
    for node in cluster.nodes() {
        eventually(TIMEOUT, || node.exec(&["nft", "list", "table", "inet", "fairlead_source_check"]))
            .unwrap();
    }
    running.more_start(&room);
    addresses_agree(&cluster);
}

/// Sets the links of all pods on a node down and up, which removes their routes.
fn bounce(node: &Node) {
    let script = "
        for link in $(ip -o link show group 116 | cut -d: -f2 | cut -d@ -f1); do
            # The pod of another test may end meanwhile.
            ip link set $link down && ip link set $link up || ! ip link show $link || exit 1
        done
    ";
    node.exec(&["sh", "-ec", script]).unwrap();
}

/// The container of the node program.
fn program(cluster: &Cluster, node: &Node) -> Result<String> {
    let field = format!("spec.nodeName={}", node.name());
    let path = "jsonpath={.items[0].status.containerStatuses[?(@.name==\"coild\")].containerID}";
    let selector = "app.kubernetes.io/component=coild";
    let id = cluster.kubectl(&[
        "-n",
        "kube-system",
        "get",
        "pods",
        "-l",
        selector,
        "--field-selector",
        &field,
        "-o",
        path,
    ])?;
    let id = id.trim().strip_prefix("containerd://").with_context(|| format!("no container ID: {id:?}"))?;
    Ok(id.to_owned())
}

#[test]
fn a_link_that_goes_down_and_up_keeps_its_pod_and_its_address_also_when_the_node_program_is_away() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "bounce");
    let running = Running::start(&room);
    cluster.nodes().iter().for_each(bounce);
    everything_flows(&running, &room);
    // A program that is frozen cannot restore anything; the one after it must find the addresses elsewhere.
    for node in cluster.nodes() {
        let id = program(&cluster, node).unwrap();
        // runc gives up where a process takes long to stop, and thaws it: "unable to freeze" on a busy machine.
        eventually(TIMEOUT, || node.exec(&["ctr", "-n", "k8s.io", "tasks", "pause", &id])).unwrap();
        bounce(node);
        let of_pods = node.exec(&["ip", "route", "show", "table", "116", "type", "unicast"]).unwrap();
        assert_eq!(of_pods, "", "{}", node.name());
        node.exec(&["ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", &id]).unwrap();
        let _ = node.exec(&["ctr", "-n", "k8s.io", "tasks", "resume", &id]);
        let replaced = || {
            let now = program(&cluster, node)?;
            ensure!(now != id, "{id} still is the node program of {}", node.name());
            Ok(())
        };
        eventually(TIMEOUT, replaced).unwrap();
    }
    cluster.wait_fairlead().unwrap();
    everything_flows(&running, &room);
    running.more_start(&room);
    addresses_agree(&cluster);
}

/// Sources of what arrives at `to`, of datagrams with these sources from a pod; the last one arrives.
fn arrives(from: &ForeignNetwork, at: &ForeignNetwork, to: IpAddr, sources: [IpAddr; 2]) -> Vec<IpAddr> {
    let server = at.inside(|| UdpSocket::bind((to, 0)).unwrap()).unwrap();
    let port = server.local_addr().unwrap().port();
    server.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    for source in sources {
        from.inside(|| UdpSocket::bind((source, 0)).unwrap().send_to(b"x", (to, port)).unwrap()).unwrap();
    }
    let mut seen = Vec::new();
    while seen.last() != Some(&sources[1]) {
        seen.push(server.recv_from(&mut [0; 8]).unwrap().1.ip());
    }
    seen
}

#[test]
fn a_pod_cannot_send_with_the_address_of_its_neighbour() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "spoof");
    let pods = room.run("deployment/web", &server("web", 6));
    let on = |node: &str| pods.iter().filter(|pod| pod.node == node).collect::<Vec<&Pod>>();
    let (near, far) = (on("cloud-1"), on("cloud-2"));
    let (pod, there) = (network(&cluster, near[0]), network(&cluster, far[0]));
    for ((own, neighbour), to) in near[0].addresses.iter().zip(&near[1].addresses).zip(&far[0].addresses) {
        // An IPv6 address that is checked for duplicates cannot be used at once.
        let add = format!("ip addr add {neighbour} dev lo nodad");
        assert!(pod.inside(|| Command::new("sh").args(["-c", &add]).status().unwrap()).unwrap().success());
        assert_eq!(arrives(&pod, &there, *to, [*neighbour, *own]), [*own]);
    }
}

#[test]
fn a_pod_that_asks_for_an_unknown_egress_does_not_start_and_its_events_say_why() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "egress");
    let manifest = format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: client, annotations: {{egress.coil.cybozu.com/internet: nat}}}}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{{name: main, image: '{AGNHOST}', args: [pause]}}]
"
    );
    room.apply(&manifest).unwrap();
    let refused = || {
        let events =
            room.kubectl("get events --field-selector reason=EgressUnknown -o jsonpath={.items[*].message}")?;
        ensure!(events.contains("no Egress internet/nat"), "{events:?}");
        Ok(())
    };
    eventually(TIMEOUT, refused).unwrap();
    assert_eq!(room.kubectl("get pod client -o jsonpath={.status.podIP}").unwrap(), "");
}

fn blocks_of(cluster: &Cluster, node: &str) -> String {
    let selector = format!("coil.cybozu.com/node={node}");
    cluster.kubectl(&["get", "addressblocks", "-l", &selector, "-o", "name"]).unwrap()
}

/// `kubectl delete node`, and the kubelet registers again, while the pods run.
#[test]
fn a_node_that_is_deleted_and_registers_again_keeps_its_blocks_and_its_pods() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "again");
    let running = Running::start(&room);
    let blocks = blocks_of(&cluster, "cloud-2");
    assert!(!blocks.is_empty());
    cluster.kubectl(&["delete", "node", "cloud-2"]).unwrap();
    cluster.node("cloud-2").unwrap().restart_kubelet().unwrap();
    eventually(TIMEOUT, || cluster.kubectl(&["get", "node", "cloud-2"])).unwrap();
    cluster.wait_ready().unwrap();
    everything_flows(&running, &room);
    let kept = blocks_of(&cluster, "cloud-2");
    assert!(blocks.lines().all(|block| kept.contains(block)), "before: {blocks} now: {kept}");
    running.more_start(&room);
    addresses_agree(&cluster);
}

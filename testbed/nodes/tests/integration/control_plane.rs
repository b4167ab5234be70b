//! Control-plane nodes that are rebooted: three nodes on one network, joined by the mesh, each with an etcd and an API server of its own. A node's
//! kubelet, kube-proxy and node program use the API server of that node, which asks the etcd of that node, which needs one of another node.
//! So a node that boots, without any tunnel, waits for other nodes before its node program can make one.
//!
//! Real: all that `tests/mesh` has; etcd's members and API servers are programs of each node's process 1, and end with it. Shared: one
//! kernel. Controllers and scheduler of Kubernetes run on the first node alone.
//!
//! Pods talk to each other all the time. The switch between the nodes counts what it carries outside of tunnels: of pods there must be nothing.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed_kube::images::AGNHOST;
use testbed_lab::{Progress, eventually};
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{Families, Network, stacked};
use testbed_nodes::{Cluster, Node};

use crate::bed;
use crate::bed::{Pod, Room, TIMEOUT, addresses_agree, all_different, server};

static BED: bed::Bed = bed::Bed::new(build);

/// Longest time from power-on until everything works again, on two busy cores.
const BOUND: Duration = Duration::from_secs(120);
/// TCP port of the pods.
const PORT: u16 = 8080;
/// Time in which etcd's members send each other several heartbeats.
const HEARTBEATS: Duration = Duration::from_secs(3);

/// Counts packets between the nodes that are in no tunnel: those of pods, whose flows it lists, and those between etcd's members.
const JUDGE: &str = "nft -f - <<'END'
table bridge judge {
  counter pods { }
  counter members { }
  set flows_ipv4 {
    type ifname . ipv4_addr . ipv4_addr . inet_proto . inet_service
    flags dynamic
    size 1024
  }
  set flows_ipv6 {
    type ifname . ipv6_addr . ipv6_addr . inet_proto . inet_service
    flags dynamic
    size 1024
  }
  chain seen {
    type filter hook prerouting priority -300;
    ip saddr 10.64.0.0/16 counter name pods update @flows_ipv4 { iifname . ip saddr . ip daddr . meta l4proto . th dport }
    ip daddr 10.64.0.0/16 counter name pods update @flows_ipv4 { iifname . ip saddr . ip daddr . meta l4proto . th dport }
    ip6 saddr fd02:fa1e::/112 counter name pods update @flows_ipv6 { iifname . ip6 saddr . ip6 daddr . meta l4proto . th dport }
    ip6 daddr fd02:fa1e::/112 counter name pods update @flows_ipv6 { iifname . ip6 saddr . ip6 daddr . meta l4proto . th dport }
    tcp dport 2380 counter name members
    tcp sport 2380 counter name members
  }
}
END";

fn build() -> Result<Cluster> {
    let topology = stacked(3, Families::Dual, Network::Installed { pods: POOL_RANGES });
    let cluster = Cluster::start(topology, &test_images()?, Progress::default())?;
    cluster.install_fairlead(Mode::Mesh)?;
    cluster.sites().first().context("no network")?.router().shell(JUDGE)?;
    Ok(cluster)
}

#[test]
fn a_control_plane_node_that_is_rebooted_comes_back_without_its_tunnels() {
    let mut cluster = BED.alone();
    start_pods(&cluster, "each");
    for name in names(&cluster) {
        reboot(&mut cluster, "each", &[name]);
    }
    drop(Room::again(&cluster, "each"));
}

#[test]
fn control_plane_nodes_that_are_all_rebooted_at_once_come_back_without_their_tunnels() {
    let mut cluster = BED.alone();
    start_pods(&cluster, "all");
    let names = names(&cluster);
    reboot(&mut cluster, "all", &names);
    drop(Room::again(&cluster, "all"));
}

fn names(cluster: &Cluster) -> Vec<String> {
    cluster.nodes().iter().map(|node| node.name().to_owned()).collect()
}

/// Starts pods on each node that talk to each other, in a room that stays, once the mesh has everything between the nodes.
fn start_pods(cluster: &Cluster, room: &str) {
    eventually(TIMEOUT, || control_plane_answers(cluster)).unwrap();
    everything_is_in_the_mesh(cluster);
    let room = Room::new(cluster, room);
    let pods = room.run("deployment/web", &server("web", 3));
    let on: BTreeSet<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
    assert_eq!(on.len(), 3, "{pods:#?}");
    let talking = room.run("daemonset/client", &client(&pods));
    assert_eq!(talking.len(), 3, "{talking:#?}");
    room.keep();
}

/// Takes the power of all these nodes before one has it again, and waits until everything works as before.
fn reboot(cluster: &mut Cluster, room: &str, nodes: &[String]) {
    let before = {
        let room = Room::again(cluster, room);
        let pods = room.pods("web").unwrap();
        room.keep();
        pods
    };
    let carried = counted(cluster, "members").unwrap();
    // Without a cable, the kernel below a node without power refuses no connection: the others must notice by themselves.
    nodes.iter().for_each(|name| cluster.node(name).unwrap().host().partition().unwrap());
    for name in nodes {
        cluster.node_mut(name).unwrap().power_cut().unwrap();
    }
    nodes.iter().for_each(|name| cluster.node(name).unwrap().host().heal().unwrap());
    let on = Instant::now();
    for name in nodes {
        cluster.node_mut(name).unwrap().power_on().unwrap();
    }
    let left = BOUND.saturating_sub(on.elapsed());
    let room = Room::again(cluster, room);
    let back = eventually(left, || works(&room, &before, nodes));
    back.with_context(|| cluster.explain()).unwrap();
    println!("reboot of {}: everything works {:.1?} after power-on", nodes.join(", "), on.elapsed());

    assert!(counted(cluster, "members").unwrap() > carried, "etcd did not need the way past the mesh");
    everything_is_in_the_mesh(cluster);
    cluster.wait_ready().unwrap();
    cluster.wait_fairlead().unwrap();
    all_different(&room.pods("web").unwrap());
    addresses_agree(cluster);
    let judged = judged(cluster).unwrap();
    assert_eq!(packets(&judged, "pods").unwrap(), 0, "packets of pods left outside of the mesh: {judged}");
    room.keep();
}

/// Asks for everything in the order in which a cluster boots, since each question takes time from what it waits for.
fn works(room: &Room<'_>, before: &[Pod], rebooted: &[String]) -> Result<()> {
    let cluster = room.cluster;
    control_plane_answers(cluster)?;
    nodes_are_ready(cluster)?;
    let pods = room.pods("web")?;
    let is_back = |old: &Pod| {
        let was_rebooted = rebooted.contains(&old.node);
        // That it was started again, only the kubelet that runs since the reboot can say.
        let is_new = |pod: &Pod| !was_rebooted || pod.restarts > old.restarts;
        pods.iter().any(|pod| pod.name == old.name && pod.ready && is_new(pod))
    };
    ensure!(pods.len() == before.len() && before.iter().all(is_back), "{before:#?} are now {pods:#?}");
    tunnels_are_up(cluster)?;
    let targets: Vec<String> = pods.iter().flat_map(urls).collect();
    for pod in &pods {
        let script =
            format!("for to in {}; do curl -gsS -m 5 -o /dev/null $to || exit 1; done", targets.join(" "));
        room.shell(&pod.name, &script).with_context(|| format!("from {}", pod.node))?;
    }
    Ok(())
}

/// Every node finds each member of etcd healthy (it answers a read that needs most members), and each API server ready.
fn control_plane_answers(cluster: &Cluster) -> Result<()> {
    let file = |name: &str| cluster.plane().directory().join(name).display().to_string();
    let (authority, certificate, key) = (file("ca.crt"), file("etcd.crt"), file("etcd.key"));
    let tls = ["--cacert", authority.as_str(), "--cert", certificate.as_str(), "--key", key.as_str()];
    for from in cluster.nodes() {
        for to in cluster.nodes().iter().map(ipv4) {
            for (url, good) in [
                (format!("https://{to}:2379/health"), "\"health\":\"true\""),
                (format!("https://{to}:6443/readyz"), "ok"),
            ] {
                let ask = ["curl", "-sS", "-m", "5", url.as_str()];
                let answer = from.exec(&[&ask[..], &tls[..]].concat())?;
                ensure!(answer.contains(good), "{url}, from {}: {answer}", from.name());
            }
        }
    }
    Ok(())
}

fn ipv4(node: &Node) -> IpAddr {
    node.addresses()[0]
}

fn nodes_are_ready(cluster: &Cluster) -> Result<()> {
    let path = "jsonpath={range .items[*]}{.status.conditions[?(@.type=='Ready')].status} {end}";
    let listed = cluster.kubectl(&["get", "nodes", "-o", path])?;
    let ready = listed.split_whitespace().filter(|status| *status == "True").count();
    ensure!(ready == cluster.nodes().len(), "{ready} nodes are Ready: {listed}");
    Ok(())
}

/// Each node knows the other control-plane nodes, and leads packets to none of them past the mesh any more.
fn tunnels_are_up(cluster: &Cluster) -> Result<()> {
    for node in cluster.nodes() {
        for family in ["ipv4", "ipv6"] {
            let knows_others = has_elements(node, &format!("fairlead_control_plane_{family}"))?;
            ensure!(knows_others, "{} knows no other control-plane node", node.name());
            let leads_past = has_elements(node, &format!("fairlead_control_plane_down_{family}"))?;
            ensure!(!leads_past, "a tunnel of {} is down", node.name());
        }
    }
    Ok(())
}

fn has_elements(node: &Node, set: &str) -> Result<bool> {
    Ok(node.exec(&["nft", "list", "set", "inet", "talos_kubespan", set])?.contains("elements"))
}

/// Tunnels are up, and between the nodes nothing of etcd is seen any more: the way past the mesh is for nodes without a tunnel alone.
fn everything_is_in_the_mesh(cluster: &Cluster) {
    let inside = || {
        tunnels_are_up(cluster)?;
        let before = counted(cluster, "members")?;
        std::thread::sleep(HEARTBEATS);
        let more = counted(cluster, "members")? - before;
        ensure!(more == 0, "{more} packets between members of etcd were in no tunnel");
        Ok(())
    };
    eventually(TIMEOUT, inside).with_context(|| cluster.explain()).unwrap();
}

/// Packets of a counter of [`JUDGE`] so far.
fn counted(cluster: &Cluster, counter: &str) -> Result<u64> {
    packets(&judged(cluster)?, counter)
}

/// The table of [`JUDGE`] with its counters and flows, as nft lists it.
fn judged(cluster: &Cluster) -> Result<String> {
    let router = cluster.sites().first().context("no network")?.router();
    router.shell("nft list table bridge judge")
}

fn packets(judged: &str, counter: &str) -> Result<u64> {
    let figures = judged.split_once(&format!("counter {counter} {{")).map(|(_, figures)| figures);
    let packets = figures.and_then(|figures| figures.split_whitespace().nth(1));
    Ok(packets.with_context(|| format!("no counter {counter}: {judged}"))?.parse()?)
}

fn urls(pod: &Pod) -> Vec<String> {
    let url = |address: &IpAddr| format!("http://{}/hostname", SocketAddr::new(*address, PORT));
    pod.addresses.iter().map(url).collect()
}

/// A pod on each node that asks these pods all the time, and first of all when its node was rebooted.
fn client(pods: &[Pod]) -> String {
    let targets: Vec<String> = pods.iter().flat_map(urls).collect();
    let targets = targets.join(" ");
    format!(
        "\
apiVersion: apps/v1
kind: DaemonSet
metadata: {{name: client}}
spec:
  selector: {{matchLabels: {{app: client}}}}
  template:
    metadata: {{labels: {{app: client}}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: main
          image: {AGNHOST}
          command: [sh, -c]
          args:
            - |
              while :; do
                for to in {targets}; do curl -gs -m 1 -o /dev/null $to; done
                sleep 1
              done
"
    )
}

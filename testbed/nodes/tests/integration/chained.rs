//! Egress gateways for pods of other plugins, ptp with host-local, on two nodes of one network: `deploy/overlays/egress-only`.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use testbed_lab::{Host, Progress, eventually};
use testbed_nodes::Cluster;
use testbed_nodes::install::{Mode, test_images};
use testbed_nodes::topology::{Families, Network, one_network};

use crate::bed;
use crate::bed::outside::{addresses_of, ask_by_udp, connect, run, serve};
use crate::bed::{Pod, Room, TIMEOUT, network, server};

static BED: bed::Bed = bed::Bed::new(build);

/// The ranges of host-local, which the gateways take from the Nodes: no block says which addresses a node may register.
const RANGES: [(&str, &str, &str); 2] =
    [("cloud-1", "10.244.1.0/24", "fd00:10:244:1::/64"), ("cloud-2", "10.244.2.0/24", "fd00:10:244:2::/64")];

const EGRESS: &str = "\
apiVersion: v1
kind: Namespace
metadata: {name: internet-egress}
---
apiVersion: coil.cybozu.com/v2
kind: Egress
metadata: {name: nat, namespace: internet-egress}
spec: {replicas: 2, destinations: [0.0.0.0/0, '::/0']}
";

fn build() -> Result<Cluster> {
    let cluster =
        Cluster::start(one_network(2, Families::Dual, Network::Stock), &test_images()?, Progress::default())?;
    for (node, ipv4, ipv6) in RANGES {
        let patch = format!(r#"{{"spec": {{"podCIDR": "{ipv4}", "podCIDRs": ["{ipv4}", "{ipv6}"]}}}}"#);
        cluster.kubectl(&["patch", "node", node, "-p", &patch])?;
    }
    cluster.sites().first().context("no network")?.router().set_ipv6_firewall(false)?;
    cluster.install_fairlead(Mode::EgressOnly)?;
    cluster.apply(EGRESS)?;
    eventually(TIMEOUT, || {
        let replicas = ["-n", "internet-egress", "get", "egress", "nat", "-o", "jsonpath={.status.replicas}"];
        ensure!(cluster.kubectl(&replicas)? == "2", "the gateways are not ready");
        Ok(())
    })
    .with_context(|| cluster.explain())?;
    Ok(cluster)
}

/// A machine outside, and routes of all pods to it and back: who is translated, and who is not, can then be seen.
fn outside(cluster: &Cluster) -> Result<Host> {
    let host = cluster.lab().dual_stack_site("outside").host("outside")?;
    serve(&host, addresses_of(&host))?;
    let cloud = cluster.sites().first().context("no network")?.router();
    let lan6 = cloud.lan6().context("no IPv6 in the cloud")?;
    for (name, ipv4, ipv6) in RANGES {
        let node = cluster.node(name)?;
        for (option, range, lan) in [("-4", ipv4, cloud.lan().to_string()), ("-6", ipv6, lan6.to_string())] {
            let is_same = |address: &&IpAddr| address.is_ipv4() == (option == "-4");
            let via = node.addresses().iter().find(is_same).context("the node has no such address")?;
            cloud.shell(&format!("ip {option} route replace {range} via {via}"))?;
            let through =
                format!("ip {option} route show {lan} | head -1 | grep -o 'via .*' | sed 's/ metric.*//'");
            cluster
                .lab()
                .internet()
                .shell(&format!("ip {option} route replace {range} $({through}) onlink"))?;
        }
    }
    Ok(host)
}

/// Addresses of the gateway pods.
fn gateways(cluster: &Cluster) -> Result<BTreeSet<IpAddr>> {
    let path = "jsonpath={.items[*].status.podIPs[*].ip}";
    let selector = "app.kubernetes.io/component=egress";
    let list = cluster.kubectl(&["-n", "internet-egress", "get", "pods", "-l", selector, "-o", path])?;
    Ok(list.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
}

/// Counts packets from or to addresses of client pods on the Internet, and those of other pods, which must be seen there.
fn count(cluster: &Cluster, clients: &[Pod], others: &[Pod]) -> Result<()> {
    let of = |pods: &[Pod], counter: &str| -> String {
        let family = |address: &IpAddr| if address.is_ipv4() { "ip" } else { "ip6" };
        let of_address = |address: &IpAddr| {
            ["saddr", "daddr"]
                .map(|end| format!("{} {end} {address} counter name {counter}\n", family(address)))
                .concat()
        };
        pods.iter().flat_map(|pod| &pod.addresses).map(of_address).collect()
    };
    let table = format!(
        "table inet judge {{
            counter clients {{ }}
            counter others {{ }}
            chain forward {{ type filter hook forward priority -300;
            {}{} }}
        }}",
        of(clients, "clients"),
        of(others, "others")
    );
    cluster.lab().internet().shell(&format!("nft -f - <<'END'\n{table}\nEND")).map(drop)
}

/// Packets of a counter so far.
fn counted(cluster: &Cluster, counter: &str) -> Result<u64> {
    let listed = cluster.lab().internet().shell(&format!("nft list counter inet judge {counter}"))?;
    let number = listed.split_whitespace().skip_while(|word| *word != "packets").nth(1);
    Ok(number.with_context(|| format!("no number: {listed}"))?.parse()?)
}

#[test]
fn annotated_pods_of_another_plugin_leave_by_gateways_and_others_as_before() {
    let cluster = BED.shared();
    let outside = outside(&cluster).unwrap();
    let room = Room::new(&cluster, "chained");
    let annotated = server("client", 2).replace(
        "metadata: {labels: {app: client}}",
        "metadata: {labels: {app: client}, annotations: {egress.coil.cybozu.com/internet-egress: nat}}",
    );
    let clients = room.run("deployment/client", &annotated);
    let others = room.run("deployment/other", &server("other", 2));
    let gateways = gateways(&cluster).unwrap();
    assert_eq!(gateways.len(), 4, "{gateways:?}");
    count(&cluster, &clients, &others).unwrap();
    for pod in &clients {
        let place = network(&cluster, pod);
        for to in addresses_of(&outside) {
            let context = || run(&place, "ip rule; ip route show table 118; ip -d link").unwrap_or_default();
            let (_, seen) = connect(&place, to).with_context(context).unwrap();
            assert!(gateways.contains(&seen), "TCP of {pod:?} to {to} came from {seen}");
            let seen = ask_by_udp(&place, to).with_context(context).unwrap();
            assert!(gateways.contains(&seen), "UDP of {pod:?} to {to} came from {seen}");
        }
        // Other pods and Services are reached as before.
        let other = others.iter().find(|other| other.node != pod.node).unwrap();
        run(&place, &format!("ping -n -c 1 -W 5 {}", other.addresses[0])).unwrap();
    }
    for pod in &others {
        let place = network(&cluster, pod);
        for to in addresses_of(&outside) {
            let (_, seen) = connect(&place, to).unwrap();
            assert!(pod.addresses.contains(&seen), "{pod:?} came from {seen}");
        }
    }
    let [of_clients, of_others] = ["clients", "others"].map(|counter| counted(&cluster, counter).unwrap());
    println!("outside were {of_clients} packets of client pods and {of_others} of other pods");
    assert!(of_clients == 0 && of_others > 0, "{of_clients} and {of_others} packets");
}

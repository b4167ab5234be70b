//! The cluster with both Egresses, and client pods.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};
use testbed_kube::images::AGNHOST;
use testbed_lab::{Progress, eventually};
use testbed_nodes::Cluster;
use testbed_nodes::install::{Mode, POOL_RANGES, test_images};
use testbed_nodes::topology::{Families, Network, two_and_one_behind_nat};

use crate::bed::{Pod, Room, TIMEOUT, server};

/// Namespace of the gateways to the Internet, and their addresses, which are public.
pub(crate) const INTERNET: &str = "internet-egress";
/// Namespace of the gateways to 192.168.10.0/24.
pub(crate) const DOMESTIC: &str = "domestic-egress";
/// Namespace of the gateways to the Internet that have source addresses.
pub(crate) const FLOATING: &str = "floating-egress";
/// Host part of these addresses in the network of the nodes.
const SOURCE: u8 = 200;
/// Annotations of client pods.
pub(crate) const ANNOTATIONS: &str =
    "egress.coil.cybozu.com/internet-egress: nat, egress.coil.cybozu.com/domestic-egress: nat";

/// Addresses of gateways keep their form outside: each block has one.
const POOLS: &str = "\
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: internet}
spec: {blockSizeBits: 0, masquerade: false, subnets: [{ipv4: 192.0.2.0/28, ipv6: 2001:db8:ee::/124}]}
---
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: domestic}
spec: {blockSizeBits: 0, masquerade: false, subnets: [{ipv4: 192.168.20.0/28, ipv6: fd00:20::/124}]}
";

/// The source addresses of the third Egress.
pub(crate) fn source_addresses(cluster: &Cluster) -> Result<BTreeSet<IpAddr>> {
    let router = cluster.sites().first().context("no network")?.router();
    let ipv4 = u32::from(router.lan().network()) | u32::from(SOURCE);
    let ipv6 = u128::from(router.lan6().context("no IPv6")?.network()) | u128::from(SOURCE);
    Ok(BTreeSet::from([Ipv4Addr::from(ipv4).into(), Ipv6Addr::from(ipv6).into()]))
}

/// The third Egress, once the controller permits its addresses.
fn with_source_addresses(cluster: &Cluster) -> Result<()> {
    let addresses: Vec<String> = source_addresses(cluster)?.iter().map(ToString::to_string).collect();
    let flag = format!("--egress-source-addresses={}/32,{}/128", addresses[0], addresses[1]);
    let patch =
        format!(r#"[{{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "{flag}"}}]"#);
    let words =
        ["-n", "kube-system", "patch", "deployment", "coil-egress-controller", "--type=json", "-p", &patch];
    cluster.kubectl(&words)?;
    let manifest = egress(FLOATING, "default", "0.0.0.0/0, '::/0'")
        + &format!("  sourceAddresses: [{}, '{}']\n", addresses[0], addresses[1]);
    cluster.apply(&manifest).map(drop)
}

/// A namespace with its pool and its Egress. Gateways are on the nodes that the Internet reaches.
fn egress(namespace: &str, pool: &str, destinations: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Namespace
metadata: {{name: {namespace}, annotations: {{coil.cybozu.com/pool: {pool}}}}}
---
apiVersion: coil.cybozu.com/v2
kind: Egress
metadata: {{name: nat, namespace: {namespace}}}
spec:
  replicas: 2
  destinations: [{destinations}]
  template:
    spec:
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions: [{{key: kubernetes.io/hostname, operator: In, values: [cloud-1, cloud-2]}}]
"
    )
}

/// The cluster of all tests here.
pub(crate) fn build() -> Result<Cluster> {
    let topology = two_and_one_behind_nat(Families::Dual, Network::Installed { pods: POOL_RANGES });
    let cluster = Cluster::start(topology, &test_images()?, Progress::default())?;
    for site in cluster.sites() {
        // Its router drops incoming IPv6 otherwise.
        site.router().set_ipv6_firewall(false)?;
    }
    cluster.install_fairlead(Mode::MeshWithEgress)?;
    cluster.apply(POOLS)?;
    cluster.apply(&egress(INTERNET, "internet", "0.0.0.0/0, '::/0'"))?;
    cluster.apply(&egress(DOMESTIC, "domestic", "192.168.10.0/24"))?;
    with_source_addresses(&cluster)?;
    for namespace in [INTERNET, DOMESTIC, FLOATING] {
        wait_for_gateways(&cluster, namespace)?;
    }
    cluster.progress().step("three Egresses have two gateways each");
    Ok(cluster)
}

/// Waits until both gateways of an Egress are ready.
fn wait_for_gateways(cluster: &Cluster, namespace: &str) -> Result<()> {
    eventually(TIMEOUT, || {
        let ready = ["-n", namespace, "get", "egress", "nat", "-o", "jsonpath={.status.replicas}"];
        ensure!(cluster.kubectl(&ready)? == "2", "the gateways of {namespace} are not ready");
        Ok(())
    })
    .with_context(|| cluster.explain())
}

/// An Egress like that to the Internet for one test, which may change it, with its gateways. All of it goes with the room.
pub(crate) fn own_egress<'a>(cluster: &'a Cluster, namespace: &str) -> (Room<'a>, Vec<Gateway>) {
    let room = Room::of_pool(cluster, namespace, Some("internet"));
    cluster.apply(&egress(namespace, "internet", "0.0.0.0/0, '::/0'")).unwrap();
    wait_for_gateways(cluster, namespace).unwrap();
    let gateways = gateways(cluster, namespace).unwrap();
    assert_eq!(gateways.len(), 2, "{gateways:?}");
    (room, gateways)
}

/// A client pod of the Egress in a namespace, on a node.
pub(crate) fn client_on(room: &Room<'_>, namespace: &str, node: &str) -> Pod {
    let metadata = format!(
        "metadata: {{labels: {{app: client}}, annotations: {{egress.coil.cybozu.com/{namespace}: nat}}}}"
    );
    let selector = format!("nodeSelector: {{kubernetes.io/hostname: {node}}}");
    let manifest = server("client", 1)
        .replace("metadata: {labels: {app: client}}", &metadata)
        .replace("      containers:\n", &format!("      {selector}\n      containers:\n"));
    assert!(manifest.contains(&metadata) && manifest.contains(&selector), "{manifest}");
    room.run("deployment/client", &manifest).remove(0)
}

/// A gateway pod that is not being deleted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Gateway {
    pub(crate) name: String,
    pub(crate) node: String,
    pub(crate) addresses: Vec<IpAddr>,
}

/// The gateways of a namespace.
pub(crate) fn gateways(cluster: &Cluster, namespace: &str) -> Result<Vec<Gateway>> {
    let fields = "{.metadata.deletionTimestamp}/{.metadata.name}/{.spec.nodeName}/{.status.podIPs[*].ip}";
    let path = format!("jsonpath={{range .items[*]}}{fields}{{\"\\n\"}}{{end}}");
    let selector = "app.kubernetes.io/component=egress";
    let list = cluster.kubectl(&["-n", namespace, "get", "pods", "-l", selector, "-o", &path])?;
    let living = list.lines().filter_map(|line| line.strip_prefix('/'));
    let gateway = |line: &str| {
        let mut fields = line.split('/');
        let mut next = || fields.next().with_context(|| format!("incomplete: {line}"));
        let (name, node) = (next()?.to_owned(), next()?.to_owned());
        let addresses = next()?.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        Ok(Gateway { name, node, addresses })
    };
    living.map(gateway).collect()
}

/// All addresses of gateways.
pub(crate) fn addresses(gateways: &[Gateway]) -> BTreeSet<IpAddr> {
    gateways.iter().flat_map(|gateway| gateway.addresses.iter().copied()).collect()
}

/// Client pods, spread over the nodes.
pub(crate) fn clients(room: &Room<'_>, replicas: usize) -> Vec<Pod> {
    let metadata = format!("metadata: {{labels: {{app: client}}, annotations: {{{ANNOTATIONS}}}}}");
    let manifest = server("client", replicas).replace("metadata: {labels: {app: client}}", &metadata);
    assert!(manifest.contains(ANNOTATIONS), "{manifest}");
    room.run("deployment/client", &manifest)
}

/// A pod that connects to `target` once, before anything else, and does not try again.
pub(crate) fn connects_once(target: &str, pods: usize, at_once: usize) -> String {
    format!(
        "\
apiVersion: batch/v1
kind: Job
metadata: {{name: once}}
spec:
  completions: {pods}
  parallelism: {at_once}
  backoffLimit: 0
  template:
    metadata: {{annotations: {{{ANNOTATIONS}}}}}
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 1
      initContainers:
        - name: connect
          image: {AGNHOST}
          command: [curl, -sS, --http0.9, -m, '10', 'http://{target}/']
      containers:
        - name: main
          image: {AGNHOST}
          command: ['true']
"
    )
}

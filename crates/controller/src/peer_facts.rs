//! Copies what Nodes say to the WireKubePeers of the same names, with the addresses on the mesh that nodes are given. Every node program watches all WireKubePeers, and would have to watch all
//! Nodes, which change with each heartbeat, to know these few facts. It costs one write for each change of a fact.

use std::time::Duration;

use fairlead_api::resources::{NodeFacts, NodeFilters, NodeLocation, Topology, WireKubeMesh, WireKubePeer};
use fairlead_cluster::events::EventPublisher;
use fairlead_cluster::writes::apply_status;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;

use self::addresses::Addresses;
use self::beliefs::Beliefs;
use self::internal_ips::Judged;
use crate::changes::Changes;

mod addresses;
mod beliefs;
mod internal_ips;

/// Field manager of `status.node`.
const MANAGER: &str = "fairlead-controller-node";
/// Changes are collected this long.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Interval without a change, for writes that failed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(30);
/// The same while the identifier of the cluster cannot be read.
const RETRY_INTERVAL: Duration = Duration::from_secs(3);
/// Writes at a time.
const CONCURRENCY: usize = 8;

/// Objects that the copies are made of, and signals of their changes.
pub(crate) struct Sources {
    pub(crate) nodes: Store<Node>,
    pub(crate) peers: Store<WireKubePeer>,
    pub(crate) meshes: Store<WireKubeMesh>,
    pub(crate) watches: [watch::Receiver<u64>; 3],
}

/// Keeps the copies current forever, and gives nodes addresses on the mesh.
pub(crate) async fn run(client: Client, sources: Sources, events: EventPublisher) {
    let Sources { nodes, peers, meshes, mut watches } = sources;
    // In half a list the Node is missing that had an address first.
    for watch in &mut watches {
        if watch.wait_for(|generation| *generation > 0).await.is_err() {
            return;
        }
    }
    let api: Api<WireKubePeer> = Api::all(client.clone());
    let mut addresses = Addresses::new(client.clone());
    let mut beliefs = Beliefs::new(client, events);
    let mut changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    loop {
        let peers = peers.state();
        let all = nodes.state();
        let meshes = meshes.state();
        let is_complete = addresses.update(&meshes, &peers, &all).await;
        let mesh = WireKubeMesh::selected(&meshes);
        let judged = beliefs.judge(mesh, &peers, &all);
        let topology = mesh.and_then(|mesh| mesh.spec.topology.clone()).unwrap_or_default();
        changes.resync = if is_complete { RESYNC_INTERVAL } else { RETRY_INTERVAL };
        // What a Node said stays after the Node is gone: its peer is deleted with it.
        let due = peers.iter().filter_map(|peer| {
            let node = nodes.get(&ObjectRef::new(&peer.name_any()))?;
            let judged = judged.get(&peer.name_any()).cloned().unwrap_or_default();
            Some((peer.name_any(), due(peer, &node, &judged, &topology, addresses.of(peer))?))
        });
        futures::stream::iter(due)
            .for_each_concurrent(CONCURRENCY, |(name, facts)| write(&api, name, facts))
            .await;
        // The peers come first: others wait for them.
        beliefs.publish(mesh, &judged).await;
        changes.next().await;
    }
}

async fn write(api: &Api<WireKubePeer>, name: String, facts: NodeFacts) {
    let object = json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
        "metadata": { "name": name }, "status": { "node": facts },
    });
    if let Err(error) = apply_status(api, &name, MANAGER, &object).await {
        tracing::warn!(peer = name, %error, "cannot copy what the Node says to its WireKubePeer; retrying");
    }
}

/// Facts to write to the peer; `None` if its status has them.
fn due(
    peer: &WireKubePeer,
    node: &Node,
    judged: &Judged,
    topology: &Topology,
    mesh_ips: Vec<String>,
) -> Option<NodeFacts> {
    let facts = NodeFacts { mesh_ips, ..facts(node, judged, topology) };
    let present = peer.status.as_ref().and_then(|status| status.node.as_ref());
    (present != Some(&facts)).then_some(facts)
}

/// Facts about a Node. Pure. The order of addresses is always the same.
fn facts(node: &Node, judged: &Judged, topology: &Topology) -> NodeFacts {
    // What it cannot read there, the node itself reports.
    let (location, _) = NodeLocation::of(node, topology);
    let (filters, _) = NodeFilters::of(node);
    let endpoint_filters = filters.published.map(|it| it.entries().iter().map(ToString::to_string).collect());
    NodeFacts {
        internal_ips: judged.believed.iter().map(ToString::to_string).collect(),
        first_internal_ips: judged.first.iter().map(ToString::to_string).collect(),
        is_control_plane: NodeFacts::is_control_plane_of(node),
        location: Some(location),
        endpoint_filters,
        pod_cidrs: NodeFacts::pod_cidrs_of(node).iter().map(ToString::to_string).collect(),
        mesh_ips: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As of a Node that is alone.
    fn due(
        peer: &WireKubePeer,
        node: &Node,
        topology: &Topology,
        mesh_ips: Vec<String>,
    ) -> Option<NodeFacts> {
        super::due(peer, node, &judged(node), topology, mesh_ips)
    }

    fn facts(node: &Node, topology: &Topology) -> NodeFacts {
        super::facts(node, &judged(node), topology)
    }

    fn judged(node: &Node) -> Judged {
        let believed = beliefs::internal_ips(node);
        Judged { first: believed.clone(), believed, ..Judged::default() }
    }

    fn node(addresses: &[(&str, &str)]) -> Node {
        let addresses: Vec<_> =
            addresses.iter().map(|(type_, address)| json!({ "type": type_, "address": address })).collect();
        let node = json!({ "metadata": { "name": "n1" }, "status": { "addresses": addresses } });
        serde_json::from_value(node).unwrap()
    }

    fn peer(status: &serde_json::Value) -> WireKubePeer {
        let peer = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": "n1" },
            "spec": {}, "status": status,
        });
        serde_json::from_value(peer).unwrap()
    }

    #[test]
    fn internal_addresses_are_copied_once_and_nothing_else() {
        let node = node(&[
            ("Hostname", "n1"),
            ("InternalIP", "192.0.2.7"),
            ("ExternalIP", "203.0.113.1"),
            ("InternalIP", "nonsense"),
            ("InternalIP", "fd00::7"),
        ]);
        let facts = due(&peer(&json!(null)), &node, &Topology::default(), Vec::new()).unwrap();
        assert_eq!(facts.internal_ips, ["192.0.2.7", "fd00::7"]);
        let written = peer(&json!({ "connected": true, "node": facts }));
        assert_eq!(due(&written, &node, &Topology::default(), Vec::new()), None);
        let forged = peer(&json!({ "node": { "internalIPs": ["192.0.2.8"] } }));
        assert_eq!(due(&forged, &node, &Topology::default(), Vec::new()), Some(facts));
    }

    #[test]
    fn a_node_that_moves_is_written_once() {
        let mut node = node(&[("InternalIP", "192.0.2.7")]);
        node.metadata.annotations = Some([("kilo.squat.ai/location".to_owned(), "lab".to_owned())].into());
        let facts = due(
            &peer(&json!({ "node": { "internalIPs": ["192.0.2.7"] } })),
            &node,
            &Topology::default(),
            Vec::new(),
        )
        .unwrap();
        let location = facts.location.as_ref().unwrap();
        assert_eq!(
            (location.name.as_str(), &location.internal_ips[..]),
            ("lab", &["192.0.2.7".to_owned()][..])
        );
        assert_eq!(due(&peer(&json!({ "node": facts })), &node, &Topology::default(), Vec::new()), None);
    }

    #[test]
    fn networks_of_pods_are_copied_as_prefixes() {
        let with = |spec: serde_json::Value| -> Node {
            let metadata = json!({ "name": "n1" });
            serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
        };
        let both =
            json!({ "podCIDR": "10.244.1.0/24", "podCIDRs": ["fd00:1::/64", "10.244.1.0/24", "nonsense"] });
        assert_eq!(facts(&with(both), &Topology::default()).pod_cidrs, ["10.244.1.0/24", "fd00:1::/64"]);
        assert_eq!(
            facts(&with(json!({ "podCIDR": "10.244.1.7/24" })), &Topology::default()).pod_cidrs,
            ["10.244.1.0/24"]
        );
        let facts = facts(&with(json!({ "podCIDRs": ["10.244.1.0/24"] })), &Topology::default());
        let written = peer(&json!({ "node": facts }));
        assert_eq!(
            due(&written, &with(json!({ "podCIDRs": ["10.244.1.0/24"] })), &Topology::default(), Vec::new()),
            None
        );
        let gone = due(&written, &with(json!({})), &Topology::default(), Vec::new()).unwrap();
        assert_eq!(gone.pod_cidrs, [""; 0]);
    }

    #[test]
    fn another_label_of_locations_is_one_write_of_each_node_that_it_moves() {
        let mut node = node(&[("InternalIP", "192.0.2.7")]);
        node.metadata.labels = Some([("topology.kubernetes.io/zone".to_owned(), "z".to_owned())].into());
        let written = peer(&json!({ "node": facts(&node, &Topology::default()) }));
        let by_zone =
            Topology { label: Some("topology.kubernetes.io/zone".to_owned()), ..Topology::default() };
        let moved = due(&written, &node, &by_zone, Vec::new()).unwrap();
        assert_eq!(moved.location.as_ref().unwrap().name, "z");
        assert_eq!(due(&peer(&json!({ "node": moved })), &node, &by_zone, Vec::new()), None);
    }

    #[test]
    fn what_a_node_says_of_its_endpoints_and_networks_is_copied() {
        let with = |annotations: serde_json::Value| -> Node {
            let metadata = json!({ "name": "n1", "annotations": annotations });
            let spec = json!({ "podCIDRs": ["10.244.1.0/24"] });
            serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
        };
        let both = with(json!({
            "wirekube.io/endpoint-filters": "0.0.0.0/0,!10.0.0.0/8,nonsense",
            "networking.talos.dev/kubespan-exclude-advertised-networks": "10.244.1.0/25",
        }));
        let facts = due(&peer(&json!(null)), &both, &Topology::default(), Vec::new()).unwrap();
        assert_eq!(facts.endpoint_filters, Some(vec!["0.0.0.0/0".to_owned(), "!10.0.0.0/8".to_owned()]));
        assert_eq!(facts.pod_cidrs, ["10.244.1.128/25"]);
        let written = peer(&json!({ "node": facts }));
        assert_eq!(due(&written, &both, &Topology::default(), Vec::new()), None);
        // An empty filter lets everything pass, which is more than none.
        let facts = due(
            &written,
            &with(json!({ "wirekube.io/endpoint-filters": "" })),
            &Topology::default(),
            Vec::new(),
        )
        .unwrap();
        assert_eq!(
            (facts.endpoint_filters, facts.pod_cidrs),
            (Some(vec![]), vec!["10.244.1.0/24".to_owned()])
        );
        assert_eq!(
            due(&written, &with(json!({})), &Topology::default(), Vec::new()).unwrap().endpoint_filters,
            None
        );
    }

    /// Two sites may have the same private addresses, and packets in a location need its own.
    #[test]
    fn an_address_that_is_not_believed_is_one_in_its_location_all_the_same() {
        let node = node(&[("InternalIP", "10.0.0.7"), ("InternalIP", "10.0.0.8")]);
        let other = "10.0.0.8".parse().unwrap();
        let mut judged = judged(&node);
        judged.believed.remove(&other);
        judged.refused.insert(other, internal_ips::Why::Held("n2".to_owned()));
        let facts = super::facts(&node, &judged, &Topology::default());
        assert_eq!(facts.internal_ips, ["10.0.0.7"]);
        assert!(facts.location.unwrap().internal_ips.contains(&"10.0.0.8".to_owned()));
    }

    #[test]
    fn a_control_plane_node_is_written_once_and_once_more_when_it_is_none_any_longer() {
        let mut node = node(&[("InternalIP", "192.0.2.7")]);
        let worker = facts(&node, &Topology::default());
        node.metadata.labels =
            Some([("node-role.kubernetes.io/control-plane".to_owned(), String::new())].into());
        crate::leader::trim_node(&mut node);
        let written = peer(&json!({ "node": worker }));
        let control_plane = due(&written, &node, &Topology::default(), Vec::new()).unwrap();
        assert!(control_plane.is_control_plane && !worker.is_control_plane);
        let written = peer(&json!({ "node": control_plane }));
        assert_eq!(due(&written, &node, &Topology::default(), Vec::new()), None);
        node.metadata.labels = None;
        assert_eq!(due(&written, &node, &Topology::default(), Vec::new()), Some(worker));
    }

    #[test]
    fn a_node_without_addresses_says_so() {
        let nothing = NodeFacts { location: Some(NodeLocation::default()), ..NodeFacts::default() };
        assert_eq!(due(&peer(&json!({})), &node(&[]), &Topology::default(), Vec::new()), Some(nothing));
        let node: Node = serde_json::from_value(json!({ "metadata": { "name": "n1" } })).unwrap();
        assert_eq!(
            due(&peer(&json!({ "node": { "location": {} } })), &node, &Topology::default(), Vec::new()),
            None
        );
    }
}

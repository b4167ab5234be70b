//! `fairlead graph`: the mesh as a picture, or as data for one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::process::ExitCode;

use fairlead_api::resources::{KiloPeer, PeerTransport, WireKubeMesh, WireKubePeer};
use fairlead_members::configuration::entry_nodes;
use fairlead_members::locations::{self, locations};
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde_json::json;

use crate::api;
use crate::arguments::queries::{GraphArguments, GraphOutput};
use crate::output;
use crate::query::current_thread;

/// Prints the graph.
///
/// # Errors
/// The API server refuses, or does not answer.
pub fn run(query: &GraphArguments) -> anyhow::Result<ExitCode> {
    let graph = current_thread(async { Graph::read(&query.api.client().await?).await })?;
    let text = match query.output {
        GraphOutput::Dot => graph.dot(),
        GraphOutput::Json => format!("{:#}\n", json!(graph)),
    };
    output::print(&text);
    Ok(ExitCode::SUCCESS)
}

/// Nodes, where they are, how they reach each other, and Peers.
#[derive(Debug, Serialize)]
struct Graph {
    nodes: Vec<Node>,
    paths: Vec<Path>,
    locations: Vec<Location>,
    peers: Vec<External>,
}

/// Nodes that share a location.
#[derive(Debug, Serialize)]
struct Location {
    name: String,
    nodes: Vec<String>,
    /// Best first; none unless the granularity is `location`.
    gateways: Vec<String>,
}

/// A Peer of Kilo.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct External {
    name: String,
    #[serde(rename = "allowedIPs")]
    allowed_ips: Vec<String>,
    /// Empty if it has a tunnel with every node.
    entry_nodes: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<String>,
    /// The word of the status; empty if it is unknown.
    nat_type: String,
    /// Whether it reaches all others; `None` before it has said so.
    connected: Option<bool>,
}

/// Connection of two nodes, as each of them reports it. In a mesh of more than 100 others nodes name only peers that they do
/// not reach directly.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Path {
    ends: [String; 2],
    /// From the first to the second, and back; `None` where that node says nothing.
    transports: [Option<PeerTransport>; 2],
}

impl Graph {
    async fn read(client: &Client) -> anyhow::Result<Self> {
        let peers = Api::<WireKubePeer>::all(client.clone());
        let peers = api::list(&peers, "WireKubePeers", ListParams::default()).await?;
        let meshes = api::list_if_served(&Api::<WireKubeMesh>::all(client.clone()), "WireKubeMeshes").await?;
        // Nodes follow the first by name.
        let mesh = meshes.into_iter().min_by_key(ResourceExt::name_any);
        let kilo = ApiResource::erase::<KiloPeer>(&());
        let external = Api::<DynamicObject>::all_with(client.clone(), &kilo);
        let external = match api::list_if_served(&external, "Peers").await {
            Ok(external) => external,
            // The role `view` has them not: they have secrets.
            Err(error) if api::is_forbidden(&error) => {
                tracing::warn!("Peers are not shown: {error:#}");
                Vec::new()
            }
            Err(error) => return Err(error),
        };
        Ok(Self::of(&peers, mesh.as_ref(), &external))
    }

    fn of(peers: &[WireKubePeer], mesh: Option<&WireKubeMesh>, external: &[DynamicObject]) -> Self {
        let names: BTreeSet<String> = peers.iter().map(ResourceExt::name_any).collect();
        let mut paths: BTreeMap<[String; 2], [Option<PeerTransport>; 2]> = BTreeMap::new();
        for peer in peers {
            let from = peer.name_any();
            let transports = peer.status.iter().flat_map(|status| &status.peer_transports);
            // A status may name peers that are gone.
            for (to, transport) in transports.filter(|(to, _)| names.contains(*to) && **to != from) {
                let [forward, back] = paths
                    .entry(if from < *to { [from.clone(), to.clone()] } else { [to.clone(), from.clone()] })
                    .or_default();
                *(if from < *to { forward } else { back }) = Some(*transport);
            }
        }
        let mut nodes: Vec<Node> = peers.iter().map(Node::of).collect();
        nodes.sort_by(|one, other| one.name.cmp(&other.name));
        let paths = paths.into_iter().map(|(ends, transports)| Path { ends, transports }).collect();
        let mut external: Vec<External> = external.iter().map(External::of).collect();
        external.sort_by(|one, other| one.name.cmp(&other.name));
        let locations = locations(peers, mesh).into_iter().map(|(name, found)| {
            let locations::Location { nodes, gateways } = found;
            Location { name, nodes, gateways }
        });
        Self { nodes, paths, locations: locations.collect(), peers: external }
    }

    /// For Graphviz: `dot -Tsvg`.
    fn dot(&self) -> String {
        // Of the layouts for undirected graphs this one draws clusters.
        let layout = if self.locations.is_empty() { "circo" } else { "fdp" };
        let mut text = format!("graph fairlead {{\n  layout={layout}\n  node [shape=box, style=rounded]\n");
        for (index, location) in self.locations.iter().enumerate() {
            let _ = writeln!(text, "  subgraph cluster_{index} {{\n    label={}", quoted(location.label()));
            for name in &location.nodes {
                let _ = writeln!(text, "    {}", quoted(name));
            }
            text.push_str("  }\n");
        }
        for node in &self.nodes {
            let _ = writeln!(text, "  {} [{}]", quoted(&node.name), node.attributes(&self.locations));
        }
        for peer in &self.peers {
            let _ = writeln!(text, "  {} [{}]", quoted(&peer.id()), peer.attributes());
        }
        for path in &self.paths {
            let [one, other] = &path.ends;
            let _ = writeln!(text, "  {} -- {}{}", quoted(one), quoted(other), path.attributes());
        }
        let is_shown = |name: &&String| self.nodes.iter().any(|node| node.name == **name);
        for peer in &self.peers {
            for entry in peer.entry_nodes.iter().filter(is_shown) {
                let _ = writeln!(text, "  {} -- {}", quoted(&peer.id()), quoted(entry));
            }
        }
        text.push_str("}\n");
        text
    }
}

impl Location {
    fn label(&self) -> &str {
        if self.name.is_empty() { "(no location)" } else { &self.name }
    }

    /// Place of a node among the gateways, from 1.
    fn place(&self, node: &str) -> Option<usize> {
        self.gateways.iter().zip(1..).find_map(|(gateway, place)| (gateway == node).then_some(place))
    }
}

impl External {
    fn of(peer: &DynamicObject) -> Self {
        let allowed = peer.data.get("spec").and_then(|spec| spec.get("allowedIPs")?.as_array());
        let allowed = allowed.into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned));
        Self { name: peer.name_any(), allowed_ips: allowed.collect(), entry_nodes: entry_nodes(peer) }
    }

    /// No Node has such a name.
    fn id(&self) -> String {
        format!("peer/{}", self.name)
    }

    fn attributes(&self) -> String {
        let all = self.entry_nodes.is_empty().then(|| "tunnels with all nodes".to_owned());
        let lines = [self.name.clone()].into_iter().chain(self.allowed_ips.iter().cloned()).chain(all);
        format!("label={}, shape=ellipse", quoted(&lines.collect::<Vec<_>>().join("\n")))
    }
}

impl Node {
    fn of(peer: &WireKubePeer) -> Self {
        let status = peer.status.as_ref();
        let nat_type = status.and_then(|status| serde_json::to_value(status.nat_type?).ok());
        Self {
            name: peer.name_any(),
            endpoint: peer.spec.endpoint.clone().filter(|endpoint| !endpoint.is_empty()),
            nat_type: nat_type.as_ref().and_then(|word| word.as_str()).unwrap_or_default().to_owned(),
            connected: status.and_then(|status| status.connected),
        }
    }

    fn attributes(&self, locations: &[Location]) -> String {
        let place = locations.iter().find_map(|location| location.place(&self.name));
        let gateway = place.map(|place| format!("gateway {place}"));
        let frame = place.map(|_| ", peripheries=2").unwrap_or_default();
        let nat = (!self.nat_type.is_empty()).then(|| format!("NAT: {}", self.nat_type));
        let lines = [Some(self.name.clone()), self.endpoint.clone(), nat, gateway];
        let label = lines.into_iter().flatten().collect::<Vec<_>>().join("\n");
        let color = match self.connected {
            Some(true) => "",
            Some(false) => ", color=red",
            None => ", color=gray",
        };
        format!("label={}{frame}{color}", quoted(&label))
    }
}

impl Path {
    /// A direct path is a line, a relayed one is dashed; one that the two ends see differently has an arrow for each.
    fn attributes(&self) -> String {
        use PeerTransport::{Direct, Relay};
        match self.transports {
            [Some(Relay), Some(Relay) | None] | [None, Some(Relay)] => {
                " [style=dashed, color=orange]".to_owned()
            }
            [Some(Direct), Some(Direct) | None] | [None, Some(Direct)] => String::new(),
            [Some(Direct), Some(Relay)] | [Some(Relay), Some(Direct)] => {
                let [one, other] = &self.ends;
                let relayed = if self.transports == [Some(Relay), Some(Direct)] { one } else { other };
                format!(" [style=dashed, color=orange, label={}]", quoted(&format!("relay from {relayed}")))
            }
            _ => " [style=dotted, color=gray]".to_owned(),
        }
    }
}

/// A string of the DOT language.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(name: &str, status: serde_json::Value) -> WireKubePeer {
        let object = json!({ "metadata": { "name": name }, "spec": { "endpoint": "192.0.2.1:51820" }, "status": status });
        serde_json::from_value(object).unwrap()
    }

    fn peers() -> Vec<WireKubePeer> {
        vec![
            peer(
                "c",
                json!({ "connected": false, "peerTransports": { "a": "direct", "gone": "relay", "c": "relay" } }),
            ),
            peer(
                "a",
                json!({ "connected": true, "natType": "symmetric", "peerTransports": { "b": "relay", "c": "relay" } }),
            ),
            peer("b", json!({ "connected": true, "peerTransports": { "c": "direct", "a": "relay" } })),
        ]
    }

    #[test]
    fn each_pair_has_one_path_with_what_both_ends_say() {
        use PeerTransport::{Direct, Relay};
        let graph = Graph::of(&peers(), None, &[]);
        let path = |ends: [&str; 2], transports| Path { ends: ends.map(str::to_owned), transports };
        assert_eq!(
            graph.paths,
            [
                path(["a", "b"], [Some(Relay), Some(Relay)]),
                path(["a", "c"], [Some(Relay), Some(Direct)]),
                path(["b", "c"], [Some(Direct), None]),
            ]
        );
        let data = json!(graph);
        assert_eq!(data["nodes"][0]["natType"], "symmetric");
        assert_eq!(data["paths"][2], json!({ "ends": ["b", "c"], "transports": ["direct", null] }));
    }

    #[test]
    fn the_picture_shows_relays_and_nodes_that_do_not_reach_all() {
        assert_eq!(
            Graph::of(&peers(), None, &[]).dot(),
            r#"graph fairlead {
  layout=circo
  node [shape=box, style=rounded]
  "a" [label="a\n192.0.2.1:51820\nNAT: symmetric"]
  "b" [label="b\n192.0.2.1:51820"]
  "c" [label="c\n192.0.2.1:51820", color=red]
  "a" -- "b" [style=dashed, color=orange]
  "a" -- "c" [style=dashed, color=orange, label="relay from a"]
  "b" -- "c"
}
"#
        );
    }

    #[test]
    fn locations_gateways_and_peers_are_in_the_picture_and_in_the_data() {
        let at = |name: &str, key: u8, address: &str| {
            let location = json!({ "name": "lab\"", "internalIPs": [address] });
            let mut node = peer(name, json!({ "node": { "internalIPs": [], "location": location } }));
            node.spec.endpoint = None;
            node.spec.public_key = fairlead_keys::PublicKey([key; 32]).to_string();
            node
        };
        let nodes = [at("a", 1, "192.0.2.1/24"), at("b", 2, "192.0.2.2/24"), at("c", 3, "192.0.2.3/24")];
        let spec = json!({ "topology": { "granularity": "location" } });
        let mesh = serde_json::from_value(json!({ "metadata": { "name": "mesh" }, "spec": spec })).unwrap();
        let external = |name: &str, entries: &[&str]| {
            let key = fairlead_keys::PublicKey([9; 32]).to_string();
            let spec = json!({ "publicKey": key, "allowedIPs": ["10.9.0.1/32"], "entryNodes": entries });
            let kind = json!({ "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
                "metadata": { "name": name }, "spec": spec });
            serde_json::from_value::<DynamicObject>(kind).unwrap()
        };
        let graph =
            Graph::of(&nodes, Some(&mesh), &[external("phone", &[]), external("laptop", &["b", "gone"])]);
        assert_eq!(
            graph.dot(),
            r#"graph fairlead {
  layout=fdp
  node [shape=box, style=rounded]
  subgraph cluster_0 {
    label="lab\""
    "a"
    "b"
    "c"
  }
  "a" [label="a\ngateway 1", peripheries=2, color=gray]
  "b" [label="b\ngateway 2", peripheries=2, color=gray]
  "c" [label="c", color=gray]
  "peer/laptop" [label="laptop\n10.9.0.1/32", shape=ellipse]
  "peer/phone" [label="phone\n10.9.0.1/32\ntunnels with all nodes", shape=ellipse]
  "peer/laptop" -- "b"
}
"#
        );
        let data = json!(graph);
        let lab = json!([{ "name": "lab\"", "nodes": ["a", "b", "c"], "gateways": ["a", "b"] }]);
        assert_eq!(data["locations"], lab);
        assert_eq!(data["peers"][0]["entryNodes"], json!(["b", "gone"]));
    }

    /// Serves no nodes and no mesh, and refuses to list Peers.
    async fn without_peers(uri: axum::http::Uri) -> (axum::http::StatusCode, String) {
        let list = |version: &str, kind: &str| {
            json!({ "apiVersion": version, "kind": kind, "metadata": {}, "items": [] }).to_string()
        };
        match uri.path() {
            path if path.ends_with("/wirekubepeers") => {
                (axum::http::StatusCode::OK, list("wirekube.io/v1alpha1", "WireKubePeerList"))
            }
            path if path.ends_with("/wirekubemeshes") => {
                (axum::http::StatusCode::OK, list("wirekube.io/v1alpha1", "WireKubeMeshList"))
            }
            path => {
                let message = format!("may not list {path}");
                let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                    "reason": "Forbidden", "message": message, "code": 403 });
                (axum::http::StatusCode::FORBIDDEN, status.to_string())
            }
        }
    }

    #[tokio::test]
    async fn who_may_not_read_peers_sees_the_rest() {
        let client = Client::new(axum::Router::new().fallback(without_peers), "default");
        let graph = Graph::read(&client).await.unwrap();
        assert!(graph.nodes.is_empty() && graph.peers.is_empty());
    }

    #[test]
    fn what_is_published_cannot_leave_its_string() {
        assert_eq!(quoted("a\"]\n\\"), r#""a\"]\n\\""#);
    }
}

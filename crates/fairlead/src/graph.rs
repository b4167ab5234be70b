//! `fairlead graph`: the mesh as a picture, or as data for one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use fairlead_api::resources::{PeerTransport, WireKubePeer};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::json;

use crate::api;
use crate::arguments::{GraphArguments, GraphOutput};
use crate::status::current_thread;

/// Prints the graph.
pub(crate) fn run(query: &GraphArguments) -> anyhow::Result<ExitCode> {
    let peers = current_thread(async {
        let client = query.api.client().await?;
        api::list(&Api::<WireKubePeer>::all(client), "WireKubePeers", ListParams::default()).await
    })?;
    let graph = Graph::of(&peers);
    let text = match query.output {
        GraphOutput::Dot => graph.dot(),
        GraphOutput::Json => format!("{:#}\n", json!(graph)),
    };
    // A closed pipe (`| head`) is not a failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}

/// Nodes, and how they reach each other.
#[derive(Debug, Serialize)]
struct Graph {
    nodes: Vec<Node>,
    paths: Vec<Path>,
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

/// How two nodes reach each other, as each of them says. In a mesh of more than 100 others nodes name only peers that they do
/// not reach directly.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Path {
    ends: [String; 2],
    /// From the first to the second, and back; `None` where that node says nothing.
    transports: [Option<PeerTransport>; 2],
}

impl Graph {
    fn of(peers: &[WireKubePeer]) -> Self {
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
        Self { nodes, paths }
    }

    /// For Graphviz: `dot -Tsvg`.
    fn dot(&self) -> String {
        let mut text = String::from("graph fairlead {\n  layout=circo\n  node [shape=box, style=rounded]\n");
        for node in &self.nodes {
            let _ = writeln!(text, "  {} [{}]", quoted(&node.name), node.attributes());
        }
        for path in &self.paths {
            let [one, other] = &path.ends;
            let _ = writeln!(text, "  {} -- {}{}", quoted(one), quoted(other), path.attributes());
        }
        text.push_str("}\n");
        text
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

    fn attributes(&self) -> String {
        let nat = (!self.nat_type.is_empty()).then(|| format!("NAT: {}", self.nat_type));
        let lines = [Some(self.name.clone()), self.endpoint.clone(), nat];
        let label = lines.into_iter().flatten().collect::<Vec<_>>().join("\n");
        let color = match self.connected {
            Some(true) => "",
            Some(false) => ", color=red",
            None => ", color=gray",
        };
        format!("label={}{color}", quoted(&label))
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
        let graph = Graph::of(&peers());
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
            Graph::of(&peers()).dot(),
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
    fn what_is_published_cannot_leave_its_string() {
        assert_eq!(quoted("a\"]\n\\"), r#""a\"]\n\\""#);
    }
}

//! `fairlead status`: this node as its program reports it, or all nodes as the API server lists them.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_api::resources::WireKubePeer;
use fairlead_wire::node::node_client::NodeClient;
use fairlead_wire::node::{Peer, StatusRequest, StatusResponse};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint};

use crate::arguments::{Output, StatusArguments};
use crate::output::{or_dash, table};
use crate::programs;

/// Exit code when the query succeeded and found a problem.
pub(crate) const PROBLEM_FOUND: u8 = 3;

/// Prints the status. The exit code says whether a problem was found.
pub(crate) fn run(query: &StatusArguments) -> anyhow::Result<ExitCode> {
    let (text, healthy) = current_thread(async {
        if query.cluster { cluster(query.output).await } else { node(&query.socket, query.output).await }
    })?;
    // A closed pipe (`| head`) is not a failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::from(PROBLEM_FOUND) })
}

/// Runs a query on this thread.
pub(crate) fn current_thread<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Connects to the node program at a UNIX socket.
pub(crate) async fn connect(socket: &Path) -> anyhow::Result<NodeClient<Channel>> {
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
        .with_context(|| format!("{} is not the path of a UNIX socket", socket.display()))?
        .connect()
        .await
        .with_context(|| {
            format!(
                "no node program answers at {}: run this as root on a node where `fairlead node` runs, or use --cluster",
                socket.display()
            )
        })?;
    Ok(NodeClient::new(channel))
}

async fn node(socket: &Path, output: Output) -> anyhow::Result<(String, bool)> {
    let status = connect(socket)
        .await?
        .status(StatusRequest {})
        .await
        .context("the node program failed to report its status")?
        .into_inner();
    let healthy = status.problems.is_empty() && status.peers.iter().all(|peer| peer.state == "up");
    let text = match output {
        Output::Json => format!("{:#}\n", node_json(&status)),
        Output::Table => node_table(&status),
    };
    Ok((text, healthy))
}

/// The status for scripts: names and types are stable.
fn node_json(status: &StatusResponse) -> Value {
    json!({
        "node": status.node,
        "version": status.version,
        "wireguard": status.wireguard,
        "interface": status.interface,
        "publicKey": status.public_key,
        "listenPort": status.listen_port,
        "mtu": status.mtu,
        "natType": status.nat_type,
        "prefixes": status.prefixes,
        "problems": status.problems,
        "netlinkChanges": status.netlink_changes,
        "router": status.router.as_ref().map(|router| json!({
            "routes": router.routes.iter().map(|route| json!({
                "destination": route.destination, "node": route.node, "gateway": route.gateway,
            })).collect::<Vec<_>>(),
        })),
        "blocks": status.blocks.iter().map(|block| json!({
            "name": block.name, "pool": block.pool, "ipv4": block.ipv4, "ipv6": block.ipv6,
            "used": block.used, "capacity": block.capacity, "state": block.state,
        })).collect::<Vec<_>>(),
        "peers": status.peers.iter().map(|peer| json!({
            "name": peer.name, "publicKey": peer.public_key, "state": peer.state, "endpoint": peer.endpoint,
            "endpointSource": peer.endpoint_source, "handshakeAgeSeconds": peer.handshake_age_seconds,
            "rxBytes": peer.rx_bytes, "txBytes": peer.tx_bytes, "prefixes": peer.prefixes, "reason": peer.reason,
        })).collect::<Vec<_>>(),
    })
}

fn node_table(status: &StatusResponse) -> String {
    let mut text = format!(
        "node {}  wireguard {}  interface {}  port {}  mtu {}  nat {}\npublic key {}\nprefixes {}\n\n",
        status.node,
        or_dash(&status.wireguard),
        or_dash(&status.interface),
        status.listen_port,
        status.mtu,
        or_dash(&status.nat_type),
        or_dash(&status.public_key),
        or_dash(&status.prefixes.join(" ")),
    );
    let mut peers = table(&[
        "PEER",
        "STATE",
        "ENDPOINT",
        "SOURCE",
        "HANDSHAKE",
        "RECEIVED",
        "SENT",
        "PREFIXES",
        "REASON",
    ]);
    for peer in &status.peers {
        peers.add_row(peer_row(peer));
    }
    text.push_str(&format!("{peers}\n"));
    if !status.blocks.is_empty() {
        let mut blocks = table(&["BLOCK", "POOL", "IPV4", "IPV6", "USED", "CAPACITY"]);
        for block in &status.blocks {
            let (used, capacity) = (block.used.to_string(), block.capacity.to_string());
            blocks.add_row([
                &block.name,
                &block.pool,
                &or_dash(&block.ipv4),
                &or_dash(&block.ipv6),
                &used,
                &capacity,
            ]);
        }
        text.push_str(&format!("\n{blocks}\n"));
    }
    if let Some(router) = &status.router {
        let mut routes = table(&["ROUTE", "NODE", "VIA"]);
        for route in &router.routes {
            routes.add_row([&route.destination, &route.node, &route.gateway]);
        }
        text.push_str(&format!("\n{routes}\n"));
    }
    for problem in &status.problems {
        text.push_str(&format!("\nproblem: {problem}\n"));
    }
    text
}

fn peer_row(peer: &Peer) -> Vec<String> {
    vec![
        peer.name.clone(),
        peer.state.clone(),
        or_dash(&peer.endpoint),
        or_dash(&peer.endpoint_source),
        peer.handshake_age_seconds.map_or("never".to_owned(), |age| format!("{age:.0}s ago")),
        bytes(peer.rx_bytes),
        bytes(peer.tx_bytes),
        peer.prefixes.join(" "),
        peer.reason.clone(),
    ]
}

/// A byte count with a binary unit: `1.5 MiB`.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

async fn cluster(output: Output) -> anyhow::Result<(String, bool)> {
    let client = Client::try_from(programs::cluster().await?)?;
    let peers: Api<WireKubePeer> = Api::all(client);
    let peers = peers.list(&ListParams::default()).await.context("cannot list WireKubePeers")?.items;
    let healthy = peers.iter().all(|peer| {
        peer.status
            .as_ref()
            .is_some_and(|status| status.connected == Some(true) && status.problems.is_empty())
    });
    let text = match output {
        Output::Json => {
            format!("{:#}\n", json!({ "nodes": peers.iter().map(peer_json).collect::<Vec<_>>() }))
        }
        Output::Table => cluster_table(&peers),
    };
    Ok((text, healthy))
}

fn peer_json(peer: &WireKubePeer) -> Value {
    json!({ "name": peer.name_any(), "spec": peer.spec, "status": peer.status })
}

fn cluster_table(peers: &[WireKubePeer]) -> String {
    let word = |value: Value| value.as_str().filter(|word| !word.is_empty()).unwrap_or("-").to_owned();
    let mut nodes =
        table(&["NODE", "CONNECTED", "PEERS UP", "ENDPOINT", "NAT", "MODE", "WIREGUARD", "PROBLEMS"]);
    for peer in peers {
        let status = peer.status.clone().unwrap_or_default();
        nodes.add_row([
            peer.name_any(),
            status.connected.map_or("-".to_owned(), |connected| connected.to_string()),
            status.peer_transports.len().to_string(),
            peer.spec.endpoint.clone().unwrap_or_else(|| "-".to_owned()),
            word(json!(status.nat_type)),
            word(json!(status.transport_mode)),
            word(json!(status.wireguard)),
            status.problems.join("; "),
        ]);
    }
    format!("{nodes}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_have_binary_units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }

    #[test]
    fn the_table_names_every_peer_and_problem() {
        let peer = Peer {
            name: "home-1".into(),
            state: "down".into(),
            reason: "no packet for 73 s".into(),
            ..Peer::default()
        };
        let status = StatusResponse {
            node: "cloud-1".into(),
            peers: vec![peer],
            problems: vec!["two nodes".into()],
            ..StatusResponse::default()
        };
        let text = node_table(&status);
        for word in ["cloud-1", "home-1", "down", "no packet for 73 s", "problem: two nodes", "never"] {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
    }

    #[test]
    fn json_keeps_numbers_and_absence() {
        let status = StatusResponse { peers: vec![Peer::default()], ..StatusResponse::default() };
        let value = node_json(&status);
        assert!(value["peers"][0]["handshakeAgeSeconds"].is_null());
        assert_eq!(value["peers"][0]["rxBytes"], 0);
    }
}

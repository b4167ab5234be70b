//! The status of one node, as its program reports it.

use std::path::Path;

use anyhow::anyhow;
use comfy_table::Table;
use fairlead_cluster::naming::some_of;
use fairlead_wire::node::{
    Block, DiscoveryService, ExternalPeer, MemberSource, Peer, PortMapping, Relay, ReleasedBlock, Router,
    SourceAddress, StatusRequest, StatusResponse,
};
use serde_json::{Value, json};

use super::path;
use crate::netcheck;
use crate::output::{Output, age, bytes, milliseconds, or_dash, render, table, time};
use crate::query::connect;

/// Most released blocks in a line.
const MAX_RELEASED: usize = 3;

/// The status of the node program at `socket`, or of one peer of it, and whether there is no problem.
///
/// # Errors
/// No node program answers.
pub(super) async fn node(
    socket: &Path,
    peer: Option<&str>,
    output: Output,
) -> anyhow::Result<(String, bool)> {
    let status = connect(socket)
        .await?
        .status(StatusRequest { peer: peer.unwrap_or_default().to_owned() })
        .await
        .map_err(|status| anyhow!("the node program failed to report its status: {}", status.message()))?
        .into_inner();
    if peer.is_some() {
        let healthy = status.peers.iter().all(|peer| peer.state == "up");
        let text = render(output, || path::peers_json(&status.peers), |_| path::text(&status.peers))?;
        return Ok((text, healthy));
    }
    let healthy = status.problems.is_empty() && status.peers.iter().all(|peer| peer.state == "up");
    let text =
        render(output, || with_released(node_json(&status), &status), |wide| node_table(&status, wide))?;
    Ok((text, healthy))
}

/// The status for scripts: names and types are stable.
fn node_json(status: &StatusResponse) -> Value {
    json!({
        "node": status.node,
        "version": status.version,
        "wireguard": status.wireguard,
        "wireguardReason": status.wireguard_reason,
        "portAccess": status.port_access,
        "interface": status.interface,
        "publicKey": status.public_key,
        "nextPublicKey": status.next_public_key,
        "listenPort": status.listen_port,
        "mtu": status.mtu,
        "natType": status.nat_type,
        "prefixes": status.prefixes,
        "problems": status.problems,
        "netlinkChanges": status.netlink_changes,
        "portMappings": status.port_mappings.iter().map(netcheck::port_mapping_json).collect::<Vec<_>>(),
        "nat64Prefixes": status.nat64_prefixes,
        "relay": status.relay.as_ref().map(|relay| json!({
            "endpoint": relay.endpoint, "connected": relay.connected, "error": relay.error,
            "roundTripSeconds": relay.round_trip_seconds, "rxBytes": relay.rx_bytes, "txBytes": relay.tx_bytes,
        })),
        "discoveryAffiliateID": status.discovery_affiliate_id,
        "discoveryServices": status.discovery_services.iter().map(|service| json!({
            "server": service.server, "connected": service.connected, "published": service.published,
            "members": service.members, "error": service.error,
        })).collect::<Vec<_>>(),
        "router": status.router.as_ref().map(|router| json!({
            "routes": router.routes.iter().map(|route| json!({
                "destination": route.destination, "node": route.node, "gateway": route.gateway,
            })).collect::<Vec<_>>(),
        })),
        "sourceAddresses": status.source_addresses.iter().map(|source| json!({
            "address": source.address, "egress": source.egress, "gateway": source.gateway, "term": source.term,
            "links": source.links,
        })).collect::<Vec<_>>(),
        "blocks": status.blocks.iter().map(|block| json!({
            "name": block.name, "pool": block.pool, "ipv4": block.ipv4, "ipv6": block.ipv6,
            "used": block.used, "capacity": block.capacity, "state": block.state,
        })).collect::<Vec<_>>(),
        "peers": status.peers.iter().map(peer_json).collect::<Vec<_>>(),
        "externalPeers": status.external_peers.iter().map(|peer| json!({
            "name": peer.name, "publicKey": peer.public_key, "connected": peer.connected, "endpoint": peer.endpoint,
            "handshakeAgeSeconds": peer.handshake_age_seconds, "rxBytes": peer.rx_bytes, "txBytes": peer.tx_bytes,
            "prefixes": peer.prefixes, "standby": peer.standby,
        })).collect::<Vec<_>>(),
    })
}

/// The document with blocks that were released, if there are some.
fn with_released(mut document: Value, status: &StatusResponse) -> Value {
    let block = |it: &ReleasedBlock| json!({ "prefix": it.prefix, "until": time(it.until_seconds) });
    if let Some(fields) = document.as_object_mut().filter(|_| !status.released_blocks.is_empty()) {
        fields.insert("releasedBlocks".to_owned(), status.released_blocks.iter().map(block).collect());
    }
    document
}

pub(super) fn peer_json(peer: &Peer) -> Value {
    json!({
        "name": peer.name, "publicKey": peer.public_key, "state": peer.state, "endpoint": peer.endpoint,
        "endpointSource": peer.endpoint_source, "handshakeAgeSeconds": peer.handshake_age_seconds,
        "roundTripSeconds": peer.round_trip_seconds,
        "rxBytes": peer.rx_bytes, "txBytes": peer.tx_bytes, "prefixes": peer.prefixes, "reason": peer.reason,
        "relayReason": peer.relay_reason, "plainPrefixes": peer.plain_prefixes,
        "encapsulatedPrefixes": peer.encapsulated_prefixes,
        "sources": peer.sources.iter().map(|it| json!({
            "source": it.source, "ageSeconds": it.age_seconds,
        })).collect::<Vec<_>>(),
    })
}

fn node_table(status: &StatusResponse, wide: bool) -> String {
    let mut text = device_lines(status) + &service_lines(status);
    let mut header =
        vec!["PEER", "STATE", "ENDPOINT", "SOURCE", "HANDSHAKE", "RECEIVED", "SENT", "REASON", "KNOWN FROM"];
    if wide {
        header.extend(["RTT", "PREFIXES", "PUBLIC KEY"]);
    }
    let mut peers = table(&header);
    for peer in &status.peers {
        peers.add_row(peer_row(peer, wide));
    }
    text.push_str(&format!("{peers}\n"));
    let others = [
        (!status.external_peers.is_empty()).then(|| external_table(&status.external_peers)),
        (!status.blocks.is_empty()).then(|| block_table(&status.blocks)),
        status.router.as_ref().map(route_table),
        (!status.source_addresses.is_empty()).then(|| source_table(&status.source_addresses)),
    ];
    for rows in others.into_iter().flatten() {
        text.push_str(&format!("\n{rows}\n"));
    }
    for problem in &status.problems {
        text.push_str(&format!("\nproblem: {problem}\n"));
    }
    text
}

/// Lines about this node and its WireGuard device.
fn device_lines(status: &StatusResponse) -> String {
    let mut text = format!(
        "node {}  wireguard {}  interface {}  port {} ({})  mtu {}  nat {}\npublic key {}\nprefixes {}\n\n",
        status.node,
        or_dash(&status.wireguard),
        or_dash(&status.interface),
        status.listen_port,
        or_dash(&status.port_access),
        status.mtu,
        or_dash(&status.nat_type),
        or_dash(&status.public_key),
        or_dash(&status.prefixes.join(" ")),
    );
    if !status.wireguard_reason.is_empty() {
        text.push_str(&format!("wireguard {}: {}\n\n", status.wireguard, status.wireguard_reason));
    }
    if !status.next_public_key.is_empty() {
        text.push_str(&format!("the key will be replaced by {}\n\n", status.next_public_key));
    }
    let block = |it: &ReleasedBlock| format!("{} until {}", it.prefix, time(it.until_seconds));
    let released: Vec<String> = status.released_blocks.iter().map(block).collect();
    if !released.is_empty() {
        text.push_str(&format!("released blocks guarded: {}\n\n", some_of(&released, MAX_RELEASED)));
    }
    text
}

/// Lines about what this node uses of its network: gateways, a NAT64, the relay and discovery services.
fn service_lines(status: &StatusResponse) -> String {
    let mut text = String::new();
    for PortMapping { gateway, protocol, external, error, .. } in &status.port_mappings {
        let outcome = if error.is_empty() { format!("{external}  {protocol}") } else { error.clone() };
        text.push_str(&format!("port mapping by {gateway}: {outcome}\n\n"));
    }
    if !status.nat64_prefixes.is_empty() {
        text.push_str(&format!("IPv4 through the NAT64 {}\n\n", status.nat64_prefixes.join(" ")));
    }
    if let Some(relay) = &status.relay {
        text.push_str(&format!("relay {}\n\n", relay_line(relay)));
    }
    for service in &status.discovery_services {
        text.push_str(&format!("discovery service {}\n\n", discovery_line(service)));
    }
    if !status.discovery_affiliate_id.is_empty() {
        text.push_str(&format!("affiliate ID at discovery services {}\n\n", status.discovery_affiliate_id));
    }
    text
}

fn block_table(blocks: &[Block]) -> Table {
    let mut rows = table(&["BLOCK", "POOL", "IPV4", "IPV6", "USED", "CAPACITY"]);
    for block in blocks {
        let (used, capacity) = (block.used.to_string(), block.capacity.to_string());
        rows.add_row([
            &block.name,
            &block.pool,
            &or_dash(&block.ipv4),
            &or_dash(&block.ipv6),
            &used,
            &capacity,
        ]);
    }
    rows
}

fn route_table(router: &Router) -> Table {
    let mut rows = table(&["ROUTE", "NODE", "VIA"]);
    for route in &router.routes {
        rows.add_row([&route.destination, &route.node, &route.gateway]);
    }
    rows
}

fn source_table(sources: &[SourceAddress]) -> Table {
    let mut rows = table(&["SOURCE ADDRESS", "EGRESS", "GATEWAY", "LINKS"]);
    for source in sources {
        rows.add_row([&source.address, &source.egress, &source.gateway, &or_dash(&source.links.join(", "))]);
    }
    rows
}

/// Peers outside of the cluster. One that sends nothing has no session, and nothing is wrong with it.
fn external_table(peers: &[ExternalPeer]) -> Table {
    let mut rows =
        table(&["EXTERNAL PEER", "CONNECTED", "ENDPOINT", "HANDSHAKE", "RECEIVED", "SENT", "PREFIXES"]);
    for peer in peers {
        rows.add_row([
            peer.name.clone(),
            match (peer.standby, peer.connected) {
                (true, _) => "at another entry node".to_owned(),
                (false, true) => "yes".to_owned(),
                (false, false) => "no".to_owned(),
            },
            or_dash(&peer.endpoint),
            peer.handshake_age_seconds.map_or("never".to_owned(), |seconds| age(seconds as i64)),
            bytes(peer.rx_bytes),
            bytes(peer.tx_bytes),
            or_dash(&peer.prefixes.join(" ")),
        ]);
    }
    rows
}

fn relay_line(relay: &Relay) -> String {
    let round_trip = relay.round_trip_seconds.map(milliseconds).unwrap_or_default();
    let (received, sent) = (bytes(relay.rx_bytes), bytes(relay.tx_bytes));
    match relay.connected {
        true => format!("{}  connected  {round_trip}  received {received}  sent {sent}", relay.endpoint),
        false => format!("{}  not connected: {}", relay.endpoint, or_dash(&relay.error)),
    }
}

fn discovery_line(service: &DiscoveryService) -> String {
    let DiscoveryService { server, connected, published, members, error } = service;
    let state = match (connected, published) {
        (false, _) => format!("not connected: {}", or_dash(error)),
        (true, false) => {
            format!("connected  {members} members  this node is not published: {}", or_dash(error))
        }
        (true, true) => format!("connected  {members} members"),
    };
    format!("{server}  {state}")
}

/// Reason why a peer is not up, or not direct, or the packets that take another way.
pub(super) fn reason(peer: &Peer) -> String {
    match (peer.reason.as_str(), peer.relay_reason.as_str()) {
        ("", "") if !peer.plain_prefixes.is_empty() => {
            let through = |prefix: &String| match peer.encapsulated_prefixes.contains(prefix) {
                true => format!("{prefix} (in an IP tunnel)"),
                false => prefix.clone(),
            };
            let prefixes: Vec<String> = peer.plain_prefixes.iter().map(through).collect();
            format!("unencrypted in the location: {}", prefixes.join(" "))
        }
        ("", "") => "-".to_owned(),
        ("", relayed) => format!("relay: {relayed}"),
        (down, _) => down.to_owned(),
    }
}

/// The age of the handshake is that of the latest one.
fn peer_row(peer: &Peer, wide: bool) -> Vec<String> {
    let age = |seconds: f64| age(seconds as i64);
    let mut row = vec![
        peer.name.clone(),
        peer.state.clone(),
        or_dash(&peer.endpoint),
        or_dash(&peer.endpoint_source),
        peer.handshake_age_seconds.map_or("never".to_owned(), age),
        bytes(peer.rx_bytes),
        bytes(peer.tx_bytes),
        reason(peer),
        sources(peer),
    ];
    if wide {
        let round_trip = peer.round_trip_seconds.map(milliseconds);
        row.extend([
            round_trip.unwrap_or_else(|| "-".to_owned()),
            or_dash(&peer.prefixes.join(" ")),
            peer.public_key.clone(),
        ]);
    }
    row
}

/// Sources of a member, each with its age; a watch is current.
pub(super) fn sources(peer: &Peer) -> String {
    let named = |it: &MemberSource| match it.age_seconds.map(|seconds| seconds as i64) {
        Some(seconds) if seconds > 0 => format!("{} ({} ago)", it.source, age(seconds)),
        _ => it.source.clone(),
    };
    or_dash(&peer.sources.iter().map(named).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

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
            wireguard: "embedded".into(),
            wireguard_reason: "several gateways".into(),
            problems: vec!["two nodes".into()],
            external_peers: vec![ExternalPeer { name: "laptop".into(), ..ExternalPeer::default() }],
            discovery_services: vec![DiscoveryService {
                server: "https://a:1".into(),
                error: "refused".into(),
                ..DiscoveryService::default()
            }],
            discovery_affiliate_id: "5e1f".into(),
            ..StatusResponse::default()
        };
        let text = node_table(&status, false);
        for word in [
            "EXTERNAL PEER",
            "laptop",
            "cloud-1",
            "home-1",
            "down",
            "no packet for 73 s",
            "problem: two nodes",
            "never",
            "wireguard embedded: several gateways",
            "discovery service https://a:1  not connected: refused",
            "affiliate ID at discovery services 5e1f",
        ] {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
    }

    #[test]
    fn tables_follow_the_peers_and_problems_come_last() {
        let status = StatusResponse {
            external_peers: vec![ExternalPeer::default()],
            blocks: vec![Block { name: "default-1".into(), ..Block::default() }],
            router: Some(Router::default()),
            source_addresses: vec![SourceAddress {
                address: "198.51.100.7".into(),
                ..SourceAddress::default()
            }],
            problems: vec!["two nodes".into()],
            ..StatusResponse::default()
        };
        let text = node_table(&status, false);
        let parts = [
            "node ",
            "STATE",
            "EXTERNAL PEER",
            "BLOCK",
            "default-1",
            "ROUTE",
            "SOURCE ADDRESS",
            "198.51.100.7",
            "problem: ",
        ];
        let places =
            parts.map(|part| text.find(part).unwrap_or_else(|| panic!("{part} is missing in\n{text}")));
        assert!(places.is_sorted(), "{text}");
        let none = node_table(&StatusResponse::default(), false);
        assert!(parts[2..].iter().all(|part| !none.contains(part)), "{none}");
    }

    #[test]
    fn handshakes_have_an_age_and_a_wide_table_has_prefixes() {
        let peer = Peer {
            handshake_age_seconds: Some(130.9),
            round_trip_seconds: Some(0.0123),
            prefixes: vec!["10.0.0.0/27".into(), "fd00::/123".into()],
            sources: [("Kubernetes", 0.0), ("discovery https://a:1", 65.0)]
                .map(|(source, age)| MemberSource { source: source.into(), age_seconds: Some(age) })
                .into(),
            ..Peer::default()
        };
        let status = StatusResponse { peers: vec![peer], ..StatusResponse::default() };
        let (narrow, wide) = (node_table(&status, false), node_table(&status, true));
        assert!(narrow.contains("2m10s") && wide.contains("2m10s"), "{narrow}{wide}");
        assert!(wide.contains("12.3 ms") && !narrow.contains("12.3 ms"), "{narrow}{wide}");
        assert!(wide.contains("10.0.0.0/27 fd00::/123") && !narrow.contains("PREFIXES"), "{narrow}{wide}");
        assert!(wide.contains("Kubernetes, discovery https://a:1 (65s ago)"), "{wide}");
    }

    #[test]
    fn json_keeps_numbers_and_absence() {
        let mapping = PortMapping { lifetime_seconds: Some(7200), ..PortMapping::default() };
        let status = StatusResponse {
            peers: vec![Peer::default()],
            port_mappings: vec![mapping, PortMapping::default()],
            ..StatusResponse::default()
        };
        let value = node_json(&status);
        assert_eq!(value["portMappings"][0]["lifetimeSeconds"], 7200);
        assert!(value["portMappings"][1]["lifetimeSeconds"].is_null());
        assert!(value["peers"][0]["handshakeAgeSeconds"].is_null());
        assert!(value["peers"][0]["roundTripSeconds"].is_null());
        assert_eq!(value["peers"][0]["rxBytes"], 0);
    }

    #[test]
    fn released_blocks_are_a_line_and_a_field_only_where_there_are_some() {
        let without = StatusResponse::default();
        assert!(!node_table(&without, true).contains("released"));
        assert!(with_released(node_json(&without), &without).get("releasedBlocks").is_none());
        let block = |at: u8| ReleasedBlock { prefix: format!("10.64.{at}.0/26"), until_seconds: 0.0 };
        let status = StatusResponse { released_blocks: (1..=5).map(block).collect(), ..without };
        let text = node_table(&status, false);
        let first =
            "released blocks guarded: 10.64.1.0/26 until 1970-01-01T00:00:00.000Z, 10.64.2.0/26 until ";
        assert!(text.contains(first) && text.contains("10.64.3.0/26"), "{text}");
        assert!(text.contains(" and 2 more\n") && !text.contains("10.64.4.0/26"), "{text}");
        let told = with_released(node_json(&status), &status)["releasedBlocks"].clone();
        assert_eq!(told.as_array().map(Vec::len), Some(5));
        assert_eq!(told[4], json!({ "prefix": "10.64.5.0/26", "until": "1970-01-01T00:00:00.000Z" }));
    }

    /// Whether a later document says at least the same.
    fn has_all(later: &Value, kept: &Value) -> bool {
        match (later, kept) {
            (Value::Object(later), Value::Object(kept)) => {
                kept.iter().all(|(name, kept)| later.get(name).is_some_and(|later| has_all(later, kept)))
            }
            (Value::Array(later), Value::Array(kept)) => {
                later.len() == kept.len() && later.iter().zip(kept).all(|(later, kept)| has_all(later, kept))
            }
            _ => later == kept,
        }
    }

    /// The answer is that of a node program of commit 5a83802c with every field, and the documents are what its `fairlead status` made of it.
    #[test]
    fn scripts_find_all_that_they_found() {
        let answers = concat!(env!("CARGO_MANIFEST_DIR"), "/../wire/fixtures/5a83802c/status.txt");
        let answers = std::fs::read_to_string(answers).unwrap();
        let hex = answers.lines().find_map(|line| line.strip_prefix("StatusResponse ")).unwrap();
        let digits = (0..hex.len()).step_by(2).map(|at| &hex[at..at + 2]);
        let bytes: Vec<u8> = digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect();
        let status = StatusResponse::decode(bytes.as_slice()).unwrap();
        let kept: Value = serde_json::from_str(include_str!("../../fixtures/5a83802c/status.json")).unwrap();
        let today = json!({ "status": node_json(&status), "statusOfPeers": path::peers_json(&status.peers) });
        assert!(has_all(&today, &kept), "{today:#}");
    }
}

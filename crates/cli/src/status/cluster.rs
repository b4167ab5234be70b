//! Nodes and pools, as the API server has them. A node that is down is there, too.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, ensure};
use fairlead_api::conditions::{RANGE_IN_USE, RANGE_OF_POD_CIDRS, RANGE_WITHIN_WIDER};
use fairlead_api::names::{LABEL_NODE, NODE_PROGRAM, SYSTEM_NAMESPACE};
use fairlead_api::resources::{AddressBlock, AddressPool, WireKubePeer, WireKubePeerStatus};
use fairlead_cluster::network_policies::unenforced;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{ListParams, PartialObjectMeta};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};

use crate::api;
use crate::output::{Output, age, bytes, now, or_dash, render, table};

/// Condition of pools.
const READY: &str = "Ready";
/// Reason of that condition in a pool that an administrator disabled, which is no problem.
const DISABLED: &str = "Disabled";

/// All nodes and pools, and whether there is no problem.
///
/// # Errors
/// The API server does not answer or refuses.
pub(super) async fn all(client: &Client, output: Output) -> anyhow::Result<(String, bool)> {
    let every = ListParams::default;
    let peers = api::list(&Api::<WireKubePeer>::all(client.clone()), "WireKubePeers", every()).await?;
    let blocks = api::list(&Api::<AddressBlock>::all(client.clone()), "AddressBlocks", every()).await?;
    let pools = api::list(&Api::<AddressPool>::all(client.clone()), "AddressPools", every()).await?;
    // Who may not read it sees the rest.
    let policy = unenforced(client).await.ok().flatten();
    let data = || {
        json!({
            "nodes": peers.iter().map(peer_json).collect::<Vec<_>>(),
            "unenforcedNetworkPolicy": policy.as_ref().map(|policy| json!({ "namespace": policy.namespace, "name": policy.name })),
            "pools": pools.iter().map(|pool| json!({ "name": pool.name_any(), "spec": pool.spec, "status": pool.status })).collect::<Vec<_>>(),
        })
    };
    let text = render(output, data, |wide| {
        let notice = policy.as_ref().map(|policy| format!("\n{policy}\n")).unwrap_or_default();
        cluster_table(&peers, &blocks, &pools, wide) + &notice
    })?;
    let is_healthy = peers.iter().all(is_healthy) && !pools.iter().any(has_problem);
    Ok((text, is_healthy))
}

/// One node, and whether there is no problem.
///
/// # Errors
/// The API server does not answer or refuses, or knows nothing of such a node.
pub(super) async fn node(client: &Client, name: &str, output: Output) -> anyhow::Result<(String, bool)> {
    let peer = Api::<WireKubePeer>::all(client.clone()).get_opt(name).await;
    let peer = peer.with_context(|| format!("cannot read WireKubePeer {name}"))?;
    let own = ListParams::default().labels(&format!("{LABEL_NODE}={name}"));
    let blocks = api::list(&Api::<AddressBlock>::all(client.clone()), "AddressBlocks", own).await?;
    ensure!(
        peer.is_some() || !blocks.is_empty(),
        "node '{name}' has no WireKubePeer and no AddressBlock: is the name right, and does `fairlead node` run there?"
    );
    let data = || {
        json!({
            "name": name,
            "peer": peer.as_ref().map(peer_json),
            "blocks": blocks.iter().map(|block| json!({ "name": block.name_any(), "pool": block.pool(), "ipv4": block.spec.ipv4, "ipv6": block.spec.ipv6 })).collect::<Vec<_>>(),
        })
    };
    let program = program(client, name).await;
    let text = render(output, data, |_| node_text(name, peer.as_ref(), &blocks, program.as_deref()))?;
    Ok((text, peer.as_ref().is_none_or(is_healthy)))
}

/// The node program's pod, for the hint where more is to be seen; `None` if it cannot be found.
async fn program(client: &Client, node: &str) -> Option<String> {
    let pods = Api::<PartialObjectMeta<Pod>>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let labels = api::programs(&[NODE_PROGRAM]);
    let parameters = ListParams::default().labels(&labels).fields(&format!("spec.nodeName={node}"));
    pods.list(&parameters).await.ok()?.items.first().map(ResourceExt::name_any)
}

fn is_healthy(peer: &WireKubePeer) -> bool {
    peer.status.as_ref().is_some_and(|status| status.connected == Some(true) && status.problems.is_empty())
}

/// Reasons why no block can be granted from a pool, unless an administrator wants it so, and why its addresses do not work.
fn pool_problems(pool: &AddressPool) -> Vec<&Condition> {
    let is_problem = |condition: &&Condition| match condition.type_.as_str() {
        READY => condition.status == "False" && condition.reason != DISABLED,
        RANGE_IN_USE => condition.status == "True",
        _ => false,
    };
    pool.status.iter().flat_map(|status| &status.conditions).filter(is_problem).collect()
}

/// Whether one of them is certain: a range of `spec.podCIDRs` is in use only if another plugin assigns its addresses, and a range within a
/// wider one only if a host of that has its addresses.
fn has_problem(pool: &AddressPool) -> bool {
    let is_certain = |condition: &&Condition| {
        ![RANGE_OF_POD_CIDRS, RANGE_WITHIN_WIDER].contains(&condition.reason.as_str())
    };
    pool_problems(pool).iter().any(is_certain)
}

fn peer_json(peer: &WireKubePeer) -> Value {
    json!({ "name": peer.name_any(), "spec": peer.spec, "status": peer.status })
}

fn cluster_table(
    peers: &[WireKubePeer],
    blocks: &[AddressBlock],
    pools: &[AddressPool],
    wide: bool,
) -> String {
    let mut owned: BTreeMap<&str, usize> = BTreeMap::new();
    for node in blocks.iter().filter_map(AddressBlock::node) {
        *owned.entry(node).or_default() += 1;
    }
    let by_name: BTreeMap<String, &WireKubePeer> = peers.iter().map(|peer| (peer.name_any(), peer)).collect();
    let names: BTreeSet<&str> = by_name.keys().map(String::as_str).chain(owned.keys().copied()).collect();
    let mut header =
        vec!["NODE", "CONNECTED", "PEERS", "ENDPOINT", "NAT", "WIREGUARD", "BLOCKS", "REPORTED", "PROBLEMS"];
    if wide {
        header.extend(["HANDSHAKE", "MODE", "DISCOVERY", "ADDRESSES", "PUBLIC KEY"]);
    }
    let mut nodes = table(&header);
    for name in &names {
        let blocks = owned.get(name).copied().unwrap_or_default();
        nodes.add_row(node_row(name, by_name.get(*name).copied(), blocks, wide));
    }
    let mut text = format!("{nodes}\n");
    if !pools.is_empty() {
        text.push_str(&format!("\n{}\n", pool_table(pools)));
    }
    let sentences = peers.iter().flat_map(|peer| {
        let problems = peer.status.iter().flat_map(|status| &status.problems);
        problems.map(|problem| format!("\nnode {}: {problem}\n", peer.name_any())).collect::<Vec<_>>()
    });
    text.extend(sentences);
    for pool in pools {
        for condition in pool_problems(pool) {
            text.push_str(&format!("\npool {}: {}\n", pool.name_any(), condition.message));
        }
    }
    text
}

fn node_row(name: &str, peer: Option<&WireKubePeer>, blocks: usize, wide: bool) -> Vec<String> {
    let status = peer.and_then(|peer| peer.status.clone()).unwrap_or_default();
    let spec = peer.map(|peer| peer.spec.clone()).unwrap_or_default();
    let mut row = vec![
        name.to_owned(),
        connected(&status).to_owned(),
        reached(&status),
        or_dash(spec.endpoint.as_deref().unwrap_or_default()),
        word(&status.nat_type),
        word(&status.wireguard),
        blocks.to_string(),
        status
            .last_reported_at
            .as_ref()
            .map_or("-".to_owned(), |at| age(now().saturating_sub(at.0.as_second()))),
        status.problems.len().to_string(),
    ];
    if wide {
        row.extend([
            handshake(&status),
            word(&status.transport_mode),
            word(&status.endpoint_discovery_method),
            or_dash(&spec.allowed_ips.join(" ")),
            or_dash(&spec.public_key),
        ]);
    }
    row
}

fn pool_table(pools: &[AddressPool]) -> String {
    let mut rows = table(&["POOL", "READY", "REASON", "BLOCKS", "CAPACITY", "FREE", "NODES"]);
    let number = |number: Option<i64>| number.map_or("-".to_owned(), |number| number.to_string());
    for pool in pools {
        let status = pool.status.clone().unwrap_or_default();
        let ready = status.conditions.iter().find(|condition| condition.type_ == READY);
        rows.add_row([
            pool.name_any(),
            ready.map_or("-".to_owned(), |ready| ready.status.clone()),
            ready.map_or("-".to_owned(), |ready| ready.reason.clone()),
            number(status.blocks),
            number(status.capacity),
            number(status.free),
            number(status.node_count),
        ]);
    }
    rows.to_string()
}

fn node_text(
    name: &str,
    peer: Option<&WireKubePeer>,
    blocks: &[AddressBlock],
    program: Option<&str>,
) -> String {
    let mut text = format!("node {name}");
    match peer {
        None => text.push_str("  not in the mesh: it has no WireKubePeer\n"),
        Some(peer) => text.push_str(&peer_text(peer)),
    }
    if !blocks.is_empty() {
        let mut rows = table(&["BLOCK", "POOL", "IPV4", "IPV6"]);
        for block in blocks {
            let [ipv4, ipv6] =
                [&block.spec.ipv4, &block.spec.ipv6].map(|net| or_dash(net.as_deref().unwrap_or_default()));
            rows.add_row([block.name_any(), or_dash(block.pool().unwrap_or_default()), ipv4, ipv6]);
        }
        text.push_str(&format!("\n{rows}\n"));
    }
    for problem in peer.and_then(|peer| peer.status.as_ref()).iter().flat_map(|status| &status.problems) {
        text.push_str(&format!("\nproblem: {problem}\n"));
    }
    if let Some(program) = program {
        text.push_str(&format!(
            "\nevery peer with its endpoint and reason: kubectl -n {SYSTEM_NAMESPACE} exec {program} -- fairlead status\n"
        ));
    }
    text
}

fn peer_text(peer: &WireKubePeer) -> String {
    let (spec, status) = (&peer.spec, peer.status.clone().unwrap_or_default());
    let count = |count: Option<i64>| {
        count.map_or("-".to_owned(), |count| bytes(u64::try_from(count).unwrap_or_default()))
    };
    format!(
        "  connected {}  peers {}  wireguard {}  nat {}  handshake {}  received {}  sent {}\nendpoint {} ({})\npublic key {}\naddresses {}\n",
        connected(&status),
        reached(&status),
        word(&status.wireguard),
        word(&status.nat_type),
        handshake(&status),
        count(status.bytes_received),
        count(status.bytes_sent),
        or_dash(spec.endpoint.as_deref().unwrap_or_default()),
        word(&status.endpoint_discovery_method),
        or_dash(&spec.public_key),
        or_dash(&spec.allowed_ips.join(" ")),
    )
}

fn connected(status: &WireKubePeerStatus) -> &'static str {
    match status.connected {
        Some(true) => "yes",
        Some(false) => "no",
        None => "-",
    }
}

/// The word by which the API calls a value.
fn word(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    or_dash(value.as_str().unwrap_or_default())
}

/// Number of the peers that a node reaches, of all.
fn reached(status: &WireKubePeerStatus) -> String {
    status.peers.map_or("-".to_owned(), |peers| {
        format!("{}/{}", peers.total.saturating_sub(peers.unreachable), peers.total)
    })
}

/// The age of the latest handshake when the node wrote its status, which it does rarely.
fn handshake(status: &WireKubePeerStatus) -> String {
    let (Some(handshake), Some(reported)) = (&status.last_handshake, &status.last_reported_at) else {
        return "-".to_owned();
    };
    age(reported.0.as_second().saturating_sub(handshake.0.as_second()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(name: &str, status: &Value) -> WireKubePeer {
        serde_json::from_value(json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": name },
            "spec": { "endpoint": "203.0.113.7:40001", "allowedIPs": ["192.0.2.1/32", "2001:db8::1/128"] },
            "status": status,
        }))
        .unwrap()
    }

    fn pool(reason: &str) -> AddressPool {
        serde_json::from_value(json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": "default" },
            "spec": { "subnets": [{ "ipv4": "10.0.0.0/24" }] },
            "status": { "blocks": 8, "capacity": 256, "free": 0, "nodeCount": 3, "conditions": [{
                "type": "Ready", "status": "False", "reason": reason, "message": "all 8 blocks are granted",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }] },
        }))
        .unwrap()
    }

    fn block(node: &str) -> AddressBlock {
        serde_json::from_value(json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": "10.0.0.0/27",
            "metadata": { "name": "default-0", "labels": { "coil.cybozu.com/node": node, "coil.cybozu.com/pool": "default" } },
        }))
        .unwrap()
    }

    #[test]
    fn the_table_has_nodes_with_and_without_the_mesh_and_no_json() {
        let status = json!({ "connected": false, "natType": "symmetric", "wireguard": "kernel", "problems": ["home-1 is down"] });
        let peers = [peer("a", &status)];
        let (blocks, pools) = ([block("a"), block("b")], [pool("Exhausted")]);
        for wide in [false, true] {
            let text = cluster_table(&peers, &blocks, &pools, wide);
            for word in [
                "symmetric",
                "kernel",
                "203.0.113.7:40001",
                "node a: home-1 is down",
                "pool default: all 8 blocks",
            ] {
                assert!(text.contains(word), "{word} is missing in\n{text}");
            }
            assert!(text.lines().any(|line| line.trim_start().starts_with("b ")), "{text}");
            assert_eq!(text.contains("192.0.2.1/32 2001:db8::1/128"), wide, "{text}");
            assert!(!text.contains(['[', '"', '{']), "{text}");
        }
    }

    #[test]
    fn a_problem_of_a_node_or_a_pool_is_one_of_the_cluster() {
        assert!(is_healthy(&peer("a", &json!({ "connected": true }))));
        assert!(!is_healthy(&peer("a", &json!({ "connected": true, "problems": ["x"] }))));
        assert!(!is_healthy(&peer("a", &Value::Null)));
        assert!(has_problem(&pool("Exhausted")));
        assert!(!has_problem(&pool("Disabled")));
    }

    #[test]
    fn a_pool_whose_range_is_in_use_is_a_problem_although_it_is_ready() {
        let in_use = |reason: &str| {
            let mut pool = pool("Disabled");
            let condition = json!({
                "type": "RangeInUse", "status": "True", "reason": reason, "message": "10.0.0.0/24 shares addresses with x",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            });
            pool.status.as_mut().unwrap().conditions.push(serde_json::from_value(condition).unwrap());
            pool
        };
        assert!(has_problem(&in_use("RangeInUse")));
        assert!(!has_problem(&in_use("RangeOfPodCIDRs")), "perhaps no plugin uses them");
        assert!(!has_problem(&in_use("RangeWithinWider")), "perhaps no host has them");
        for reason in ["RangeInUse", "RangeOfPodCIDRs", "RangeWithinWider"] {
            let text = cluster_table(&[], &[], &[in_use(reason)], false);
            assert!(text.contains("pool default: 10.0.0.0/24 shares addresses with x"), "{text}");
        }
    }

    #[test]
    fn a_node_is_described_with_its_handshake_and_blocks() {
        let status = json!({
            "connected": true, "bytesReceived": 2048, "peers": { "total": 3, "direct": 2, "unreachable": 1 },
            "lastHandshake": "2026-01-01T00:00:00Z", "lastReportedAt": "2026-01-01T00:03:20Z",
        });
        let peer = peer("a", &status);
        let text = node_text("a", Some(&peer), &[block("a")], Some("coild-x"));
        for word in [
            "connected yes",
            "peers 2/3",
            "handshake 3m20s",
            "received 2.0 KiB",
            "sent -",
            "default-0",
            "10.0.0.0/27",
            "exec coild-x",
        ] {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
        assert!(node_text("b", None, &[block("b")], None).contains("no WireKubePeer"));
    }
}

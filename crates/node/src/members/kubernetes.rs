//! The cluster's objects as a source of members: WireKubePeers, AddressBlocks and, for the built-in router, Nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_api::resources::{AddressBlock, CandidateType, EndpointDiscoveryMethod, WireKubePeer};
use fairlead_cluster::caches::Cache;
use fairlead_topology::{Endpoints, Member, MemberRecord, Source};
use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use tokio::sync::watch;

use super::{MemberSource, SourceProblem, nodes};

/// Watch caches of the cluster. The blocks of a node and what it published become one record.
pub struct Kubernetes {
    peers: Option<Arc<Cache<WireKubePeer>>>,
    nodes: Option<Arc<Cache<Node>>>,
    blocks: Arc<Cache<AddressBlock>>,
    changes: Vec<watch::Receiver<u64>>,
}

impl Kubernetes {
    /// Members of the mesh: published peers, with their blocks.
    pub fn of_mesh(peers: Arc<Cache<WireKubePeer>>, blocks: Arc<Cache<AddressBlock>>) -> Self {
        let changes = vec![peers.subscribe(), blocks.subscribe()];
        Self { peers: Some(peers), nodes: None, blocks, changes }.with_changes_seen()
    }

    /// Nodes for routes: all Nodes, [trimmed](nodes::trim), with their blocks.
    pub fn of_routes(nodes: Arc<Cache<Node>>, blocks: Arc<Cache<AddressBlock>>) -> Self {
        let changes = vec![nodes.subscribe(), blocks.subscribe()];
        Self { peers: None, nodes: Some(nodes), blocks, changes }.with_changes_seen()
    }

    /// Only what changes from now on is news.
    fn with_changes_seen(mut self) -> Self {
        self.changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
        self
    }
}

impl MemberSource for Kubernetes {
    fn changed(&mut self) -> BoxFuture<'_, ()> {
        let changed = self.changes.iter_mut().map(|change| change.changed().boxed());
        select_all(changed).map(drop).boxed()
    }

    fn is_ready(&self) -> bool {
        self.blocks.is_ready()
            && self.peers.as_ref().is_none_or(|peers| peers.is_ready())
            && self.nodes.as_ref().is_none_or(|nodes| nodes.is_ready())
    }

    fn records(&self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord> {
        let mut by_node = ByNode::default();
        for peer in self.peers.iter().flat_map(|peers| peers.store.state()) {
            let member = by_node.member(&peer.name_any());
            if let Err(problem) = read_peer(&peer, member, problems) {
                problems.push(problem);
            }
        }
        for node in self.nodes.iter().flat_map(|nodes| nodes.store.state()) {
            by_node.member(&node.name_any()).addresses = Some(nodes::addresses(&node, nodes::INTERNAL));
        }
        for block in self.blocks.store.state() {
            // A block that is being deleted still counts: pods may use it.
            if let (Some(node), Ok(nets)) = (block.node(), block.parse()) {
                let prefixes = nets.ipv4.map(IpNet::from).into_iter().chain(nets.ipv6.map(IpNet::from));
                by_node.member(node).blocks.extend(prefixes);
            }
        }
        let mut records: Vec<MemberRecord> = by_node.0.into_values().collect();
        records.iter_mut().for_each(|record| record.member.blocks.sort());
        records
    }
}

#[derive(Default)]
struct ByNode(BTreeMap<String, MemberRecord>);

impl ByNode {
    fn member(&mut self, node: &str) -> &mut Member {
        let record = || MemberRecord::of_node(Source::Kubernetes, node);
        &mut self.0.entry(node.to_owned()).or_insert_with(record).member
    }
}

/// Adds what one WireKubePeer says. What cannot be read is left out and added to `problems`.
///
/// # Errors
/// The key cannot be read: without it the rest has no meaning.
fn read_peer(
    peer: &WireKubePeer,
    member: &mut Member,
    problems: &mut Vec<SourceProblem>,
) -> Result<(), SourceProblem> {
    let name = member.name.clone();
    let spec = &peer.spec;
    let key = spec.parse_public_key();
    let key = key.map_err(|error| SourceProblem::InvalidPublicKey { peer: name.clone(), error })?;
    let (claims, unreadable) = spec.parse_allowed_ips();
    problems.extend(
        unreadable
            .into_iter()
            .map(|entry| SourceProblem::InvalidAllowedIp { peer: name.clone(), entry: entry.to_owned() }),
    );
    member.public_key = Some(key);
    member.claims = claims;
    member.persistent_keepalive = Some(spec.persistent_keepalive);
    member.endpoints = endpoints(peer);
    Ok(())
}

fn endpoints(peer: &WireKubePeer) -> Endpoints {
    let status = peer.status.as_ref();
    let method = status.and_then(|status| status.endpoint_discovery_method);
    let is_manual = method.is_none_or(|method| method == EndpointDiscoveryMethod::Manual);
    let published = peer.spec.endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
    let candidates = status.into_iter().flat_map(|status| &status.ice_candidates);
    let sightings = status.into_iter().flat_map(|status| &status.observed_endpoints);
    Endpoints {
        manual: published.filter(|_| is_manual).map(str::to_owned),
        preferred: published.filter(|_| !is_manual).and_then(|text| text.parse().ok()),
        host: candidates
            .filter(|candidate| candidate.type_ == CandidateType::Host)
            .filter_map(|candidate| candidate.address.parse().ok())
            .collect(),
        sightings: sightings
            .filter_map(|(peer, seen)| {
                Some((peer.clone(), (seen.public_key.parse().ok()?, seen.parse_endpoint().ok()?)))
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use fairlead_api::wireguard::PublicKey;

    use super::*;

    fn key(byte: u8) -> PublicKey {
        PublicKey([byte; 32])
    }

    fn peer(json: serde_json::Value) -> WireKubePeer {
        let mut object = serde_json::json!({ "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer" });
        if let (Some(object), Some(more)) = (object.as_object_mut(), json.as_object()) {
            object.extend(more.clone());
        }
        serde_json::from_value(object).unwrap()
    }

    fn read(json: serde_json::Value) -> (Result<Member, SourceProblem>, Vec<SourceProblem>) {
        let (object, mut problems) = (peer(json), Vec::new());
        let mut member = Member::named(object.name_any());
        let outcome = read_peer(&object, &mut member, &mut problems);
        (outcome.map(|()| member), problems)
    }

    #[test]
    fn what_does_not_parse_is_reported_and_left_out() {
        let (parsed, problems) = read(serde_json::json!({
            "metadata": { "name": "n1" },
            "spec": { "publicKey": key(1).to_string(), "allowedIPs": ["10.0.0.1/32", "nonsense"] },
            "status": { "iceCandidates": [
                { "type": "host", "address": "10.0.0.1:51820", "priority": 100 },
                { "type": "host", "address": "not an address", "priority": 100 },
                { "type": "relay", "address": "relay", "priority": 10 },
            ] },
        }));
        let parsed = parsed.unwrap();
        assert_eq!(parsed.claims, ["10.0.0.1/32".parse().unwrap()]);
        assert_eq!(parsed.endpoints.host, ["10.0.0.1:51820".parse().unwrap()]);
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert!(
            problems.iter().any(|problem| problem.contains("n1") && problem.contains("nonsense")),
            "{problems:?}"
        );
    }

    #[test]
    fn a_peer_without_a_key_is_an_error_that_names_it() {
        let (parsed, _) =
            read(serde_json::json!({ "metadata": { "name": "n1" }, "spec": { "publicKey": "" } }));
        let problem = parsed.unwrap_err();
        assert!(problem.to_string().contains("WireKubePeer n1"));
        assert_eq!(problem.reason(), "InvalidPublicKey");
    }

    #[test]
    fn an_endpoint_counts_as_manual_unless_the_node_discovered_it() {
        let with = |method: Option<&str>| {
            let (parsed, _) = read(serde_json::json!({
                "metadata": { "name": "n1" },
                "spec": { "publicKey": key(1).to_string(), "endpoint": "192.0.2.1:5" },
                "status": { "endpointDiscoveryMethod": method },
            }));
            parsed.unwrap().endpoints
        };
        for manual in [None, Some("manual")] {
            assert_eq!(with(manual).manual.as_deref(), Some("192.0.2.1:5"));
        }
        assert_eq!(with(Some("internal-ip")).manual, None);
        assert_eq!(with(Some("internal-ip")).preferred, "192.0.2.1:5".parse().ok());
    }

    proptest::proptest! {
        /// Everything in it was written by another node or an administrator.
        #[test]
        fn hostile_peers_never_panic(
            texts in proptest::collection::vec("[0-9a-f.:/\\[\\]%+=A-Z-]{0,50}", 6), name: String, keepalive: u16,
        ) {
            let (parsed, _) = read(serde_json::json!({
                "metadata": { "name": name },
                "spec": {
                    "publicKey": texts[0], "allowedIPs": [texts[1], "10.0.0.1/32"], "endpoint": texts[2],
                    "persistentKeepalive": keepalive,
                },
                "status": {
                    "iceCandidates": [{ "type": "host", "address": texts[3], "priority": 1 }],
                    "observedEndpoints": { (texts[4].clone()): { "publicKey": key(1).to_string(), "endpoint": texts[5] } },
                },
            }));
            if let Ok(parsed) = parsed {
                proptest::prop_assert!(parsed.claims.contains(&"10.0.0.1/32".parse().unwrap()));
            }
        }
    }
}

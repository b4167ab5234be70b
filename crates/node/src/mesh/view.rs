//! What the cluster says, parsed: custom resources to members, endpoints and settings. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_api::resources::{
    AddressBlock, CandidateType, EndpointDiscoveryMethod, WireKubeMesh, WireKubePeer,
};
use fairlead_api::wireguard::PublicKey;
use fairlead_topology::Member;
use ipnet::IpNet;

/// The mesh as its resource describes it, with defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshSettings {
    /// Name of the WireGuard device.
    pub interface: String,
    /// UDP port of every node that names no other.
    pub port: u16,
    /// Largest device MTU, in bytes.
    pub mtu: u32,
    /// Destinations that never enter the mesh.
    pub excluded: Vec<IpNet>,
    /// Whether nodes are to be reached at their own addresses through the mesh, as KubeSpan does; WireKube's
    /// `autoAllowedIPs.includeNodeInternalIP` says no when it is there and false.
    pub claim_node_addresses: bool,
}

impl MeshSettings {
    /// Reads the mesh resource; what does not parse is left out and said in `problems`.
    pub fn parse(mesh: &WireKubeMesh, problems: &mut Vec<String>) -> Self {
        let spec = &mesh.spec;
        let name = mesh.metadata.name.as_deref().unwrap_or_default();
        let excluded = spec.routing.iter().flat_map(|routing| &routing.exclude_cidrs).filter_map(|text| {
            text.parse()
                .map_err(|_| {
                    problems.push(format!("WireKubeMesh {name}: excludeCIDRs entry {text:?} is no CIDR"))
                })
                .ok()
        });
        Self {
            excluded: excluded.collect(),
            interface: spec.interface_name.clone(),
            port: spec.listen_port,
            mtu: u32::from(spec.mtu),
            claim_node_addresses: spec
                .auto_allowed_ips
                .as_ref()
                .is_none_or(|auto| auto.include_node_internal_ip),
        }
    }
}

/// One peer as published by its own node or by an administrator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedPeer {
    /// Name of the WireKubePeer, which is the node's.
    pub name: String,
    /// Identity.
    pub public_key: PublicKey,
    /// An endpoint somebody chose by hand; it beats discovered ones. Host names are kept as text.
    pub manual: Option<String>,
    /// The endpoint the node thinks best, when nobody chose one.
    pub endpoint: Option<SocketAddr>,
    /// Addresses of the node itself, with its port.
    pub host: Vec<SocketAddr>,
    /// Where it sees others come from: peer name to endpoint, for the identity given there.
    pub sees: BTreeMap<String, (PublicKey, SocketAddr)>,
    /// Address prefixes it claims.
    pub claims: Vec<IpNet>,
    /// Seconds between keepalives, if it asks for others than the default.
    pub keepalive: Option<u16>,
}

/// Reads one WireKubePeer. An unreadable key makes it useless and is an error; anything else unreadable is left out
/// and said in `problems`.
///
/// # Errors
/// A sentence that names the peer and what is wrong.
pub fn parse_peer(peer: &WireKubePeer, problems: &mut Vec<String>) -> Result<PublishedPeer, String> {
    let name = peer.metadata.name.clone().unwrap_or_default();
    let spec = &peer.spec;
    let public_key =
        spec.parse_public_key().map_err(|error| format!("WireKubePeer {name}: spec.publicKey is {error}"))?;
    let status = peer.status.as_ref();
    let method = status.and_then(|status| status.endpoint_discovery_method);
    let by_hand = method.is_none_or(|method| method == EndpointDiscoveryMethod::Manual);
    let published = spec.endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
    let (claims, unreadable) = spec.parse_allowed_ips();
    problems.extend(
        unreadable.iter().map(|text| format!("WireKubePeer {name}: allowedIPs entry {text:?} is no CIDR")),
    );
    Ok(PublishedPeer {
        public_key,
        claims,
        manual: published.filter(|_| by_hand).map(str::to_owned),
        endpoint: published.filter(|_| !by_hand).and_then(|text| text.parse().ok()),
        host: status
            .iter()
            .flat_map(|status| &status.ice_candidates)
            .filter(|candidate| candidate.type_ == CandidateType::Host)
            .filter_map(|candidate| candidate.address.parse().ok())
            .collect(),
        sees: status
            .iter()
            .flat_map(|status| &status.observed_endpoints)
            .filter_map(|(peer, seen)| {
                Some((peer.clone(), (seen.public_key.parse().ok()?, seen.parse_endpoint().ok()?)))
            })
            .collect(),
        keepalive: Some(spec.persistent_keepalive),
        name,
    })
}

/// Prefixes of all blocks, by the node they belong to. Blocks on their way out still count: pods may use them.
pub fn blocks_by_node(blocks: &[Arc<AddressBlock>]) -> BTreeMap<String, Vec<IpNet>> {
    let mut by_node: BTreeMap<String, Vec<IpNet>> = BTreeMap::new();
    for block in blocks {
        let (Some(node), Ok(nets)) = (block.node(), block.parse()) else { continue };
        let prefixes = nets.ipv4.map(IpNet::from).into_iter().chain(nets.ipv6.map(IpNet::from));
        by_node.entry(node.to_owned()).or_default().extend(prefixes);
    }
    by_node
}

/// Members of the mesh: published peers, each with the blocks the controller gave it.
pub fn members(peers: &[PublishedPeer], mut blocks: BTreeMap<String, Vec<IpNet>>) -> Vec<Member> {
    peers
        .iter()
        .map(|peer| Member {
            public_key: Some(peer.public_key),
            claims: peer.claims.clone(),
            blocks: blocks.remove(&peer.name).unwrap_or_default(),
            persistent_keepalive: peer.keepalive,
            ..Member::named(&peer.name)
        })
        .collect()
}

/// Where the others see `name` with this identity; one entry for each observer, by its name.
pub fn seen_by_others(peers: &[PublishedPeer], name: &str, key: &PublicKey) -> Vec<(String, SocketAddr)> {
    peers
        .iter()
        .filter_map(|observer| {
            let (seen_key, endpoint) = observer.sees.get(name)?;
            (seen_key == key && observer.name != name).then(|| (observer.name.clone(), *endpoint))
        })
        .collect()
}

/// The distinct endpoints of [`seen_by_others`], in a stable order.
pub fn observed_endpoints(peers: &[PublishedPeer], name: &str, key: &PublicKey) -> Vec<SocketAddr> {
    let distinct: BTreeSet<SocketAddr> =
        seen_by_others(peers, name, key).into_iter().map(|(_, seen)| seen).collect();
    distinct.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use fairlead_topology::{Policy, plan};

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

    #[test]
    fn what_does_not_parse_is_said_and_left_out() {
        let object = peer(serde_json::json!({
            "metadata": { "name": "n1" },
            "spec": { "publicKey": key(1).to_string(), "allowedIPs": ["10.0.0.1/32", "nonsense"] },
            "status": { "iceCandidates": [
                { "type": "host", "address": "10.0.0.1:51820", "priority": 100 },
                { "type": "host", "address": "not an address", "priority": 100 },
                { "type": "relay", "address": "relay", "priority": 10 },
            ] },
        }));
        let mut problems = Vec::new();
        let parsed = parse_peer(&object, &mut problems).unwrap();
        assert_eq!(parsed.claims, ["10.0.0.1/32".parse().unwrap()]);
        assert_eq!(parsed.host, ["10.0.0.1:51820".parse().unwrap()]);
        assert!(
            problems.iter().any(|problem| problem.contains("n1") && problem.contains("nonsense")),
            "{problems:?}"
        );
    }

    #[test]
    fn a_peer_without_a_key_is_an_error_that_names_it() {
        let object = peer(serde_json::json!({ "metadata": { "name": "n1" }, "spec": { "publicKey": "" } }));
        assert!(parse_peer(&object, &mut Vec::new()).unwrap_err().contains("WireKubePeer n1"));
    }

    #[test]
    fn an_endpoint_counts_as_chosen_by_hand_unless_the_node_discovered_it() {
        let with = |method: Option<&str>| {
            let object = peer(serde_json::json!({
                "metadata": { "name": "n1" },
                "spec": { "publicKey": key(1).to_string(), "endpoint": "192.0.2.1:5" },
                "status": { "endpointDiscoveryMethod": method },
            }));
            parse_peer(&object, &mut Vec::new()).unwrap()
        };
        for by_hand in [None, Some("manual")] {
            assert_eq!(with(by_hand).manual.as_deref(), Some("192.0.2.1:5"));
        }
        assert_eq!(with(Some("internal-ip")).manual, None);
        assert_eq!(with(Some("internal-ip")).endpoint, "192.0.2.1:5".parse().ok());
    }

    #[test]
    fn where_others_see_a_peer_counts_only_for_its_present_key() {
        let observer = |name: &str, seen: PublicKey| PublishedPeer {
            name: name.to_owned(),
            public_key: key(7),
            manual: None,
            endpoint: None,
            host: Vec::new(),
            sees: [("n1".to_owned(), (seen, "203.0.113.1:9".parse().unwrap()))].into(),
            claims: Vec::new(),
            keepalive: None,
        };
        let peers = [observer("a", key(1)), observer("b", key(2)), observer("n1", key(1))];
        assert_eq!(seen_by_others(&peers, "n1", &key(1)).len(), 1);
        assert_eq!(observed_endpoints(&peers, "n1", &key(2)), ["203.0.113.1:9".parse().unwrap()]);
    }

    #[test]
    fn a_thousand_peers_lose_one_and_only_it_changes() {
        let peers: Vec<PublishedPeer> = (0..1000u32)
            .map(|index| {
                let mut bytes = [0; 32];
                bytes[..4].copy_from_slice(&index.to_be_bytes());
                bytes[31] = 1;
                PublishedPeer {
                    name: format!("node-{index:04}"),
                    public_key: PublicKey(bytes),
                    manual: None,
                    endpoint: None,
                    host: Vec::new(),
                    sees: BTreeMap::new(),
                    claims: vec![IpNet::from(std::net::IpAddr::from([
                        10,
                        0,
                        (index / 256) as u8,
                        (index % 256) as u8,
                    ]))],
                    keepalive: None,
                }
            })
            .collect();
        let policy = Policy::new("node-0000");
        let before = plan(&members(&peers, BTreeMap::new()), &policy);
        let after = plan(&members(&peers[..999], BTreeMap::new()), &policy);
        let gone: Vec<_> =
            before.peers.iter().filter(|(key, peer)| after.peers.get(key) != Some(peer)).collect();
        assert_eq!(gone.len(), 1);
        assert_eq!(after.peers.len(), 998);
    }

    proptest::proptest! {
        /// Everything in it was written by another node or a person.
        #[test]
        fn hostile_peers_never_panic(
            texts in proptest::collection::vec("[0-9a-f.:/\\[\\]%+=A-Z-]{0,50}", 6), name: String, keepalive: u16,
        ) {
            let object = peer(serde_json::json!({
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
            let mut problems = Vec::new();
            if let Ok(parsed) = parse_peer(&object, &mut problems) {
                proptest::prop_assert!(parsed.claims.contains(&"10.0.0.1/32".parse().unwrap()));
            }
        }
    }
}

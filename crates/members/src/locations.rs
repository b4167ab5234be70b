//! The locations of a mesh, as every node computes them: what `fairlead graph` shows.

use std::collections::BTreeMap;

use fairlead_api::resources::{Encapsulation, Granularity, WireKubeMesh, WireKubePeer};
use fairlead_topology::{self as topology, Down, Member, OwnAddress, gateways, location};

use super::cached_peer::CachedPeer;

/// Nodes that share a location.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// Names of its nodes.
    pub nodes: Vec<String>,
    /// Names of its gateways, best first; none unless the granularity in use is `location`.
    pub gateways: Vec<String>,
}

/// The locations by name; none where they mean nothing, because every pair of nodes has a tunnel. The name of one is empty: that of nodes
/// which neither annotation nor label puts anywhere.
pub fn locations(peers: &[WireKubePeer], mesh: Option<&WireKubeMesh>) -> BTreeMap<String, Location> {
    let granularity = mesh.map(WireKubeMesh::granularity).unwrap_or_default();
    if granularity == Granularity::Full {
        return BTreeMap::new();
    }
    let members = peers.iter().map(|peer| CachedPeer::new(peer.clone(), "").member().clone());
    let mut members: Vec<Member> = members.collect();
    members.sort_by(|one, other| one.name.cmp(&other.name));
    let mut found: BTreeMap<String, Location> = BTreeMap::new();
    for member in &members {
        if let Some(name) = location(member) {
            found.entry(name.to_owned()).or_default().nodes.push(member.name.clone());
        }
    }
    if granularity == Granularity::Location {
        for (name, gateways) in gateways(&members) {
            found.entry(name).or_default().gateways = gateways;
        }
    }
    found
}

/// The granularity of a mesh on a host with these addresses, to which these gateways are down.
pub fn granularity(of_mesh: Granularity, addresses: Vec<OwnAddress>, down: Down) -> topology::Granularity {
    match of_mesh {
        Granularity::Cross => topology::Granularity::Cross(addresses),
        Granularity::Full => topology::Granularity::Full,
        Granularity::Location => topology::Granularity::Location { addresses, down },
    }
}

/// The encapsulation that a mesh asks for.
pub fn encapsulation(of_mesh: Encapsulation) -> topology::Encapsulation {
    match of_mesh {
        Encapsulation::Always => topology::Encapsulation::Always,
        Encapsulation::CrossSubnet => topology::Encapsulation::CrossSubnet,
        Encapsulation::Never => topology::Encapsulation::Never,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(name: &str, key: u8, location: Value) -> WireKubePeer {
        let public_key = fairlead_keys::PublicKey([key; 32]).to_string();
        let object = json!({
            "metadata": { "name": name }, "spec": { "publicKey": public_key },
            "status": { "node": { "internalIPs": ["192.0.2.1"], "location": location } },
        });
        serde_json::from_value(object).unwrap()
    }

    fn mesh(granularity: &str) -> WireKubeMesh {
        let spec = json!({ "topology": { "granularity": granularity } });
        serde_json::from_value(json!({ "metadata": { "name": "mesh" }, "spec": spec })).unwrap()
    }

    #[test]
    fn gateways_are_those_that_nodes_choose_and_nodes_without_an_address_inside_share_no_location() {
        let at = |name: &str, leader: bool, address: &[&str]| json!({ "name": name, "leader": leader, "internalIPs": address });
        let peers = [
            node("a", 1, at("lab", false, &["192.0.2.1/24"])),
            node("b", 2, at("lab", false, &["192.0.2.2/24"])),
            node("c", 3, at("lab", true, &["192.0.2.3/24"])),
            node("d", 4, at("lab", false, &[])),
            node("e", 5, at("", false, &["192.0.2.5/24"])),
        ];
        let found = locations(&peers, Some(&mesh("location")));
        let lab = Location {
            nodes: ["a", "b", "c"].map(str::to_owned).to_vec(),
            gateways: ["c", "a"].map(str::to_owned).to_vec(),
        };
        assert_eq!(found["lab"], lab);
        assert_eq!((found[""].nodes.len(), found.len()), (1, 2));
        let found = locations(&peers, Some(&mesh("cross")));
        assert_eq!(found["lab"], Location { gateways: Vec::new(), ..lab });
        assert!(locations(&peers, Some(&mesh("full"))).is_empty() && locations(&peers, None).is_empty());
    }
}

//! The WireGuard peers of one member, computed from objects of the cluster as every node computes them: what `fairlead showconf` prints.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlead_address::Endpoint;
use fairlead_api::resources::{AddressBlock, WireKubePeer};
use fairlead_api::wireguard::{PresharedKey, PublicKey};
use fairlead_topology::{Member, MemberRecord, PeerPlan, Policy, Source, merge, plan};
use ipnet::IpNet;
use kube::api::DynamicObject;

use super::cached_peer::CachedPeer;
use super::external_peers::CachedExternalPeer;
use crate::ipam::cached_block::CachedBlock;

/// Objects of the cluster.
#[derive(Debug, Default)]
pub struct Objects {
    /// Nodes.
    pub peers: Vec<WireKubePeer>,
    /// Their blocks.
    pub blocks: Vec<AddressBlock>,
    /// Peers of Kilo.
    pub external: Vec<DynamicObject>,
}

/// Whose peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject<'a> {
    /// Those of the node of this name: other nodes and Peers.
    Node(&'a str),
    /// Those of the Peer of this name: nodes.
    Peer(&'a str),
}

/// What the subject configures.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configuration {
    /// Its peers, by name.
    pub peers: Vec<ConfiguredPeer>,
    /// What of the subject is left out, and why, one sentence each.
    pub problems: Vec<String>,
}

/// One peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredPeer {
    /// Name of the node or Peer.
    pub name: String,
    /// Its identity.
    pub public_key: PublicKey,
    /// Extra symmetric key of the two.
    pub preshared_key: Option<PresharedKey>,
    /// What it may send from and is sent for.
    pub allowed_ips: Vec<IpNet>,
    /// Where it listens; `None` if it has to initiate.
    pub endpoint: Option<String>,
    /// Seconds between keepalives; zero sends none.
    pub persistent_keepalive: u16,
}

/// The peers of `subject`; `None` if there is no such object.
pub fn configuration(objects: Objects, subject: Subject<'_>) -> Option<Configuration> {
    let external: Vec<CachedExternalPeer> = objects.external.iter().map(CachedExternalPeer::new).collect();
    let exists = match subject {
        Subject::Node(name) => objects.peers.iter().any(|peer| peer.metadata.name.as_deref() == Some(name)),
        Subject::Peer(name) => external.iter().any(|peer| peer.name() == name),
    };
    if !exists {
        return None;
    }
    let unread = external.iter().filter(|peer| subject == Subject::Peer(peer.name()));
    let mut problems: Vec<String> =
        unread.flat_map(CachedExternalPeer::problems).map(ToString::to_string).collect();
    let members = members(objects.peers, objects.blocks, &external);
    let own = match subject {
        Subject::Node(name) => Member::named(name).name,
        Subject::Peer(name) => Member::of_peer(name).name,
    };
    // Of a Peer, as its nodes see it: what others own goes before its claims.
    let viewer = if matches!(subject, Subject::Node(_)) { own.as_str() } else { "" };
    let plan = plan(&members, &Policy::new(viewer));
    let about_own = plan.problems.iter().filter(|problem| problem.nodes().contains(&own.as_str()));
    problems.extend(about_own.map(ToString::to_string));
    let by_name: BTreeMap<&str, &Member> =
        members.iter().map(|member| (member.name.as_str(), member)).collect();
    let subject = by_name.get(own.as_str()).copied();
    // One whose key is another's gets no tunnel.
    let is_left_out = subject.is_none_or(|subject| {
        subject.external.is_some() && !plan.peers.values().any(|peer| peer.members.contains(&own))
    });
    let planned = plan.peers.iter().filter(|_| !is_left_out);
    let peers = planned.filter_map(|(key, planned)| peer(*key, planned, subject?, &by_name));
    let mut peers: Vec<ConfiguredPeer> = peers.collect();
    peers.sort_by(|a, b| a.name.cmp(&b.name));
    Some(Configuration { peers, problems })
}

fn members(
    peers: Vec<WireKubePeer>,
    blocks: Vec<AddressBlock>,
    external: &[CachedExternalPeer],
) -> Vec<Member> {
    let peers = peers.into_iter().map(|peer| CachedPeer::new(peer, "").member().clone());
    let blocks = blocks.into_iter().map(|block| {
        let block = CachedBlock::new(block, "");
        let existing = block.existing();
        Member { blocks: existing.nets.iter().collect(), ..Member::named(&existing.node) }
    });
    let blocks = blocks.filter(|member| !member.name.is_empty());
    let external = external.iter().filter_map(|peer| peer.member().cloned());
    let record = |member| MemberRecord { age: Duration::ZERO, source: Source::Kubernetes, member };
    merge(peers.chain(blocks).chain(external).map(record).collect())
}

fn peer(
    public_key: PublicKey,
    planned: &PeerPlan,
    subject: &Member,
    by_name: &BTreeMap<&str, &Member>,
) -> Option<ConfiguredPeer> {
    let member = planned.members.iter().find_map(|name| by_name.get(name.as_str()).copied())?;
    // Peers have tunnels with nodes only.
    if member.name == subject.name || (member.external.is_some() && subject.external.is_some()) {
        return None;
    }
    let endpoints = &member.endpoints;
    let preferred = endpoints.preferred.map(Endpoint::Address);
    // A Peer's settings count for its tunnels, on both sides.
    let settings = if subject.external.is_some() { subject } else { member };
    Some(ConfiguredPeer {
        name: member.peer_name().unwrap_or(&member.name).to_owned(),
        public_key,
        preshared_key: settings.external.as_ref().and_then(|external| external.preshared_key),
        allowed_ips: planned.allowed_ips.clone(),
        endpoint: endpoints.manual.clone().or(preferred).map(|endpoint| endpoint.to_string()),
        persistent_keepalive: settings.persistent_keepalive.unwrap_or(planned.keepalive),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(byte: u8) -> String {
        PublicKey([byte; 32]).to_string()
    }

    fn node(name: &str, number: u8) -> WireKubePeer {
        serde_json::from_value(json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
            "metadata": { "name": name, "uid": name, "creationTimestamp": "1970-01-01T00:00:01Z" },
            "spec": {
                "publicKey": key(number), "allowedIPs": [format!("192.0.2.{number}/32")],
                "endpoint": format!("203.0.113.{number}:51820"),
            },
            "status": { "endpointDiscoveryMethod": "stun", "natType": "cone" },
        }))
        .unwrap()
    }

    fn block(node: &str, ipv4: &str) -> AddressBlock {
        serde_json::from_value(json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": ipv4,
            "metadata": { "name": format!("b-{node}"), "labels": { "coil.cybozu.com/node": node, "coil.cybozu.com/pool": "default" } },
        }))
        .unwrap()
    }

    fn external(name: &str, number: u8, allowed_ips: &[&str]) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
            "metadata": { "name": name, "uid": name, "creationTimestamp": "1970-01-01T00:00:02Z" },
            "spec": {
                "publicKey": key(number), "presharedKey": key(77), "allowedIPs": allowed_ips, "persistentKeepalive": 10,
            },
        }))
        .unwrap()
    }

    fn objects() -> Objects {
        Objects {
            peers: vec![node("a", 1), node("b", 2)],
            blocks: vec![block("a", "10.64.0.0/27"), block("b", "10.64.0.32/27")],
            external: vec![
                external("laptop", 3, &["10.9.0.1/32", "10.64.0.32/27"]),
                external("phone", 4, &["10.9.0.2/32"]),
                external("copy", 1, &["10.9.0.3/32"]),
            ],
        }
    }

    fn names(configuration: &Configuration) -> Vec<&str> {
        configuration.peers.iter().map(|peer| peer.name.as_str()).collect()
    }

    #[test]
    fn a_peer_has_all_nodes_with_its_own_settings() {
        let laptop = configuration(objects(), Subject::Peer("laptop")).unwrap();
        assert_eq!(names(&laptop), ["a", "b"]);
        let b = &laptop.peers[1];
        assert_eq!(b.allowed_ips, ["10.64.0.32/27", "192.0.2.2/32"].map(|text| text.parse().unwrap()));
        assert_eq!(b.endpoint.as_deref(), Some("203.0.113.2:51820"));
        assert_eq!((b.preshared_key, b.persistent_keepalive), (Some(PresharedKey([77; 32])), 10));
        let [problem] = &laptop.problems[..] else { panic!("{:?}", laptop.problems) };
        assert!(problem.contains("10.64.0.32/27"), "{problem}");
    }

    #[test]
    fn a_node_has_the_other_nodes_and_the_peers() {
        let a = configuration(objects(), Subject::Node("a")).unwrap();
        assert_eq!(names(&a), ["b", "laptop", "phone"]);
        let laptop = &a.peers[1];
        assert_eq!(laptop.allowed_ips, ["10.9.0.1/32".parse().unwrap()]);
        assert_eq!((laptop.preshared_key, &laptop.endpoint), (Some(PresharedKey([77; 32])), &None));
        assert_eq!((a.peers[0].preshared_key, a.peers[0].persistent_keepalive), (None, 25));
    }

    #[test]
    fn what_does_not_exist_is_none_and_what_is_left_out_has_a_reason() {
        for absent in [Subject::Node("laptop"), Subject::Peer("a"), Subject::Node("")] {
            assert_eq!(configuration(objects(), absent), None);
        }
        let copy = configuration(objects(), Subject::Peer("copy")).unwrap();
        assert_eq!(names(&copy), [""; 0]);
        assert!(copy.problems[0].contains("its public key is that of node a"), "{:?}", copy.problems);
    }
}

//! WireKubePeers as the watch cache keeps them.

use std::sync::Arc;

use fairlead_api::resources::WireKubePeer;
use fairlead_cluster::cached_by_name;
use fairlead_cluster::lean;
use fairlead_topology::Member;
use kube::ResourceExt;

use super::SourceProblem;
use super::kubernetes::{pod_networks, read_peer};

/// A peer, parsed: a node program keeps those of all nodes.
#[derive(Debug, Clone)]
pub struct CachedPeer {
    member: Member,
    problems: Vec<SourceProblem>,
    own: Option<Arc<WireKubePeer>>,
}

impl CachedPeer {
    /// Parses a peer. A node whose key cannot be read is a member all the same: its blocks and networks of pods count.
    pub fn new(mut peer: WireKubePeer, own_node: &str) -> Self {
        let (member, problems) = read_peer(&peer);
        let pod_networks = if member.is_none() { pod_networks(&peer) } else { Vec::new() };
        let name = peer.name_any();
        let own = (name == own_node).then(|| {
            lean::identified(&mut peer);
            Arc::new(peer)
        });
        let member = member.unwrap_or_else(|| Member { pod_networks, ..Member::named(name) });
        Self { member, problems, own }
    }

    /// Member as the peer publishes it.
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// Problems of parts that could not be read, and were left out.
    pub fn problems(&self) -> &[SourceProblem] {
        &self.problems
    }

    /// The object, if it is this node's.
    pub fn own(&self) -> Option<&Arc<WireKubePeer>> {
        self.own.as_ref()
    }
}

cached_by_name!(CachedPeer, WireKubePeer, |cached| &cached.member.name);

#[cfg(test)]
mod tests {
    use fairlead_keys::PublicKey;

    use super::*;

    fn peer(name: &str, key: &str) -> WireKubePeer {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
            "metadata": { "name": name, "uid": "u", "resourceVersion": "7" },
            "spec": { "publicKey": key, "endpoint": "192.0.2.1:51820" },
            "status": { "endpointDiscoveryMethod": "stun", "natType": "symmetric" },
        }))
        .unwrap()
    }

    #[test]
    fn the_endpoint_of_a_symmetric_nat_is_a_placeholder_in_the_cache_too() {
        let cached = CachedPeer::new(peer("n2", &PublicKey([1; 32]).to_string()), "n1");
        assert_eq!((cached.member().endpoints.preferred, cached.own()), (None, None));
    }

    #[test]
    fn this_node_s_object_is_kept_whole() {
        let own = peer("n1", &PublicKey([1; 32]).to_string());
        assert_eq!(CachedPeer::new(own.clone(), "n1").own().map(|kept| &**kept), Some(&own));
    }

    #[test]
    fn a_peer_without_a_readable_key_is_a_member_with_a_problem() {
        let cached = CachedPeer::new(peer("n2", "nonsense"), "n1");
        assert_eq!(cached.member(), &Member::named("n2"));
        assert_eq!(cached.problems().first().map(SourceProblem::reason), Some("InvalidPublicKey"));
    }
}

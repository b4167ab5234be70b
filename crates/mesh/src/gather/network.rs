//! Network of this node, and its identity on the mesh, as other parts of the program find them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use fairlead_address::InterfaceId;
use fairlead_keys::PublicKey;
use fairlead_members::discovery_client::Shared;
use fairlead_port_mapping::task::PortMappings;
use fairlead_topology::{Member, SourceNodes};
use fairlead_wire::discovery::{id_of_key, mesh_subnet};
use tokio::sync::watch;

use super::keys::Keys;
use crate::model::nat64::Nat64Answer;

/// Network that this node is in, as others tell it.
pub(crate) struct NetworkWatches {
    /// Grants and refusals of gateways that were asked to map the WireGuard port.
    pub(crate) port_mappings: watch::Receiver<PortMappings>,
    /// Public address that EC2 translates to this node's own.
    pub(crate) public_ipv4: watch::Receiver<Option<Ipv4Addr>>,
    /// Answer of the resolver about a NAT64.
    pub(crate) nat64: watch::Receiver<Nat64Answer>,
    /// Source addresses of egress gateways that this node announces.
    pub(crate) announced_sources: watch::Receiver<BTreeSet<IpAddr>>,
    /// Nodes that may claim each such address; `None` until the API server has said it.
    pub(crate) source_nodes: watch::Receiver<Option<Arc<BTreeMap<IpAddr, SourceNodes>>>>,
    /// See [`MeshIdentity`].
    pub(crate) mesh_identity: MeshIdentity,
}

/// Identity of this node, from which its addresses on the mesh follow.
pub(crate) struct MeshIdentity {
    /// See [`crate::model::inputs::OwnNode::interface_id`].
    pub(crate) interface_id: Option<InterfaceId>,
    /// Whether a controller gives this node its addresses.
    pub(crate) is_in_cluster: bool,
    /// See [`crate::model::inputs::Inputs::cluster`].
    pub(crate) cluster: watch::Receiver<Option<Shared>>,
    /// Keys of this node.
    pub(crate) keys: watch::Receiver<Keys>,
}

impl MeshIdentity {
    /// The address of a node that no controller gives one: as a node of KubeSpan makes it. If another has that, one of its key.
    pub(super) fn derived(&self, node: &str, key: &PublicKey, members: &[Member]) -> Option<IpAddr> {
        let subnet = self.cluster.borrow().as_ref().map(|cluster| mesh_subnet(&cluster.current.cluster_id));
        let subnet = subnet.filter(|_| !self.is_in_cluster)?;
        let is_taken = |address: &IpAddr| {
            let mut others = members.iter().filter(|member| member.name != node);
            others.any(|it| {
                it.addresses.mesh.contains(address) && (!it.discovery.is_only_source || *it.name < *node)
            })
        };
        let ids = self.interface_id.into_iter().chain([InterfaceId(id_of_key(&key.0))]);
        ids.map(|id| IpAddr::from(id.address_in(subnet))).find(|address| !is_taken(address))
    }
}

impl NetworkWatches {
    /// Resolves when something is another.
    pub(super) async fn changed(&mut self) {
        tokio::select! {
            Ok(()) = self.port_mappings.changed() => {}
            Ok(()) = self.public_ipv4.changed() => {}
            Ok(()) = self.nat64.changed() => {}
            Ok(()) = self.announced_sources.changed() => {}
            Ok(()) = self.source_nodes.changed() => {}
            Ok(()) = self.mesh_identity.cluster.changed() => {}
            Ok(()) = self.mesh_identity.keys.changed() => {}
            else => std::future::pending().await,
        }
    }
}

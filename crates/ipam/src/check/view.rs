//! Views that are compared: the state of a node, and the objects of the API server.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::table::{Allocated, Key};

/// Pod that an attachment was made for, as the runtime said at ADD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod; `None` of runtimes that do not pass it.
    pub uid: Option<String>,
}

/// Reservation of addresses for an interface of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// The interface.
    pub key: Key,
    /// The addresses.
    pub allocated: Allocated,
    /// The pod; unknown for attachments of before the last start.
    pub owner: Option<Owner>,
    /// Whether a CNI operation of the container is under way, so that parts of it may be missing.
    pub busy: bool,
}

/// A pod's link as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLink {
    /// The interface, by the alias of the link.
    pub key: Key,
    /// Name of the end on the host.
    pub name: String,
    /// Addresses that the table of pods leads to it.
    pub addresses: Vec<IpAddr>,
}

/// An AddressBlock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownBlock {
    /// Name of the AddressBlock.
    pub name: String,
    /// Name of the pool, by the block's label.
    pub pool: String,
    /// Name of the node, by the block's label.
    pub node: String,
    /// Prefixes of the block.
    pub nets: Vec<IpNet>,
}

/// An AddressPool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPool {
    /// Name of the AddressPool.
    pub name: String,
    /// Prefixes of the pool's subnets.
    pub nets: Vec<IpNet>,
}

/// A Pod object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// The UIDs it goes by.
    pub uids: Vec<String>,
    /// Name of the pod's node.
    pub node: String,
    /// `status.podIPs`.
    pub addresses: Vec<IpAddr>,
    /// Whether addresses are expected of it: it has a network of its own and has not ended.
    pub has_network: bool,
}

impl KnownPod {
    /// Namespace and name, as people write them: `namespace/name`.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether an attachment was made for it. A pod made anew under the same name is another one.
    pub fn is(&self, owner: &Owner) -> bool {
        let same_life = owner.uid.as_ref().is_none_or(|uid| self.uids.contains(uid));
        self.namespace == owner.namespace && self.name == owner.name && same_life
    }
}

/// State of one node, as far as the node itself knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Name of the node.
    pub node: String,
    /// The allocation table.
    pub reservations: Vec<Reservation>,
    /// The kernel's links of pods.
    pub links: Vec<PodLink>,
    /// Single addresses in the table of pods that lead to no pod's link.
    pub stray: Vec<IpAddr>,
    /// Table 119.
    pub exported: Vec<IpNet>,
    /// The blocks of all nodes; `None` while the API server has not said.
    pub blocks: Option<Vec<KnownBlock>>,
    /// All pools; `None` while the API server has not said.
    pub pools: Option<Vec<KnownPool>>,
    /// The pods of this node; `None` while the API server has not said.
    pub pods: Option<Vec<KnownPod>>,
}

/// Objects of the API server, of all nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterView {
    /// Names of all Nodes.
    pub nodes: Vec<String>,
    /// All blocks.
    pub blocks: Vec<KnownBlock>,
    /// All pools.
    pub pools: Vec<KnownPool>,
    /// All pods.
    pub pods: Vec<KnownPod>,
}

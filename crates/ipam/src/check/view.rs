//! What is compared: what a node knows, and what the API server has.

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

/// What an interface of a container has reserved.
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
    /// Its name.
    pub name: String,
    /// Its pool, by its label.
    pub pool: String,
    /// Its node, by its label.
    pub node: String,
    /// Its prefixes.
    pub nets: Vec<IpNet>,
}

/// An AddressPool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPool {
    /// Its name.
    pub name: String,
    /// Its subnets.
    pub nets: Vec<IpNet>,
}

/// A Pod object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The UIDs it goes by.
    pub uids: Vec<String>,
    /// Its node.
    pub node: String,
    /// `status.podIPs`.
    pub addresses: Vec<IpAddr>,
    /// Whether addresses are expected of it: it has a network of its own and has not ended.
    pub has_network: bool,
}

impl KnownPod {
    /// As people name it.
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether an attachment was made for it. A pod made anew under the same name is another one.
    pub fn is(&self, owner: &Owner) -> bool {
        let same_life = owner.uid.as_ref().is_none_or(|uid| self.uids.contains(uid));
        self.namespace == owner.namespace && self.name == owner.name && same_life
    }
}

/// What one node knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Its name.
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

/// What the API server has of all nodes.
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

//! Masquerading of connections that pods open to hosts outside of the cluster: these have no route back to a pod's address.
//!
//! `nft list table inet fairlead_masquerade` prints, with the same for IPv6:
//!
//! ```text
//! oifgroup 116 accept
//! oifname "wire_kube" accept (and the same for tunnels inside of the location)
//! ip daddr @cluster_ipv4 accept
//! ip saddr @pods_ipv4 masquerade fully-random
//! ```
//!
//! Packets to pods of this node and into the mesh keep their source, and so do those to a cluster address by any other way. A
//! Service's address has been replaced by a pod's before (kube-proxy, hook prerouting). Source addresses of egress gateways stay, since they lie
//! in no pool. The hook sees the first packet of a connection only.

use std::collections::BTreeMap;

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::names::{LINK_GROUP_PODS, NFT_TABLE_MASQUERADE};
use fairlead_netlink::Result;
use fairlead_netlink::nftables::{AddressEnd, Chain, Comparison, Expression, Hook, Meta, Rule, Table};
use ipnet::IpNet;

use crate::nft_table::{self, Applied};

/// `srcnat` (`NF_IP_PRI_NAT_SRC`).
const PRIORITY: i32 = 100;

/// Sources whose packets are masqueraded, and destinations for which they are not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Masquerade {
    /// Prefixes of the pods, in any order; they may overlap.
    pub pods: Vec<IpNet>,
    /// Destinations inside of the cluster, and others that see pods' addresses; in any order, they may overlap.
    pub cluster: Vec<IpNet>,
    /// Names of the mesh's device, and of tunnels beside it.
    pub mesh_devices: Vec<String>,
}

/// Brings the table to what it should be, or removes it where nothing is to be masqueraded. Sends nothing when nothing
/// differs.
///
/// # Errors
/// The kernel refuses.
pub fn apply(wanted: &Masquerade) -> Result<Option<Applied>> {
    if wanted.pods.is_empty() {
        return nft_table::remove(NFT_TABLE_MASQUERADE).map(|()| None);
    }
    nft_table::apply(&table(wanted)).map(Some)
}

/// The table that should be.
fn table(wanted: &Masquerade) -> Table {
    let accept = |mut expressions: Vec<Expression>| {
        expressions.push(Expression::Accept);
        Rule(expressions)
    };
    let group = LINK_GROUP_PODS.to_ne_bytes().to_vec();
    let to_pod =
        vec![Expression::LoadMeta(Meta::OutputInterfaceGroup), Expression::Compare(Comparison::Equal, group)];
    let into_mesh = wanted
        .mesh_devices
        .iter()
        .map(|device| vec![Expression::LoadMeta(Meta::OutputInterface), Expression::is_interface(device)]);
    let mut rules: Vec<Rule> = [to_pod].into_iter().chain(into_mesh).map(accept).collect();
    let mut sets = BTreeMap::new();
    for (family, cluster, pods) in
        [(IpFamily::V4, "cluster_ipv4", "pods_ipv4"), (IpFamily::V6, "cluster_ipv6", "pods_ipv6")]
    {
        rules.push(accept(Expression::address_in(family, AddressEnd::Destination, cluster)));
        let mut hide = Expression::address_in(family, AddressEnd::Source, pods);
        hide.push(Expression::Masquerade);
        rules.push(Rule(hide));
        sets.insert(cluster.to_owned(), IntervalSet::from_prefixes(family, &wanted.cluster));
        sets.insert(pods.to_owned(), IntervalSet::from_prefixes(family, &wanted.pods));
    }
    let chain = Chain { hook: Hook::NatPostrouting, priority: PRIORITY, rules };
    let chains = BTreeMap::from([("postrouting".to_owned(), chain)]);
    Table {
        name: NFT_TABLE_MASQUERADE.to_owned(),
        sets,
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains,
    }
}

//! Masquerading of connections that pods open to hosts outside of the cluster: these have no route back to a pod's address.
//!
//! `nft list table inet fairlead_masquerade` prints, with the same for IPv6:
//!
//! ```text
//! oifgroup 116 accept
//! oifname "wire_kube" accept (and the same for tunnels inside of the location)
//! meta mark & 0x00000060 == 0x00000040 accept
//! ip daddr @cluster_ipv4 accept
//! ip saddr @pods_ipv4 masquerade fully-random
//! ```
//!
//! and in a chain of the hook postrouting behind it, after the same four rules,
//!
//! ```text
//! ip saddr @pods_ipv4 ct state & invalid == invalid counter drop
//! ```
//!
//! since sources are translated by connection: a packet that belongs to none, such as the reset of a connection that has left by a gateway before,
//! would leave with the pod's address.
//!
//! Packets to pods of this node and into the mesh keep their source, and so do those to a cluster address by any other way. In the mesh is also
//! what its mark leads past its device: neighbours of the location, which have a plain route. What is not marked goes past the mesh although it is for a
//! node (`spec.routing`: prefixes that are excluded, subnets or nodes that are bypassed), through networks that may let no pod's address pass. A
//! Service's address has been replaced by a pod's before (kube-proxy, hook prerouting). Source addresses of egress gateways stay, since they lie
//! in no pool. The hook sees the first packet of a connection only.
//!
//! A kernel translates the packets of a connection only while there is a chain for translation and an expression that needs connection
//! tracking. So where nothing is to be masqueraded any more the table stays, without pods, until the last connection of a pod has ended that is
//! translated: without it, that connection would be cut and its packets would leave with the pod's address.

use std::collections::BTreeMap;

use fairlead_address::{IntervalSet, IpFamily, PrefixSet};
use fairlead_api::names::{LINK_GROUP_PODS, MARK_MASK, MARK_TO_WIREGUARD, NFT_TABLE_MASQUERADE};
use fairlead_netlink::conntrack::{ConnectionTable, Flow};
use fairlead_netlink::nftables::{
    self, AddressEnd, Chain, Comparison, Expression, Hook, Meta, Rule, STATE_INVALID, Table,
};
use fairlead_netlink::{Family, Result, Socket};
use ipnet::IpNet;

use crate::nft_table::{self, Applied};

/// `TCP_CONNTRACK_TIME_WAIT`, `TCP_CONNTRACK_CLOSE` (`linux/netfilter/nf_conntrack_tcp.h`).
const TCP_ENDED: [u8; 2] = [7, 8];
/// `srcnat` (`NF_IP_PRI_NAT_SRC`).
const PRIORITY: i32 = 100;
/// Behind it: what is translated has another source there.
const PRIORITY_UNTRANSLATED: i32 = 101;

/// Names of the sets of a family: destinations of the cluster, and pods.
const FAMILIES: [(IpFamily, &str, &str); 2] =
    [(IpFamily::V4, "cluster_ipv4", "pods_ipv4"), (IpFamily::V6, "cluster_ipv6", "pods_ipv6")];

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

/// Brings the table to what it should be, or removes it where nothing is to be masqueraded and no connection is. Sends nothing when
/// nothing differs.
///
/// # Errors
/// The kernel refuses.
pub fn apply(wanted: &Masquerade) -> Result<Option<Applied>> {
    if wanted.pods.is_empty() && !is_in_use(wanted)? {
        return nft_table::remove(NFT_TABLE_MASQUERADE).map(|()| None);
    }
    nft_table::apply(&table(wanted)).map(Some)
}

/// Whether the table is there, and a connection of a pod is translated.
fn is_in_use(wanted: &Masquerade) -> Result<bool> {
    if nftables::read(&mut Socket::open(Family::Netfilter)?, NFT_TABLE_MASQUERADE)?.is_none() {
        return Ok(false);
    }
    let translated = ConnectionTable::open()?.translated()?;
    // Prefixes of all pods are among those of the cluster.
    let cluster: PrefixSet = wanted.cluster.iter().collect();
    Ok(translated.iter().any(|flow| !is_over(flow) && cluster.contains(flow.original.source)))
}

/// Whether the connection has ended, and the kernel only waits to forget it.
fn is_over(flow: &Flow) -> bool {
    flow.tcp.is_some_and(|tcp| TCP_ENDED.contains(&tcp.state))
}

/// The table that should be.
fn table(wanted: &Masquerade) -> Table {
    let untranslated = [&Expression::state_has(STATE_INVALID)[..], &[Expression::Counter, Expression::Drop]];
    let chains = [
        ("postrouting", Hook::NatPostrouting, PRIORITY, vec![Expression::Masquerade]),
        ("untranslated", Hook::FilterPostrouting, PRIORITY_UNTRANSLATED, untranslated.concat()),
    ];
    let chains = chains.map(|(name, hook, priority, verdict)| {
        (name.to_owned(), Chain { hook, priority, rules: rules(wanted, &verdict) })
    });
    let sets = FAMILIES.into_iter().flat_map(|(family, cluster, pods)| {
        let set = |name: &str, prefixes| (name.to_owned(), IntervalSet::from_prefixes(family, prefixes));
        [set(cluster, &wanted.cluster), set(pods, &wanted.pods)]
    });
    Table {
        name: NFT_TABLE_MASQUERADE.to_owned(),
        sets: sets.collect(),
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains: chains.into(),
    }
}

/// Rules that leave alone what keeps its source, and end with what happens to the other packets of pods.
fn rules(wanted: &Masquerade, verdict: &[Expression]) -> Vec<Rule> {
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
    let is_marked =
        (!wanted.mesh_devices.is_empty()).then(|| Expression::mark_is(MARK_TO_WIREGUARD, MARK_MASK));
    let mut rules: Vec<Rule> = [to_pod].into_iter().chain(into_mesh).chain(is_marked).map(accept).collect();
    for (family, cluster, pods) in FAMILIES {
        rules.push(accept(Expression::address_in(family, AddressEnd::Destination, cluster)));
        let mut others = Expression::address_in(family, AddressEnd::Source, pods);
        others.extend_from_slice(verdict);
        rules.push(Rule(others));
    }
    rules
}

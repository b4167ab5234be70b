//! Addresses inside of the cluster, which are no endpoints of nodes.

use std::borrow::Borrow;
use std::fmt;
use std::net::IpAddr;

use fairlead_address::is_reachable;
use fairlead_cluster::caches::Cache;
use fairlead_topology::Member;
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::ServiceCIDR;

/// Reason why no peer can reach a node at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnusableAddress {
    /// Loopback, link-local, multicast, unspecified or reserved.
    NotReachable,
    /// An address inside a block, whatever a node says.
    Pod,
    /// An address inside a network of pods of a Node.
    PodNetwork,
    /// An address from which Services get theirs: each node translates it itself.
    Service,
}

impl UnusableAddress {
    /// Reason why no peer can reach a node there; `None` if a node may be there.
    pub fn of<M: Borrow<Member>>(address: IpAddr, members: &[M], services: &[IpNet]) -> Option<Self> {
        let address = address.to_canonical();
        let members = || members.iter().map(|member| -> &Member { member.borrow() });
        let mut blocks = members().flat_map(|member| &member.blocks);
        if !is_reachable(address) {
            Some(Self::NotReachable)
        } else if services.iter().any(|range| range.contains(&address)) {
            Some(Self::Service)
        } else {
            let is_pod = blocks.any(|block| block.contains(&address)).then_some(Self::Pod);
            let mut networks = members().flat_map(|member| &member.pod_networks);
            is_pod.or_else(|| networks.any(|it| it.contains(&address)).then_some(Self::PodNetwork))
        }
    }
}

impl fmt::Display for UnusableAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotReachable => "an address that packets from other hosts cannot come to",
            Self::Pod => "in an AddressBlock: an address of pods",
            Self::PodNetwork => "in spec.podCIDRs of a Node: an address of pods",
            Self::Service => "in a ServiceCIDR: an address of Services",
        })
    }
}

/// The prefixes of all ServiceCIDRs, in order. One that is being deleted counts as long as it exists. The API server checks their
/// spelling.
pub fn service_prefixes(ranges: &Cache<ServiceCIDR>) -> Vec<IpNet> {
    let ranges = ranges.store.state();
    let texts = ranges.iter().filter_map(|range| range.spec.as_ref()?.cidrs.as_ref()).flatten();
    let mut prefixes: Vec<IpNet> = texts.filter_map(|text| text.parse().ok()).collect();
    prefixes.sort_unstable();
    prefixes.dedup();
    prefixes
}

//! Assignment of mesh addresses to nodes. Pure.
//!
//! One of each family: of IPv6 that which KubeSpan derives from the cluster and the node's first link-layer address, of IPv4 one of
//! `spec.meshCIDR`. What a node has it keeps, whatever joins later; so no node can take the address of another, whatever it says.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use fairlead_address::InterfaceId;
use fairlead_keys::PublicKey;
use fairlead_wire::discovery::id_of_key;
use ipnet::{Ipv4Net, Ipv6Net};
use jiff::Timestamp;

/// Time for which the IPv4 address of a deleted node is kept for it.
pub(crate) const KEEP: Duration = Duration::from_secs(24 * 3600);
/// Most addresses of deleted nodes that are kept: the newest.
const MAX_KEPT: usize = 1024;

/// A node of the mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Applicant {
    pub(crate) name: String,
    /// Seconds at which its object was created, and its UID: the order of age.
    pub(crate) since: (i64, String),
    /// Addresses that the node has on the mesh now.
    pub(crate) present: Vec<IpAddr>,
    /// Interface identifier from the first link-layer address of the node; `None` if it has none.
    pub(crate) interface_id: Option<InterfaceId>,
    /// Whether the node has reported its status; before that, a missing `interface_id` means nothing.
    pub(crate) has_reported: bool,
    pub(crate) public_key: Option<PublicKey>,
}

/// An address that is kept for a node that was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) node: String,
    pub(crate) ip: Ipv4Addr,
    pub(crate) until: Timestamp,
}

/// Ranges from which addresses are assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Space {
    /// Prefix of the cluster; `None` while the identifier of the cluster is not known: nodes keep their addresses until then.
    pub(crate) ipv6: Option<Ipv6Net>,
    /// `spec.meshCIDR`; `None` where no IPv4 addresses are wanted.
    pub(crate) ipv4: Option<Ipv4Net>,
}

/// Result of an assignment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Assigned {
    /// Addresses by node name, IPv6 first.
    pub(crate) addresses: BTreeMap<String, Vec<IpAddr>>,
    pub(crate) kept: Vec<Kept>,
    /// Nodes for which no IPv4 address is left.
    pub(crate) without: Vec<String>,
}

/// Decides. `departed` are the addresses of nodes that were deleted since the last time, `avoided` those that nodes have elsewhere.
pub(crate) fn assign(
    applicants: &[Applicant],
    space: Space,
    kept: &[Kept],
    departed: &BTreeMap<String, Ipv4Addr>,
    avoided: &BTreeSet<IpAddr>,
    now: Timestamp,
) -> Assigned {
    let mut by_age: Vec<&Applicant> = applicants.iter().collect();
    by_age.sort_by_key(|applicant| &applicant.since);
    let kept = still_kept(kept, departed, space, now);
    let ipv6 = ipv6(&by_age, space.ipv6);
    let ipv4 = space.ipv4.map(|subnet| ipv4(&by_age, subnet, &kept, avoided)).unwrap_or_default();
    let of = |name: &str| {
        let ipv6 = ipv6.get(name).copied().map(IpAddr::from);
        ipv6.into_iter().chain(ipv4.get(name).copied().map(IpAddr::from)).collect()
    };
    let is_without = |applicant: &&&Applicant| space.ipv4.is_some() && !ipv4.contains_key(&*applicant.name);
    let taken: BTreeSet<Ipv4Addr> = ipv4.values().copied().collect();
    Assigned {
        addresses: by_age.iter().map(|applicant| (applicant.name.clone(), of(&applicant.name))).collect(),
        without: by_age.iter().filter(is_without).map(|applicant| applicant.name.clone()).collect(),
        kept: kept.into_iter().filter(|kept| !taken.contains(&kept.ip)).collect(),
    }
}

fn still_kept(
    kept: &[Kept],
    departed: &BTreeMap<String, Ipv4Addr>,
    space: Space,
    now: Timestamp,
) -> Vec<Kept> {
    let Some(subnet) = space.ipv4 else { return Vec::new() };
    let until = now.checked_add(KEEP).unwrap_or(Timestamp::MAX);
    let new = departed.iter().map(|(node, ip)| Kept { node: node.clone(), ip: *ip, until });
    let old = kept.iter().filter(|kept| kept.until > now && !departed.contains_key(&kept.node)).cloned();
    let mut all: Vec<Kept> = old.chain(new).filter(|kept| subnet.contains(&kept.ip)).collect();
    all.sort_by(|a, b| (&a.until, &a.node).cmp(&(&b.until, &b.node)));
    let beyond = all.len().saturating_sub(MAX_KEPT);
    all.split_off(beyond)
}

fn ipv6(by_age: &[&Applicant], subnet: Option<Ipv6Net>) -> BTreeMap<String, Ipv6Addr> {
    let present = |applicant: &Applicant| {
        let all = applicant.present.iter().filter_map(|address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => Some(*address),
        });
        all.into_iter().find(|address| subnet.is_none_or(|subnet| subnet.contains(address)))
    };
    let mut addresses = BTreeMap::new();
    let mut taken = BTreeSet::new();
    let mut give = |applicant: &Applicant, address: Option<Ipv6Addr>| match address {
        Some(address) if !addresses.contains_key(&applicant.name) && taken.insert(address) => {
            addresses.insert(applicant.name.clone(), address);
        }
        _ => {}
    };
    by_age.iter().for_each(|applicant| give(applicant, present(applicant)));
    if let Some(subnet) = subnet {
        let address = |id: InterfaceId| (!id.is_zero()).then(|| id.address_in(subnet));
        for applicant in by_age.iter().filter(|applicant| applicant.has_reported) {
            give(applicant, applicant.interface_id.and_then(address));
            give(applicant, applicant.public_key.and_then(|key| address(InterfaceId(id_of_key(&key.0)))));
        }
    }
    addresses
}

fn ipv4(
    by_age: &[&Applicant],
    subnet: Ipv4Net,
    kept: &[Kept],
    avoided: &BTreeSet<IpAddr>,
) -> BTreeMap<String, Ipv4Addr> {
    let (first, count) = hosts(subnet);
    let is_host = |address: Ipv4Addr| u64::from(address.to_bits().wrapping_sub(first)) < count;
    let mut addresses = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for applicant in by_age {
        let present = applicant.present.iter().find_map(|address| match address {
            IpAddr::V4(address) if is_host(*address) => Some(*address),
            _ => None,
        });
        if let Some(address) = present.filter(|address| taken.insert(*address)) {
            addresses.insert(applicant.name.clone(), address);
        }
    }
    for applicant in by_age {
        if addresses.contains_key(&applicant.name) {
            continue;
        }
        let own = kept.iter().find(|kept| kept.node == applicant.name).map(|kept| kept.ip);
        let is_kept = |address: &Ipv4Addr| kept.iter().any(|kept| kept.ip == *address);
        let is_free = |address: &Ipv4Addr| {
            is_host(*address) && !taken.contains(address) && !avoided.contains(&IpAddr::V4(*address))
        };
        // From a place that follows from the name: a node that comes back has a good chance to find its own.
        let start = hash(&applicant.name) % count.max(1);
        let place = |step: u64| {
            let offset = start.wrapping_add(step) % count.max(1);
            Ipv4Addr::from_bits(first.wrapping_add(u32::try_from(offset).unwrap_or_default()))
        };
        let found = own
            .filter(is_free)
            .or_else(|| (0..count).map(place).find(|address| is_free(address) && !is_kept(address)))
            .or_else(|| (0..count).map(place).find(is_free));
        if let Some(address) = found {
            taken.insert(address);
            addresses.insert(applicant.name.clone(), address);
        }
    }
    addresses
}

/// The first address that a host of the subnet may have, and how many there are.
fn hosts(subnet: Ipv4Net) -> (u32, u64) {
    let network = subnet.network().to_bits();
    let size = 1u64 << (32 - u32::from(subnet.prefix_len()));
    match size {
        1 | 2 => (network, size),
        _ => (network.wrapping_add(1), size.saturating_sub(2)),
    }
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;

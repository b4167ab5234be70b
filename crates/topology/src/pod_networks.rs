//! Networks of pods that another plugin gives addresses (`spec.podCIDRs` of Nodes), where the mesh is to carry them.
//!
//! The controller copies them from Nodes, where no kubelet may set them (`deploy/policy`). So they go before addresses that nodes say are
//! theirs: no other node gets packets for its pods. Blocks go before them, and so do single addresses that administrators grant.

use std::collections::BTreeSet;

use fairlead_address::PrefixSet;
use ipnet::IpNet;

use crate::conflicts::{Entry, Tier};
use crate::external::usable;
use crate::member::Member;
use crate::policy::Policy;
use crate::problem::Problem;
use crate::site::Granularity;

/// Parts of the member's networks that may be compared with prefixes of others. Reserved prefixes are cut out. A node without a key has
/// them too: packets to its pods are dropped.
pub(crate) fn entries(
    owner: usize,
    member: &Member,
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> Vec<Entry> {
    let is_node = member.external.is_none() && !member.discovery.is_only_source;
    if !(policy.includes_pod_networks && is_node) || member.pod_networks.is_empty() {
        return Vec::new();
    }
    let (services, reserved) = policy.reserved.sets();
    let mut entries = Vec::new();
    for prefix in member.pod_networks.iter().map(IpNet::trunc) {
        match usable(prefix, policy.is_granted(member, &prefix), &reserved, &services) {
            Ok(parts) => entries.extend(parts.into_iter().map(|prefix| Entry {
                prefix,
                owner,
                tier: Tier::PodNetwork,
                is_held: is_held(member, &prefix, policy),
            })),
            Err(why) => {
                problems.insert(Problem::PodNetworkRefused { node: member.name.clone(), prefix, why });
            }
        }
    }
    entries
}

/// Whether the device has the network at this member's key, or it is this node's own: of two nodes with one network, such a one keeps it.
fn is_held(member: &Member, prefix: &IpNet, policy: &Policy) -> bool {
    // Behind gateways the device has the prefixes of many members at one key.
    let keeps_holders = !matches!(policy.granularity, Granularity::Location { .. });
    let held = member.public_key.and_then(|key| policy.held.get(&key)).filter(|_| keeps_holders);
    member.name == policy.own || held.is_some_and(|held| held.contains(prefix))
}

/// Networks of its pods that this node keeps, without what stronger entries of others take out of them.
pub(crate) fn kept(own: &[&Entry], foreign: &[&Entry]) -> Vec<IpNet> {
    let own: PrefixSet = own.iter().map(|entry| &entry.prefix).collect();
    let stronger = foreign.iter().filter(|entry| entry.tier > Tier::PodNetwork).map(|entry| &entry.prefix);
    own.subtract(&stronger.collect()).prefixes().collect()
}

#[cfg(test)]
mod tests;

//! Prefixes of hosts beside nodes (`kilo.squat.ai/allowed-location-ips`): others reach them through the node, which masquerades.
//!
//! Administrators name them on the Node, and no kubelet may, so they go before ranges that nodes and Peers claim. They never take an
//! address of a node or a block of pods, and hosts of a network that a node is connected to are reached there.

use std::collections::BTreeSet;

use fairlead_address::PrefixSet;
use ipnet::IpNet;

use crate::conflicts::{Entry, Tier};
use crate::external::usable;
use crate::gateways::location;
use crate::member::Member;
use crate::policy::Policy;
use crate::problem::Problem;
use crate::site::Granularity;

/// Parts of the member's prefixes that may be compared with those of others. Reserved prefixes are cut out.
pub(crate) fn entries(
    owner: usize,
    member: &Member,
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> Vec<Entry> {
    let networks = networks(member);
    if networks.is_empty() || member.public_key.is_none() {
        return Vec::new();
    }
    let (services, reserved) = policy.reserved.sets();
    let mut entries = Vec::new();
    for prefix in networks.iter().map(IpNet::trunc) {
        let is_granted = policy.is_granted(member, &prefix);
        match usable(prefix, is_granted, &reserved, &services) {
            Ok(parts) => entries.extend(parts.into_iter().map(|prefix| Entry {
                prefix,
                owner,
                tier: Tier::SiteRange,
                is_held: false,
            })),
            Err(why) => {
                problems.insert(Problem::SitePrefixRefused { node: member.name.clone(), prefix, why });
            }
        }
    }
    entries
}

/// The prefixes into which this node masquerades: its own, and as a gateway of its location those of the others there, which it may
/// be connected to. Sorted. Blocks and addresses of nodes within them are left out: whoever has one is no host beside a node.
pub(crate) fn masqueraded(ranked: &[&Member], entries: &[Entry], policy: &Policy) -> Vec<IpNet> {
    let own = ranked.iter().find(|member| member.name == policy.own);
    let own_location = own
        .and_then(|own| location(own))
        .filter(|_| matches!(policy.granularity, Granularity::Location { .. }));
    let is_here = |entry: &&Entry| {
        let owner = ranked.get(entry.owner);
        let is_near = |owner: &&Member| own_location.is_some() && location(owner) == own_location;
        entry.tier == Tier::SiteRange && owner.is_some_and(|owner| owner.name == policy.own || is_near(owner))
    };
    let here: Vec<IpNet> = entries.iter().filter(is_here).map(|entry| entry.prefix).collect();
    if here.is_empty() {
        return here;
    }
    let stronger = entries.iter().filter(|entry| entry.tier > Tier::SiteRange).map(|entry| &entry.prefix);
    let here = here.iter().collect::<PrefixSet>().subtract(&stronger.collect());
    here.prefixes().collect()
}

fn networks(member: &Member) -> &[IpNet] {
    let is_node = member.external.is_none() && !member.discovery.is_only_source;
    member.site.as_ref().filter(|_| is_node).map(|site| site.networks.as_slice()).unwrap_or_default()
}

#[cfg(test)]
mod tests;

//! Claims of nodes: which of them count, and how strongly.
//!
//! A node's token can announce any single address (`deploy/policy`). So an address counts only if the Node object has it, or an
//! administrator granted it, or the controller gave it to the node on the mesh, or it is a source address of egress gateways of which one is on the node. Where the controller has not copied yet what the Node object says, it counts less than all others.

use std::collections::BTreeSet;

use fairlead_address::usable_parts;
use fairlead_keys::PublicKey;
use ipnet::IpNet;

use crate::conflicts::{Entry, Tier};
use crate::member::Member;
use crate::policy::Policy;
use crate::prefixes;
use crate::problem::{Problem, Refusal};
use crate::site::Granularity;

/// The shortest prefix a member may have without a grant: `0.0.0.0/0` and its halves would capture what belongs to others.
pub(crate) const MIN_LENGTH: u8 = 8;

/// The claims of a member that count and its addresses on the mesh, as entries of `owner`. Claims are bound to a key. Those of external members were judged before. The
/// peer `carrier` has the prefixes of the member in place of its own.
pub(crate) fn entries(
    owner: usize,
    member: &Member,
    carrier: Option<PublicKey>,
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> Vec<Entry> {
    let Some(key) = member.public_key else { return Vec::new() };
    // Behind gateways the device has the prefixes of many members at one key.
    let keeps_holders = !matches!(policy.granularity, Granularity::Location { .. });
    let held = [Some(key), carrier].map(|key| policy.held.get(&key?).filter(|_| keeps_holders));
    let is_own = member.name == policy.own;
    let mesh_addresses = member.addresses.mesh.iter().copied().map(|address| Entry {
        prefix: IpNet::from(address),
        owner,
        tier: if member.discovery.is_only_source { Tier::DiscoveredHostClaim } else { Tier::MeshAddress },
        is_held: false,
    });
    let mut entries: Vec<Entry> = mesh_addresses.collect();
    for claim in &member.claims {
        let claim = claim.trunc();
        if let Some(problem) = refusal(member, claim, policy) {
            problems.insert(problem);
            continue;
        }
        let is_wide = claim.prefix_len() < MIN_LENGTH && policy.is_granted(member, &claim);
        let parts = if is_wide { usable_parts(claim) } else { vec![claim] };
        entries.extend(parts.into_iter().map(|prefix| Entry {
            prefix,
            owner,
            tier: tier(member, &prefix, policy),
            is_held: !member.discovery.is_only_source
                && (is_own || held.iter().flatten().any(|held| held.contains(&prefix))),
        }));
    }
    entries
}

/// Reason why a claim is left out; `None` if it counts.
fn refusal(member: &Member, prefix: IpNet, policy: &Policy) -> Option<Problem> {
    if member.name == policy.own || member.external.is_some() || policy.is_granted(member, &prefix) {
        return None;
    }
    if policy.source_tier(member, &prefix).is_some() {
        return None;
    }
    let node = || member.name.clone();
    if prefix.prefix_len() < MIN_LENGTH {
        return Some(Problem::ClaimTooWide { node: node(), prefix });
    }
    let is_told = member.discovery.is_only_source && prefixes::is_host(&prefix);
    if let Some(why) = is_told.then(|| needed_by_others(&prefix, policy)).flatten() {
        return Some(Problem::ClaimRefused { node: node(), prefix, why });
    }
    let of_node = member
        .addresses
        .node
        .as_ref()
        .filter(|_| prefixes::is_host(&prefix) && !member.discovery.is_only_source)?;
    (!of_node.contains(&prefix.addr())).then(|| Problem::ClaimNotOfNode { node: node(), prefix })
}

/// Reason why a member that only discovery services know may not have this address; `None` if it may. A stranger with the cluster's secret
/// could take it from all nodes.
fn needed_by_others(address: &IpNet, policy: &Policy) -> Option<Refusal> {
    let is_in = |prefixes: &[IpNet]| prefixes.iter().any(|prefix| prefix.contains(address));
    is_in(&policy.reserved.services)
        .then_some(Refusal::Service)
        .or_else(|| is_in(&policy.reserved.hosts).then_some(Refusal::Reserved))
}

fn tier(member: &Member, prefix: &IpNet, policy: &Policy) -> Tier {
    let is_host = prefixes::is_host(prefix);
    let is_granted = policy.is_granted(member, prefix);
    let source = policy.source_tier(member, prefix).filter(|_| member.name != policy.own && !is_granted);
    if let Some(tier) = source {
        return tier;
    }
    let has_node_address =
        || member.addresses.node.as_ref().is_some_and(|of_node| of_node.contains(&prefix.addr()));
    match (is_host, member.external.is_some()) {
        (true, _) if member.discovery.is_only_source => Tier::DiscoveredHostClaim,
        (false, _) if member.discovery.is_only_source => Tier::DiscoveredWideClaim,
        (true, _) if is_granted || member.name == policy.own => Tier::GrantedHost,
        (false, _) if is_granted => Tier::GrantedRange,
        (true, false) if has_node_address() => Tier::NodeAddress,
        (true, _) => Tier::HostClaim,
        (false, true) => Tier::ExternalRange,
        (false, false) => Tier::WideClaim,
    }
}

#[cfg(test)]
mod tests;

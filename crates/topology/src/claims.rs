//! Claims of nodes: which of them count, and how strongly.
//!
//! A node's token can announce any single address (`deploy/policy`). So an address counts only if the Node object has it, or an
//! administrator granted it, or the controller gave it to the node on the mesh, or it is a source address of egress gateways of which one is on the node. Until
//! the controller has copied what the Node object says, an address counts only where this node's device has it at the member's key already: then
//! less than all others, and not if others need it.

use std::collections::{BTreeMap, BTreeSet};

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
        let has = |prefix: &IpNet| held.iter().flatten().any(|held| held.contains(prefix));
        if let Some(problem) = refusal(member, claim, has(&claim), policy) {
            problems.insert(problem);
            continue;
        }
        let is_wide = claim.prefix_len() < MIN_LENGTH && policy.is_granted(member, &claim);
        let parts = if is_wide { usable_parts(claim) } else { vec![claim] };
        entries.extend(parts.into_iter().map(|prefix| Entry {
            prefix,
            owner,
            tier: tier(member, &prefix, policy),
            is_held: !member.discovery.is_only_source && (is_own || has(&prefix)),
        }));
    }
    entries
}

/// Names both nodes where an address that was refused is one that another node keeps: of two nodes with one InternalIP the controller
/// copies that of the first alone. `owned` are the prefixes that each member keeps, and `names` its name, by index.
pub(crate) fn name_holders(
    problems: &mut BTreeSet<Problem>,
    owned: &[Vec<IpNet>],
    names: &[&str],
    policy: &Policy,
) {
    let refused = |problem: &Problem| match problem {
        // A source address of egress gateways is no InternalIP.
        Problem::ClaimNotOfNode { prefix, .. } => {
            Some(*prefix).filter(|prefix| !policy.sources.contains_key(&prefix.addr()))
        }
        _ => None,
    };
    let prefixes: BTreeSet<IpNet> = problems.iter().filter_map(refused).collect();
    if prefixes.is_empty() {
        return;
    }
    let kept =
        owned.iter().zip(names).flat_map(|(owned, name)| owned.iter().map(move |prefix| (*prefix, *name)));
    let holders: BTreeMap<IpNet, &str> = kept.filter(|(prefix, _)| prefixes.contains(prefix)).collect();
    let named = |problem| match problem {
        Problem::ClaimNotOfNode { node, prefix } => match holders.get(&prefix) {
            Some(owner) => {
                let mut nodes = vec![node, (*owner).to_owned()];
                nodes.sort();
                Problem::ClaimedTwice { prefix, nodes, owner: (*owner).to_owned() }
            }
            None => Problem::ClaimNotOfNode { node, prefix },
        },
        other => other,
    };
    *problems = std::mem::take(problems).into_iter().map(named).collect();
}

/// Reason why a claim is left out; `None` if it counts. `is_held` says whether this node's device has it at the member's key.
pub(crate) fn refusal(member: &Member, prefix: IpNet, is_held: bool, policy: &Policy) -> Option<Problem> {
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
    if !prefixes::is_host(&prefix) {
        return None;
    }
    let needed = || needed_by_others(&prefix, policy);
    let refused = |why| Problem::ClaimRefused { node: node(), prefix, why };
    match &member.addresses.node {
        _ if member.discovery.is_only_source => needed().map(refused),
        Some(of_node) if !of_node.contains(&prefix.addr()) => {
            Some(Problem::ClaimNotOfNode { node: node(), prefix })
        }
        // A node may be a gateway or a server of the API, and is no Service.
        Some(_) => needed().filter(|why| *why == Refusal::Service).map(refused),
        None if member.addresses.is_unconfirmed && !(is_held && needed().is_none()) => {
            Some(Problem::ClaimNotYetConfirmed { node: node(), prefix })
        }
        None => None,
    }
}

/// Reason why a member that nothing in the cluster names as its holder may not have this address; `None` if it may. A stranger with the
/// cluster's secret could take it from all nodes.
fn needed_by_others(address: &IpNet, policy: &Policy) -> Option<Refusal> {
    let is_in = |prefixes: &[IpNet]| prefixes.iter().any(|prefix| prefix.contains(address));
    is_in(&policy.reserved.services)
        .then_some(Refusal::Service)
        .or_else(|| is_in(&policy.reserved.hosts).then_some(Refusal::Reserved))
        .or_else(|| is_in(&policy.reserved.name_servers).then_some(Refusal::NameServer))
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

//! Admission of external members, before any prefix is compared: no key of another member, and no prefix that is reserved or too
//! wide.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_address::{PrefixSet, usable_parts};
use fairlead_keys::PublicKey;
use ipnet::IpNet;

use crate::claims::MIN_LENGTH;
use crate::member::Member;
use crate::policy::Policy;
use crate::prefixes;
use crate::problem::{Problem, Refusal};

/// The external members that take part, in the order in which they joined, with the claims that may be compared. What lies inside a
/// claim and is reserved is cut out of it.
pub(crate) fn admitted(
    members: &[&Member],
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> Vec<Member> {
    let mut externals: Vec<&Member> =
        members.iter().copied().filter(|member| member.external.is_some()).collect();
    if externals.is_empty() {
        return Vec::new();
    }
    externals.sort_by_key(|member| (member.since.is_none(), &member.since, &member.name));
    let nodes = members.iter().filter(|member| member.external.is_none());
    let mut keys: BTreeMap<PublicKey, &str> =
        nodes.filter_map(|node| Some((node.public_key?, node.name.as_str()))).collect();
    let (services, reserved) = policy.reserved.sets();
    let mut admitted = Vec::new();
    for member in externals {
        let Some(key) = member.public_key else { continue };
        if let Some(other) = keys.get(&key) {
            let other = (*other).to_owned();
            problems.insert(Problem::ExternalKeyTaken { node: member.name.clone(), other });
            continue;
        }
        keys.insert(key, &member.name);
        let claims = member.claims.iter().map(IpNet::trunc).flat_map(|prefix| {
            let is_granted = policy.is_granted(member, &prefix);
            usable(prefix, is_granted, &reserved, &services).unwrap_or_else(|why| {
                let node = member.name.clone();
                problems.insert(Problem::ExternalPrefixRefused { node, prefix, why });
                Vec::new()
            })
        });
        admitted.push(Member { claims: claims.collect(), blocks: Vec::new(), ..member.clone() });
    }
    admitted
}

/// Parts that are left of a prefix that an administrator named; `services` are the prefixes of Services among the reserved ones.
pub(crate) fn usable(
    prefix: IpNet,
    is_granted: bool,
    reserved: &PrefixSet,
    services: &PrefixSet,
) -> Result<Vec<IpNet>, Refusal> {
    if prefix.prefix_len() < MIN_LENGTH {
        let parts = usable_parts(prefix).into_iter().filter(|_| is_granted);
        let parts: Vec<IpNet> = parts.flat_map(|part| prefixes::without(part, reserved)).collect();
        return if parts.is_empty() { Err(Refusal::TooWide) } else { Ok(parts) };
    }
    if reserved.overlapping(prefix).is_none() {
        return Ok(vec![prefix]);
    }
    let rest = prefixes::without(prefix, reserved);
    match rest.is_empty() {
        false => Ok(rest),
        true if services.overlapping(prefix).is_some() => Err(Refusal::Service),
        true => Err(Refusal::Reserved),
    }
}

#[cfg(test)]
mod tests;

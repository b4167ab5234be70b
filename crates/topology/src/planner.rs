//! Plans again after each change, from what changed.
//!
//! Members concern each other only by what they name in common ([`Links`]). So the plan of all members is the union of the plans of the
//! groups that are linked, each together with this node, whose links join its own group. After a change, [`plan`] decides for the groups of
//! the members that changed, once as they were and once as they are, and the plan of all gets the difference. There is one set of
//! rules, that of [`plan`], and a change costs what its groups cost.
//!
//! All members are planned again where that is not possible: the policy is another one, apart from what the device has and what is
//! guarded, which changes whenever a node releases a block; this node has another key or place; it reaches others through gateways, so
//! that all are in one group; or the group is large.

mod cover;
mod links;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;

use fairlead_address::PrefixSet;
use fairlead_keys::PublicKey;
use ipnet::IpNet;

use self::links::Links;
use crate::locations::TunnelRoute;
use crate::member::{ByDiscovery, Keepalive, Member};
use crate::plan::{Plan, plan};
use crate::policy::Policy;
use crate::routes::BlockRoute;
use crate::site::Granularity;

/// Up to this many members are always planned as a group.
const SMALL_GROUP: usize = 64;
/// Largest share of all members that is planned as a group, as a divisor: of a larger group, all are planned again.
const LARGEST_SHARE: usize = 4;

/// Keeps the last plan, and from what it follows.
#[derive(Debug, Default)]
pub struct Planner {
    last: Option<Last>,
    full_plans: usize,
}

#[derive(Debug)]
struct Last {
    /// Members of the last plan, sorted by name.
    members: Vec<Arc<Member>>,
    policy: Policy,
    /// Links of `members`; made when the first change comes.
    links: Option<Links>,
    plan: Plan,
}

/// A member before and after a change: `None` where it is not a member.
pub type Change<'a> = (Option<&'a Arc<Member>>, Option<&'a Arc<Member>>);

impl Planner {
    /// Plans as [`plan`] does. Members that have not changed since the last time are to be the same allocations, and all are to be
    /// sorted by their names, as [`crate::merge`] leaves them; else all are planned.
    pub fn plan(&mut self, members: &[Arc<Member>], policy: Policy) -> &Plan {
        // A last plan that could not follow the change is of no use any more.
        let last = match self.last.take().and_then(|last| last.followed(members, &policy)) {
            Some(last) => Last { policy, ..last },
            None => {
                self.full_plans = self.full_plans.saturating_add(1);
                let plan = plan(members, &policy);
                Last { members: members.to_vec(), policy, links: None, plan }
            }
        };
        &self.last.insert(last).plan
    }

    /// Number of times that all members were planned.
    pub fn full_plans(&self) -> usize {
        self.full_plans
    }
}

impl Last {
    /// Follows the plan to these members and this policy; `None` if all have to be planned.
    fn followed(mut self, members: &[Arc<Member>], policy: &Policy) -> Option<Self> {
        let is_sorted = |members: &[Arc<Member>]| members.is_sorted_by(|a, b| a.name < b.name);
        if !self.policy.can_be_followed(policy) || policy.routes_on.is_some() || !is_sorted(members) {
            return None;
        }
        let changes: Vec<Change<'_>> = changes(&self.members, members).collect();
        let owns = [own(&self.members, policy), own(members, policy)];
        let stays = match owns {
            [Some(before), Some(after)] => is_placed_alike(before, after),
            [before, after] => before.is_none() && after.is_none(),
        };
        if !stays {
            return None;
        }
        let mut links = self.links.take().unwrap_or_else(|| Links::new(&self.members, policy));
        changes.iter().filter_map(|(_, after)| *after).for_each(|after| links.insert(after, policy));
        let concerned = changes.iter().filter(|(before, after)| !is_planned_alike(*before, *after));
        let concerned = concerned.flat_map(|(before, after)| [*before, *after]).flatten().cloned();
        let mut seeds: Vec<Arc<Member>> = concerned.collect();
        seeds.extend(other_holders(&self.policy, policy).iter().flat_map(|key| links.of_key(key)).cloned());
        let guarded = other_guarded(&self.policy, policy);
        seeds.extend(guarded.iter().flat_map(|prefix| links.overlapping(prefix)));
        if !(seeds.is_empty() && guarded.is_empty()) {
            seeds.extend(owns.into_iter().flatten().cloned());
            let most = members.len().div_ceil(LARGEST_SHARE).max(SMALL_GROUP);
            let group = links.group(seeds, policy, most)?;
            replan(&mut self.plan, &group, (&changes, &guarded), [&self.policy, policy])?;
        }
        changes.iter().filter_map(|(before, _)| *before).for_each(|before| links.remove(before, policy));
        drop(changes);
        self.members = members.to_vec();
        self.links = Some(links);
        Some(self)
    }
}

/// Plans a group that has no link to other members, neither before nor after the changes, and shares no prefix that is `guarded` only before or
/// only after them with others; `None` if that is not possible.
fn replan(
    all: &mut Plan,
    group: &[Arc<Member>],
    (changes, guarded): (&[Change<'_>], &[IpNet]),
    [policy_before, policy]: [&Policy; 2],
) -> Option<()> {
    let address = |member: &Arc<Member>| Arc::as_ptr(member).addr();
    let old: BTreeSet<usize> = changes.iter().filter_map(|(before, _)| *before).map(address).collect();
    let new: BTreeSet<usize> = changes.iter().filter_map(|(_, after)| *after).map(address).collect();
    let without = |others: &BTreeSet<usize>| -> Vec<&Member> {
        group.iter().filter(|member| !others.contains(&address(member))).map(|member| &**member).collect()
    };
    let before = plan(&sorted(without(&new)), policy_before);
    let after = plan(&sorted(without(&old)), policy);
    let is_location = matches!(policy.granularity, Granularity::Location { .. });
    if is_location && !(before.is_gateway && after.is_gateway) {
        return None;
    }
    let of_group = group.iter().flat_map(|member| links::prefixes(member, policy));
    let area: PrefixSet = of_group.chain(guarded.iter().copied()).collect();
    replace(all, &before, after, &area);
    Some(())
}

fn sorted(mut members: Vec<&Member>) -> Vec<&Member> {
    members.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    members
}

fn own<'a>(members: &'a [Arc<Member>], policy: &Policy) -> Option<&'a Arc<Member>> {
    let found = members.binary_search_by(|member| member.name.as_str().cmp(&policy.own)).ok()?;
    members.get(found)
}

/// Members that are other allocations than before, both lists sorted by name.
pub fn changes<'a>(before: &'a [Arc<Member>], after: &'a [Arc<Member>]) -> impl Iterator<Item = Change<'a>> {
    let order = |a: &&Arc<Member>, b: &&Arc<Member>| match Arc::ptr_eq(a, b) {
        true => Ordering::Equal,
        false => a.name.cmp(&b.name),
    };
    let is_other = |(before, after): &Change<'_>| match (before, after) {
        (Some(before), Some(after)) => !Arc::ptr_eq(before, after),
        _ => true,
    };
    joined(before.iter(), after.iter(), order).filter(is_other)
}

/// The keys at which the device has something else, if that counts.
fn other_holders(before: &Policy, after: &Policy) -> Vec<PublicKey> {
    // Behind gateways the device has the prefixes of many members at one key.
    if matches!(after.granularity, Granularity::Location { .. }) {
        return Vec::new();
    }
    let pairs = joined(before.held.iter(), after.held.iter(), |(a, _), (b, _)| a.cmp(b));
    let other = pairs.filter(|(before, after)| before != after);
    other.filter_map(|(before, after)| before.or(after)).map(|(key, _)| *key).collect()
}

/// The prefixes that are guarded before or after, and not both.
fn other_guarded(before: &Policy, after: &Policy) -> Vec<IpNet> {
    if before.guarded == after.guarded {
        return Vec::new();
    }
    let [before, after]: [BTreeSet<IpNet>; 2] =
        [before, after].map(|policy| policy.guarded.iter().copied().collect());
    before.symmetric_difference(&after).copied().collect()
}

/// Pairs of two sorted lists.
fn joined<T>(
    before: impl Iterator<Item = T>,
    after: impl Iterator<Item = T>,
    order: impl Fn(&T, &T) -> Ordering,
) -> impl Iterator<Item = (Option<T>, Option<T>)> {
    let mut before = before.peekable();
    let mut after = after.peekable();
    std::iter::from_fn(move || {
        let next = match (before.peek(), after.peek()) {
            (None, None) => return None,
            (None, Some(_)) => Ordering::Greater,
            (Some(_), None) => Ordering::Less,
            (Some(a), Some(b)) => order(a, b),
        };
        let before = if next.is_le() { before.next() } else { None };
        let after = if next.is_ge() { after.next() } else { None };
        Some((before, after))
    })
}

/// Whether [`plan`] makes the same of both: what it does not read is where members are reached.
fn is_planned_alike(before: Option<&Arc<Member>>, after: Option<&Arc<Member>>) -> bool {
    let (Some(before), Some(after)) = (before, after) else { return false };
    let Member {
        name,
        sources: _,
        public_key,
        next_key,
        claims,
        blocks,
        pod_networks,
        addresses,
        endpoints: _,
        keepalive: Keepalive { interval, always_sends: _ },
        site,
        since,
        discovery: ByDiscovery { is_only_source, needs_preshared_key: _ },
        entry_terms,
        external,
    } = &**before;
    *name == after.name
        && *public_key == after.public_key
        && *next_key == after.next_key
        && *claims == after.claims
        && *blocks == after.blocks
        && *pod_networks == after.pod_networks
        && *addresses == after.addresses
        && *interval == after.keepalive.interval
        && *site == after.site
        && *since == after.since
        && *is_only_source == after.discovery.is_only_source
        && *entry_terms == after.entry_terms
        && *external == after.external
}

/// Whether this node concerns the same members apart from those with its prefixes.
fn is_placed_alike(before: &Member, after: &Member) -> bool {
    let of = |member: &Member| (member.public_key, member.next_key, member.discovery.is_only_source);
    of(before) == of(after)
        && before.site == after.site
        && before.since == after.since
        && before.external == after.external
}

impl Policy {
    /// Whether nothing differs but what the device has and what is guarded.
    fn can_be_followed(&self, other: &Self) -> bool {
        let Self {
            own,
            excluded,
            guarded: _,
            keepalive,
            held: _,
            completed,
            reserved,
            grants,
            sources,
            entry_terms,
            routes_on,
            granularity,
            encapsulation,
            includes_pod_networks,
            connected,
        } = self;
        *own == other.own
            && *excluded == other.excluded
            && *keepalive == other.keepalive
            && *completed == other.completed
            && *reserved == other.reserved
            && *grants == other.grants
            && *sources == other.sources
            && *entry_terms == other.entry_terms
            && *routes_on == other.routes_on
            && *granularity == other.granularity
            && *encapsulation == other.encapsulation
            && *includes_pod_networks == other.includes_pod_networks
            && *connected == other.connected
    }
}

/// Puts what a group is to have in place of what it had; its members have prefixes in `area` alone, and no others have any there.
fn replace(plan: &mut Plan, before: &Plan, after: Plan, area: &PrefixSet) {
    for key in before.peers.keys().filter(|key| !after.peers.contains_key(*key)) {
        plan.peers.remove(key);
    }
    for (key, peer) in after.peers {
        // The same stays the same allocation.
        if plan.peers.get(&key) != Some(&peer) {
            plan.peers.insert(key, peer);
        }
    }
    for key in before.next_keys.keys() {
        plan.next_keys.remove(key);
    }
    plan.next_keys.extend(after.next_keys);
    if before.targets_ipv4 != after.targets_ipv4 {
        cover::replace_ipv4(&mut plan.targets_ipv4, area, &after.targets_ipv4);
    }
    if before.targets_ipv6 != after.targets_ipv6 {
        cover::replace_ipv6(&mut plan.targets_ipv6, area, &after.targets_ipv6);
    }
    if before.masqueraded != after.masqueraded {
        let others = plan.masqueraded.iter().collect::<PrefixSet>().subtract(area);
        let all: PrefixSet = others.prefixes().chain(after.masqueraded).collect();
        plan.masqueraded = all.prefixes().collect();
    }
    replace_members(&mut plan.nodes, &before.nodes, after.nodes);
    replace_members(&mut plan.tunnels.senders, &before.tunnels.senders, after.tunnels.senders);
    let of_route = |route: &BlockRoute| route.destination;
    replace_sorted(&mut plan.routes, &before.routes, after.routes, of_route);
    let of_tunnel = |route: &TunnelRoute| route.destination;
    replace_sorted(&mut plan.tunnels.routes, &before.tunnels.routes, after.tunnels.routes, of_tunnel);
    plan.tunnels.local = after.tunnels.local;
    plan.is_gateway = after.is_gateway;
    if before.problems != after.problems {
        plan.problems.retain(|problem| before.problems.binary_search(problem).is_err());
        plan.problems.extend(after.problems);
        plan.problems.sort();
    }
}

fn replace_members<T: Ord>(all: &mut BTreeSet<T>, before: &BTreeSet<T>, after: BTreeSet<T>) {
    for gone in before.difference(&after) {
        all.remove(gone);
    }
    all.extend(after);
}

/// Replaces entries of lists that are sorted by their prefixes.
fn replace_sorted<T: PartialEq>(all: &mut Vec<T>, before: &[T], after: Vec<T>, prefix: impl Fn(&T) -> IpNet) {
    if *before == *after {
        return;
    }
    all.retain(|it| before.binary_search_by_key(&prefix(it), &prefix).is_err());
    all.extend(after);
    all.sort_by_key(prefix);
}

#[cfg(test)]
mod tests;

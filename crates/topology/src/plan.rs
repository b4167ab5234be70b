//! Members to peers, prefixes, targets and routes.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_address::PrefixSet;
use fairlead_keys::PublicKey;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::claims;
use crate::conflicts::{self, Entry, Resolved, Tier};
use crate::entry::EntryNodes;
use crate::external;
use crate::gateways::Gateways;
use crate::locations::{self, Tunnels};
use crate::member::Member;
use crate::peer::{Carriers, Holders, PeerPlan, name, peer_plan};
use crate::pod_networks;
use crate::policy::Policy;
use crate::prefixes;
use crate::problem::Problem;
use crate::rotation::{Announced, NextKey};
use crate::routes::{self, BlockRoute};
use crate::site_networks;

/// The mesh and the routes as this node should configure them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Peers by identity; never this node.
    pub peers: BTreeMap<PublicKey, Arc<PeerPlan>>,
    /// Keys that members are about to use: none of them is a key of `peers`.
    pub next_keys: BTreeMap<PublicKey, NextKey>,
    /// IPv4 destinations that enter the mesh, or are dropped there: the smallest sorted list that covers exactly them.
    pub targets_ipv4: Vec<Ipv4Net>,
    /// IPv6 destinations that enter the mesh, or are dropped there: the smallest sorted list that covers exactly them.
    pub targets_ipv6: Vec<Ipv6Net>,
    /// Addresses that belong to other nodes themselves: claims they keep, outside of all blocks and networks of pods. None of external members.
    pub nodes: BTreeSet<IpAddr>,
    /// Plain routes to prefixes of neighbours, at most one to each destination, sorted by it.
    pub routes: Vec<BlockRoute>,
    /// IP tunnels to neighbours, and what may go through them.
    pub tunnels: Tunnels,
    /// Prefixes of hosts beside this node: what others send there is masqueraded. Sorted.
    pub masqueraded: Vec<IpNet>,
    /// Whether this node has tunnels with nodes of other locations itself: where locations have gateways, it is one of them or in
    /// none of the locations.
    pub is_gateway: bool,
    /// Problems that left something out, sorted, each once.
    pub problems: Vec<Problem>,
}

impl Plan {
    /// Whether several members claim the address, so that peers may take it for that of another one than this node does.
    pub fn is_claimed_twice(&self, address: IpAddr) -> bool {
        self.problems.iter().any(
            |problem| matches!(problem, Problem::ClaimedTwice { prefix, .. } if prefix.addr() == address),
        )
    }

    /// Parts of prefixes to which packets leave by a tunnel of WireGuard or not at all: what is a target, without what has a plain route to its
    /// holder, or may take an IP tunnel to it. Each prefix comes after the name of the member that has it. The fewest prefixes that cover exactly them.
    pub fn in_tunnels<'a>(&self, held: impl IntoIterator<Item = (&'a str, &'a IpNet)>) -> Vec<IpNet> {
        let routes = self.routes.iter().map(|route| (&route.node, route.destination));
        let tunnels = self.tunnels.routes.iter().map(|route| (&route.node, route.destination));
        let mut beside: BTreeMap<&str, Vec<IpNet>> = BTreeMap::new();
        for (node, destination) in routes.chain(tunnels) {
            beside.entry(node.as_str()).or_default().push(destination);
        }
        let beside: BTreeMap<&str, PrefixSet> =
            beside.into_iter().map(|(node, all)| (node, all.into_iter().collect())).collect();
        // What is behind a gateway has a plain route to the gateway, by which nothing else leads there.
        let left = |(holder, prefix): (&str, &IpNet)| match beside.get(holder) {
            Some(beside) => prefixes::without(*prefix, beside),
            None => vec![*prefix],
        };
        let left: PrefixSet = held.into_iter().flat_map(left).collect();
        let ipv4 = self.targets_ipv4.iter().copied().map(IpNet::from);
        let targets: PrefixSet = ipv4.chain(self.targets_ipv6.iter().copied().map(IpNet::from)).collect();
        let outside = left.subtract(&targets);
        left.subtract(&outside).prefixes().collect()
    }
}

/// Decides peers, prefixes and routes. Takes `O(n log n)` in the number of prefixes. Names of members are unique, as
/// [`crate::merge`] leaves them.
///
/// This node's own member may be missing (it has not published itself yet); then only conflicts among the
/// others are seen.
pub fn plan<M: Borrow<Member>>(members: &[M], policy: &Policy) -> Plan {
    plan_of(members.iter().map(Borrow::borrow).collect(), policy)
}

fn plan_of(members: Vec<&Member>, policy: &Policy) -> Plan {
    let mut problems = BTreeSet::new();
    if let Some(on) = &policy.routes_on {
        let routes = routes::plan(&policy.own, on, &members, &mut problems);
        return Plan { routes, problems: problems.into_iter().collect(), ..Plan::default() };
    }
    let mut taken = Vec::new();
    let announced = Announced::new(&members, policy, &mut taken);
    problems.extend(taken);
    let followed = announced.followed(&members, policy);
    let members = members.into_iter().enumerate();
    let members: Vec<&Member> = members.map(|(at, member)| followed.get(&at).unwrap_or(member)).collect();
    let externals = external::admitted(&members, policy, &mut problems);
    let nodes = members.iter().copied().filter(|member| member.external.is_none());
    let ranked = ranked(nodes.chain(&externals), policy);
    let names: Vec<&str> = ranked.iter().map(|member| member.name.as_str()).collect();
    let entry_nodes = EntryNodes::new(&ranked, policy, &mut problems);
    let entries = usable_entries(&ranked, &entry_nodes, policy, &mut problems);
    let Resolved { owned, lost_blocks } = conflicts::resolve(entries.clone(), &names, &mut problems);
    claims::name_holders(&mut problems, &owned, &names, policy);
    let by_key = usable_keys(&ranked, policy, &mut problems);
    let has_peer = entry_nodes.reached(by_key.values().flatten().copied().collect());
    let carriers = Carriers::new(&has_peer, &entry_nodes, Gateways::new(&ranked, &has_peer, policy));
    report_missing_peers(&ranked, &entries, &has_peer, policy, &mut problems);
    let holders = Holders::new(&owned, &lost_blocks, &has_peer);
    let peer = |(key, owners): (PublicKey, Vec<usize>)| {
        let planned = peer_plan(&ranked, &owned, &owners, &holders, policy, &entry_nodes, &carriers);
        planned.map(|planned| (key, Arc::new(planned)))
    };
    let peers = by_key.into_iter().filter_map(peer).collect();
    let next_keys = announced.prepared(&members, &peers, policy);
    let is_gateway = carriers.gateways.is_own();
    let (routes, tunnels) = locations::routes(policy, &members, &peers, &mut problems);
    let (targets_ipv4, targets_ipv6) = targets(&ranked, &entries, &lost_blocks, policy);
    let nodes = node_addresses(&ranked, &entries, &owned, policy);
    let masqueraded = site_networks::masqueraded(&ranked, &entries, policy);
    let problems = problems.into_iter().collect();
    Plan {
        peers,
        next_keys,
        targets_ipv4,
        targets_ipv6,
        nodes,
        routes,
        tunnels,
        masqueraded,
        is_gateway,
        problems,
    }
}

/// This node, which yields its addresses to no other, then the members in the order in which they joined.
fn ranked<'a>(members: impl Iterator<Item = &'a Member>, policy: &Policy) -> Vec<&'a Member> {
    let mut ranked: Vec<&Member> = members.collect();
    ranked.sort_by_key(|member| {
        (member.name != policy.own, member.since.is_none(), &member.since, &member.name)
    });
    ranked
}

/// Entries that the members name, without those that no mesh can carry.
fn usable_entries(
    ranked: &[&Member],
    entry_nodes: &EntryNodes,
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> Vec<Entry> {
    let mut entries = Vec::new();
    for (owner, member) in ranked.iter().enumerate() {
        let block = |block: &IpNet| Entry { prefix: block.trunc(), owner, tier: Tier::Block, is_held: false };
        let carrier = entry_nodes.elsewhere(owner).and_then(|carrier| ranked.get(carrier)?.public_key);
        let claims = claims::entries(owner, member, carrier, policy, problems);
        let networks = site_networks::entries(owner, member, policy, problems);
        let pods = pod_networks::entries(owner, member, policy, problems);
        for entry in claims.into_iter().chain(networks).chain(pods).chain(member.blocks.iter().map(block)) {
            match prefixes::unusable(&entry.prefix) {
                None => entries.push(entry),
                // An interface always has link-local and loopback addresses: only those of a peer are reported.
                Some(_) if member.name == policy.own => {}
                Some(why) => {
                    let node = member.name.clone();
                    problems.insert(Problem::Unusable { node, prefix: entry.prefix, why });
                }
            }
        }
    }
    entries
}

/// The keys that make a peer, each with the members that publish it.
fn usable_keys(
    ranked: &[&Member],
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> BTreeMap<PublicKey, Vec<usize>> {
    let mut by_key: BTreeMap<PublicKey, Vec<usize>> = BTreeMap::new();
    for (owner, member) in ranked.iter().enumerate() {
        match member.public_key {
            Some(PublicKey(bytes)) if bytes == [0; 32] => {
                problems.insert(Problem::NoKey { node: member.name.clone() });
            }
            Some(key) => by_key.entry(key).or_default().push(owner),
            None => {}
        }
    }
    by_key.retain(|key, owners| {
        let is_discovered =
            |owner: &usize| ranked.get(*owner).is_some_and(|member| member.discovery.is_only_source);
        let mut nodes: Vec<String> = owners.iter().map(|owner| name(ranked, *owner)).collect();
        let own = nodes.contains(&policy.own);
        if nodes.len() > 1 {
            nodes.sort();
            problems.insert(Problem::SharedKey { key: *key, nodes, own });
        }
        // A member of which only discovery services know shares nothing with a member that the cluster knows.
        if !owners.iter().all(is_discovered) {
            owners.retain(|owner| !is_discovered(owner));
        }
        !own
    });
    by_key
}

/// Reports the members to which packets are dropped because nothing else explains it.
fn report_missing_peers(
    ranked: &[&Member],
    entries: &[Entry],
    has_peer: &BTreeSet<usize>,
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) {
    let without: BTreeSet<usize> =
        entries.iter().map(|entry| entry.owner).filter(|owner| !has_peer.contains(owner)).collect();
    let members = without.into_iter().filter_map(|owner| ranked.get(owner));
    let keyless = members.filter(|member| member.public_key.is_none() && member.name != policy.own);
    problems.extend(keyless.map(|member| Problem::NotPublished { node: member.name.clone() }));
}

/// Destinations that enter the mesh or are dropped there: all that belongs to other members, or did to one that is missing, whether a
/// peer has it or not.
fn targets(
    ranked: &[&Member],
    entries: &[Entry],
    lost_blocks: &BTreeSet<IpNet>,
    policy: &Policy,
) -> (Vec<Ipv4Net>, Vec<Ipv6Net>) {
    let is_own = |entry: &&Entry| ranked.get(entry.owner).is_some_and(|member| member.name == policy.own);
    let (own, foreign): (Vec<&Entry>, Vec<&Entry>) = entries.iter().partition(is_own);
    let (own_pods, own): (Vec<&Entry>, Vec<&Entry>) =
        own.into_iter().partition(|entry| entry.tier == Tier::PodNetwork);
    let own = own.into_iter().filter(|entry| match entry.tier {
        Tier::Block => !lost_blocks.contains(&entry.prefix),
        Tier::SiteRange => true,
        _ => prefixes::is_host(&entry.prefix),
    });
    let own_pods = pod_networks::kept(&own_pods, &foreign);
    let keep_out: PrefixSet =
        own.map(|entry| &entry.prefix).chain(&policy.excluded).chain(&own_pods).collect();
    let (at_sites, foreign): (Vec<&Entry>, Vec<&Entry>) =
        foreign.into_iter().partition(|entry| entry.tier == Tier::SiteRange);
    let connected: PrefixSet = policy.connected.iter().collect();
    let at_sites = at_sites.into_iter().map(|entry| &entry.prefix).collect::<PrefixSet>();
    let at_sites = at_sites.subtract(&connected);
    let at_sites: Vec<IpNet> = at_sites.prefixes().collect();
    let foreign = foreign.into_iter().map(|entry| &entry.prefix).chain(&at_sites);
    let guarded = policy.guarded.iter().filter(|prefix| prefixes::unusable(prefix).is_none());
    let targets = foreign.chain(guarded).collect::<PrefixSet>().subtract(&keep_out);
    (targets.ipv4_prefixes(), targets.ipv6_prefixes())
}

fn node_addresses(
    ranked: &[&Member],
    entries: &[Entry],
    owned: &[Vec<IpNet>],
    policy: &Policy,
) -> BTreeSet<IpAddr> {
    let pods = entries.iter().filter(|entry| matches!(entry.tier, Tier::Block | Tier::PodNetwork));
    let pods: PrefixSet = pods.map(|entry| &entry.prefix).collect();
    let is_other_node = |member: &Member| member.name != policy.own && member.external.is_none();
    let others = ranked.iter().zip(owned).filter(|(member, _)| is_other_node(member));
    let kept = others.flat_map(|(_, owned)| owned).filter(|prefix| prefixes::is_host(prefix));
    let is_node = |address: &IpAddr| !pods.contains(*address) && !policy.sources.contains_key(address);
    kept.map(IpNet::addr).filter(is_node).collect()
}

#[cfg(test)]
mod tests;

//! Members to peers, prefixes, targets and routes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use fairlead_api::wireguard::PublicKey;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::conflicts::{self, Entry, Tier};
use crate::member::Member;
use crate::prefixes;
use crate::problem::Problem;
use crate::routes::{self, BlockRoute, OwnAddress};

/// What this node makes of the members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Name of the member that is this node.
    pub own: String,
    /// Prefixes never sent into the mesh: the API server's address, the mesh resource's `excludeCIDRs`.
    /// Peers may still send *from* them, so that an excluded node's answers are not dropped.
    pub excluded: Vec<IpNet>,
    /// Seconds between keepalives towards members that ask for nothing else.
    pub keepalive: u16,
    /// Addresses of this host. On their networks, nodes get plain routes to their blocks; `None` asks for no routes.
    pub routes_on: Option<Vec<OwnAddress>>,
}

impl Policy {
    /// The usual policy: nothing excluded, a keepalive every 25 s ([`fairlead_api::names::KEEPALIVE`]), no routes.
    pub fn new(own: impl Into<String>) -> Self {
        let keepalive = u16::try_from(fairlead_api::names::KEEPALIVE.as_secs()).unwrap_or(25);
        Self { own: own.into(), excluded: Vec::new(), keepalive, routes_on: None }
    }
}

/// What one peer should be, apart from its endpoint.
#[derive(Clone, PartialEq, Eq)]
pub struct PeerPlan {
    /// The member's name.
    pub name: String,
    /// What the peer may send from and is sent for: sorted, none inside another, none shared with another peer.
    pub allowed_ips: Vec<IpNet>,
    /// Seconds between keepalives; zero sends none.
    pub keepalive: u16,
    /// Symmetric key to mix into handshakes.
    pub preshared_key: Option<[u8; 32]>,
}

impl fmt::Debug for PeerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerPlan")
            .field("name", &self.name)
            .field("allowed_ips", &self.allowed_ips)
            .field("keepalive", &self.keepalive)
            .field("preshared_key", &self.preshared_key.map(|_| "hidden"))
            .finish()
    }
}

/// The mesh and the routes as this node should configure them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Peers by identity; never this node.
    pub peers: BTreeMap<PublicKey, PeerPlan>,
    /// IPv4 destinations that enter the mesh: the smallest sorted list that covers exactly them.
    pub targets_ipv4: Vec<Ipv4Net>,
    /// IPv6 destinations that enter the mesh: the smallest sorted list that covers exactly them.
    pub targets_ipv6: Vec<Ipv6Net>,
    /// Plain routes to blocks of neighbours, at most one to each destination, sorted by it.
    pub routes: Vec<BlockRoute>,
    /// What was left out and why, sorted, each once.
    pub problems: Vec<Problem>,
}

/// Members of the mesh by name. Only a defect of a source makes more than one of a name.
type ByName<'a> = BTreeMap<&'a str, Vec<(PublicKey, &'a Member)>>;

/// Decides peers, prefixes and routes. Takes `O(n log n)` in the number of prefixes.
///
/// This node's own member may be missing (it has not published itself yet); then only conflicts among the
/// others are seen.
pub fn plan(members: &[Member], policy: &Policy) -> Plan {
    let mut by_name = ByName::new();
    for member in members {
        // A member without a key is no member of the mesh yet; the routes count it all the same.
        if let Some(key) = member.public_key {
            by_name.entry(&member.name).or_default().push((key, member));
        }
    }
    let mut problems = BTreeSet::new();
    let left_out = unidentifiable(&by_name, policy, &mut problems);
    let names: Vec<&str> = by_name.keys().copied().collect();
    let entries = usable_entries(&by_name, policy, &mut problems);
    let mut owned = conflicts::resolve(entries, &names, &mut problems);

    let mut peers = BTreeMap::new();
    let mut keep_out = policy.excluded.clone();
    for (owner, (name, same_name)) in by_name.iter().enumerate() {
        let prefixes = owned.remove(&owner).unwrap_or_default();
        if *name == policy.own {
            keep_out.extend(prefixes);
            let own_claims = same_name.iter().flat_map(|(_, member)| &member.claims);
            keep_out.extend(own_claims.filter(|claim| prefixes::is_host(claim)));
        } else if let Some((key, member)) = same_name.first().filter(|_| !left_out.contains(name)) {
            peers.insert(*key, peer_plan(member, prefixes, policy));
        }
    }
    let allowed = peers.values().flat_map(|peer| peer.allowed_ips.iter());
    let (targets_ipv4, targets_ipv6) = prefixes::cover_without(allowed, &keep_out);
    let routes = policy.routes_on.as_ref();
    let routes = routes.map(|on| routes::plan(&policy.own, on, members, &mut problems)).unwrap_or_default();
    Plan { peers, targets_ipv4, targets_ipv6, routes, problems: problems.into_iter().collect() }
}

fn peer_plan(member: &Member, prefixes: Vec<IpNet>, policy: &Policy) -> PeerPlan {
    PeerPlan {
        name: member.name.clone(),
        allowed_ips: prefixes::outermost(prefixes),
        keepalive: member.persistent_keepalive.unwrap_or(policy.keepalive),
        preshared_key: member.preshared_key,
    }
}

/// What members name, without what no mesh can carry.
fn usable_entries(by_name: &ByName<'_>, policy: &Policy, problems: &mut BTreeSet<Problem>) -> Vec<Entry> {
    let mut entries = Vec::new();
    for (owner, (_, member)) in
        by_name.values().enumerate().flat_map(|(at, m)| m.iter().map(move |m| (at, m)))
    {
        for entry in entries_of(owner, member) {
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

fn entries_of(owner: usize, member: &Member) -> impl Iterator<Item = Entry> {
    let claims = member.claims.iter().map(move |claim| Entry {
        prefix: claim.trunc(),
        owner,
        tier: if prefixes::is_host(claim) { Tier::HostClaim } else { Tier::WideClaim },
    });
    let blocks =
        member.blocks.iter().map(move |block| Entry { prefix: block.trunc(), owner, tier: Tier::Block });
    claims.chain(blocks)
}

/// Names of members that share their identity with another one, or have none. Their prefixes still
/// count in the conflict check: a node does not lose its block to a node that claims it and copied its key.
fn unidentifiable<'a>(
    by_name: &ByName<'a>,
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> BTreeSet<&'a str> {
    let mut by_key: BTreeMap<PublicKey, BTreeSet<&str>> = BTreeMap::new();
    let mut left_out = BTreeSet::new();
    for (&name, same_name) in by_name {
        if same_name.len() > 1 && name != policy.own {
            problems.insert(Problem::SharedName { node: name.to_owned(), members: same_name.len() });
            left_out.insert(name);
        }
        for (key, _) in same_name {
            if *key == PublicKey([0; 32]) {
                problems.insert(Problem::NoKey { node: name.to_owned() });
                left_out.insert(name);
            } else {
                by_key.entry(*key).or_default().insert(name);
            }
        }
    }
    for (key, names) in by_key.into_iter().filter(|(_, names)| names.len() > 1) {
        let own = names.contains(policy.own.as_str());
        left_out.extend(&names);
        let nodes = names.into_iter().map(str::to_owned).collect();
        problems.insert(Problem::SharedKey { key, nodes, own });
    }
    left_out
}

#[cfg(test)]
mod tests;

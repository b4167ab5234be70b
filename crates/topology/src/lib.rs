//! Who is a WireGuard peer of this node, and which prefixes go to whom.
//!
//! A shell gathers [`Member`]s (custom resources, annotations, discovery, static peers) and calls [`plan`];
//! the data plane makes WireGuard peers and nftables sets of the [`Plan`]. Endpoints are not decided here:
//! that is `fairlead-path`, peer by peer.
//!
//! The one promise: **no member can take what belongs to another, and a bad one harms only itself.** What the
//! controller grants (blocks) beats what a node says of itself (claims); what two nodes say of themselves at
//! once is left out on both and reported. Every node computes the same answer from the same members, in
//! whatever order they arrive.
//!
//! Where nodes share a layer-2 network and want no mesh, [`desired_routes`] says which plain routes lead to the blocks of
//! the others.
//!
//! Pure: no I/O, no clock, no randomness. Not here: kernel routes, nftables, WireGuard.
//!
//! Locations and gateways are to come between the two steps of [`plan`]: after the conflict check has said
//! which prefixes each member really owns, and before they are laid on peers, a stage can move the prefixes of
//! a location's members onto the peer that carries them. Neither the conflict check nor the targets need to
//! know.

mod conflicts;
mod prefixes;
mod problem;
mod router;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use fairlead_api::wireguard::PublicKey;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use conflicts::{Entry, Tier};
pub use prefixes::Unusable;
pub use problem::Problem;
pub use router::{BlockRoute, OwnAddress, RouterBlock, RouterNode, RouterProblem, Routing, desired_routes};

/// One node (or external peer) that wants to be in the mesh.
#[derive(Clone, PartialEq, Eq)]
pub struct Member {
    /// Its name in the cluster, unique.
    pub name: String,
    /// Its WireGuard identity.
    pub public_key: PublicKey,
    /// What it says it is reachable at: its own addresses, as host prefixes. Not trusted.
    pub claims: Vec<IpNet>,
    /// Address blocks the controller gave it. Trusted.
    pub blocks: Vec<IpNet>,
    /// Seconds between keepalives towards it; `None` takes the policy's, zero sends none.
    pub persistent_keepalive: Option<u16>,
    /// Symmetric key to mix into handshakes with it.
    pub preshared_key: Option<[u8; 32]>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member")
            .field("name", &self.name)
            .field("public_key", &self.public_key)
            .field("claims", &self.claims)
            .field("blocks", &self.blocks)
            .field("persistent_keepalive", &self.persistent_keepalive)
            .field("preshared_key", &self.preshared_key.map(|_| "hidden"))
            .finish()
    }
}

/// How this node wants its mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Name of the member that is this node.
    pub own: String,
    /// Prefixes never sent into the mesh: the API server's address, the mesh resource's `excludeCIDRs`.
    /// Peers may still send *from* them, so that an excluded node's answers are not dropped.
    pub excluded: Vec<IpNet>,
    /// Seconds between keepalives towards members that ask for nothing else.
    pub keepalive: u16,
}

impl Policy {
    /// The usual policy: nothing excluded, a keepalive every 25 s ([`fairlead_api::names::KEEPALIVE`]).
    pub fn new(own: impl Into<String>) -> Self {
        let keepalive = u16::try_from(fairlead_api::names::KEEPALIVE.as_secs()).unwrap_or(25);
        Self { own: own.into(), excluded: Vec::new(), keepalive }
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

/// The mesh as this node should configure it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Peers by identity; never this node.
    pub peers: BTreeMap<PublicKey, PeerPlan>,
    /// IPv4 destinations that enter the mesh: the smallest sorted list that covers exactly them.
    pub targets_ipv4: Vec<Ipv4Net>,
    /// IPv6 destinations that enter the mesh: the smallest sorted list that covers exactly them.
    pub targets_ipv6: Vec<Ipv6Net>,
    /// What was left out and why, sorted, each once.
    pub problems: Vec<Problem>,
}

/// Decides peers and prefixes. Takes `O(n log n)` in the number of prefixes.
///
/// This node's own member may be missing (it has not published itself yet); then only conflicts among the
/// others are seen.
pub fn plan(members: &[Member], policy: &Policy) -> Plan {
    let mut by_name: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    members.iter().for_each(|member| by_name.entry(&member.name).or_default().push(member));
    let names: Vec<&str> = by_name.keys().copied().collect();

    let mut problems = BTreeSet::new();
    let left_out = unidentifiable(&by_name, policy, &mut problems);
    let mut entries = Vec::new();
    for (owner, member) in
        by_name.values().enumerate().flat_map(|(owner, m)| m.iter().map(move |m| (owner, m)))
    {
        for entry in entries_of(owner, member) {
            match prefixes::unusable(&entry.prefix) {
                None => entries.push(entry),
                // An interface always has link-local and loopback addresses: only a peer's are worth a word.
                Some(_) if member.name == policy.own => {}
                Some(why) => {
                    let node = member.name.clone();
                    problems.insert(Problem::Unusable { node, prefix: entry.prefix, why });
                }
            }
        }
    }
    let mut owned = conflicts::settle(entries, &names, &mut problems);

    let mut peers = BTreeMap::new();
    let mut keep_out = policy.excluded.clone();
    for (owner, (name, same_name)) in by_name.iter().enumerate() {
        let prefixes = owned.remove(&owner).unwrap_or_default();
        if *name == policy.own {
            keep_out.extend(prefixes);
            let own_claims = same_name.iter().flat_map(|member| &member.claims);
            keep_out.extend(own_claims.filter(|claim| prefixes::is_host(claim)));
        } else if let Some(member) = same_name.first().filter(|_| !left_out.contains(name)) {
            peers.insert(member.public_key, peer_plan(member, prefixes, policy));
        }
    }
    let allowed = peers.values().flat_map(|peer| peer.allowed_ips.iter());
    let (targets_ipv4, targets_ipv6) = prefixes::cover_without(allowed, &keep_out);
    Plan { peers, targets_ipv4, targets_ipv6, problems: problems.into_iter().collect() }
}

fn peer_plan(member: &Member, prefixes: Vec<IpNet>, policy: &Policy) -> PeerPlan {
    PeerPlan {
        name: member.name.clone(),
        allowed_ips: prefixes::outermost(prefixes),
        keepalive: member.persistent_keepalive.unwrap_or(policy.keepalive),
        preshared_key: member.preshared_key,
    }
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

/// Names of members that cannot be told from another one, or have no identity at all. Their prefixes still
/// count in the conflict check: a node does not lose its block to a liar because somebody copied its key.
fn unidentifiable<'a>(
    by_name: &BTreeMap<&'a str, Vec<&'a Member>>,
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
        for member in same_name {
            if member.public_key == PublicKey([0; 32]) {
                problems.insert(Problem::NoKey { node: name.to_owned() });
                left_out.insert(name);
            } else {
                by_key.entry(member.public_key).or_default().insert(name);
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

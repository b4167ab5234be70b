//! Entry nodes of external members: through which of those that it names a member is reached.
//!
//! Each entry node takes a term, higher than all it knows of, when the member completes a handshake with it while another node is in
//! use, and publishes it. Of the entry nodes the one with the highest term is in use, on every node the same; before any handshake it is the
//! first that the member names. No clock is compared.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::member::{Member, peer_name};
use crate::policy::Policy;
use crate::problem::Problem;

/// Role of this node for an external member that names it as an entry node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryRole {
    /// The term that this node has taken; zero before the first handshake.
    pub own_term: u64,
    /// The term of the node in use, if that is another one.
    pub other_term: Option<u64>,
}

/// Way to one external member.
struct Place {
    /// The entry node in use; `None` if none of them exists.
    node: Option<usize>,
    /// Whether this node is the one in use.
    is_here: bool,
    /// Role of this node for the member; `None` if it is none of its entry nodes.
    role: Option<EntryRole>,
}

/// The entry nodes of all external members that name some, by index among the ranked members.
pub(crate) struct EntryNodes {
    places: BTreeMap<usize, Place>,
    carried: BTreeMap<usize, Vec<usize>>,
}

impl EntryNodes {
    /// Decides for each member. An entry node that is missing is reported.
    pub(crate) fn new(ranked: &[&Member], policy: &Policy, problems: &mut BTreeSet<Problem>) -> Self {
        let mut found = Self { places: BTreeMap::new(), carried: BTreeMap::new() };
        let names_entry_nodes = |member: &&Member| {
            member.external.as_ref().is_some_and(|external| !external.entry_nodes.is_empty())
        };
        if !ranked.iter().any(names_entry_nodes) {
            return found;
        }
        // A member that only discovery services know proves no name.
        let can_enter = |member: &Member| {
            member.public_key.is_some() && member.external.is_none() && !member.discovery.is_only_source
        };
        let nodes: BTreeMap<&str, usize> = ranked
            .iter()
            .enumerate()
            .filter(|(_, member)| can_enter(member))
            .map(|(at, member)| (member.name.as_str(), at))
            .collect();
        for (owner, member) in ranked.iter().enumerate().filter(|(_, member)| names_entry_nodes(member)) {
            let place = place(member, ranked, &nodes, policy, problems);
            if let Some(node) = place.node.filter(|_| !place.is_here) {
                found.carried.entry(node).or_default().push(owner);
            }
            found.places.insert(owner, place);
        }
        found
    }

    /// Whether the member is reached through another node, or not at all.
    pub(crate) fn is_elsewhere(&self, owner: usize) -> bool {
        self.places.get(&owner).is_some_and(|place| !place.is_here)
    }

    /// The other node through which the member is reached.
    pub(crate) fn elsewhere(&self, owner: usize) -> Option<usize> {
        self.places.get(&owner).filter(|place| !place.is_here)?.node
    }

    /// The members that are reached through this other node.
    pub(crate) fn carried_by(&self, node: usize) -> impl Iterator<Item = usize> {
        self.carried.get(&node).into_iter().flatten().copied()
    }

    /// Role of this node for the member; `None` if it is none of its entry nodes.
    pub(crate) fn role(&self, owner: usize) -> Option<EntryRole> {
        self.places.get(&owner)?.role
    }

    /// Members of `has_key` that are reached; a member behind an entry node is reached if that is.
    pub(crate) fn reached(&self, mut has_key: BTreeSet<usize>) -> BTreeSet<usize> {
        let all = has_key.clone();
        has_key.retain(|owner| {
            !self.is_elsewhere(*owner) || self.elsewhere(*owner).is_some_and(|node| all.contains(&node))
        });
        has_key
    }
}

fn place(
    member: &Member,
    ranked: &[&Member],
    nodes: &BTreeMap<&str, usize>,
    policy: &Policy,
    problems: &mut BTreeSet<Problem>,
) -> Place {
    let named = member.external.iter().flat_map(|external| &external.entry_nodes);
    let (known, missing): (Vec<&String>, Vec<&String>) =
        named.partition(|name| nodes.contains_key(name.as_str()));
    if !missing.is_empty() {
        let node = member.name.clone();
        let missing = missing.into_iter().cloned().collect();
        problems.insert(Problem::EntryNodesMissing { node, missing, is_unreachable: known.is_empty() });
    }
    let indexes = known.iter().filter_map(|name| nodes.get(name.as_str()).copied());
    let terms: Vec<(usize, u64)> =
        indexes.filter_map(|at| Some((at, term(ranked.get(at)?, member, policy)))).collect();
    let in_use = terms.iter().enumerate().max_by_key(|(rank, (_, term))| (*term, Reverse(*rank)));
    let in_use = in_use.map(|(_, (node, term))| (*node, *term));
    let is_own = |at: &usize| ranked.get(*at).is_some_and(|node| node.name == policy.own);
    let is_here = in_use.is_some_and(|(node, _)| is_own(&node));
    let own = terms.iter().find(|(at, _)| is_own(at));
    let role = own.map(|(_, own_term)| EntryRole {
        own_term: *own_term,
        other_term: in_use.filter(|_| !is_here).map(|(_, term)| term),
    });
    Place { node: in_use.map(|(node, _)| node), is_here, role }
}

/// The term of an entry node for a member; one of another key of the member does not count.
fn term(node: &Member, member: &Member, policy: &Policy) -> u64 {
    let published = peer_name(&member.name).and_then(|peer| node.entry_terms.get(peer));
    let published = published.filter(|(key, _)| Some(*key) == member.public_key).map(|(_, term)| *term);
    let known = member.public_key.and_then(|key| policy.entry_terms.get(&key)).copied();
    published.into_iter().chain(known.filter(|_| node.name == policy.own)).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use fairlead_keys::PublicKey;
    use ipnet::IpNet;
    use proptest::prelude::*;

    use super::*;
    use crate::member::{External, Keepalive};
    use crate::plan::{Plan, plan};

    const LAPTOP: PublicKey = PublicKey([99; 32]);

    fn node(number: u8, term: u64) -> Member {
        let entry_terms = (term > 0).then(|| ("laptop".to_owned(), (LAPTOP, term)));
        Member {
            public_key: Some(PublicKey([number; 32])),
            claims: vec![format!("192.0.2.{number}/32").parse().unwrap()],
            blocks: vec![format!("10.64.{number}.0/24").parse().unwrap()],
            entry_terms: entry_terms.into_iter().collect(),
            ..Member::named(format!("n{number}"))
        }
    }

    fn laptop(entry_nodes: &[&str]) -> Member {
        let entry_nodes = entry_nodes.iter().map(|name| (*name).to_owned()).collect();
        Member {
            public_key: Some(LAPTOP),
            claims: vec!["10.9.0.1/32".parse().unwrap()],
            external: Some(External { entry_nodes, ..External::default() }),
            keepalive: Keepalive::every(Some(25)),
            ..Member::of_peer("laptop")
        }
    }

    fn has(plan: &Plan, key: PublicKey) -> bool {
        let prefix: IpNet = "10.9.0.1/32".parse().unwrap();
        plan.peers.get(&key).is_some_and(|peer| peer.allowed_ips.contains(&prefix))
    }

    /// The key to which a node sends what is for the laptop.
    fn holder(members: &[Member], own: &str) -> Option<PublicKey> {
        let plan = plan(members, &Policy::new(own));
        let mut holders = plan.peers.keys().filter(|key| has(&plan, **key)).copied();
        let holder = holders.next();
        assert_eq!(holders.next(), None);
        holder
    }

    #[test]
    fn before_a_handshake_the_first_entry_node_that_exists_is_used() {
        let members = [node(1, 0), node(2, 0), node(3, 0), laptop(&["n9", "n2", "n3"])];
        assert_eq!(holder(&members, "n1"), Some(PublicKey([2; 32])));
        assert_eq!(holder(&members, "n3"), Some(PublicKey([2; 32])));
        assert_eq!(holder(&members, "n2"), Some(LAPTOP));
        let other = plan(&members, &Policy::new("n1"));
        assert!(!other.peers.contains_key(&LAPTOP), "only entry nodes have a tunnel");
        let texts: Vec<String> = other.problems.iter().map(ToString::to_string).collect();
        assert!(
            texts
                .iter()
                .any(|text| text
                    .starts_with("Peer laptop names entry nodes that publish no WireGuard key (n9)")),
            "{texts:?}"
        );
        let standby = &plan(&members, &Policy::new("n3")).peers[&LAPTOP];
        assert_eq!((&*standby.allowed_ips, standby.keepalive), (&[][..], 0), "it must not call");
        assert_eq!(standby.entry, Some(EntryRole { own_term: 0, other_term: Some(0) }));
    }

    #[test]
    fn the_entry_node_with_the_highest_term_is_used_and_its_own_counts_before_it_is_published() {
        let members = [node(1, 0), node(2, 3), node(3, 4), laptop(&["n2", "n3"])];
        assert_eq!(holder(&members, "n1"), Some(PublicKey([3; 32])));
        let policy = Policy { entry_terms: [(LAPTOP, 5)].into(), ..Policy::new("n2") };
        let planned = plan(&members, &policy);
        assert!(has(&planned, LAPTOP) && !has(&planned, PublicKey([3; 32])));
        assert_eq!(planned.peers[&LAPTOP].entry, Some(EntryRole { own_term: 5, other_term: None }));
        // The policy has terms of this node alone.
        let policy = Policy { entry_terms: [(LAPTOP, 5)].into(), ..Policy::new("n1") };
        assert!(has(&plan(&members, &policy), PublicKey([3; 32])));
    }

    #[test]
    fn terms_of_others_and_of_another_key_do_not_count() {
        let mut stale = node(3, 9);
        stale.entry_terms.insert("laptop".to_owned(), (PublicKey([98; 32]), 9));
        let members = [node(1, 9), node(2, 0), stale, laptop(&["n2", "n3"])];
        assert_eq!(holder(&members, "n1"), Some(PublicKey([2; 32])));
    }

    #[test]
    fn without_an_entry_node_packets_are_dropped_and_never_sent_in_clear() {
        let members = [node(1, 0), laptop(&["n8", "n9"])];
        let planned = plan(&members, &Policy::new("n1"));
        assert_eq!(holder(&members, "n1"), None);
        assert!(planned.targets_ipv4.contains(&"10.9.0.1/32".parse().unwrap()));
        assert!(
            planned.problems[0].to_string().contains("packets to it are dropped"),
            "{:?}",
            planned.problems
        );
    }

    #[test]
    fn a_peer_keeps_its_prefix_against_a_younger_one_wherever_it_enters() {
        let mut rival = laptop(&["n3"]);
        rival.name = Member::of_peer("rival").name;
        rival.public_key = Some(PublicKey([98; 32]));
        let members = [node(1, 0), node(2, 0), node(3, 0), laptop(&["n2"]), rival];
        for own in ["n1", "n3"] {
            let held = [(PublicKey([2; 32]), ["10.9.0.1/32".parse().unwrap()].into())].into();
            let planned = plan(&members, &Policy { held, ..Policy::new(own) });
            assert!(has(&planned, PublicKey([2; 32])), "{own}");
        }
    }

    proptest! {
        /// All nodes agree on the entry node, and what goes to nodes stays the same.
        #[test]
        fn every_node_sends_to_the_same_entry_node(
            terms in prop::collection::vec(0..4u64, 4),
            entries in prop::collection::vec(1..7u8, 0..4),
        ) {
            let nodes: Vec<Member> = (1..5).zip(&terms).map(|(number, term)| node(number, *term)).collect();
            let names: Vec<String> = entries.iter().map(|number| format!("n{number}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let all: Vec<Member> = nodes.iter().cloned().chain([laptop(&names)]).collect();
            let mut seen = BTreeSet::new();
            for own in &nodes {
                let entry = match holder(&all, &own.name) {
                    Some(LAPTOP) => own.public_key,
                    other => other,
                };
                seen.insert(entry);
                let (alone, with) = (plan(&nodes, &Policy::new(&own.name)), plan(&all, &Policy::new(&own.name)));
                for (key, peer) in alone.peers {
                    let allowed = &with.peers[&key].allowed_ips;
                    prop_assert!(peer.allowed_ips.iter().all(|prefix| allowed.contains(prefix)));
                }
            }
            prop_assert!(names.is_empty() || seen.len() == 1);
        }
    }
}

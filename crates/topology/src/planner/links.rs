//! Links between members: names, keys and prefixes that they have in common.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_keys::PublicKey;
use ipnet::IpNet;

use crate::claims::MIN_LENGTH;
use crate::gateways::location;
use crate::member::Member;
use crate::policy::Policy;
use crate::site::Granularity;

/// Link by which members may concern each other: those that name the same, and of prefixes those that overlap.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Link {
    /// An internal address: two members of a location that name it are reached there by neither.
    Internal(IpAddr),
    /// A key that a member has or is about to use.
    Key(PublicKey),
    /// A location, whose members choose gateways.
    Location(String),
    /// A node, which is an entry node of members that name it.
    Node(String),
    /// Members compete for prefixes.
    Prefix(IpNet),
}

/// All members by their links.
#[derive(Debug, Default)]
pub(super) struct Links {
    members: BTreeMap<Link, Vec<Arc<Member>>>,
    /// Number of prefixes of each length: whether they are IPv4, and the length.
    lengths: BTreeMap<(bool, u8), usize>,
}

impl Links {
    pub(super) fn new(members: &[Arc<Member>], policy: &Policy) -> Self {
        let mut links = Self::default();
        members.iter().for_each(|member| links.insert(member, policy));
        links
    }

    pub(super) fn insert(&mut self, member: &Arc<Member>, policy: &Policy) {
        for link in links(member, policy) {
            if let Link::Prefix(prefix) = &link {
                let length = self.lengths.entry(kind(prefix)).or_default();
                *length = length.saturating_add(1);
            }
            self.members.entry(link).or_default().push(Arc::clone(member));
        }
    }

    /// Takes out what was inserted with this allocation.
    pub(super) fn remove(&mut self, member: &Arc<Member>, policy: &Policy) {
        for link in links(member, policy) {
            if let Link::Prefix(prefix) = &link
                && let Some(length) = self.lengths.get_mut(&kind(prefix))
            {
                *length = length.saturating_sub(1);
            }
            // It is gone already if the member names it twice.
            let Some(known) = self.members.get_mut(&link) else { continue };
            known.retain(|other| !Arc::ptr_eq(other, member));
            if known.is_empty() {
                self.members.remove(&link);
            }
        }
    }

    /// Members that have the key or are about to use it.
    pub(super) fn of_key(&self, key: &PublicKey) -> impl Iterator<Item = &Arc<Member>> {
        self.members.get(&Link::Key(*key)).into_iter().flatten()
    }

    /// Members that name a prefix which overlaps this one.
    pub(super) fn overlapping(&self, prefix: &IpNet) -> Vec<Arc<Member>> {
        self.linked(&Link::Prefix(*prefix)).cloned().collect()
    }

    /// The seeds, and all that are linked to one of them, directly or not; `None` if there are more than `most`.
    pub(super) fn group(
        &self,
        seeds: Vec<Arc<Member>>,
        policy: &Policy,
        most: usize,
    ) -> Option<Vec<Arc<Member>>> {
        let mut seen = BTreeSet::new();
        let mut is_new = |member: &Arc<Member>| seen.insert(Arc::as_ptr(member).addr());
        let mut group: Vec<Arc<Member>> = seeds.into_iter().filter(&mut is_new).collect();
        let mut next = 0_usize;
        while let Some(member) = group.get(next).cloned() {
            next = next.saturating_add(1);
            for link in links(&member, policy) {
                for other in self.linked(&link) {
                    if is_new(other) {
                        group.push(Arc::clone(other));
                    }
                    if group.len() > most {
                        return None;
                    }
                }
            }
        }
        Some(group)
    }

    fn linked(&self, link: &Link) -> impl Iterator<Item = &Arc<Member>> {
        let (from, to, around) = match link {
            Link::Prefix(prefix) => {
                let (from, to) = ends(prefix);
                (Link::Prefix(from), Link::Prefix(to), self.around(prefix))
            }
            other => (other.clone(), other.clone(), Vec::new()),
        };
        let around = around.into_iter().filter_map(|prefix| self.members.get(&Link::Prefix(prefix)));
        self.members.range(from..=to).map(|(_, members)| members).chain(around).flatten()
    }

    /// The prefixes that may contain this one.
    fn around(&self, prefix: &IpNet) -> Vec<IpNet> {
        let (is_ipv4, length) = kind(prefix);
        let shorter = self.lengths.range((is_ipv4, 0)..(is_ipv4, length)).filter(|(_, count)| **count > 0);
        shorter
            .filter_map(|((_, length), _)| IpNet::new(prefix.network(), *length).ok())
            .map(|it| it.trunc())
            .collect()
    }
}

fn kind(prefix: &IpNet) -> (bool, u8) {
    (prefix.addr().is_ipv4(), prefix.prefix_len())
}

/// The least and the greatest prefix that begins in this one.
fn ends(prefix: &IpNet) -> (IpNet, IpNet) {
    let least = IpNet::new(prefix.network(), 0).unwrap_or(*prefix);
    (least, IpNet::from(prefix.broadcast()))
}

/// The prefixes that a member may get or take from others, and some that are refused.
pub(super) fn prefixes(member: &Member, policy: &Policy) -> impl Iterator<Item = IpNet> {
    let named = member.claims.iter().chain(&member.pod_networks);
    let networks = member.site.iter().flat_map(|site| &site.networks);
    let counts = |prefix: &IpNet| {
        // A wider prefix is refused without a grant.
        prefix.prefix_len() >= MIN_LENGTH || member.name == policy.own || policy.is_granted(member, prefix)
    };
    let named = named.chain(networks).map(IpNet::trunc).filter(move |prefix| counts(prefix));
    let on_mesh = member.addresses.mesh.iter().copied().map(IpNet::from);
    named.chain(member.blocks.iter().map(IpNet::trunc)).chain(on_mesh)
}

/// Links of a member: all by which it may concern others.
fn links(member: &Member, policy: &Policy) -> Vec<Link> {
    let keys = member.public_key.into_iter().chain(member.next_key);
    let mut links: Vec<Link> = keys.map(Link::Key).collect();
    links.extend(prefixes(member, policy).map(Link::Prefix));
    links.push(Link::Node(member.name.clone()));
    let entry_nodes = member.external.iter().flat_map(|external| &external.entry_nodes);
    links.extend(entry_nodes.cloned().map(Link::Node));
    if let Some(of_host) = policy.granularity.addresses() {
        let internal = member.site.iter().flat_map(|site| &site.internal).map(|it| it.address);
        let of_host = of_host.iter().map(|it| it.prefix.addr()).filter(|_| member.name == policy.own);
        links.extend(internal.chain(of_host).map(Link::Internal));
    }
    if matches!(policy.granularity, Granularity::Location { .. }) {
        links.extend(location(member).map(|location| Link::Location(location.to_owned())));
    }
    links
}

//! Who owns a prefix that several members name.
//!
//! Prefixes either contain each other or have nothing in common, so one walk over the sorted list with a stack
//! of the open ones sees every overlap. For each open prefix only the two first owners per tier are kept: enough
//! to know whether another owner is there and to name one of them.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use crate::problem::Problem;

/// How strongly a member owns a prefix. The stronger wins; equals both lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    /// A range a node says is behind it.
    WideClaim,
    /// An address a node says is its own.
    HostClaim,
    /// A block the controller gave.
    Block,
}

/// One prefix of one member, without host bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) prefix: IpNet,
    pub(crate) owner: usize,
    pub(crate) tier: Tier,
}

/// The first two different owners of something.
#[derive(Debug, Clone, Copy, Default)]
struct Few {
    first: Option<(usize, IpNet)>,
    second: Option<(usize, IpNet)>,
}

impl Few {
    fn add(&mut self, item: (usize, IpNet)) {
        match self.first {
            None => self.first = Some(item),
            Some(first) if first.0 == item.0 => self.first = Some(first.min(item)),
            Some(first) if item < first => {
                self.first = Some(item);
                self.second = Some(first);
            }
            Some(_) => self.second = Some(self.second.map_or(item, |second| second.min(item))),
        }
    }

    fn other_than(&self, owner: usize) -> Option<(usize, IpNet)> {
        self.first.filter(|(first, _)| *first != owner).or(self.second)
    }
}

/// Who has something that overlaps, by tier.
#[derive(Debug, Clone, Copy, Default)]
struct Rivals {
    wide: Few,
    host: Few,
    block: Few,
}

impl Rivals {
    fn tier_mut(&mut self, tier: Tier) -> &mut Few {
        match tier {
            Tier::WideClaim => &mut self.wide,
            Tier::HostClaim => &mut self.host,
            Tier::Block => &mut self.block,
        }
    }

    fn merge(&mut self, other: &Self) {
        for (tier, few) in
            [(Tier::WideClaim, other.wide), (Tier::HostClaim, other.host), (Tier::Block, other.block)]
        {
            few.first.into_iter().chain(few.second).for_each(|item| self.tier_mut(tier).add(item));
        }
    }

    /// The strongest rival that an entry of this owner and tier cannot stand beside.
    fn beats(&self, owner: usize, tier: Tier) -> Option<(Tier, usize, IpNet)> {
        [(Tier::Block, self.block), (Tier::HostClaim, self.host), (Tier::WideClaim, self.wide)]
            .into_iter()
            .filter(|(rival, _)| *rival >= tier)
            .find_map(|(rival, few)| few.other_than(owner).map(|(owner, prefix)| (rival, owner, prefix)))
    }
}

/// A prefix whose insides are still being walked.
struct Open {
    prefix: IpNet,
    holders: BTreeMap<usize, Tier>,
    own: Rivals,
    above: Rivals,
    below: Rivals,
}

/// Gives each member the prefixes it keeps and reports the rest. `names` are the owners' names by index, sorted.
pub(crate) fn resolve(
    entries: Vec<Entry>,
    names: &[&str],
    problems: &mut BTreeSet<Problem>,
) -> BTreeMap<usize, Vec<IpNet>> {
    let mut by_prefix: BTreeMap<IpNet, BTreeMap<usize, Tier>> = BTreeMap::new();
    for Entry { prefix, owner, tier } in entries {
        let present = by_prefix.entry(prefix).or_default().entry(owner).or_insert(tier);
        *present = (*present).max(tier);
    }
    let mut owners = Owners { names, problems, owned: BTreeMap::new() };
    let mut stack: Vec<Open> = Vec::new();
    for (prefix, holders) in by_prefix {
        while stack.last().is_some_and(|open| !open.prefix.contains(&prefix)) {
            close(&mut stack, &mut owners);
        }
        let mut own = Rivals::default();
        holders.iter().for_each(|(owner, tier)| own.tier_mut(*tier).add((*owner, prefix)));
        let mut above = Rivals::default();
        if let Some(parent) = stack.last() {
            above.merge(&parent.above);
            above.merge(&parent.own);
        }
        stack.push(Open { prefix, holders, own, above, below: Rivals::default() });
    }
    while !stack.is_empty() {
        close(&mut stack, &mut owners);
    }
    owners.owned
}

fn close(stack: &mut Vec<Open>, owners: &mut Owners<'_>) {
    let Some(open) = stack.pop() else { return };
    if let Some(parent) = stack.last_mut() {
        parent.below.merge(&open.own);
        parent.below.merge(&open.below);
    }
    owners.decide(&open);
}

struct Owners<'a> {
    names: &'a [&'a str],
    problems: &'a mut BTreeSet<Problem>,
    owned: BTreeMap<usize, Vec<IpNet>>,
}

impl Owners<'_> {
    fn decide(&mut self, open: &Open) {
        let mut rivals = open.own;
        rivals.merge(&open.above);
        rivals.merge(&open.below);
        let mut sharing: Option<Tier> = None;
        for (&owner, &tier) in &open.holders {
            match rivals.beats(owner, tier) {
                None => self.owned.entry(owner).or_default().push(open.prefix),
                Some((rival, _, prefix)) if rival == tier && tier != Tier::Block && prefix == open.prefix => {
                    sharing = Some(tier);
                }
                Some(rival) => self.report(open.prefix, owner, tier, rival),
            }
        }
        if let Some(shared) = sharing {
            let holders = open.holders.iter().filter(|(_, tier)| **tier == shared);
            let nodes = holders.map(|(owner, _)| self.name(*owner)).collect();
            self.problems.insert(Problem::ClaimedTwice { prefix: open.prefix, nodes });
        }
    }

    fn name(&self, owner: usize) -> String {
        self.names.get(owner).copied().unwrap_or_default().to_owned()
    }

    fn report(&mut self, prefix: IpNet, owner: usize, tier: Tier, rival: (Tier, usize, IpNet)) {
        let (rival_tier, other, other_prefix) = rival;
        let (node, other_node) = (self.name(owner), self.name(other));
        let problem = match (tier, rival_tier) {
            (Tier::Block, _) if owner < other => {
                Problem::BlocksOverlap { node, block: prefix, other: other_node, other_block: other_prefix }
            }
            (Tier::Block, _) => Problem::BlocksOverlap {
                node: other_node,
                block: other_prefix,
                other: node,
                other_block: prefix,
            },
            (_, Tier::Block) => {
                Problem::ClaimOverlapsBlock { node, prefix, other: other_node, block: other_prefix }
            }
            _ => Problem::ClaimOverlapsClaim { node, prefix, other: other_node, other_prefix },
        };
        self.problems.insert(problem);
    }
}

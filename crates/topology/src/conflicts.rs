//! Owners of prefixes that several members name.
//!
//! Prefixes either contain each other or have nothing in common, so one walk over the sorted list with a stack of the
//! open ones sees every overlap. WireGuard sends a packet to the owner of the longest prefix (WireGuard paper 2): a prefix
//! inside another one does not take the rest of it.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use ipnet::IpNet;

use crate::problem::Problem;

/// Strength with which a member owns a prefix. The stronger wins. Of two equally strong claims that one wins which this node's WireGuard
/// device has at the key of its member, then that of the member that joined first; of two blocks, which the controller never grants so,
/// neither.
///
/// A range never takes an address in it from the node that has it, not even a granted one: `0.0.0.0/0` contains all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    /// A range that a member has of which only discovery services know.
    DiscoveredWideClaim,
    /// An address that such a member says is its own: nothing is taken from a member that the cluster knows.
    DiscoveredHostClaim,
    /// A range a node says is behind it.
    WideClaim,
    /// A range that an administrator says is behind an external member.
    ExternalRange,
    /// A range that an administrator lets the member have, also where other members claim it.
    GrantedRange,
    /// A prefix of hosts beside a node, which an administrator names on the Node.
    SiteRange,
    /// An address a node says is its own, or an administrator says of an external member.
    HostClaim,
    /// An address that a node says is its own, and that its Node object has.
    NodeAddress,
    /// A source address of an egress gateway, claimed by a node that has a gateway pod of its Egress.
    SourceAddress,
    /// A source address of an egress gateway, claimed by the node of the gateway that the controller names as its holder.
    HeldSourceAddress,
    /// The network of a node's pods, as its Node object has it: an address that another node says is its own takes nothing of it.
    PodNetwork,
    /// An address on the mesh that the controller gave the node.
    MeshAddress,
    /// An address that an administrator lets the member have, also where other members claim it, or this node's own.
    GrantedHost,
    /// A block the controller gave.
    Block,
}

/// One prefix of one member, without host bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) prefix: IpNet,
    /// Index of the member; a lower one joined earlier.
    pub(crate) owner: usize,
    pub(crate) tier: Tier,
    /// Whether this node's WireGuard device has it at the member's key.
    pub(crate) is_held: bool,
}

impl Entry {
    /// Greater for the stronger of two entries.
    fn strength(&self) -> (Tier, bool, Reverse<usize>) {
        (self.tier, self.is_held, Reverse(self.owner))
    }
}

/// The two strongest entries of different owners.
#[derive(Debug, Clone, Copy, Default)]
struct Strongest {
    first: Option<Entry>,
    second: Option<Entry>,
}

impl Strongest {
    fn add(&mut self, entry: Entry) {
        let stronger = |than: Option<Entry>| than.is_none_or(|than| entry.strength() > than.strength());
        let same_owner = |than: Option<Entry>| than.is_some_and(|than| than.owner == entry.owner);
        if stronger(self.first) {
            if !same_owner(self.first) {
                self.second = self.first;
            }
            self.first = Some(entry);
        } else if !same_owner(self.first) && stronger(self.second) {
            self.second = Some(entry);
        }
    }

    fn other_than(&self, owner: usize) -> Option<Entry> {
        self.first.filter(|first| first.owner != owner).or(self.second)
    }
}

/// A prefix whose insides are still being walked.
struct Open {
    prefix: IpNet,
    /// The strongest entries of it and of all that contain it.
    strongest: Strongest,
    /// Index of the member that gets a packet to it, as far as is known.
    holder: Option<usize>,
}

/// Prefixes and their owners.
pub(crate) struct Resolved {
    /// Prefixes that each member keeps, by its index, sorted. Those of one member that lie in one another are listed once, unless
    /// another member's lies between them.
    pub(crate) owned: Vec<Vec<IpNet>>,
    /// Blocks that no member keeps.
    pub(crate) lost_blocks: BTreeSet<IpNet>,
}

/// Gives each member the prefixes it keeps, and reports the rest. `names` are the owners' names by index.
pub(crate) fn resolve(mut entries: Vec<Entry>, names: &[&str], problems: &mut BTreeSet<Problem>) -> Resolved {
    entries.sort_unstable_by_key(|entry| (entry.prefix, entry.owner, Reverse(entry.strength())));
    entries.dedup_by_key(|entry| (entry.prefix, entry.owner));
    let overlapping = overlapping_blocks(&entries, names, problems);
    let mut owned = vec![Vec::new(); names.len()];
    let mut stack: Vec<Open> = Vec::new();
    for rivals in entries.chunk_by(|a, b| a.prefix == b.prefix) {
        let Some(prefix) = rivals.first().map(|entry| entry.prefix) else { continue };
        while stack.last().is_some_and(|open| !open.prefix.contains(&prefix)) {
            stack.pop();
        }
        let parent = stack.last();
        let mut strongest = parent.map(|parent| parent.strongest).unwrap_or_default();
        rivals.iter().for_each(|entry| strongest.add(*entry));
        let outer = parent.and_then(|parent| parent.holder);
        let is_kept = |entry: &&Entry| {
            let beaten =
                strongest.other_than(entry.owner).is_some_and(|rival| rival.strength() > entry.strength());
            !beaten && !overlapping.contains(&(entry.prefix, entry.owner))
        };
        let winner = rivals.iter().find(is_kept).map(|entry| entry.owner);
        if let Some(owned) = winner.filter(|winner| outer != Some(*winner)).and_then(|at| owned.get_mut(at)) {
            owned.push(prefix);
        }
        report_losers(rivals, &strongest, names, problems);
        let is_lost = rivals.iter().any(|entry| overlapping.contains(&(prefix, entry.owner)));
        stack.push(Open { prefix, strongest, holder: winner.or(outer.filter(|_| !is_lost)) });
    }
    Resolved { owned, lost_blocks: overlapping.into_iter().map(|(prefix, _)| prefix).collect() }
}

/// Blocks that overlap blocks of other members, each pair of neighbours reported.
fn overlapping_blocks(
    entries: &[Entry],
    names: &[&str],
    problems: &mut BTreeSet<Problem>,
) -> BTreeSet<(IpNet, usize)> {
    let mut overlapping = BTreeSet::new();
    let mut open: Vec<Entry> = Vec::new();
    for block in entries.iter().filter(|entry| entry.tier == Tier::Block) {
        open.retain(|outer| outer.prefix.contains(&block.prefix));
        for outer in open.iter().filter(|outer| outer.owner != block.owner) {
            overlapping.extend([(outer.prefix, outer.owner), (block.prefix, block.owner)]);
            let mut pair =
                [(name(names, outer.owner), outer.prefix), (name(names, block.owner), block.prefix)];
            pair.sort();
            let [(node, block), (other, other_block)] = pair;
            problems.insert(Problem::BlocksOverlap { node, block, other, other_block });
        }
        open.push(*block);
    }
    overlapping
}

/// Reports the claims on one prefix that lost; lost blocks are reported already.
fn report_losers(rivals: &[Entry], strongest: &Strongest, names: &[&str], problems: &mut BTreeSet<Problem>) {
    let mut sharing = Vec::new();
    // Two nodes may claim a source address for a moment, and one that lost its power goes on.
    let is_reported =
        |entry: &&Entry| !matches!(entry.tier, Tier::Block | Tier::SourceAddress | Tier::HeldSourceAddress);
    for entry in rivals.iter().filter(is_reported) {
        let beaten_by = strongest.other_than(entry.owner).filter(|rival| rival.strength() > entry.strength());
        let Some(rival) = beaten_by else { continue };
        let node = name(names, entry.owner);
        let other = name(names, rival.owner);
        let prefix = entry.prefix;
        if rival.tier == Tier::Block {
            problems.insert(Problem::ClaimOverlapsBlock { node, prefix, other, block: rival.prefix });
        } else if rival.prefix == prefix {
            sharing.push((node, other));
        } else {
            problems.insert(Problem::ClaimOverlapsClaim { node, prefix, other, other_prefix: rival.prefix });
        }
    }
    if let Some((_, owner)) = sharing.first().cloned()
        && let Some(prefix) = rivals.first().map(|entry| entry.prefix)
    {
        let mut nodes: Vec<String> =
            sharing.into_iter().map(|(node, _)| node).chain([owner.clone()]).collect();
        nodes.sort();
        problems.insert(Problem::ClaimedTwice { prefix, nodes, owner });
    }
}

fn name(names: &[&str], owner: usize) -> String {
    names.get(owner).copied().unwrap_or_default().to_owned()
}

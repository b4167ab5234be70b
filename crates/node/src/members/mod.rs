//! Who is in the mesh or on the network: records of all sources, merged.
//!
//! A source says what it knows as [`MemberRecord`]s. [`merged`] asks all of them; [`fairlead_topology::merge`] makes one
//! member of all records of an identity. [`kubernetes`] has the nodes and the most authority, [`external_peers`] the Peers of Kilo, [`discovery`]
//! the least authority. Data goes one way: source, record, merge, plan, kernel.

pub mod annotations;
pub mod cached_peer;
pub mod cluster_addresses;
pub mod configuration;
pub mod discovery;
pub mod external_peers;
pub mod kubernetes;
pub mod nodes;
mod problem;

use std::collections::BTreeSet;
use std::time::Duration;

use fairlead_cluster::caches::Refusal;
use fairlead_topology::{Member, MemberRecord, Source, merge};
use futures::future::{BoxFuture, select_all};

pub use problem::SourceProblem;

/// Most problems of members that only discovery services know: they can cause any number.
const MAX_DISCOVERED_PROBLEMS: usize = 32;

/// Where records come from: objects of the cluster, discovery services.
pub trait MemberSource: Send + Sync {
    /// Resolves when the records may have changed.
    fn changed(&mut self) -> BoxFuture<'_, ()>;

    /// Whether it has answered once. Before, a member that is missing may only not have been heard of.
    fn is_ready(&self) -> bool;

    /// Whether it is the cluster that answers: what was saved of that takes its place until the API server has answered.
    fn is_cluster(&self) -> bool {
        true
    }

    /// Why it cannot answer, if that is known.
    fn refusal(&self) -> Option<Refusal> {
        None
    }

    /// What it says now. Parts that cannot be read are left out and added to `problems`.
    fn records(&mut self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord>;
}

/// Resolves when the records of a source may have changed.
pub async fn changed(sources: &mut [Box<dyn MemberSource>]) {
    select_all(sources.iter_mut().map(|source| source.changed())).await;
}

/// What all sources and the program itself say; `None` while a source has not answered.
pub fn merged(
    sources: &mut [Box<dyn MemberSource>],
    own: Option<MemberRecord>,
    problems: &mut Vec<SourceProblem>,
) -> Option<Vec<Member>> {
    if !sources.iter().all(|source| source.is_ready()) {
        return None;
    }
    Some(united(own.into_iter().collect(), sources.iter_mut(), problems))
}

/// What was saved of the cluster, and what the other sources say.
pub fn merged_with_saved(
    saved: Vec<Member>,
    sources: &mut [Box<dyn MemberSource>],
    problems: &mut Vec<SourceProblem>,
) -> Vec<Member> {
    let record = |member| MemberRecord { source: Source::Kubernetes, age: Duration::ZERO, member };
    let others = sources.iter_mut().filter(|source| !source.is_cluster());
    united(saved.into_iter().map(record).collect(), others, problems)
}

fn united<'a>(
    mut records: Vec<MemberRecord>,
    sources: impl Iterator<Item = &'a mut Box<dyn MemberSource>>,
    problems: &mut Vec<SourceProblem>,
) -> Vec<Member> {
    for source in sources {
        records.append(&mut source.records(problems));
    }
    let members = merge(records);
    retain_of_discovered(problems, &members);
    members
}

/// What discovery services say of members that the cluster knows is no problem.
fn retain_of_discovered(problems: &mut Vec<SourceProblem>, members: &[Member]) {
    let is_about = |problem: &SourceProblem| matches!(problem, SourceProblem::DiscoveredPart { .. });
    if !problems.iter().any(is_about) {
        return;
    }
    let known = members.iter().filter(|member| !member.is_discovered).map(|member| member.name.as_str());
    let known: BTreeSet<&str> = known.collect();
    let mut told = 0_usize;
    problems.retain(|problem| match problem {
        SourceProblem::DiscoveredPart { member, .. } if known.contains(member.as_str()) => false,
        SourceProblem::DiscoveredPart { .. } => {
            told = told.saturating_add(1);
            told <= MAX_DISCOVERED_PROBLEMS
        }
        _ => true,
    });
}

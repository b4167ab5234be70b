//! Who is in the mesh or on the network: records of all sources, merged.
//!
//! A source says what it knows as [`MemberRecord`]s. [`merged`] asks all of them; [`fairlead_topology::merge`] makes one
//! member of all records of an identity. [`kubernetes`] has the nodes, [`external_peers`] the Peers of Kilo. Data goes one way: source, record, merge,
//! plan, kernel.

pub mod annotations;
pub mod cached_peer;
pub mod cluster_addresses;
pub mod configuration;
pub mod external_peers;
pub mod kubernetes;
pub mod nodes;
mod problem;

use fairlead_cluster::caches::Refusal;
use fairlead_topology::{Member, MemberRecord, merge};
use futures::future::{BoxFuture, select_all};

pub use problem::SourceProblem;

/// Where records come from: objects of the cluster, later a discovery service or a file.
pub trait MemberSource: Send + Sync {
    /// Resolves when the records may have changed.
    fn changed(&mut self) -> BoxFuture<'_, ()>;

    /// Whether it has answered once. Before, a member that is missing may only not have been heard of.
    fn is_ready(&self) -> bool;

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
    let mut records: Vec<MemberRecord> = own.into_iter().collect();
    for source in sources {
        records.append(&mut source.records(problems));
    }
    Some(merge(records))
}

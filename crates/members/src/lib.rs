//! Sources of members: who is in the mesh, or on the network, and what each source says of it.
//!
//! A source ([`MemberSource`]) says what it knows as [`MemberRecord`]s. [`merged`] asks all of them; [`fairlead_topology::merge`]
//! makes one member of all records of an identity. [`kubernetes`] has the nodes and the most authority, [`external_peers`] the
//! Peers of Kilo, [`static_peers`] those of a file, [`discovery`] the least authority. [`departures`] remembers who left,
//! [`membership`] has all of it for the mesh, [`saved`] keeps it in files, and [`provenance`] what users see of the sources.
//!
//! [`settings`] reads the mesh resource, [`discovery_client`] publishes this node at the discovery services and follows what they
//! tell, and [`names`] looks up the host names of endpoints.
//!
//! Data comes from watch caches ([`cached_peer`], [`cached_block`] and others keep of objects what is read), a file, and what
//! discovery services tell. It goes to the mesh and to the built-in router, and by way of [`configuration`] to the command line,
//! which computes the peers of a member as its node does. [`ipam_check`] is what these two share of `fairlead ipam check`.
//!
//! Nothing is decided here but what of a source is valid: `fairlead-topology` decides peers, prefixes and routes.

pub mod annotations;
pub mod cached_block;
pub mod cached_peer;
pub mod cluster_addresses;
pub mod configuration;
pub mod departures;
pub mod discovery;
pub mod discovery_client;
pub mod external_peers;
pub mod grants;
pub mod ipam_check;
pub mod kubernetes;
pub mod locations;
pub mod membership;
pub mod names;
pub mod nodes;
pub mod preshared_keys;
mod problem;
pub mod provenance;
pub mod saved;
pub mod settings;
pub mod state_file;
pub mod static_peers;

use std::collections::BTreeSet;
use std::sync::Arc;

use fairlead_cluster::caches::Refusal;
use fairlead_topology::{Member, MemberRecord, merge};
use futures::future::{BoxFuture, select_all};
use tokio::sync::watch;

use self::departures::Deletion;
pub use problem::SourceProblem;

/// Most problems of members that only discovery services know: they can cause any number.
const MAX_DISCOVERED_PROBLEMS: usize = 32;

/// Source of member records: objects of the cluster, a file, discovery services.
pub trait MemberSource: Send + Sync {
    /// Resolves when the records may have changed.
    fn changed(&mut self) -> BoxFuture<'_, ()>;

    /// Whether it has answered once. Before, a member that is missing may only not have been heard of.
    fn is_ready(&self) -> bool;

    /// Whether it is the cluster that answers: what was saved of that takes its place until the API server has answered.
    fn is_cluster(&self) -> bool {
        true
    }

    /// Reason why it cannot answer, if that is known.
    fn refusal(&self) -> Option<Refusal> {
        None
    }

    /// Members that were removed on purpose since the last time, or as far as it remembers. It is asked before [`Self::records`].
    fn deletions(&mut self) -> Vec<Deletion> {
        Vec::new()
    }

    /// Records of the source now. Parts that cannot be read are left out and added to `problems`.
    fn records(&mut self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord>;
}

/// Resolves when the records of a source may have changed.
pub async fn changed(sources: &mut [Box<dyn MemberSource>]) {
    select_all(sources.iter_mut().map(|source| source.changed())).await;
}

/// Members of which all sources tell; `None` while a source has not answered.
pub fn merged(
    sources: &mut [Box<dyn MemberSource>],
    problems: &mut Vec<SourceProblem>,
) -> Option<Vec<Member>> {
    if !sources.iter().all(|source| source.is_ready()) {
        return None;
    }
    Some(united(Vec::new(), sources.iter_mut(), |_| {}, problems))
}

/// Members of these `records` and of those that the sources have beside them, as far as `admit` leaves them.
fn united<'a>(
    mut records: Vec<MemberRecord>,
    sources: impl Iterator<Item = &'a mut Box<dyn MemberSource>>,
    admit: impl FnOnce(&mut Vec<MemberRecord>),
    problems: &mut Vec<SourceProblem>,
) -> Vec<Member> {
    for source in sources {
        records.append(&mut source.records(problems));
    }
    admit(&mut records);
    let members = merge(records);
    retain_of_discovered(problems, &members);
    members
}

/// Shares allocations with the members `before`: one that is the same keeps its own, so that what follows from it is not decided
/// again. Both lists are sorted by name.
pub fn shared(members: Vec<Member>, before: &[Arc<Member>]) -> Vec<Arc<Member>> {
    let mut before = before.iter().peekable();
    let share = |member: Member| {
        while before.next_if(|known| known.name < member.name).is_some() {}
        match before.next_if(|known| ***known == member) {
            Some(known) => Arc::clone(known),
            None => Arc::new(member),
        }
    };
    members.into_iter().map(share).collect()
}

/// Leaves out problems of discovery services with members that the cluster knows, and keeps `MAX_DISCOVERED_PROBLEMS` of the others.
fn retain_of_discovered(problems: &mut Vec<SourceProblem>, members: &[Member]) {
    let is_about = |problem: &SourceProblem| matches!(problem, SourceProblem::DiscoveredPart { .. });
    if !problems.iter().any(is_about) {
        return;
    }
    let known =
        members.iter().filter(|member| !member.discovery.is_only_source).map(|member| member.name.as_str());
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

/// Waits until something was sent; without a sender nothing ever will be.
async fn sent<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use fairlead_topology::Keepalive;

    use super::*;

    #[test]
    fn members_that_are_as_before_are_the_same_allocations() {
        let named =
            |name: &str, keepalive| Member { keepalive: Keepalive::every(keepalive), ..Member::named(name) };
        let before = shared(vec![named("a", None), named("b", None), named("d", None)], &[]);
        let now = vec![named("a", None), named("b", Some(1)), named("c", None), named("d", None)];
        let after = shared(now.clone(), &before);
        assert!(after.iter().map(|member| &**member).eq(&now));
        let is_shared = |member: &Arc<Member>| before.iter().any(|known| Arc::ptr_eq(known, member));
        assert_eq!(after.iter().map(is_shared).collect::<Vec<_>>(), [true, false, false, true]);
    }
}

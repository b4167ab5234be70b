//! All sources together, and the memory of members that left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_cluster::caches::Refusal;
use fairlead_keys::PublicKey;
use fairlead_topology::{Member, MemberRecord, Source};

use super::departures::{Deletion, Departures, Evidence, Revoked, Session};
use super::{MemberSource, SourceProblem, united};

/// Function that reports the state of the tunnel with the peer of a key.
pub type SessionOf = Box<dyn Fn(&PublicKey) -> Session + Send + Sync>;

/// The members of the mesh.
pub struct Membership {
    node: String,
    sources: Vec<Box<dyn MemberSource>>,
    departures: Departures,
    /// Time at which members are followed again although no source says anything new.
    check_at: Option<Instant>,
    session: SessionOf,
}

/// Facts with which members are followed.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The members as of the last time.
    pub previous: &'a [Arc<Member>],
    /// Age of `previous`; zero unless an earlier program saved them.
    pub age: Duration,
    /// Members that administrators revoked.
    pub revoked: &'a Revoked,
    /// Deletions that the controller has seen.
    pub deleted: &'a [Deletion],
    /// Whether the mesh has discovery services.
    pub uses_discovery: bool,
    /// Present time.
    pub now: Instant,
}

impl Membership {
    /// Members of the mesh of this node, from these sources.
    pub fn new(node: String, sources: Vec<Box<dyn MemberSource>>, session: SessionOf) -> Self {
        Self { node, sources, departures: Departures::default(), check_at: None, session }
    }

    /// Takes what an earlier run of this program remembered.
    pub fn restore(&mut self, departures: Departures) {
        self.departures = departures;
    }

    /// Resolves when the members may have changed.
    pub async fn changed(&mut self) {
        let check_at = self.check_at;
        let check = async move {
            match check_at {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = super::changed(&mut self.sources) => {}
            // Once: without an answer of all sources nothing comes of it.
            () = check => self.check_at = None,
        }
    }

    /// Whether all sources have answered once.
    pub fn is_ready(&self) -> bool {
        self.sources.iter().all(|source| source.is_ready())
    }

    /// Reasons why sources cannot answer.
    pub fn refusals(&self) -> impl Iterator<Item = Refusal> {
        self.sources.iter().filter_map(|source| source.refusal())
    }

    /// Members of which all sources and the program itself tell, and missing ones whose tunnels work.
    pub fn members(
        &mut self,
        own: MemberRecord,
        view: &View<'_>,
        problems: &mut Vec<SourceProblem>,
    ) -> Vec<Member> {
        let mut deletions = self.deletions(|_| true);
        deletions.extend_from_slice(view.deleted);
        let admit = |records: &mut Vec<MemberRecord>| {
            self.departures.admit(records, &deletions, view.revoked, view.now);
        };
        let mut members = united(vec![own], self.sources.iter_mut(), admit, problems);
        let evidence = Evidence {
            own: &self.node,
            previous: view.previous,
            age: view.age,
            uses_discovery: view.uses_discovery,
            deletions: &deletions,
            revoked: view.revoked,
            session: &self.session,
            now: view.now,
        };
        self.departures.follow(&mut members, &evidence);
        self.check_at = self.departures.next_check(view.now);
        problems.extend(self.departures.problems());
        if view.revoked.names.contains(&self.node) {
            problems.push(SourceProblem::Revoked { node: self.node.clone() });
        }
        members
    }

    /// Members that were saved of the cluster, and those of which the other sources tell.
    pub fn with_saved(
        &mut self,
        saved: Vec<Member>,
        view: &View<'_>,
        problems: &mut Vec<SourceProblem>,
    ) -> Vec<Member> {
        let record = |member| MemberRecord { source: Source::Kubernetes, age: Duration::ZERO, member };
        let mut deletions = self.deletions(|source| !source.is_cluster());
        deletions.extend_from_slice(view.deleted);
        let admit = |records: &mut Vec<MemberRecord>| {
            self.departures.admit(records, &deletions, view.revoked, view.now);
        };
        let others = self.sources.iter_mut().filter(|source| !source.is_cluster());
        united(saved.into_iter().map(record).collect(), others, admit, problems)
    }

    /// Memory of members that left.
    pub fn departures(&self) -> &Departures {
        &self.departures
    }

    /// Deletions that these sources saw. Asked before the records: what is deleted and there again was made anew.
    fn deletions(&mut self, which: impl Fn(&dyn MemberSource) -> bool) -> Vec<Deletion> {
        let asked = self.sources.iter_mut().filter(|source| which(&***source));
        asked.flat_map(|source| source.deletions()).collect()
    }
}

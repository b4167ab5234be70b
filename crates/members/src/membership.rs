//! All sources together, and what is remembered of members that left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_cluster::caches::Refusal;
use fairlead_keys::PublicKey;
use fairlead_topology::{Member, MemberRecord, Source};

use super::departures::{Deletion, Departures, Evidence, Revoked, Session};
use super::{MemberSource, SourceProblem, united};

/// How often missing members are looked at: their tunnels end without a change of any source.
const CHECK: Duration = Duration::from_secs(5);

/// How the tunnel of a key does.
pub type SessionOf = Box<dyn Fn(&PublicKey) -> Session + Send + Sync>;

/// The members of the mesh.
pub struct Membership {
    node: String,
    sources: Vec<Box<dyn MemberSource>>,
    departures: Departures,
    /// When missing members are looked at again; `None` while there are none.
    check_at: Option<Instant>,
    session: SessionOf,
}

/// What members are followed with.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The members as of the last time.
    pub previous: &'a [Arc<Member>],
    /// How long ago that was; zero unless an earlier program saved them.
    pub age: Duration,
    /// Whom administrators revoked.
    pub revoked: &'a Revoked,
    /// Whose deletion the controller has seen.
    pub deleted: &'a [Deletion],
    /// Whether the mesh has discovery services.
    pub uses_discovery: bool,
    /// The time.
    pub now: Instant,
}

impl Membership {
    /// Of the mesh of this node.
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
            () = check => {}
        }
    }

    /// Whether all sources have answered once.
    pub fn is_ready(&self) -> bool {
        self.sources.iter().all(|source| source.is_ready())
    }

    /// Why sources cannot answer.
    pub fn refusals(&self) -> impl Iterator<Item = Refusal> {
        self.sources.iter().filter_map(|source| source.refusal())
    }

    /// What all sources and the program itself say, and who is missing.
    pub fn members(
        &mut self,
        own: MemberRecord,
        view: &View<'_>,
        problems: &mut Vec<SourceProblem>,
    ) -> Vec<Member> {
        let mut deletions = self.deletions(|_| true);
        deletions.extend_from_slice(view.deleted);
        let (departures, revoked) = (&mut self.departures, view.revoked);
        let admit =
            |records: &mut Vec<MemberRecord>| departures.admit(records, &deletions, revoked, view.now);
        let mut members = united(vec![own], self.sources.iter_mut(), admit, problems);
        let evidence = Evidence {
            own: &self.node,
            previous: view.previous,
            age: view.age,
            uses_discovery: view.uses_discovery,
            deletions: &deletions,
            revoked,
            session: &self.session,
            now: view.now,
        };
        self.departures.follow(&mut members, &evidence);
        self.check_at = self.departures.is_waiting().then(|| view.now + CHECK);
        problems.extend(self.departures.problems());
        if revoked.names.contains(&self.node) {
            problems.push(SourceProblem::Revoked { node: self.node.clone() });
        }
        members
    }

    /// What was saved of the cluster, and what the other sources say.
    pub fn with_saved(
        &mut self,
        saved: Vec<Member>,
        view: &View<'_>,
        problems: &mut Vec<SourceProblem>,
    ) -> Vec<Member> {
        let record = |member| MemberRecord { source: Source::Kubernetes, age: Duration::ZERO, member };
        let mut deletions = self.deletions(|source| !source.is_cluster());
        deletions.extend_from_slice(view.deleted);
        let (departures, revoked) = (&mut self.departures, view.revoked);
        let admit =
            |records: &mut Vec<MemberRecord>| departures.admit(records, &deletions, revoked, view.now);
        let others = self.sources.iter_mut().filter(|source| !source.is_cluster());
        united(saved.into_iter().map(record).collect(), others, admit, problems)
    }

    /// What is remembered of members that left.
    pub fn departures(&self) -> &Departures {
        &self.departures
    }

    /// Before the records: what is deleted and there again was made anew.
    fn deletions(&mut self, which: impl Fn(&dyn MemberSource) -> bool) -> Vec<Deletion> {
        let asked = self.sources.iter_mut().filter(|source| which(&***source));
        asked.flat_map(|source| source.deletions()).collect()
    }
}

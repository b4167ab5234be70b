//! Members that left, without I/O: those that were removed on purpose, and those that are only missing.
//!
//! A member that an administrator revoked, or whose WireKubePeer was deleted while this node watched, is gone at once: no weaker
//! source brings it back. One that is missing for no known reason (a watch that was interrupted, a cluster restored from a backup,
//! a service that forgets) stays while its tunnel works. After that its prefixes are guarded: what is sent there is dropped, and
//! never leaves in clear text. The same holds for blocks that members released.

mod released;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_topology::{ByDiscovery, Member, MemberRecord, Source, Sources};
use ipnet::IpNet;

pub use self::released::ReleasedBlocks;
use super::SourceProblem;

/// Time for which prefixes of a missing member and blocks that were released are guarded: 24 hours.
pub const GUARD: Duration = Duration::from_secs(24 * 3600);
/// Time for which a deletion is remembered: 7 days.
pub const KEEP_DELETIONS: Duration = Duration::from_secs(7 * 24 * 3600);
/// Interval at which missing members are looked at: their tunnels end without a change of any source.
const CHECK: Duration = Duration::from_secs(5);
/// Most deletions that are remembered: the newest.
pub const MAX_DELETIONS: usize = 4096;
/// Most members that are guarded, and problems that are told of them.
const MAX_MISSING: usize = 4096;
const MAX_PROBLEMS: usize = 32;

/// State of the tunnel to a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Session {
    /// Packets arrive, or there was a handshake within the life of a session.
    Alive,
    /// There was a handshake, and it is too old.
    Ended,
    /// There was none.
    Never,
    /// The device was not read yet.
    Unknown,
}

/// Removal of a member on purpose, as a source saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deletion {
    /// Source that saw it.
    pub source: Source,
    /// Name of the member.
    pub name: String,
    /// The key it had.
    pub public_key: PublicKey,
    /// The key that it was about to use.
    pub next_key: Option<PublicKey>,
}

/// Members that administrators revoked (`spec.revokedPeers` of the WireKubeMesh).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Revoked {
    /// Public keys that are revoked, whichever member has one.
    pub keys: BTreeSet<PublicKey>,
    /// Names of members that are revoked, whatever their keys.
    pub names: BTreeSet<String>,
}

impl Revoked {
    fn has(&self, member: &Member) -> bool {
        self.names.contains(&member.name) || member.public_key.is_some_and(|key| self.keys.contains(&key))
    }
}

/// Memory of members that left: those that were deleted, those that are missing, and blocks that were released.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Departures {
    deleted: BTreeMap<String, Deleted>,
    missing: BTreeMap<String, Missing>,
    released: ReleasedBlocks,
}

/// A WireKubePeer whose deletion was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deleted {
    /// Public key that it had.
    pub public_key: PublicKey,
    /// The key that it was about to use.
    pub next_key: Option<PublicKey>,
    /// Time at which this is forgotten.
    pub until: Instant,
}

/// A member that is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Member as it was known last.
    pub member: Member,
    /// Time until which its prefixes are guarded.
    pub until: Instant,
    /// Whether its prefixes are guarded, because its tunnel works no more.
    pub is_guarded: bool,
}

impl Departures {
    /// Restores what an earlier run of this program remembered.
    pub fn restored(
        deleted: BTreeMap<String, Deleted>,
        missing: BTreeMap<String, Missing>,
        released: ReleasedBlocks,
    ) -> Self {
        Self { deleted, missing, released }
    }

    /// Blocks that no member has any more.
    pub fn released(&self) -> &ReleasedBlocks {
        &self.released
    }

    /// Deleted and missing members, by name, to be saved.
    pub fn remembered(&self) -> (&BTreeMap<String, Deleted>, &BTreeMap<String, Missing>) {
        (&self.deleted, &self.missing)
    }

    /// Takes out what belongs to members that were removed. Blocks stay: the controller frees them, and packets to pods of such a node
    /// are dropped. A deletion counts until the cluster has the member again.
    pub fn admit(
        &mut self,
        records: &mut Vec<MemberRecord>,
        deletions: &[Deletion],
        revoked: &Revoked,
        now: Instant,
    ) {
        self.note(deletions, now);
        let deleted_keys = self.deleted_keys(records, now);
        let is_deleted = |member: &Member| {
            self.deleted.contains_key(&member.name)
                || member.public_key.is_some_and(|key| deleted_keys.contains(&key))
        };
        for MemberRecord { source, member, .. } in records.iter_mut() {
            let is_refused = match source {
                Source::Local => false,
                Source::Kubernetes => revoked.has(member),
                Source::Cache | Source::Discovery | Source::Static => {
                    revoked.has(member) || is_deleted(member)
                }
            };
            if is_refused {
                let blocks = std::mem::take(&mut member.blocks);
                let pod_networks = std::mem::take(&mut member.pod_networks);
                *member = Member {
                    blocks,
                    pod_networks,
                    discovery: ByDiscovery {
                        is_only_source: member.discovery.is_only_source,
                        needs_preshared_key: false,
                    },
                    ..Member::named(&*member.name)
                };
            }
            // The key that it has stays: another may have copied it to have it revoked.
            member.next_key.take_if(|key| revoked.keys.contains(key));
        }
        records.retain(|record| record.source <= Source::Kubernetes || record.member.public_key.is_some());
    }

    /// Forgets deletions of members that the cluster has again. Returns the keys of all others.
    fn deleted_keys(&mut self, records: &[MemberRecord], now: Instant) -> BTreeSet<PublicKey> {
        if self.deleted.is_empty() {
            return BTreeSet::new();
        }
        let of_cluster = records.iter().filter(|record| record.source <= Source::Kubernetes);
        let published: Vec<&Member> =
            of_cluster.map(|record| &record.member).filter(|member| member.public_key.is_some()).collect();
        let names: BTreeSet<&str> = published.iter().map(|member| member.name.as_str()).collect();
        let keys: BTreeSet<PublicKey> =
            published.iter().flat_map(|member| [member.public_key, member.next_key]).flatten().collect();
        self.deleted.retain(|name, deleted| deleted.until > now && !names.contains(name.as_str()));
        // A member that is deleted may have copied the key of another.
        let deleted_keys = self.deleted.values().flat_map(|it| [Some(it.public_key), it.next_key]).flatten();
        deleted_keys.filter(|key| !keys.contains(key)).collect()
    }

    fn note(&mut self, deletions: &[Deletion], now: Instant) {
        for Deletion { name, public_key, next_key, .. } in
            deletions.iter().filter(|deletion| deletion.source == Source::Kubernetes)
        {
            // The controller tells of it again and again.
            let is_noted = |noted: &Deleted| (noted.public_key, noted.next_key) == (*public_key, *next_key);
            if self.deleted.get(name).is_some_and(is_noted) {
                continue;
            }
            while self.deleted.len() >= MAX_DELETIONS && !self.deleted.contains_key(name) {
                let oldest = self.deleted.iter().min_by_key(|(_, deleted)| deleted.until);
                let Some(oldest) = oldest.map(|(name, _)| name.clone()) else { break };
                self.deleted.remove(&oldest);
            }
            let until = now + KEEP_DELETIONS;
            self.deleted
                .insert(name.clone(), Deleted { public_key: *public_key, next_key: *next_key, until });
        }
    }

    /// Compares with the `previous` members: who is missing without a reason stays among the `members` while the tunnel works.
    pub fn follow(&mut self, members: &mut Vec<Member>, evidence: &Evidence<'_>) {
        let now = evidence.now;
        let keyed: BTreeMap<&str, Option<PublicKey>> =
            members.iter().map(|member| (member.name.as_str(), member.public_key)).collect();
        let is_there = |member: &Member| keyed.get(member.name.as_str()).copied().flatten().is_some();
        for member in evidence.previous.iter().filter(|member| evidence.may_be_missing(member)) {
            if is_there(member) || self.missing.len() >= MAX_MISSING {
                continue;
            }
            let until = now + GUARD.saturating_sub(evidence.age);
            let missing = Missing { member: Member::clone(member), until, is_guarded: false };
            self.missing.entry(member.name.clone()).or_insert(missing);
        }
        let deleted = &self.deleted;
        self.missing.retain(|name, missing| {
            let session = missing.member.public_key.map_or(Session::Never, |key| (evidence.session)(&key));
            // A tunnel that was taken down has no session: what is guarded stays so until a source tells of it again.
            missing.is_guarded |= !matches!(session, Session::Alive | Session::Unknown);
            let is_explained = deleted.contains_key(name) || evidence.explains(&missing.member);
            let is_over = missing.is_guarded && missing.until <= now;
            !is_over && !is_explained && !is_there(&missing.member)
        });
        let kept = self.missing.values().filter(|missing| !missing.is_guarded);
        let untold = |member: &Member| Member { sources: Sources::default(), ..member.clone() };
        let kept: Vec<Member> = kept.map(|missing| untold(&missing.member)).collect();
        for member in kept {
            match members.iter_mut().find(|known| known.name == member.name) {
                Some(known) => *known = Member { blocks: std::mem::take(&mut known.blocks), ..member },
                None => members.push(member),
            }
        }
        members.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        self.released.follow(evidence.previous, members, now + GUARD.saturating_sub(evidence.age), now);
    }

    /// Prefixes to which nothing may leave in clear text, though no member has them: blocks that were released, and all of missing members, with
    /// the networks of their pods where the mesh carries these. Of what members had claimed those that the function `admits`: others had never
    /// been in the mesh.
    pub fn guarded<'a>(
        &'a self,
        includes_pod_networks: bool,
        admits: impl Fn(&Member, &IpNet) -> bool + Copy + 'a,
    ) -> impl Iterator<Item = &'a IpNet> {
        let guarded = self.missing.values().filter(|missing| missing.is_guarded).map(|it| &it.member);
        let of_missing = guarded.flat_map(move |member| {
            let Member { claims, blocks, pod_networks, .. } = member;
            let claims = claims.iter().filter(move |claim| admits(member, claim));
            claims.chain(blocks).chain(pod_networks.iter().filter(move |_| includes_pod_networks))
        });
        of_missing.chain(self.released.iter().map(|(block, _)| block))
    }

    /// Time at which members are to be followed again although no source says anything new; `None` if time alone changes nothing.
    pub fn next_check(&self, now: Instant) -> Option<Instant> {
        let of_missing = (!self.missing.is_empty()).then(|| now + CHECK);
        of_missing.into_iter().chain(self.released.ends_at()).min()
    }

    /// Problems that name missing members, for users.
    pub fn problems(&self) -> impl Iterator<Item = SourceProblem> {
        self.missing.values().take(MAX_PROBLEMS).map(|missing| SourceProblem::MemberMissing {
            member: missing.member.name.clone(),
            is_guarded: missing.is_guarded,
        })
    }
}

/// Facts from which [`Departures::follow`] decides.
pub struct Evidence<'a> {
    /// Name of this node.
    pub own: &'a str,
    /// Members as of the last time.
    pub previous: &'a [Arc<Member>],
    /// Age of `previous`; zero unless an earlier program saved them.
    pub age: Duration,
    /// Whether the mesh has discovery services.
    pub uses_discovery: bool,
    /// Deletions that sources saw.
    pub deletions: &'a [Deletion],
    /// Members that administrators revoked.
    pub revoked: &'a Revoked,
    /// Function that reports the state of the tunnel with the peer of a key.
    pub session: &'a dyn Fn(&PublicKey) -> Session,
    /// Present time.
    pub now: Instant,
}

impl Evidence<'_> {
    /// External members are configured by administrators, who remove them too. Of discovery services anything can be told: only who had
    /// a tunnel counts.
    fn may_be_missing(&self, member: &Member) -> bool {
        let Some(key) = member.public_key.filter(|_| member.name != self.own && member.external.is_none())
        else {
            return false;
        };
        let has_session = || matches!((self.session)(&key), Session::Alive | Session::Ended);
        !member.discovery.is_only_source || (self.uses_discovery && has_session())
    }

    fn explains(&self, member: &Member) -> bool {
        let is_it = |deletion: &Deletion| {
            deletion.name == member.name && Some(deletion.public_key) == member.public_key
        };
        self.revoked.has(member) || self.deletions.iter().any(is_it)
    }
}

#[cfg(test)]
mod tests;

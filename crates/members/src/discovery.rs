//! Discovery services as a source of members.
//!
//! Every node that knows the secret of the cluster can publish anything there, also in the name of others, and a service can
//! withhold everything. So what is read here has the least authority of all sources ([`fairlead_topology::merge`]), and nothing
//! that a service withholds is missing elsewhere. [`Reader`] says what the services tell now, [`Memory`] how long a member is
//! kept of which they tell no more. Both are without I/O; [`super::discovery_client`] drives them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use fairlead_address::{PrefixSet, is_reachable};
use fairlead_cluster::naming::some_of;
use fairlead_discovery::client::{Member as Affiliate, Members};
use fairlead_keys::PublicKey;
use fairlead_topology::{ByDiscovery, Endpoints, Member, MemberAddresses, MemberRecord, Since, Source};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use ipnet::IpNet;
use tokio::sync::watch;

use super::departures::Deletion;
use super::{MemberSource, SourceProblem};

/// Most problems of members that are remembered: a service can cause any number. Of members that the cluster knows none is told.
const MAX_PROBLEMS: usize = 4096;
/// Most deleted members that are remembered.
const MAX_DELETED: usize = 1024;
/// Longest name of a Node (RFC 1123).
const MAX_NAME: usize = 253;

/// Members that are known by discovery, and problems with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Discovered {
    /// Members, each once.
    pub records: Vec<MemberRecord>,
    /// Problems of parts that are left out, and of discovery itself.
    pub problems: Vec<SourceProblem>,
    /// Members that were deleted there.
    pub deleted: Vec<Deletion>,
    /// Members of which no service tells now, each with the time at which one last did.
    pub untold: BTreeMap<String, Instant>,
}

/// Source of the members that are known by discovery.
pub struct Discovery(watch::Receiver<Arc<Discovered>>);

impl Discovery {
    /// The source follows what is sent.
    pub fn new(known: watch::Receiver<Arc<Discovered>>) -> Self {
        Self(known)
    }
}

impl MemberSource for Discovery {
    fn changed(&mut self) -> BoxFuture<'_, ()> {
        super::sent(&mut self.0).boxed()
    }

    /// No mesh waits for a discovery service.
    fn is_ready(&self) -> bool {
        true
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn records(&mut self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord> {
        let known = Arc::clone(&self.0.borrow_and_update());
        problems.extend_from_slice(&known.problems);
        known.records.clone()
    }

    fn deletions(&mut self) -> Vec<Deletion> {
        self.0.borrow().deleted.clone()
    }
}

/// Reads what services tell.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    /// Name of this node.
    pub node: &'a str,
    /// Identifier of this node in discovery.
    pub node_id: &'a str,
    /// Identifiers of affiliates that another secret of the cluster can read, while it changes: that this one cannot is no
    /// problem.
    pub of_others: &'a BTreeSet<String>,
    /// Prefixes of `spec.discovery.allowedPrefixes`.
    pub allowed: &'a [IpNet],
}

/// Members of which services tell now, without this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Told {
    /// Members by name.
    members: BTreeMap<String, Known>,
    /// Problems of parts of them that are left out.
    pub problems: Vec<SourceProblem>,
}

/// A member, and its identifier in discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    id: String,
    record: MemberRecord,
    /// Time at which a service last told of it; `None` while one does.
    untold: Option<Instant>,
    /// Whether it was told of under the present secret of the cluster, not under the one before.
    has_changed: bool,
}

impl Reader<'_> {
    /// Unites what the services tell. Of two affiliates with one identifier the one that was heard last counts, of two members
    /// with one name that with the smaller identifier, as in Talos.
    pub fn read<'a>(&self, services: impl IntoIterator<Item = &'a Members>) -> Told {
        let mut told = Told::default();
        let mut by_id: BTreeMap<&str, (&Affiliate, BTreeSet<SocketAddr>)> = BTreeMap::new();
        for members in services {
            for (id, rejection) in members.rejected().filter(|(id, _)| !self.of_others.contains(*id)) {
                told.reject(&external_name(id), "the affiliate", rejection.to_string());
            }
            for (id, affiliate) in members.iter().filter(|(id, _)| *id != self.node_id) {
                let (latest, endpoints) = by_id.entry(id).or_insert_with(|| (affiliate, BTreeSet::new()));
                if affiliate.heard > latest.heard {
                    *latest = affiliate;
                }
                endpoints.extend(&affiliate.endpoints);
            }
        }
        for (id, (affiliate, endpoints)) in by_id {
            self.add(id, affiliate, endpoints, &mut told);
        }
        told
    }

    fn add(&self, id: &str, affiliate: &Affiliate, endpoints: BTreeSet<SocketAddr>, told: &mut Told) {
        let name = affiliate_name(id, affiliate);
        for rejection in &affiliate.rejections {
            told.reject(&name, "a part", rejection.to_string());
        }
        // A member without either takes no part in the mesh.
        let (Some(public_key), Some(kubespan)) = (affiliate.public_key, &affiliate.affiliate.kubespan) else {
            return;
        };
        let refusal = if name == self.node {
            Some("it has the name of this node")
        } else if !affiliate.affiliate.nodename.is_empty() && !is_name(&name) {
            Some("its name is none of a Node")
        } else if told.members.contains_key(&name) {
            Some("another member with a smaller identifier has the same name")
        } else {
            None
        };
        if let Some(why) = refusal {
            return told.reject(&external_name(id), "all", why.to_owned());
        }
        let record = MemberRecord::of_node(Source::Discovery, &name);
        let member = Member {
            public_key: Some(public_key),
            next_key: kubespan.next_public_key.parse().ok(),
            claims: self.claims(&name, affiliate, told),
            // Exclusions do not apply to it, as in Talos.
            addresses: MemberAddresses {
                mesh: kubespan.address.into_iter().filter(|address| is_reachable(*address)).collect(),
                ..record.member.addresses
            },
            discovery: ByDiscovery {
                needs_preshared_key: !kubespan.without_preshared_key,
                ..record.member.discovery
            },
            endpoints: Endpoints { discovered: endpoints.into_iter().collect(), ..Endpoints::default() },
            // Services do not tell when it joined. Of what two of them claim the smaller identifier has it, as in Talos.
            since: Some(Since { created: i64::MAX, uid: id.to_owned() }),
            ..record.member
        };
        told.members.insert(
            name,
            Known {
                id: id.to_owned(),
                record: MemberRecord { member, ..record },
                untold: None,
                has_changed: true,
            },
        );
    }

    /// Addresses of the member itself, and the allowed prefixes that it routes, without what it excludes.
    fn claims(&self, name: &str, affiliate: &Affiliate, told: &mut Told) -> Vec<IpNet> {
        let Some(kubespan) = &affiliate.affiliate.kubespan else { return Vec::new() };
        let is_allowed = |prefix: &IpNet| self.allowed.iter().any(|allowed| allowed.contains(prefix));
        let routed = &kubespan.additional_addresses;
        let beyond = routed.iter().filter(|prefix| !is_allowed(prefix)).map(ToString::to_string);
        let beyond: Vec<String> = beyond.collect();
        if !beyond.is_empty() {
            let why = "spec.discovery.allowedPrefixes of the WireKubeMesh does not cover it".to_owned();
            told.reject(name, &format!("prefix {}", some_of(&beyond, 1)), why);
        }
        let addresses: Vec<IpNet> = affiliate.affiliate.addresses.iter().copied().map(IpNet::from).collect();
        let excluded: PrefixSet = kubespan.exclude_advertised_addresses.iter().collect();
        let all = addresses.into_iter().chain(routed.iter().copied().filter(is_allowed));
        // One by one: addresses stay addresses, which count more than prefixes.
        let kept = all.flat_map(|prefix| PrefixSet::from_iter([prefix]).subtract(&excluded).prefixes());
        let distinct: BTreeSet<IpNet> = kept.collect();
        distinct.into_iter().collect()
    }
}

impl Told {
    /// Names and identifiers of the members.
    pub fn members(&self) -> impl Iterator<Item = (&str, &str)> {
        self.members.iter().map(|(name, known)| (name.as_str(), known.id.as_str()))
    }

    /// Adds members of which services tell only under the secret that the cluster had before.
    pub fn add_previous(&mut self, previous: Self) {
        for (name, known) in previous.members {
            self.members.entry(name).or_insert(Known { has_changed: false, ..known });
        }
        let new = previous.problems.into_iter().filter(|problem| !self.problems.contains(problem));
        let new: Vec<_> = new.take(MAX_PROBLEMS.saturating_sub(self.problems.len())).collect();
        self.problems.extend(new);
    }

    fn reject(&mut self, member: &str, what: &str, why: String) {
        let problem = SourceProblem::DiscoveredPart { member: member.to_owned(), what: what.to_owned(), why };
        if self.problems.len() < MAX_PROBLEMS && !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }
}

/// Name of a member that a service tells of: that of its Node, if it has one.
pub(crate) fn affiliate_name(id: &str, affiliate: &Affiliate) -> String {
    match affiliate.affiliate.nodename.as_str() {
        "" => external_name(id),
        name => name.to_owned(),
    }
}

/// Name of a member that is no Node. Identifiers are anything that a service tells.
fn external_name(id: &str) -> String {
    let shown: String = id.chars().take(64).flat_map(char::escape_default).collect();
    MemberRecord::of_external(Source::Discovery, &shown).member.name
}

/// Whether a Node may have this name (RFC 1123), which therefore is none of another source's identities.
pub(crate) fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let is_inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !label.is_empty() && label.bytes().all(is_inside) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= MAX_NAME && name.split('.').all(is_label)
}

/// Members of which the services told, now and before.
#[derive(Debug, Default)]
pub struct Memory {
    known: BTreeMap<String, Known>,
    /// Members that clients deleted, the latest last.
    deleted: VecDeque<Deletion>,
}

impl Memory {
    /// Restores members that an earlier run of this program knew at a time that this clock may not reach back to.
    pub fn with_cached(members: Vec<Member>, at: Option<Instant>) -> Self {
        let known = members.into_iter().map(|member| {
            let discovery = ByDiscovery { is_only_source: true, ..member.discovery };
            let member = Member { discovery, ..member };
            let record = MemberRecord { member, ..MemberRecord::of_node(Source::Cache, "") };
            (record.member.name.clone(), Known { id: String::new(), record, untold: at, has_changed: false })
        });
        Self { known: known.collect(), deleted: VecDeque::new() }
    }

    /// Takes what the services tell now. A member of which none tells any more is kept while it `is_alive`, and as long as no
    /// service `has_answered`, unless a client of the service deleted it (`is_deleted`). Whether any is kept.
    pub fn update(
        &mut self,
        told: &Told,
        has_answered: bool,
        is_deleted: impl Fn(&str) -> bool,
        is_alive: impl Fn(&PublicKey) -> bool,
        now: Instant,
    ) -> bool {
        let deleted = &mut self.deleted;
        deleted.retain(|deletion| !told.members.contains_key(&deletion.name));
        self.known.retain(|name, known| {
            let Member { public_key: key, next_key, .. } = known.record.member;
            if told.members.contains_key(name) {
                return true;
            }
            if !is_deleted(&known.id) {
                known.untold.get_or_insert(now);
                return !has_answered || key.as_ref().is_some_and(&is_alive);
            }
            if deleted.len() >= MAX_DELETED {
                deleted.pop_front();
            }
            let name = name.clone();
            deleted.extend(key.map(|public_key| Deletion {
                source: Source::Discovery,
                name,
                public_key,
                next_key,
            }));
            false
        });
        let keeps =
            self.known.len() > self.known.keys().filter(|name| told.members.contains_key(*name)).count();
        self.known.extend(told.members.iter().map(|(name, known)| (name.clone(), known.clone())));
        keeps
    }

    /// The secret of the cluster is another one: until services tell of members under it, they have the one before.
    pub fn change_secret(&mut self) {
        self.known.values_mut().for_each(|known| known.has_changed = false);
    }

    /// The nodes of KubeSpan that were told of under the present secret of the cluster, which is therefore their preshared key.
    pub fn changed_kubespan(&self) -> BTreeSet<String> {
        let changed = self
            .known
            .iter()
            .filter(|(_, it)| it.has_changed && it.record.member.discovery.needs_preshared_key);
        changed.map(|(name, _)| name.clone()).collect()
    }

    /// Members of which no service tells now, and when one last did.
    pub fn untold(&self) -> BTreeMap<String, Instant> {
        self.known.iter().filter_map(|(name, known)| Some((name.clone(), known.untold?))).collect()
    }

    /// Records of all members.
    pub fn records(&self) -> Vec<MemberRecord> {
        self.known.values().map(|known| known.record.clone()).collect()
    }

    /// Members that clients of the services deleted, which are therefore not missing.
    pub fn deleted(&self) -> Vec<Deletion> {
        self.deleted.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests;

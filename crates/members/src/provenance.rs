//! Provenance of members: the sources that know each one, and how long ago each source last told of it. Users see it, and nothing is
//! decided from it.
//!
//! [`fairlead_topology::merge`] says which kinds of sources know a member. When they last told of it is asked only when a user wants to
//! know, and measured by the monotonic clock of this host. A source that is watched tells of all its members as long as the watch
//! lasts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_cluster::caches::Cache;
use fairlead_discovery::client::View;
use fairlead_topology::{Source, Sources};
use tokio::sync::watch;

use super::cached_peer::CachedPeer;
use super::discovery::{Discovered, affiliate_name};
use super::static_peers::StaticPeers;

/// Sources that are asked when a user wants to know of them.
#[derive(Clone)]
pub struct Provenance {
    /// The WireKubePeers.
    pub peers: Arc<Cache<CachedPeer>>,
    /// The file of this node's administrator; `None` without one.
    pub file: Option<watch::Receiver<Arc<StaticPeers>>>,
    /// Members that are known by discovery.
    pub discovered: watch::Receiver<Arc<Discovered>>,
    /// Status of the discovery services.
    pub discovery: watch::Receiver<DiscoveryStatus>,
}

/// Status of the discovery services of the mesh; empty where there are none.
#[derive(Debug, Clone, Default)]
pub struct DiscoveryStatus {
    /// Affiliate ID of this node at the services; empty while the secret of the cluster is not known.
    pub affiliate_id: String,
    /// Status of each service, in the order of the resource.
    pub services: Vec<ServiceStatus>,
    /// URL of each service, and what it tells.
    pub views: Vec<(String, watch::Receiver<View>)>,
}

/// Status of one discovery service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceStatus {
    /// URL of the service.
    pub server: String,
    /// Whether there is a connection, and it has told all members.
    pub is_connected: bool,
    /// Whether the service has this node.
    pub is_published: bool,
    /// Number of other members that it tells of.
    pub members: usize,
    /// Error of the connection or the publication; empty if everything works.
    pub error: String,
}

/// Times at which sources last told of members.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Heard {
    /// Time at which the facts of the cluster in use were saved; `None` once the API server has shown them.
    pub saved: Option<Instant>,
    /// Time since which the watch of the cluster is interrupted; `None` while the watch lasts.
    pub cluster: Option<Instant>,
    /// Time since which the file cannot be used; `None` while it can.
    pub file: Option<Instant>,
    /// URL of each discovery service, and the time at which it last told of each member.
    pub services: Vec<(String, BTreeMap<String, Instant>)>,
    /// Times at which services last told of members of which none tells now.
    pub untold: BTreeMap<String, Instant>,
}

/// A source of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceAge {
    /// Name of the source, for users.
    pub source: String,
    /// Time since it last told of the member; `None` where that is not known.
    pub age: Option<Duration>,
}

impl Provenance {
    /// Times at which the sources last told of members, as of now. `saved` is when the facts of the cluster in use were saved.
    pub fn heard(&self, saved: Option<Instant>) -> Heard {
        let discovery = self.discovery.borrow();
        // While the secret of the cluster changes, a service has two views.
        let mut services: Vec<(String, BTreeMap<String, Instant>)> = Vec::new();
        for (server, view) in &discovery.views {
            let view = view.borrow();
            let heard = view.members.iter().map(|(id, member)| (affiliate_name(id, member), member.heard));
            match services.iter_mut().find(|(known, _)| known == server) {
                Some((_, known)) => heard.for_each(|(name, at)| {
                    known.entry(name).and_modify(|known| *known = at.max(*known)).or_insert(at);
                }),
                None => services.push((server.clone(), heard.collect())),
            }
        }
        Heard {
            saved,
            cluster: self.peers.interrupted_at(),
            file: self.file.as_ref().and_then(|file| file.borrow().unusable_since()),
            services,
            untold: self.discovered.borrow().untold.clone(),
        }
    }
}

impl Heard {
    /// Sources from which this member is known, the strongest first.
    pub fn sources(&self, member: &str, sources: Sources, now: Instant) -> Vec<SourceAge> {
        let age = |since: Option<Instant>| {
            Some(since.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)))
        };
        let one = |source: &str, age| vec![SourceAge { source: source.to_owned(), age }];
        let untold = || self.untold.get(member).and_then(|at| age(Some(*at)));
        let named = |source| match source {
            Source::Cache => one("saved discovery", untold()),
            Source::Discovery => {
                let telling = self.services.iter().filter_map(|(server, members)| {
                    let at = *members.get(member)?;
                    Some(SourceAge { source: format!("discovery {server}"), age: age(Some(at)) })
                });
                let telling: Vec<SourceAge> = telling.collect();
                if telling.is_empty() { one("discovery", untold()) } else { telling }
            }
            Source::Kubernetes if self.saved.is_some() => one("saved Kubernetes", age(self.saved)),
            Source::Kubernetes => one("Kubernetes", age(self.cluster)),
            Source::Local => one("this node", age(None)),
            Source::Static => one("static file", age(self.file)),
        };
        sources.iter().flat_map(named).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(heard: &Heard, sources: Sources, now: Instant) -> Vec<String> {
        let ages = heard.sources("n1", sources, now).into_iter();
        ages.map(|it| format!("{} {}", it.source, it.age.map_or(-1, |age| age.as_secs() as i64))).collect()
    }

    #[test]
    fn each_source_has_the_age_of_what_it_last_told() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let all = Sources::from(Source::Discovery) | Source::Kubernetes.into() | Source::Static.into();
        let told = |name: &str, seconds| BTreeMap::from([(name.to_owned(), at(seconds))]);
        let services =
            vec![("https://a:1".to_owned(), told("n1", 5)), ("https://b:1".to_owned(), told("n2", 9))];
        let heard = Heard { services, ..Heard::default() };
        assert_eq!(
            shown(&heard, all, at(12)),
            ["Kubernetes 0", "static file 0", "discovery https://a:1 7"],
            "what is watched is current, and another service tells nothing of it"
        );
        let away = Heard { cluster: Some(at(2)), file: Some(at(11)), services: Vec::new(), ..heard.clone() };
        assert_eq!(shown(&away, all, at(12)), ["Kubernetes 10", "static file 1", "discovery -1"]);
        let saved = Heard { saved: Some(start), untold: told("n1", 4), ..away };
        let of_file = Sources::from(Source::Kubernetes) | Source::Cache.into();
        assert_eq!(shown(&saved, of_file, at(12)), ["saved Kubernetes 12", "saved discovery 8"]);
        assert_eq!(shown(&saved, Sources::default(), at(12)), [""; 0], "it stays while its tunnel works");
    }
}

//! Clients of a relay in the cluster: the nodes of the mesh, by a watch of their WireKubePeers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use fairlead_api::resources::WireKubePeer;
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::lean;
use fairlead_cluster::subsystem::{Readiness, Subsystem};
use fairlead_keys::PublicKey;
use fairlead_relay::access::Authorizer;
use fairlead_relay::core::Admission;
use futures::Stream;
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};

/// Lets in the public keys of all WireKubePeers. While the API server is away the last list stays valid.
pub(super) struct Members {
    peers: Cache<WireKubePeer>,
    current: Mutex<Keys>,
}

/// The keys as of one generation of the watch cache.
#[derive(Default)]
struct Keys {
    generation: u64,
    keys: BTreeSet<PublicKey>,
    /// Whether they have changed since the relay asked.
    has_changed: bool,
}

impl Members {
    /// Starts the watch. Until its first list there is no member: see [`Members::wait_for_first_list`].
    pub(super) fn watch(subsystem: &mut Subsystem, client: Client) -> Arc<Self> {
        let peers = watcher(Api::all(client), caches::config()).modify(trim);
        Self::new(subsystem, peers)
    }

    fn new(
        subsystem: &mut Subsystem,
        peers: impl Stream<Item = watcher::Result<Event<WireKubePeer>>> + Send + 'static,
    ) -> Arc<Self> {
        let peers = caches::start(subsystem, "WireKubePeers", caches::without_deleted(peers));
        let members = Arc::new(Self { peers, current: Mutex::default() });
        subsystem.readiness(Arc::<Self>::clone(&members));
        members
    }

    /// A relay that refused every node would tell them that they are not allowed, which is not so.
    pub(super) async fn wait_for_first_list(&self) {
        let mut generation = self.peers.subscribe();
        // The watch ends with the program.
        let _ = generation.wait_for(|generation| *generation > 0).await;
    }

    /// Works on the keys of this moment.
    fn with_keys<T>(&self, work: impl FnOnce(&mut Keys) -> T) -> T {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.peers.generation();
        if current.generation != generation {
            let keys = keys(&self.peers.store.state());
            current.has_changed |= current.keys != keys;
            current.generation = generation;
            current.keys = keys;
        }
        work(&mut current)
    }
}

impl Authorizer for Members {
    fn admit(&self, key: PublicKey, instance: [u8; 8], _token: &[u8]) -> Option<Admission> {
        let is_member = self.with_keys(|current| current.keys.contains(&key));
        is_member.then_some(Admission { key, instance, token: None })
    }

    fn is_allowed(&self, admission: &Admission) -> bool {
        self.with_keys(|current| current.keys.contains(&admission.key))
    }

    fn refresh(&self) -> bool {
        self.with_keys(|current| std::mem::take(&mut current.has_changed))
    }
}

impl Readiness for Members {
    fn not_ready(&self) -> Option<String> {
        let waiting = "waiting for the API server's WireKubePeers";
        let refusal = self.peers.refusal().map(|refusal| format!("{waiting}: {refusal}"));
        (!self.peers.is_ready()).then(|| refusal.unwrap_or_else(|| waiting.to_owned()))
    }
}

/// A peer whose key does not parse is none. With the key that it announces a node registers before it uses it.
fn keys(peers: &[Arc<WireKubePeer>]) -> BTreeSet<PublicKey> {
    let keys = |peer: &Arc<WireKubePeer>| {
        let next = peer.spec.parse_next_public_key().ok().flatten();
        peer.spec.parse_public_key().ok().into_iter().chain(next)
    };
    peers.iter().flat_map(keys).collect()
}

/// Trims a peer to its keys: nothing else of it is read.
fn trim(peer: &mut WireKubePeer) {
    lean::identified(peer);
    peer.status = None;
    peer.spec.endpoint = None;
    peer.spec.allowed_ips = Vec::new();
}

#[cfg(test)]
mod tests {
    use fairlead_cluster::subsystem::Supervisor;
    use futures::channel::mpsc;
    use serde_json::json;

    use super::*;

    const A: PublicKey = PublicKey([1; 32]);
    const B: PublicKey = PublicKey([2; 32]);

    fn peer(name: &str, key: &str) -> WireKubePeer {
        let object = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": name },
            "spec": { "publicKey": key, "allowedIPs": ["10.0.0.1/32"] },
        });
        let mut peer = serde_json::from_value(object).unwrap();
        trim(&mut peer);
        peer
    }

    async fn eventually(condition: impl Fn() -> bool) {
        while !condition() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn members_are_the_keys_of_all_peers_as_the_watch_shows_them() {
        let mut supervisor = Supervisor::default();
        let (events, stream) = mpsc::unbounded();
        let members = Members::new(supervisor.subsystem("members"), stream);
        let send = |event| events.unbounded_send(Ok(event)).unwrap();
        assert!(members.not_ready().unwrap().contains("WireKubePeers"));
        assert_eq!(members.admit(A, [0; 8], b""), None);

        send(Event::Init);
        send(Event::InitApply(peer("a", &A.to_string())));
        send(Event::InitApply(peer("broken", "none")));
        send(Event::InitDone);
        members.wait_for_first_list().await;
        assert_eq!(members.not_ready(), None);
        let admission = members.admit(A, [7; 8], b"any").unwrap();
        assert_eq!((admission.key, admission.token), (A, None));
        assert_eq!(members.admit(B, [0; 8], b""), None);
        assert!(members.refresh() && !members.refresh());

        // With the key that it announces, a node registers before it uses it.
        let mut announcing = peer("a", &A.to_string());
        announcing.spec.next_public_key = Some(PublicKey([3; 32]).to_string());
        send(Event::Apply(announcing));
        eventually(|| members.admit(PublicKey([3; 32]), [0; 8], b"").is_some()).await;
        assert!(members.refresh() && members.is_allowed(&admission));

        // A node that has just joined need not wait for the next time the relay asks.
        send(Event::Apply(peer("b", &B.to_string())));
        eventually(|| members.admit(B, [0; 8], b"").is_some()).await;
        assert!(members.refresh() && members.is_allowed(&admission));

        send(Event::Delete(peer("a", &A.to_string())));
        eventually(|| members.refresh()).await;
        assert!(!members.is_allowed(&admission));
    }

    #[tokio::test]
    async fn while_the_api_server_is_away_the_last_list_stays_valid() {
        let mut supervisor = Supervisor::default();
        let (events, stream) = mpsc::unbounded();
        let members = Members::new(supervisor.subsystem("members"), stream);
        for event in [Event::Init, Event::InitApply(peer("a", &A.to_string())), Event::InitDone] {
            events.unbounded_send(Ok(event)).unwrap();
        }
        members.wait_for_first_list().await;
        assert!(members.admit(A, [0; 8], b"").is_some());
        let mut interruptions = members.peers.interruptions();
        events.unbounded_send(Err(watcher::Error::NoResourceVersion)).unwrap();
        interruptions.changed().await.unwrap();
        // The list that follows is not there until it is complete.
        events.unbounded_send(Ok(Event::Init)).unwrap();
        tokio::task::yield_now().await;
        assert!(members.admit(A, [0; 8], b"").is_some());
    }
}

//! Replaces the WireGuard key of this node without a gap: announces the next one, gives the others time to prepare it, registers it with
//! the relay, and only then uses it. [`KeyStore`] keeps each step; what follows from the keys follows [`Keys`].

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_cluster::caches::Cache;
use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_members::cached_peer::CachedPeer;
use fairlead_members::settings::RelayServer;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::keys::{KeyStore, Keys};

/// Time that others have to prepare an announced key, and the additional time for each node of the mesh.
const PREPARE: Duration = Duration::from_secs(10);
const PREPARE_PER_NODE: Duration = Duration::from_millis(10);
/// Time to prepare where only discovery services tell of the key.
const PREPARE_BY_DISCOVERY: Duration = Duration::from_secs(60);
/// Time that the announcement may take before that is a problem.
const PATIENCE: Duration = Duration::from_secs(15);
/// Longest time for the registration with the relay: the link with the present key lasts a little longer.
const REGISTRATION: Duration = Duration::from_secs(8);
/// Pause before a failed change of the key is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// Drives a rotation.
pub(crate) struct KeyRotation {
    pub(crate) node: String,
    pub(crate) store: Arc<KeyStore>,
    /// All peers; this node's own shows whether the key is announced.
    pub(crate) peers: Arc<Cache<CachedPeer>>,
    /// Whether this node has a WireKubePeer.
    pub(crate) publishes: bool,
    /// The relay of the mesh, if any.
    pub(crate) relay: watch::Receiver<Option<RelayServer>>,
    /// Key with which this node is to register with the relay.
    pub(crate) relay_key: watch::Sender<PrivateKey>,
    /// Key with which this node is registered there; `None` while it is not.
    pub(crate) registered: watch::Receiver<Option<PublicKey>>,
}

impl KeyRotation {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) -> Infallible {
        let mut keys = self.store.subscribe();
        loop {
            let is_begun = keys.wait_for(|keys| keys.next.is_some()).await.is_ok();
            if !is_begun {
                std::future::pending::<()>().await;
            }
            self.announce().await;
            sleep(self.preparation()).await;
            while let Err(why) = self.switch().await {
                tracing::warn!(reason = why, "cannot replace the WireGuard key of this node yet");
                self.store.wait_for(Some(why));
                sleep(RETRY).await;
            }
        }
    }

    /// Returns once the API server has the key.
    async fn announce(&self) {
        if !self.publishes {
            return;
        }
        let mut changes = self.peers.subscribe();
        let is_announced = |keys: &Keys| {
            let own = self.peers.store.get(&ObjectRef::new(&self.node));
            let spec = own.and_then(|own| own.own().map(|own| own.spec.parse_next_public_key()));
            spec.and_then(Result::ok).flatten() == keys.next_public_key()
        };
        let announced = async {
            while !is_announced(&self.store.current()) {
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::pin!(announced);
        if timeout(PATIENCE, &mut announced).await.is_err() {
            self.store.wait_for(Some("the API server does not have it yet".to_owned()));
            announced.await;
        }
        self.store.wait_for(None);
    }

    fn preparation(&self) -> Duration {
        let members = u32::try_from(self.peers.store.len()).unwrap_or(u32::MAX);
        let alone = if self.publishes { PREPARE } else { PREPARE_BY_DISCOVERY };
        alone.saturating_add(PREPARE_PER_NODE.saturating_mul(members))
    }

    /// The relay first: what others send to the next key arrives from then on, too.
    async fn switch(&self) -> Result<(), String> {
        let Keys { private_key, next: Some(next), .. } = self.store.current() else { return Ok(()) };
        let mut registered = self.registered.clone();
        if self.relay.borrow().is_some() && registered.borrow().is_some() {
            self.relay_key.send_replace(next.private_key);
            let is_registered = registered.wait_for(|key| *key == Some(next.public_key));
            if !matches!(timeout(REGISTRATION, is_registered).await, Ok(Ok(_))) {
                self.relay_key.send_replace(private_key);
                return Err("the relay does not let it in".to_owned());
            }
        } else {
            self.relay_key.send_replace(next.private_key);
        }
        let store = Arc::clone(&self.store);
        let switched = tokio::task::spawn_blocking(move || store.switch()).await;
        switched.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }
}

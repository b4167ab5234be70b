//! State of a relay that all of its connections share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fairlead_wire::relay::ErrorReason;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

use super::handshakes::Handshakes;
use super::relay_ports::RelayPorts;
use super::replica_port::Replicas;
use super::statistics::Statistics;
use super::udp::StunPorts;
use crate::access::Authorizer;
use crate::core::{LinkId, Relay, ReplicaLinkId};
use crate::proof::RelayKey;

/// State that all connections share.
pub(super) struct Shared {
    pub(super) access: Arc<dyn Authorizer>,
    pub(super) handshakes: Arc<Handshakes>,
    pub(super) tls: Option<TlsAcceptor>,
    pub(super) names: Vec<String>,
    pub(super) replica: [u8; 16],
    pub(super) key: RelayKey,
    pub(super) idle: Duration,
    pub(super) stun: Option<StunPorts>,
    pub(super) relay_ports: Option<RelayPorts>,
    pub(super) replicas: Option<Replicas>,
    pub(super) statistics: Statistics,
    pub(super) links: Mutex<Links>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Links, and the wakers of the task that writes to each.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) relay: Relay,
    pub(super) wakers: HashMap<LinkId, Arc<Notify>>,
    pub(super) replica_wakers: HashMap<ReplicaLinkId, Arc<Notify>>,
}

impl Links {
    /// Wakes those that have something to write.
    pub(super) fn wake(&mut self) {
        for id in self.relay.take_ready() {
            if let Some(waker) = self.wakers.get(&id) {
                waker.notify_one();
            }
        }
        for id in self.relay.take_ready_replicas() {
            if let Some(waker) = self.replica_wakers.get(&id) {
                waker.notify_one();
            }
        }
    }
}

impl Shared {
    pub(super) fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn close(&self, id: LinkId, reason: ErrorReason) {
        let mut links = self.links();
        links.relay.close(id, reason);
        links.wake();
    }
}

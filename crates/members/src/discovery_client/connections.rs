//! The clients of this node, one for each service and each secret in use.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_discovery::client::{self, Client, Local, ServerEndpoint, View, node_id};
use fairlead_wire::discovery::ClusterSecret;
use futures::FutureExt as _;
use futures::future::{join_all, select_all};
use rustls::RootCertStore;
use tokio::sync::watch;
use tokio::time::timeout;

use super::leaving::LEAVE;
use crate::saved::discovery::Credentials;
use crate::settings::DiscoverySettings;

/// Longest wait after the start for the answers of all services. After it, the silence of some counts for nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// A service, and the client for it.
pub(super) struct Service {
    pub(super) server: ServerEndpoint,
    pub(super) client: Client,
    pub(super) view: watch::Receiver<View>,
    /// Time since which there is no connection; `None` while there is one.
    pub(super) down_since: Option<Instant>,
}

/// The clients with one secret.
pub(super) struct Clients {
    pub(super) credentials: Credentials,
    /// Identifier of this node under this secret.
    pub(super) own_id: String,
    pub(super) services: Vec<Service>,
    started: Instant,
}

impl Clients {
    /// Connects to all services.
    pub(super) fn start(
        credentials: Credentials,
        node: &str,
        settings: &DiscoverySettings,
        roots: &Arc<RootCertStore>,
        mark: u32,
    ) -> Self {
        let own_id = node_id(&credentials.secret, node);
        let started = Instant::now();
        let connect = |server: &ServerEndpoint| {
            let secret = ClusterSecret::new(credentials.secret);
            let id = credentials.cluster_id.clone();
            let node = own_id.clone();
            let client = client::Settings::new(server.clone(), id, secret, node, Arc::clone(roots));
            let client = Client::start(client::Settings { mark, ..client });
            Service { server: server.clone(), view: client.view(), client, down_since: Some(started) }
        };
        Self { services: settings.servers.iter().map(connect).collect(), credentials, own_id, started }
    }

    pub(super) fn publish(&self, local: &Local) {
        self.services.iter().for_each(|service| service.client.publish(local.clone()));
    }

    /// Notes which services are connected.
    pub(super) fn observe(&mut self, now: Instant) {
        self.services.iter_mut().for_each(|service| service.observe(now));
    }

    /// Resolves when a service tells something; never without services.
    pub(super) async fn changed(&mut self) {
        let views = self.services.iter_mut().map(|service| service.view.changed().boxed());
        let views: Vec<_> = views.collect();
        if views.is_empty() {
            return std::future::pending().await;
        }
        drop(select_all(views).await);
    }

    /// Whether all services have told what they know, or some have and the others had their time.
    pub(super) fn has_answered(&self) -> bool {
        let answered = self.services.iter().filter(|service| service.down_since.is_none()).count();
        answered == self.services.len() || (answered > 0 && self.started.elapsed() >= PATIENCE)
    }

    /// Whether each connected service has this node.
    pub(super) fn is_published(&self) -> bool {
        let mut connected = self.services.iter().filter(|service| service.down_since.is_none());
        connected.all(|service| {
            let view = service.view.borrow();
            view.published.is_some() && view.publication_error.is_none() && !view.members.is_own_missing()
        })
    }

    /// Whether a client deleted this member at one of the services.
    pub(super) fn has_deleted(&self, id: &str) -> bool {
        let is_named =
            |service: &Service| service.view.borrow().members.deleted().any(|(deleted, _)| deleted == id);
        self.services.iter().any(is_named)
    }

    /// Identifiers of all that this secret can read, this node included.
    pub(super) fn ids(&self) -> BTreeSet<String> {
        let mut ids = BTreeSet::from([self.own_id.clone()]);
        for service in &self.services {
            ids.extend(service.view.borrow().members.iter().map(|(id, _)| id.to_owned()));
        }
        ids
    }

    /// Deletes this node at the services that are not used any more.
    pub(super) async fn leave_unless(&mut self, stays: impl Fn(&Service) -> bool) {
        let (staying, left) = std::mem::take(&mut self.services).into_iter().partition(stays);
        self.services = staying;
        let left: Vec<Service> = left;
        join_all(left.into_iter().map(|service| async move {
            let left = timeout(LEAVE, service.client.leave()).await;
            tracing::info!(server = %service.server, ?left, "left a discovery service");
        }))
        .await;
    }

    /// Deletes this node everywhere.
    pub(super) async fn leave(mut self) {
        self.leave_unless(|_| false).await;
    }
}

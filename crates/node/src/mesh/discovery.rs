//! Publishes this node at the discovery services of the mesh, and follows what they tell of others.
//!
//! A client of `fairlead_discovery` for each service does the talking; [`crate::members::discovery`] decides what of it counts.

pub mod admission;
pub(crate) mod leaving;
mod status;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_api::wireguard::PublicKey;
use fairlead_discovery::client::{self, Client, Local, ServerEndpoint, View, authorities, node_id};
use fairlead_topology::Member;
use fairlead_wire::discovery::{Affiliate, ClusterSecret, KubeSpan};
use futures::FutureExt as _;
use futures::future::select_all;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

pub use self::status::{DiscoveryStatus, ServiceStatus};
use super::Reports;
use super::keys::Keys;
use super::publisher::Publication;
use super::report::Report;
use super::saved::{Credentials, StateFile};
use super::settings::DiscoverySettings;
use crate::members::SourceProblem;
use crate::members::departures::Session;
use crate::members::discovery::{Discovered, Memory, Reader};

/// How often the Secret is read again, and how soon after a failure; how long reading it may take.
const SECRET_INTERVAL: Duration = Duration::from_secs(60);
const SECRET_RETRY: Duration = Duration::from_secs(5);
const SECRET_TIMEOUT: Duration = Duration::from_secs(5);
/// Least pause between two times that members are read: the changes in it are read together.
const MIN_PAUSE: Duration = Duration::from_millis(500);
/// How often they are read without a change: handshakes age, and the blocks of this node change.
const INTERVAL: Duration = Duration::from_secs(10);
/// Least pause between two writes of the file.
const SAVE_INTERVAL: Duration = Duration::from_secs(30);
/// How long all services may take to answer after the start before the silence of some counts for nothing.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a service may take that is told that this node leaves.
const LEAVE: Duration = Duration::from_secs(5);
/// Most endpoints of this node at its own addresses: there is room for others, too.
const MAX_HOST: usize = 32;

/// Runs the clients.
pub(super) struct DiscoveryTask {
    pub(super) client: kube::Client,
    /// This node's name.
    pub(super) node: String,
    pub(super) keys: watch::Receiver<Keys>,
    /// `None` while they are not known.
    pub(super) settings: watch::Receiver<Option<Option<DiscoverySettings>>>,
    /// Keeps members and the secret, for starts without the API server.
    pub(super) file: StateFile,
    /// What the file has, as [`Self::known_before`] reads it.
    pub(super) cached: (Vec<Member>, Option<Instant>),
    pub(super) reports: Arc<Reports>,
    /// What the services tell.
    pub(super) known: watch::Sender<Arc<Discovered>>,
    /// What the nodes of the cluster share; `None` without discovery services.
    pub(super) credentials: watch::Sender<Option<Credentials>>,
    /// How they do.
    pub(super) status: watch::Sender<DiscoveryStatus>,
}

/// A service, and the client for it.
struct Service {
    server: ServerEndpoint,
    client: Client,
    view: watch::Receiver<View>,
    /// Since when there is no connection; `None` while there is one.
    down_since: Option<Instant>,
}

/// What is known over changes of the settings.
struct Known {
    memory: Memory,
    /// What the file has, and when it is written again at the earliest.
    saved: Vec<Member>,
    save_at: Instant,
}

impl Known {
    fn discovered(&self, problems: Vec<SourceProblem>) -> Discovered {
        let memory = &self.memory;
        Discovered { records: memory.records(), problems, deleted: memory.deleted(), untold: memory.untold() }
    }
}

impl DiscoveryTask {
    /// Runs until it is dropped.
    pub(super) async fn run(self) {
        let mut settings = self.settings.clone();
        let mut known = Known {
            memory: Memory::with_cached(self.cached.0.clone(), self.cached.1),
            saved: self.cached.0.clone(),
            save_at: Instant::now(),
        };
        let mut services: Vec<Service> = Vec::new();
        loop {
            // Until the settings are known, what was known before counts.
            let Some(current) = settings.borrow_and_update().clone() else {
                is_changed(&mut settings).await;
                continue;
            };
            let stays = |service: &Service| {
                current.as_ref().is_some_and(|current| current.servers.contains(&service.server))
            };
            for service in services.drain(..).filter(|service| !stays(service)) {
                let left = timeout(LEAVE, service.client.leave()).await;
                tracing::info!(server = %service.server, ?left, "left a discovery service");
            }
            match current {
                Some(current) => tokio::select! {
                    () = self.serve(&current, &mut known, &mut services) => {}
                    () = is_changed(&mut settings) => {}
                },
                None => {
                    known = Known { memory: Memory::default(), saved: Vec::new(), save_at: Instant::now() };
                    self.file.remove_discovered();
                    self.credentials.send_if_modified(|known| known.take().is_some());
                    self.publish(Discovered::default(), DiscoveryStatus::default());
                    is_changed(&mut settings).await;
                }
            }
        }
    }

    /// What an earlier run of this program knew and when, and what it is as a source.
    pub(super) fn known_before(file: &StateFile) -> ((Vec<Member>, Option<Instant>), Discovered) {
        let (saved, age) = file.read_discovered(jiff::Timestamp::now()).unwrap_or_else(|error| {
            tracing::warn!(error = %format!("{error:#}"), "cannot use what discovery services told before");
            Default::default()
        });
        let at = Instant::now().checked_sub(age);
        let memory = Memory::with_cached(saved.clone(), at);
        let discovered =
            Discovered { records: memory.records(), untold: memory.untold(), ..Discovered::default() };
        ((saved, at), discovered)
    }

    /// Stays connected until the secret is another one.
    async fn serve(&self, settings: &DiscoverySettings, known: &mut Known, services: &mut Vec<Service>) {
        let started = Instant::now();
        let prepared = async {
            let credentials = self.credentials(settings).await?;
            let roots = authorities(settings.ca_bundle.as_deref());
            let roots =
                Arc::new(roots.context("this host trusts no certificates; set spec.discovery.caBundle")?);
            Ok::<_, anyhow::Error>((credentials, roots))
        };
        let (credentials, roots) = match prepared.await {
            Ok(prepared) => prepared,
            Err(error) => {
                let error = format!("{error:#}");
                let problems = vec![SourceProblem::DiscoverySecret(error.clone())];
                self.publish(known.discovered(problems), DiscoveryStatus::of_failure(settings, &error));
                return sleep(SECRET_RETRY).await;
            }
        };
        self.credentials.send_if_modified(|known| {
            let differs = known.as_ref() != Some(&credentials);
            *known = Some(credentials.clone());
            differs
        });
        if let Err(error) = self.file.write_services(&settings.servers, settings.ca_bundle.as_deref()) {
            tracing::warn!(
                error = %format!("{error:#}"),
                "cannot save where this node publishes itself: `fairlead cleanup` will not delete it there"
            );
        }
        let own_id = node_id(&credentials.secret, &self.node);
        *services = settings
            .servers
            .iter()
            .map(|server| {
                let secret = ClusterSecret::new(credentials.secret);
                let (id, node) = (credentials.cluster_id.clone(), own_id.clone());
                let client = client::Settings::new(server.clone(), id, secret, node, Arc::clone(&roots));
                let client = Client::start(client::Settings { mark: MARK_FROM_WIREGUARD, ..client });
                Service { server: server.clone(), view: client.view(), client, down_since: Some(started) }
            })
            .collect();
        tokio::select! {
            () = self.follow(settings, &own_id, known, services, started) => {}
            () = self.has_other_credentials(settings, &credentials) => {}
        }
    }

    async fn follow(
        &self,
        settings: &DiscoverySettings,
        own_id: &str,
        known: &mut Known,
        services: &mut [Service],
        started: Instant,
    ) {
        let (mut reports, mut keys) = (self.reports.subscribe(), self.keys.clone());
        loop {
            self.publish_node(services);
            let read_at = Instant::now();
            services.iter_mut().for_each(|service| service.observe(read_at));
            self.read(settings, own_id, known, services, started);
            self.save(known).await;
            sleep(MIN_PAUSE).await;
            let any_changed = async {
                let views = services.iter_mut().map(|service| service.view.changed().boxed());
                select_all(views).await
            };
            tokio::select! {
                _ = any_changed, if !settings.servers.is_empty() => {}
                _ = reports.changed() => {}
                Ok(()) = keys.changed() => {}
                () = sleep_until((read_at + INTERVAL).into()) => {}
            }
        }
    }

    fn publish_node(&self, services: &[Service]) {
        let is_member = matches!(*self.reports.subscribe().borrow(), Publication::Member(_));
        let Some(report) = self.reports.snapshot().report.filter(|_| is_member) else { return };
        let local = local(&self.node, &self.keys.borrow(), &report);
        services.iter().for_each(|service| service.client.publish(local.clone()));
    }

    /// Takes what the services tell.
    fn read(
        &self,
        settings: &DiscoverySettings,
        own_id: &str,
        known: &mut Known,
        services: &[Service],
        started: Instant,
    ) {
        let views: Vec<_> = services.iter().map(|service| service.view.borrow()).collect();
        let reader = Reader { node: &self.node, node_id: own_id, allowed: &settings.allowed };
        let told = reader.read(views.iter().map(|view| &view.members));
        let answered = services.iter().filter(|service| service.down_since.is_none()).count();
        let has_answered = answered == services.len() || (answered > 0 && started.elapsed() >= PATIENCE);
        let is_deleted =
            |id: &str| views.iter().any(|view| view.members.deleted().any(|(deleted, _)| deleted == id));
        let report = self.reports.snapshot().report;
        let now = SystemTime::now();
        let is_alive = |key: &PublicKey| {
            report.as_ref().is_some_and(|report| report.session(key, now) == Session::Alive)
        };
        known.memory.update(&told, has_answered, is_deleted, is_alive, Instant::now());
        let mut problems = told.problems;
        problems.extend(services.iter().zip(&views).flat_map(|(service, view)| service.problems(view)));
        let status = services.iter().zip(&views).map(|(service, view)| service.status(view));
        let watched = services.iter().map(|service| (service.server.to_string(), service.view.clone()));
        let status = DiscoveryStatus {
            affiliate_id: own_id.to_owned(),
            services: status.collect(),
            views: watched.collect(),
        };
        drop(views);
        self.publish(known.discovered(problems), status);
    }

    /// Says what is known, if it is anything new.
    fn publish(&self, discovered: Discovered, status: DiscoveryStatus) {
        self.known.send_if_modified(|known| {
            let differs = **known != discovered;
            if differs {
                *known = Arc::new(discovered);
            }
            differs
        });
        self.reports.discovery(&status);
        self.status.send_replace(status);
    }

    /// Not too often: flash memory wears out.
    async fn save(&self, known: &mut Known) {
        if Instant::now() < known.save_at {
            return;
        }
        let members: Vec<Member> = known.memory.records().into_iter().map(|record| record.member).collect();
        if members == known.saved {
            return;
        }
        known.save_at = Instant::now() + SAVE_INTERVAL;
        known.saved.clone_from(&members);
        let file = self.file.clone();
        let write = move || file.write_discovered(&members, jiff::Timestamp::now());
        if let Ok(Err(error)) = tokio::task::spawn_blocking(write).await {
            tracing::warn!(error = %format!("{error:#}"), "cannot save what discovery services tell");
        }
    }

    async fn has_other_credentials(&self, settings: &DiscoverySettings, current: &Credentials) {
        loop {
            sleep(SECRET_INTERVAL).await;
            // While it cannot be read, the last one stays in force.
            if self.credentials(settings).await.is_ok_and(|now| now != *current) {
                return;
            }
        }
    }

    async fn credentials(&self, settings: &DiscoverySettings) -> Result<Credentials> {
        let (namespace, name) = &settings.secret;
        let id = format!("{namespace}/{name}");
        let secrets = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let secret = match timeout(SECRET_TIMEOUT, secrets.get(name)).await {
            Ok(Err(error @ kube::Error::Api(_))) => {
                Err(error).with_context(|| format!("cannot read Secret {id}"))?
            }
            Ok(Ok(secret)) => secret,
            Ok(Err(_)) | Err(_) => {
                let saved = self.file.read_credentials(&id);
                return saved
                    .with_context(|| format!("cannot read Secret {id}: the API server does not answer"));
            }
        };
        let data = secret.data.unwrap_or_default();
        let credentials = Credentials::of_secret(&data).with_context(|| format!("Secret {id}"))?;
        if self.file.read_credentials(&id).as_ref() != Some(&credentials)
            && let Err(error) = self.file.write_credentials(&id, &credentials)
        {
            tracing::warn!(error = %format!("{error:#}"), "cannot save the secret for discovery services");
        }
        Ok(credentials)
    }
}

/// What this node publishes. The discovery service adds where it sees the node.
fn local(node: &str, keys: &Keys, report: &Report) -> Local {
    let is_claim = |prefix: &&IpNet| report.claims.iter().any(|claim| IpNet::from(*claim) == **prefix);
    let kubespan = KubeSpan {
        public_key: keys.public_key.to_string(),
        next_public_key: keys.next_public_key().map(|key| key.to_string()).unwrap_or_default(),
        additional_addresses: report
            .own_prefixes
            .iter()
            .filter(|prefix| !is_claim(prefix))
            .copied()
            .collect(),
        address: report.mesh_addresses.iter().copied().find(IpAddr::is_ipv6),
        without_preshared_key: true,
        ..KubeSpan::default()
    };
    let mesh_ipv4 = report.mesh_addresses.iter().copied().filter(IpAddr::is_ipv4);
    let affiliate = Affiliate {
        addresses: report.claims.iter().copied().chain(mesh_ipv4).collect(),
        hostname: node.to_owned(),
        nodename: node.to_owned(),
        kubespan: Some(kubespan),
        ..Affiliate::default()
    };
    let manual = report.manual.as_ref().and_then(|endpoint| endpoint.address());
    let host = report.host.iter().take(MAX_HOST);
    let seen =
        report.mapped.iter().chain(&report.reflexive).chain(&report.observed).chain(&report.peer_reflexive);
    let endpoints = manual.iter().chain(host).chain(seen).copied().collect();
    let filter = report.published.clone();
    Local {
        affiliate,
        endpoints,
        extra_endpoints: report.extra_endpoints.clone(),
        port: Some(report.port),
        filter,
    }
}

async fn is_changed(settings: &mut watch::Receiver<Option<Option<DiscoverySettings>>>) {
    if settings.changed().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests;

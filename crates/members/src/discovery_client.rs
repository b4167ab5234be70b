//! Publishes this node at the discovery services of the mesh, and follows what they tell of others.
//!
//! A client of `fairlead_discovery` for each service does the talking; [`crate::discovery`] decides what of it counts.

pub mod admission;
mod connections;
pub mod leaving;
mod secrets;
mod staging;
mod status;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fairlead_cluster::naming::some_of;
use fairlead_discovery::client::{Local, authorities};
use fairlead_keys::PublicKey;
use fairlead_topology::Member;
use futures::future::select_all;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

use self::connections::Clients;
pub use self::secrets::Shared;
use self::secrets::{InUse, MAX_NAMED};
use self::staging::{Progress, progress};
use super::saved::discovery::Credentials;
use super::settings::{ConfiguredDiscovery, DiscoverySettings};
use super::state_file::StateFile;
use crate::SourceProblem;
use crate::departures::Session;
use crate::discovery::{Discovered, Memory, Reader, Told};
use crate::provenance::DiscoveryStatus;

/// Interval at which the Secret is read again, pause after a failure, and longest time that reading it may take.
pub const SECRET_INTERVAL: Duration = Duration::from_secs(60);
const SECRET_RETRY: Duration = Duration::from_secs(5);
const SECRET_TIMEOUT: Duration = Duration::from_secs(5);
/// Least pause between two times that members are read: the changes in it are read together.
const MIN_PAUSE: Duration = Duration::from_millis(500);
/// Interval at which members are read without a change: handshakes age, and the blocks of this node change.
const INTERVAL: Duration = Duration::from_secs(10);
/// Least pause between two writes of the file.
const SAVE_INTERVAL: Duration = Duration::from_secs(30);

/// This node, as its mesh knows it.
pub trait LocalNode: Send + Sync {
    /// Records that the node publishes; `None` while it is no member. The discovery service adds where it sees the node.
    fn publication(&self) -> Option<Local>;

    /// Changes of the publication, from now on.
    fn changes(&self) -> BoxStream<'static, ()>;

    /// State of the tunnel to a member.
    fn session(&self, key: &PublicKey) -> Session;

    /// Takes note of the status of the discovery services.
    fn observe(&self, status: &DiscoveryStatus);
}

/// Runs the clients.
pub struct DiscoveryTask {
    /// Reads the Secret.
    pub client: kube::Client,
    /// Name of this node.
    pub node: String,
    /// This node.
    pub local: Arc<dyn LocalNode>,
    /// Settings of the mesh, `Some(None)` without discovery services; `None` while they are not known.
    pub settings: watch::Receiver<ConfiguredDiscovery>,
    /// Keeps members and the secret, for starts without the API server.
    pub file: StateFile,
    /// Members that the file has, as [`Self::known_before`] reads it.
    pub cached: (Vec<Member>, Option<Instant>),
    /// Members of which the services tell.
    pub known: watch::Sender<Arc<Discovered>>,
    /// Secrets that the nodes of the cluster share; `None` without discovery services.
    pub credentials: watch::Sender<Option<Shared>>,
    /// Status of the services.
    pub status: watch::Sender<DiscoveryStatus>,
    /// Interval at which the Secret is read again.
    pub secret_interval: Duration,
    /// Mark of the sockets of clients.
    pub mark: u32,
}

/// State that lasts over changes of the settings.
#[derive(Default)]
struct Known {
    memory: Memory,
    /// Members that the file has, and the time at which it is written again at the earliest.
    saved: Vec<Member>,
    save_at: Option<Instant>,
    /// Secrets in use; `None` until they are read.
    in_use: Option<InUse>,
    /// Identifiers of members under a secret that was left, which they leave, too.
    former: BTreeSet<String>,
}

impl Known {
    fn discovered(&self, problems: Vec<SourceProblem>) -> Discovered {
        let memory = &self.memory;
        Discovered { records: memory.records(), problems, deleted: memory.deleted(), untold: memory.untold() }
    }
}

impl DiscoveryTask {
    /// Runs until it is dropped.
    pub async fn run(self) {
        let mut settings = self.settings.clone();
        let mut known = Known {
            memory: Memory::with_cached(self.cached.0.clone(), self.cached.1),
            saved: self.cached.0.clone(),
            ..Known::default()
        };
        // Clients with the present secret first, then those with the one before.
        let mut clients: Vec<Clients> = Vec::new();
        loop {
            let configured = settings.borrow_and_update().clone();
            match configured {
                ConfiguredDiscovery::Disabled => {
                    for clients in &mut clients {
                        clients.leave_unless(|_| false).await;
                    }
                    known = Known::default();
                    clients.clear();
                    self.file.remove_discovered();
                    self.credentials.send_if_modified(|known| known.take().is_some());
                    self.publish(Discovered::default(), DiscoveryStatus::default());
                    is_changed(&mut settings).await;
                }
                ConfiguredDiscovery::Enabled(current) => {
                    for clients in &mut clients {
                        clients.leave_unless(|service| current.servers.contains(&service.server)).await;
                    }
                    tokio::select! {
                        () = self.serve(&current, &mut known, &mut clients) => {}
                        () = is_changed(&mut settings) => {}
                    }
                }
                // What was known before counts.
                ConfiguredDiscovery::Unknown => is_changed(&mut settings).await,
            }
        }
    }

    /// Members that an earlier run of this program knew and when, and these as a source.
    pub fn known_before(file: &StateFile) -> ((Vec<Member>, Option<Instant>), Discovered) {
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

    /// Stays connected. Returns after a failure.
    async fn serve(&self, settings: &DiscoverySettings, known: &mut Known, clients: &mut Vec<Clients>) {
        let prepared = async {
            let credentials = self.credentials(settings).await?;
            let roots = authorities(settings.ca_bundle.as_deref());
            let roots = roots.context("this host trusts no certificates; set spec.discovery.caBundle")?;
            Ok::<_, anyhow::Error>((credentials, Arc::new(roots)))
        };
        let (mut credentials, roots) = match prepared.await {
            Ok(prepared) => prepared,
            Err(error) => {
                let error = format!("{error:#}");
                let problems = vec![SourceProblem::DiscoverySecret(error.clone())];
                self.publish(known.discovered(problems), status::of_failure(settings, &error));
                if known.in_use.as_ref().is_some_and(|it| it.is_over(Instant::now())) {
                    self.leave_previous(settings, known, clients).await;
                }
                return sleep(SECRET_RETRY).await;
            }
        };
        if let Err(error) = self.file.write_services(&settings.servers, settings.ca_bundle.as_deref()) {
            tracing::warn!(
                error = %format!("{error:#}"),
                "cannot save where this node publishes itself: `fairlead cleanup` will not delete it there"
            );
        }
        // By other settings all connect anew.
        let of_other_settings = std::mem::take(clients);
        let mut left = self.change(settings, credentials.clone(), known);
        self.connect(settings, &roots, known, clients, left).await;
        drop(of_other_settings);
        loop {
            tokio::select! {
                () = self.follow(settings, known, clients) => {}
                other = self.other_credentials(settings, &credentials) => credentials = other,
            }
            left = self.change(settings, credentials.clone(), known);
            self.connect(settings, &roots, known, clients, left).await;
        }
    }

    async fn follow(&self, settings: &DiscoverySettings, known: &mut Known, clients: &mut Vec<Clients>) {
        let mut changes = self.local.changes();
        loop {
            self.publish_node(clients);
            let read_at = Instant::now();
            clients.iter_mut().for_each(|clients| clients.observe(read_at));
            if self.read(settings, known, clients) {
                self.leave_previous(settings, known, clients).await;
            }
            self.share(known);
            self.save(known).await;
            sleep(MIN_PAUSE).await;
            let any_changed = select_all(clients.iter_mut().map(|clients| clients.changed().boxed()));
            tokio::select! {
                _ = any_changed => {}
                Some(()) = changes.next() => {}
                () = sleep_until((read_at + INTERVAL).into()) => {}
            }
        }
    }

    fn publish_node(&self, clients: &[Clients]) {
        let Some(local) = self.local.publication() else { return };
        clients.iter().for_each(|clients| clients.publish(&local));
    }

    /// Takes what the services tell. Returns whether the secret of before is to be left.
    fn read(&self, settings: &DiscoverySettings, known: &mut Known, clients: &[Clients]) -> bool {
        let [current, previous @ ..] = clients else { return false };
        let previous = previous.first();
        let mut of_others = previous.map(Clients::ids).unwrap_or_default();
        of_others.extend(known.former.iter().cloned());
        let mut told = self.told(settings, current, &of_others);
        let told_before = previous.map(|previous| self.told(settings, previous, &current.ids()));
        let progress =
            told_before.as_ref().map(|before| progress(known, (current, &told), (previous, before)));
        let Progress { is_done, problem, unchanged, former } = progress.unwrap_or_default();
        told.problems.extend(problem);
        if let Some(before) = told_before {
            told.add_previous(before);
        }
        let has_answered = clients.iter().all(Clients::has_answered);
        // A member that leaves the secret of before is told of under the present one, unless no service has told of that yet.
        let counts = current.has_answered();
        let is_deleted = |id: &str| {
            current.has_deleted(id) || (counts && previous.is_some_and(|previous| previous.has_deleted(id)))
        };
        let is_alive = |key: &PublicKey| self.local.session(key) == Session::Alive;
        known.memory.update(&told, has_answered, is_deleted, is_alive, Instant::now());
        let mut problems = told.problems;
        problems.extend(current.problems());
        self.publish(known.discovered(problems), status::of_clients(clients));
        if is_done && unchanged.is_empty() {
            tracing::info!(
                "all members have changed to the present secret for discovery services; the one before is left"
            );
            known.former = former;
        } else if is_done {
            let members = some_of(&unchanged, MAX_NAMED);
            tracing::warn!(%members, "the secret for discovery services of before is left an hour after the change, although members have not changed");
            known.former = former;
        }
        is_done
    }

    fn told(&self, settings: &DiscoverySettings, clients: &Clients, of_others: &BTreeSet<String>) -> Told {
        let views: Vec<_> = clients.services.iter().map(|service| service.view.borrow()).collect();
        let reader =
            Reader { node: &self.node, node_id: &clients.own_id, of_others, allowed: &settings.allowed };
        reader.read(views.iter().map(|view| &view.members))
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
        self.local.observe(&status);
        self.status.send_replace(status);
    }

    /// Saves the members, not too often: flash memory wears out.
    async fn save(&self, known: &mut Known) {
        if known.save_at.is_some_and(|at| Instant::now() < at) {
            return;
        }
        let members: Vec<Member> = known.memory.records().into_iter().map(|record| record.member).collect();
        if members == known.saved {
            return;
        }
        known.save_at = Instant::now().checked_add(SAVE_INTERVAL);
        known.saved.clone_from(&members);
        let file = self.file.clone();
        let write = move || file.write_discovered(&members, jiff::Timestamp::now());
        if let Ok(Err(error)) = tokio::task::spawn_blocking(write).await {
            tracing::warn!(error = %format!("{error:#}"), "cannot save what discovery services tell");
        }
    }

    /// Resolves when the Secret has something else. While it cannot be read, the last one stays in force.
    async fn other_credentials(&self, settings: &DiscoverySettings, current: &Credentials) -> Credentials {
        loop {
            sleep(self.secret_interval).await;
            if let Some(other) = self.credentials(settings).await.ok().filter(|now| now != current) {
                return other;
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
        Credentials::of_secret(&data).with_context(|| format!("Secret {id}"))
    }
}

async fn is_changed(settings: &mut watch::Receiver<ConfiguredDiscovery>) {
    if settings.changed().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests;

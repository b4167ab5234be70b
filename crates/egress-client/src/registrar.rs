//! Registers the clients of this node at the gateways of their Egresses, and says to which gateways their packets may go.
//!
//! * `slices`: the gateways, from EndpointSlices.
//! * `session`, `health`, `registry`: pure; what to send to each gateway, which gateways answer, and what follows.
//! * `link`, `gateway`, `token`, `probes`: connections, tokens and ICMP; these tasks share `registrations`.
//! * `client`, `refusal`, `not_registered`: what goes in, what comes out, and why something does not.
//!
//! A gateway is used for a client once it has confirmed it, as long as EndpointSlices show it and it answers echo requests, also when the
//! stream to it ends: gateways keep the clients that they have.

mod client;
mod gateway;
mod health;
mod link;
pub(crate) mod metrics;
mod not_registered;
mod probes;
mod refusal;
mod registrations;
mod registry;
mod session;
pub(crate) mod slices;
#[cfg(test)]
pub(crate) mod tests;
mod token;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::EGRESS_REGISTRATION_PORT;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_egress::client::plan::NextHop;
use fairlead_egress::endpoints::{self, GatewayUid};
use fairlead_source_addresses::announcements::holds::HeardHold;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

pub(crate) use self::client::Client;
use self::metrics::RegistrarMetrics;
pub(crate) use self::not_registered::NotRegistered;
use self::registrations::Registrations;
use self::slices::CachedSlice;
use self::token::RequestToken;
use super::objects::CachedEgress;

/// Longest wait of [`Registrar::registered`], just less than the timeouts of its callers.
const REGISTERED: Duration = Duration::from_millis(1900);
/// Time between two looks at clients from before the start, while there are any to be decided.
const SETTLE_INTERVAL: Duration = Duration::from_millis(500);
/// Shortest time between two updates of gauges.
const GAUGES_INTERVAL: Duration = Duration::from_millis(200);

/// Dependencies of the registrar.
pub(crate) struct RegistrarDeps {
    /// Client of the API server, for tokens.
    pub(crate) client: kube::Client,
    /// Name of this node's Node object.
    pub(crate) node: String,
    /// Egresses, which say which gateways hold source addresses.
    pub(crate) egresses: Arc<Cache<CachedEgress>>,
    /// The gateways of Egresses.
    pub(crate) slices: Arc<Cache<CachedSlice>>,
    /// Metrics of gateways, connections, registrations and tokens.
    pub(crate) metrics: RegistrarMetrics,
}

/// Handle; cheap to clone.
#[derive(Clone)]
pub(crate) struct Registrar {
    shared: Arc<Registrations>,
}

impl Registrar {
    /// Starts the watch of EndpointSlices, the registrations and the probes as tasks of `subsystem`.
    pub(crate) fn start(deps: RegistrarDeps, subsystem: &mut Subsystem) -> Self {
        let RegistrarDeps { client, node, egresses, slices, metrics } = deps;
        let request = token::request_with(client);
        let registrar = Self::new(request, EGRESS_REGISTRATION_PORT, metrics);
        let follow = follow(Arc::clone(&registrar.shared), egresses, slices, node);
        subsystem.spawn("endpoints of Egresses", follow);
        registrar.spawn(subsystem);
        registrar
    }

    fn new(request_token: RequestToken, port: u16, metrics: RegistrarMetrics) -> Self {
        Self { shared: Arc::new(Registrations::new(request_token, port, metrics)) }
    }

    fn spawn(&self, subsystem: &mut Subsystem) {
        subsystem.spawn("egress registrations", run(Arc::clone(&self.shared)));
        subsystem.spawn("egress probes", probes::run(Arc::clone(&self.shared)));
        subsystem.spawn("egress gauges", gauges(Arc::clone(&self.shared)));
    }

    /// Gateways of these Egresses may have clients from before the start, also if there are none now: they are told all there are. Called
    /// before anything else, it holds back what is sent until [`Self::set_clients`] says which clients there are.
    pub(crate) fn expect_clients(&self, egresses: BTreeSet<EgressName>) {
        self.shared.registry().expect_clients(egresses);
        self.shared.tasks.notify_one();
    }

    /// All clients of each Egress on this node (desired state; called again on each change; no work if nothing differs). Clients that
    /// [`Self::add_client`] has added stay until they have been in here, or [`Self::remove_client`] removes them.
    pub(crate) fn set_clients(&self, clients: BTreeMap<EgressName, Vec<Client>>) {
        let changed = self.shared.registry().set_clients(clients, Instant::now());
        self.shared.clients_changed(changed);
    }

    /// Adds one client before the next `set_clients` would (CNI ADD).
    pub(crate) fn add_client(&self, egress: &EgressName, client: Client) {
        let changed = self.shared.registry().add_client(egress, client);
        self.shared.clients_changed(changed);
    }

    /// Removes it again (CNI DEL, failed ADD, finished pod).
    pub(crate) fn remove_client(&self, egress: &EgressName, uid: &str) {
        let changed = self.shared.registry().remove_client(egress, uid);
        self.shared.clients_changed(changed);
    }

    /// Resolves as soon as one ready gateway has registered the client (or the Egress's gateways are Coil's).
    ///
    /// # Errors
    /// All ready gateways refuse it: at once. Else after 1.9 s, so that callers with a timeout of 2 s get the reason.
    pub(crate) async fn registered(&self, egress: &EgressName, uid: &str) -> Result<(), NotRegistered> {
        let mut changes = self.changes();
        let known = async {
            loop {
                changes.mark_unchanged();
                if let Some(known) = self.shared.registry().registration(egress, uid) {
                    return known;
                }
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        match timeout(REGISTERED, known).await {
            Ok(known) => known,
            Err(_) => Err(self.shared.registry().not_registered(egress, uid)),
        }
    }

    /// NextHop of a client's packets at present.
    pub(crate) fn next_hop(&self, egress: &EgressName, uid: &str) -> NextHop {
        self.shared.registry().next_hop(egress, uid)
    }

    /// Addresses of all gateways of an Egress that have not ended.
    pub(crate) fn addresses(&self, egress: &EgressName) -> BTreeSet<IpAddr> {
        self.shared.registry().addresses(egress)
    }

    /// Keeps a connection to these gateways on this node, also without clients, to hear which source addresses they hold.
    pub(crate) fn set_local_gateways(&self, local: BTreeSet<(EgressName, GatewayUid)>) {
        if self.shared.registry().set_local(local) {
            self.shared.tasks.notify_one();
            self.shared.holds.send_replace(());
        }
    }

    /// Holds of these gateways. A hold that another gateway has with a greater term is left out, 0.6 s after that was heard.
    pub(crate) fn local_holds(&self, now: Instant) -> Vec<HeardHold> {
        self.shared.registry().local_holds(now)
    }

    /// Gateways on this node that have answered since this program started, so that [`Self::local_holds`] has what they hold.
    pub(crate) fn heard_local_gateways(&self) -> BTreeSet<(EgressName, GatewayUid)> {
        self.shared.registry().heard_local()
    }

    /// Changes whenever [`Self::local_holds`] may return something else, apart from holds that end by time.
    pub(crate) fn hold_changes(&self) -> watch::Receiver<()> {
        self.shared.holds.subscribe()
    }

    /// A counter that changes whenever `way` may return something else for some client.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }
}

/// Takes what EndpointSlices show, and which gateways hold source addresses.
async fn follow(
    shared: Arc<Registrations>,
    egresses: Arc<Cache<CachedEgress>>,
    slices: Arc<Cache<CachedSlice>>,
    node: String,
) {
    let mut shown = slices.subscribe();
    let mut held = egresses.subscribe();
    loop {
        if slices.is_ready() {
            let egresses = egresses.store.state();
            let holders = |of: &EgressName| {
                let egress = egresses.iter().find(|egress| egress.info.name == *of);
                let held = egress.into_iter().flat_map(|egress| egress.info.source_addresses.values());
                held.flatten().cloned().collect()
            };
            let slices = slices.store.state();
            let slices: Vec<_> = slices.iter().map(|slice| &slice.gateways).collect();
            let gateways = endpoints::gateways(&slices, &node, holders);
            let changed = shared.registry().set_endpoints(gateways, Instant::now());
            shared.clients_changed(changed);
        }
        tokio::select! {
            Ok(()) = shown.changed() => {}
            Ok(()) = held.changed() => {}
            else => std::future::pending().await,
        }
    }
}

/// Has a task for each gateway with clients of this node.
async fn run(shared: Arc<Registrations>) -> Result<(), tokio::task::JoinError> {
    let mut tasks = JoinSet::new();
    loop {
        for id in shared.registry().start_tasks() {
            tasks.spawn(gateway::run(Arc::clone(&shared), id));
        }
        let changed = shared.registry().settle(Instant::now());
        shared.changed(changed);
        tokio::select! {
            () = shared.tasks.notified() => {}
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => ended?,
            () = sleep(SETTLE_INTERVAL), if shared.registry().has_unsettled() => {}
        }
    }
}

async fn gauges(shared: Arc<Registrations>) {
    let mut changes = shared.changes.subscribe();
    loop {
        shared.metrics.gateways(shared.registry().gateways_in_use());
        if changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        sleep(GAUGES_INTERVAL).await;
    }
}

//! The gateway of an Egress. It runs in a pod of its own network namespace, receives packets of client pods in Foo-over-UDP tunnels, and
//! sends them on with its own address.
//!
//! * [`registry`]: which clients there are: what node programs claim, judged by [`facts`]. Pure.
//! * [`plane`]: the data path in the kernel, brought to a desired state.
//! * `server`: node programs register clients at it, with a token that [`review`] has the API server judge.
//! * `watches` and `cluster`: the Egress, and which addresses are inside of the cluster.
//! * [`source_addresses`]: source addresses that this gateway holds, agreed with the others of the Egress.
//! * `data_path`: the task that compares the kernel with the desired state and mends it. `drain`: waits for the last flow before the program
//!   ends.
//! * `clients`, `connections`, `exhaustion`: who uses the gateway how much, who used an address and port outside, and whether ports or the
//!   table of connections are used up.
//! * `health` and `probes`: whether what the Egress has probed answers.
//!
//! The kernel forwards without the program. A new one takes over links and routes, and keeps the clients that they name until node
//! programs have said again who is one.

mod certificate;
mod clients;
mod cluster;
mod condition;
mod connections;
mod data_path;
mod drain;
mod exhaustion;
pub mod facts;
mod former;
mod health;
mod metrics;
pub mod plane;
mod probes;
pub mod registry;
pub mod review;
mod server;
pub mod source_addresses;
mod watches;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_cluster::http::{Limits, MetricsAddress, Plain};
use fairlead_cluster::requests::{RequestMetrics, counting_client};
use fairlead_cluster::subsystem::{Readiness, Subsystem, Supervisor};
use fairlead_cluster::{http, metrics as exposition, process, resumption};
use fairlead_dataplane::egress_gateway::SourceTable;
use fairlead_egress::EgressName;
use fairlead_egress::registration::audience;
use fairlead_source_addresses::hold::Lease;
use fairlead_source_addresses::members::OwnPod;
use futures::{Stream, StreamExt as _};
use kube::Client;
use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::sync::{mpsc, watch};

use crate::cluster::{Cluster, Follower};
use crate::condition::Conditions;
use crate::data_path::{DataPath, InPlace, Shown, Status, watch_kernel};
use crate::metrics::{Metrics, Pod};
use crate::plane::PlaneSettings;
use crate::registry::Registry;
use crate::registry::store::Store;
use crate::review::Reviewer;
use crate::server::{ClockError, Identity, Streams};
use crate::source_addresses::holds;
use crate::source_addresses::holds::announced::Announcer;
use crate::watches::Watches;

/// Time for which clients of an earlier process that are on no known Node are kept.
const GRACE: Duration = Duration::from_secs(60);
/// The subsystem that holds source addresses.
const SOURCE_ADDRESSES: &str = "source addresses";
/// Longest wait for tasks to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// File with the token of a pod's ServiceAccount (Kubernetes).
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// Answer of `/clients`.
#[derive(serde::Serialize)]
struct Clients {
    clients: Vec<clients::ClientUse>,
}

/// Settings of the program.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The Egress.
    pub egress: EgressName,
    /// Name of this pod, where the token of its ServiceAccount does not say it.
    pub pod: String,
    /// Addresses of this pod.
    pub addresses: Vec<IpAddr>,
    /// Name of the link to the network.
    pub uplink: String,
    /// UDP port of FoU.
    pub port: u16,
    /// Whether the outer source port is computed from each inner flow.
    pub source_port_auto: bool,
    /// Address at which node programs register clients.
    pub registration: SocketAddr,
    /// User name of node programs.
    pub node_user: String,
    /// Address of metrics, and who may read them.
    pub metrics: MetricsAddress,
    /// Address of `/healthz` and `/readyz`.
    pub health: SocketAddr,
    /// Longest time that flows may go on after the first signal to end.
    pub drain: Duration,
}

/// Hold protocol of the gateway in this pod, which takes heartbeats and answers of others, once it knows its members and the Leases of
/// all slots, and has sent its first heartbeat. For fuzz targets and recorded messages; the program takes those of its members in the same way.
pub fn hold_among(
    pod: &str,
    members: &BTreeSet<String>,
    leases: &[Lease],
) -> impl source_addresses::peers::Hold + use<> {
    holds::Machine::among(pod, members, leases)
}

/// Runs the program until it has been drained after the first of `signals`, or until the second.
///
/// # Errors
/// The client configuration is invalid, the kernel cannot be read, or a task ended before the signal.
pub async fn run(
    settings: Settings,
    config: kube::Config,
    signals: impl Stream<Item = ()> + Unpin,
) -> anyhow::Result<()> {
    let mut registry = MetricsRegistry::default();
    process::register_process(&mut registry);
    let requests = RequestMetrics::register(registry.sub_registry_with_prefix("fairlead"));
    let client = counting_client(config, requests).context("cannot create a Kubernetes client")?;
    run_with(settings, resumption::checking_client(client), registry, signals).await
}

/// The pod by its token. Two gateways with the same name would believe to hold the same source addresses.
fn own_pod(told: &str) -> OwnPod {
    let token = std::fs::read_to_string(TOKEN).unwrap_or_default();
    let pod = OwnPod::of(&token, told);
    if !told.is_empty() && pod.name != told {
        tracing::warn!(
            told,
            pod = pod.name,
            "the pod has another name than --pod-name or $HOSTNAME says, by the token of its ServiceAccount, which counts"
        );
    }
    pod
}

async fn run_with(
    settings: Settings,
    client: Client,
    mut metrics_registry: MetricsRegistry,
    mut signals: impl Stream<Item = ()> + Unpin,
) -> anyhow::Result<()> {
    anyhow::ensure!(!settings.addresses.is_empty(), "the pod has no address: COIL_POD_ADDRESSES names none");
    let EgressName { namespace, name } = settings.egress.clone();
    let own = own_pod(&settings.pod);
    let metrics =
        Metrics::register(&mut metrics_registry, Pod { namespace, pod: own.name.clone(), egress: name });
    let mut supervisor = Supervisor::default();
    let known = connections::Known::new();
    let adopted =
        tokio::task::spawn_blocking(plane::earlier_clients).await.context("cannot read routes")??;
    if !adopted.is_empty() {
        tracing::info!(
            clients = adopted.len(),
            "keeping the clients of an earlier process until nodes name theirs"
        );
    }
    let follower = Follower::default();
    let in_place = watch::Sender::default();
    let registry = Registry::new(settings.addresses.clone(), adopted);
    let parts = Parts::new(registry, follower.cluster(), in_place.subscribe());
    let served = supervisor.subsystem("metrics");
    serve_metrics(served, &settings, &client, metrics_registry, &metrics, &known, &parts)?;
    let announced = parts.announcer.announced();
    let options = parts.cluster.options.clone();
    let watch =
        connections::Watch::new(Arc::clone(&parts.store), announced.clone(), options, known, metrics.clone());
    supervisor.subsystem("connections").spawn("events", connections::watch(watch));
    let table = tokio::task::spawn_blocking(SourceTable::adopt).await.context("cannot read nftables")??;
    start_watches(&mut supervisor, &client, &settings, &parts, follower, &table);
    start_data_path(&mut supervisor, &settings, &parts, in_place, &table, &metrics);
    start_source_addresses(&mut supervisor, &client, &settings, &parts, own, table, &metrics);
    start_server(&mut supervisor, client, &settings, &parts, &metrics)?;

    // Last: before, it would not know what is not ready.
    let probes =
        http::serve("health", settings.health, Limits::PROBES, Plain, http::probes(supervisor.health()));
    supervisor.subsystem("health").spawn("server", probes);

    let ended = supervisor.run_until(signals.next()).await;
    if ended.is_ok() {
        tracing::info!("draining; clients keep their flows");
        let drained = drain::drain(&parts.conditions, &parts.store, &announced, settings.drain, signals);
        if let Err(failure) = supervisor.run_until(drained).await {
            tracing::warn!(%failure, "while draining");
        }
    }
    supervisor.shutdown(&[SOURCE_ADDRESSES, "registration"], STOP_TIMEOUT).await;
    ended.map(drop).map_err(Into::into)
}

fn serve_metrics(
    subsystem: &mut Subsystem,
    settings: &Settings,
    client: &Client,
    registry: MetricsRegistry,
    metrics: &Metrics,
    known: &connections::Known,
    parts: &Parts,
) -> anyhow::Result<()> {
    let of_clients = metrics.clone();
    let of_load = metrics.clone();
    let of_connections = known.clone();
    let details = http::json("/clients", move |_| Ok(Clients { clients: of_clients.clients() }))
        .merge(http::json("/load", move |_| Ok(of_load.load())))
        .merge(http::json("/connections", move |query| of_connections.answer(query)));
    let (store, is_known) = (Arc::clone(&parts.store), parts.cluster.is_known.clone());
    // Nodes have the controller, and the API server passes on what users ask. Until it is known which addresses pods have, none may read.
    let may_read = move |source| *is_known.borrow() && !store.read(|registry| registry.may_be_client(source));
    let details = http::restrict(details, "pods may not read what a gateway does for others", may_read);
    let scrape = http::metrics(move |format| exposition::text(&registry, format)).merge(details);
    http::serve_metrics(subsystem, settings.metrics, scrape, client)
}

/// Handles that tasks share.
struct Parts {
    store: Arc<Store>,
    cluster: Cluster,
    conditions: Arc<Conditions>,
    announcer: Arc<Announcer>,
    in_place: watch::Receiver<InPlace>,
    streams: Arc<Streams>,
    clock_error: Arc<ClockError>,
}

impl Parts {
    fn new(registry: Registry, cluster: Cluster, in_place: watch::Receiver<InPlace>) -> Self {
        let store = Arc::new(Store::new(registry));
        Self {
            streams: Arc::new(Streams::new(Arc::clone(&store))),
            store,
            cluster,
            conditions: Arc::default(),
            announcer: Arc::default(),
            in_place,
            clock_error: Arc::default(),
        }
    }
}

/// Starts the watches, and what follows them alone.
fn start_watches(
    supervisor: &mut Supervisor,
    client: &Client,
    settings: &Settings,
    parts: &Parts,
    follower: Follower,
    table: &SourceTable,
) {
    let Parts { store, cluster, conditions, announcer, in_place, .. } = parts;
    let caches = supervisor.subsystem("caches");
    let watches = Arc::new(Watches::start(caches, client, &settings.egress));
    caches.readiness(Arc::clone(&watches) as Arc<dyn Readiness>);
    let follow = follower.run(
        watches,
        Arc::clone(store),
        Arc::clone(conditions),
        Arc::clone(announcer),
        table.clone(),
    );
    caches.spawn("cluster", follow);
    let own = settings.addresses.clone();
    let former = former::delete(Arc::clone(store), cluster.slots.clone(), in_place.clone(), own);
    caches.spawn("former connections", former);
    let grace = Arc::clone(store);
    caches.spawn("grace period", async move {
        tokio::time::sleep(GRACE).await;
        grace.update(Registry::end_grace);
        std::future::pending::<std::convert::Infallible>().await
    });
}

/// Starts the data path, which begins when the watches have said everything once, and the probes.
fn start_data_path(
    supervisor: &mut Supervisor,
    settings: &Settings,
    parts: &Parts,
    in_place: watch::Sender<InPlace>,
    table: &SourceTable,
    metrics: &Metrics,
) {
    let Parts { store, cluster, conditions, announcer, streams, clock_error, .. } = parts;
    let probes = probes::run(cluster.options.clone(), Arc::clone(conditions), metrics.clone());
    supervisor.subsystem("health check").spawn("probes", probes);
    let plane = PlaneSettings {
        uplink: settings.uplink.clone(),
        own: settings.addresses.clone(),
        port: settings.port,
        source_port_auto: settings.source_port_auto,
    };
    let status = Arc::new(Status::new());
    let subsystem = supervisor.subsystem("data path");
    subsystem.readiness(Arc::clone(&status) as Arc<dyn Readiness>);
    // One notification: it stands for all.
    let (changed, changes) = mpsc::channel(1);
    subsystem.spawn("kernel changes", watch_kernel(changed));
    let inputs = data_path::Inputs {
        store: Arc::clone(store),
        cluster: cluster.clone(),
        announced: announcer.announced(),
    };
    let shown = Shown {
        conditions: Arc::clone(conditions),
        streams: Arc::clone(streams),
        clock_error: Arc::clone(clock_error),
        metrics: metrics.clone(),
    };
    let data_path = DataPath::new(inputs, shown, in_place, plane, table.clone(), status);
    subsystem.spawn("kernel", data_path.run(changes));
}

fn start_source_addresses(
    supervisor: &mut Supervisor,
    client: &Client,
    settings: &Settings,
    parts: &Parts,
    pod: OwnPod,
    table: SourceTable,
    metrics: &Metrics,
) {
    let context = holds::start::Context {
        client: client.clone(),
        egress: settings.egress.clone(),
        pod,
        addresses: settings.addresses.clone(),
        store: Arc::clone(&parts.store),
        cluster: parts.cluster.clone(),
        in_place: parts.in_place.clone(),
        conditions: Arc::clone(&parts.conditions),
        announcer: Arc::clone(&parts.announcer),
        table,
        metrics: metrics.holds.clone(),
        sync_metrics: metrics.copies.clone(),
    };
    supervisor
        .subsystem(SOURCE_ADDRESSES)
        .spawn_graceful("source addresses", |stop| holds::start::run(context, stop));
}

fn start_server(
    supervisor: &mut Supervisor,
    client: Client,
    settings: &Settings,
    parts: &Parts,
    metrics: &Metrics,
) -> anyhow::Result<()> {
    let identity = Identity::generate().context("cannot make a certificate")?;
    let reviewer =
        Reviewer::new(client, audience(&settings.egress, &identity.key), settings.node_user.clone());
    let address = settings.registration;
    let listener = fairlead_transport::listen(address).with_context(|| {
        format!("cannot listen on {address} for registrations; is another program on this port?")
    })?;
    let inputs = server::Inputs {
        store: Arc::clone(&parts.store),
        streams: Arc::clone(&parts.streams),
        clock_error: Arc::clone(&parts.clock_error),
        state: parts.conditions.state(),
        in_place: parts.in_place.clone(),
        held: parts.announcer.announced().held,
    };
    let metrics = metrics.clone();
    supervisor.subsystem("registration").spawn_graceful("server", |stop| async move {
        server::serve(listener, identity, inputs, reviewer, metrics, stop).await
    });
    Ok(())
}

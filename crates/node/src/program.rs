//! Putting the parts together.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fairlead_api::names::MESH_MTU;
use fairlead_api::wireguard::{PrivateKey, PublicKey};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::uplink::{self, HostNetwork, Ignored};
use fairlead_dataplane::wireguard::Preference;
use fairlead_dataplane::{pods, routes};
use fairlead_wire::cni::cni_server::CniServer;
use fairlead_wire::network::network_server::NetworkServer;
use fairlead_wire::node::node_server::NodeServer;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;

use crate::cni::records::Records;
use crate::container_locks::ContainerLocks;
use crate::detached::Detached;
use crate::events::{News, Teller, node_reference};
use crate::ipam::inventory::Inventory;
use crate::ipam::{self, Ipam};
use crate::mesh::agent::Agent;
use crate::metrics::Metrics;
use crate::recent::Recent;
use crate::turn::{self, Turn};
use crate::watches::{self, Caches};
use crate::{api_server, cni, farewell, identity, mesh, router, status};
use fairlead_cluster::caches;
use fairlead_cluster::{http, requests as api_requests};

/// How long the start waits for the API server before it serves what needs none (DEL, status).
const FIRST_LISTS: Duration = Duration::from_secs(5);

/// How long the uplink's MTU counts once it was read. Reading it reads every link of the node, and a hundred pods that
/// start together must not do it a hundred times.
const UPLINK_LIFETIME: Duration = Duration::from_secs(1);

/// Which WireGuard to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireGuardChoice {
    /// The kernel's if it has one, else the embedded one.
    Auto,
    /// The kernel's, or none.
    Kernel,
    /// The embedded one.
    Embedded,
}

/// How the program is to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of this node's Node object.
    pub node: String,
    /// Socket for the CNI plugin and the command line.
    pub socket: PathBuf,
    /// Directory of the key file.
    pub state_dir: PathBuf,
    /// Where metrics are served.
    pub metrics: SocketAddr,
    /// Where health is served.
    pub health: SocketAddr,
    /// Whether to give addresses and make interfaces; otherwise another plugin does before this one is called.
    pub enable_ipam: bool,
    /// How long a block must have been empty before it is given back.
    pub block_grace: Duration,
    /// Which WireGuard to use.
    pub wireguard: WireGuardChoice,
    /// Whether to keep plain routes to the blocks of nodes on the same network.
    pub router: bool,
    /// Of the routes of pods and blocks in the kernel.
    pub numbers: RoutingIds,
    /// Whether links of pods have the names that Calico's policy program expects.
    pub calico_names: bool,
    /// Whether to empty the export table at the end if the Node object is gone.
    pub clear_routes_on_shutdown: bool,
}

/// Port of an address that names none (RFC 9110, section 4.2.2).
const HTTPS: u16 = 443;

/// Runs the node program until `stop` resolves. The kernel's state stays. While another one serves the socket, it waits for
/// the end of that one.
///
/// # Errors
/// The kernel refuses what every node needs, or the socket cannot be made.
pub async fn run(
    settings: Settings,
    config: kube::Config,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let host = config.cluster_url.host().unwrap_or_default().to_owned();
    let port = config.cluster_url.port_u16().unwrap_or(HTTPS);
    let metrics = Arc::new(Metrics::default());
    let client = client(config, &metrics)?;
    let mut tasks = JoinSet::new();
    let caches = Arc::new(Caches::spawn(&mut tasks, &client, &settings));
    let pods = watches::own_pods(&mut tasks, &client, &settings.node);
    let (endpoints, api_server) = watch::channel(None);
    tasks.spawn(api_server::run(client.clone(), host, port, endpoints));
    // What is above only reads. From here on there may be but one.
    let mut stop = std::pin::pin!(stop);
    let turn = tokio::select! {
        turn = Turn::wait(&settings.socket) => turn?,
        () = &mut stop => return Ok(()),
    };
    if settings.enable_ipam {
        prepare_kernel(settings.numbers).await?;
    }
    let events = Teller::spawn(&mut tasks, client.clone(), &settings.node, Arc::clone(&metrics));
    let records = Records::beside(&settings.socket);
    let addresses = adopt(&settings, &client, &caches, &records).await?;
    let locks = Arc::<ContainerLocks>::default();
    if settings.enable_ipam {
        let deps = ipam::Deps {
            client: client.clone(),
            nodes: caches.nodes.store.clone(),
            blocks: Arc::clone(&caches.blocks),
            pools: Arc::clone(&caches.pools),
            locks: Arc::clone(&locks),
            metrics: Arc::clone(&metrics),
            block_grace: settings.block_grace,
        };
        ipam::start(&addresses, deps, &mut tasks);
    }
    let shared = Arc::new(mesh::Shared::default());
    let (end_mesh, mesh_end) = oneshot::channel::<()>();
    let mut agents = JoinSet::new();
    let (public_key, problems) = match keys(&settings.state_dir) {
        Ok((private, public)) => {
            let handover = turn::handover(&settings.state_dir);
            let preference = preference(settings.wireguard);
            let agent = Agent::new((private, public), preference, handover, Instant::now());
            let context = mesh::Context {
                client: client.clone(),
                node: settings.node.clone(),
                public_key: public,
                nodes: Arc::clone(&caches.nodes),
                meshes: Arc::clone(&caches.meshes),
                peers: Arc::clone(&caches.peers),
                blocks: Arc::clone(&caches.blocks),
                api_server,
                shared: Arc::clone(&shared),
                metrics: Arc::clone(&metrics),
            };
            agents.spawn(mesh::run(context, agent, async { drop(mesh_end.await) }));
            (Some(public.to_string()), Vec::new())
        }
        // Pods still start and stop, and reach each other on this node: one bad file is no reason to stop them.
        Err(error) => {
            tracing::error!(%error, "this node is not in the mesh");
            events.warn(News {
                regarding: node_reference(&settings.node),
                reason: "WireGuardKeyUnusable",
                action: "ReadKey",
                note: error.to_string(),
            });
            (None, vec![error.to_string()])
        }
    };
    let verbs = Arc::new(cni::Service {
        gives_addresses: settings.enable_ipam,
        ipam: Arc::clone(&addresses),
        namespaces: Arc::clone(&caches.namespaces),
        pools: Arc::clone(&caches.pools),
        blocks: Arc::clone(&caches.blocks),
        client,
        locks,
        pod_mtu: pod_mtu(&caches, &shared),
        calico_names: settings.calico_names,
        mesh_problem: mesh_problem(&shared, problems.clone()),
        records,
        collecting: tokio::sync::Mutex::default(),
        events,
        metrics: Arc::clone(&metrics),
    });
    tasks.spawn(cni::gc::run(Arc::clone(&verbs)));
    let router = settings.router.then(Arc::<router::Shared>::default);
    if let Some(shared) = &router {
        let context = router_context(&mut tasks, &settings, &verbs.client, &caches, shared, &metrics);
        tasks.spawn(router::run(context));
    }
    let client = verbs.client.clone();
    let usage = addresses;
    let scrape = move || {
        metrics.blocks(&usage.usage());
        metrics.text()
    };
    let inventory = Inventory { cni: Arc::clone(&verbs), pods };
    let about = status::Service {
        node: settings.node.clone(),
        public_key,
        problems,
        mesh: shared,
        router,
        inventory,
    };
    let readiness = Arc::clone(&caches);
    tasks.spawn(http::serve("metrics", settings.metrics, http::metrics(scrape)));
    tasks.spawn(http::serve(
        "health",
        settings.health,
        http::health(Arc::new(move || readiness.not_ready())),
    ));
    wait_for_first_lists(&caches).await;
    serve(&settings.socket, verbs, about, stop).await?;
    drop(end_mesh);
    let agent = agents.join_next().await.and_then(Result::ok);
    // A successor must find nobody at work, and nothing may write the export table again after it was cleared.
    tasks.shutdown().await;
    if settings.clear_routes_on_shutdown {
        let nodes = &caches.nodes;
        let watched = nodes.is_ready().then(|| nodes.store.get(&ObjectRef::new(&settings.node)).is_some());
        farewell::clear_if_gone(&client, &settings.node, settings.numbers, watched).await;
    }
    if let Some(agent) = agent.filter(|_| turn.has_successor()) {
        turn::hand_over(agent, turn).await;
    }
    Ok(())
}

/// A client that counts what it asks.
fn client(config: kube::Config, metrics: &Arc<Metrics>) -> anyhow::Result<Client> {
    let metrics = Arc::clone(metrics);
    let count = move |kind: api_requests::Kind| metrics.api_request(kind.verb, kind.resource);
    api_requests::counting_client(config, count).context("cannot make a Kubernetes client")
}

/// The router's own watch of all Nodes, which nothing else needs.
fn router_context(
    tasks: &mut JoinSet<()>,
    settings: &Settings,
    client: &Client,
    caches: &Caches,
    shared: &Arc<router::Shared>,
    metrics: &Arc<Metrics>,
) -> router::Context {
    let nodes = watcher(Api::all(client.clone()), caches::config()).modify(router::trimmed);
    router::Context {
        node: settings.node.clone(),
        nodes: Arc::new(caches::spawn(tasks, "Nodes", nodes)),
        blocks: Arc::clone(&caches.blocks),
        meshes: Arc::clone(&caches.meshes),
        shared: Arc::clone(shared),
        metrics: Arc::clone(metrics),
    }
}

fn preference(choice: WireGuardChoice) -> Preference {
    match choice {
        WireGuardChoice::Auto => Preference::Auto,
        WireGuardChoice::Kernel => Preference::Kernel,
        WireGuardChoice::Embedded => Preference::Embedded,
    }
}

fn keys(state_dir: &Path) -> Result<(PrivateKey, PublicKey), identity::IdentityError> {
    let private = identity::load_or_create(state_dir, rand::random())?;
    let public = fairlead_tunnel::public_key(&private);
    Ok((private, public))
}

/// Forwarding and the rule for local pods, which every node needs.
async fn prepare_kernel(numbers: RoutingIds) -> anyhow::Result<()> {
    tokio::task::spawn_blocking(move || {
        uplink::enable_forwarding().context("cannot switch forwarding on")?;
        routes::ensure_rules(&routes::pod_rules(numbers))
            .map(drop)
            .context("cannot add the rule for local pods")
    })
    .await
    .context("preparing the kernel stopped half-way")?
}

/// The addresses of this node, with those of the pods that run already.
async fn adopt(
    settings: &Settings,
    client: &Client,
    caches: &Caches,
    records: &Records,
) -> anyhow::Result<Arc<Ipam>> {
    let ipam =
        Ipam::new(&settings.node, settings.numbers, caches.pools.store.clone(), Api::all(client.clone()));
    let (records, numbers) = (records.clone(), settings.numbers);
    let finish_and_list = move || {
        cni::gc::finish_pending(&records);
        let present = pods::list(numbers)?;
        match pods::gather_routes(numbers, &present)? {
            0 => Ok(present),
            moved => {
                let table = numbers.table_pods();
                tracing::info!(routes = moved, table, "moved routes of pods from another table");
                pods::list(numbers)
            }
        }
    };
    let present =
        tokio::task::spawn_blocking(finish_and_list).await?.context("cannot read the pods' links")?;
    tracing::info!(pods = present.len(), "adopted the pods that are here");
    ipam.adopt(present);
    Ok(Arc::new(ipam))
}

/// The MTU of new pods: the mesh's, so that nothing has to be fragmented; the uplink's where there is no mesh. To be asked
/// on threads that may block.
fn pod_mtu(caches: &Arc<Caches>, shared: &Arc<mesh::Shared>) -> Arc<dyn Fn() -> Option<u32> + Send + Sync> {
    let (caches, shared) = (Arc::clone(caches), Arc::clone(shared));
    let uplink = Recent::new(UPLINK_LIFETIME, || {
        HostNetwork::read().ok().and_then(|network| network.uplink_mtu(&Ignored::default()))
    });
    Arc::new(move || {
        if let Some(report) = shared.snapshot().report {
            return Some(report.mtu);
        }
        let uplink = uplink.value(Instant::now())?;
        let meshes = caches.meshes.store.state();
        if meshes.is_empty() && caches.meshes.is_ready() {
            return Some(uplink);
        }
        let configured = meshes.first().map_or(MESH_MTU, |mesh| u32::from(mesh.spec.mtu));
        Some(uplink::mesh_mtu(configured, uplink))
    })
}

fn mesh_problem(
    shared: &Arc<mesh::Shared>,
    from_the_start: Vec<String>,
) -> Arc<dyn Fn() -> Option<String> + Send + Sync> {
    let shared = Arc::clone(shared);
    // Who asked for no mesh misses none.
    let failure = move || shared.snapshot().failure.filter(|why| why != mesh::NO_MESH);
    Arc::new(move || from_the_start.first().cloned().or_else(&failure))
}

async fn wait_for_first_lists(caches: &Caches) {
    let deadline = Instant::now() + FIRST_LISTS;
    while !caches.missing().is_empty() {
        if Instant::now() >= deadline {
            tracing::warn!(missing = ?caches.missing(), "the API server has not answered yet; serving without it");
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn serve(
    path: &Path,
    verbs: Arc<cni::Service>,
    about: status::Service,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let listener = listen(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    tracing::info!(socket = %path.display(), "serving");
    tonic::transport::Server::builder()
        .add_service(CniServer::new(Detached(Arc::clone(&verbs))))
        .add_service(NetworkServer::from_arc(verbs))
        .add_service(NodeServer::new(about))
        .add_service(described().build_v1()?)
        .add_service(described().build_v1alpha()?)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop)
        .await
        .context("the socket stopped working")
}

/// Tells clients such as `grpcurl` what can be asked here, in the current version of the protocol and in the older one
/// that Coil's library speaks too.
fn described() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(fairlead_wire::FILE_DESCRIPTORS)
}

/// Binds beside the path and renames, so that a predecessor's stale socket is replaced in one step.
fn listen(path: &Path) -> std::io::Result<UnixListener> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let temporary = path.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary)?;
    // Only root may attach pods.
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&temporary, path)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    };

    use super::*;

    #[tokio::test]
    async fn clients_without_proto_files_find_the_services() {
        let mut client = ServerReflectionClient::new(described().build_v1().unwrap());
        let asked = MessageRequest::ListServices(String::new());
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(asked) };
        let mut answers =
            client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
        let answer = answers.next().await.unwrap().unwrap().message_response;
        let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
        let names: Vec<String> = list.service.into_iter().map(|service| service.name).collect();
        for name in ["pkg.cnirpc.CNI", "fairlead.cni.v1.Network", "fairlead.node.v1.Node"] {
            assert!(names.iter().any(|found| found == name), "{names:?}");
        }
    }
}

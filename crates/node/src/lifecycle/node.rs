//! What the subsystems share, and what each is given at its start.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use fairlead_api::wireguard::{PrivateKey, PublicKey};
use fairlead_cluster::events::{EventPublisher, PendingEvent, node_reference};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_cluster::{http, requests as api_requests};
use fairlead_dataplane::uplink;
use fairlead_dataplane::{pods, routes as dataplane_routes};
use kube::runtime::events::Reporter;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use tokio::sync::watch;

use super::api_server::Endpoints;
use super::identity::IdentityError;
use super::settings::Settings;
use super::watches::Caches;
use super::{api_server, handover, identity, server, shutdown};
use crate::cni::records::Records;
use crate::cni::{CniDeps, MeshState};
use crate::container_locks::ContainerLocks;
use crate::ipam::inventory::Inventory;
use crate::ipam::{self, Ipam};
use crate::mesh::problem::MeshFailure;
use crate::mesh::{MeshDeps, MeshHandle, MeshView};
use crate::metrics::Metrics;
use crate::routes::{RoutesDeps, RoutesHandle};
use crate::{cni, mesh, routes, status};

/// Port of a URL that names none (RFC 9110, section 4.2.2).
const HTTPS: u16 = 443;

/// What the subsystems of this node share.
pub(crate) struct Node {
    pub(crate) settings: Settings,
    client: Client,
    caches: Arc<Caches>,
    api_server: watch::Receiver<Endpoints>,
    metrics: Arc<Metrics>,
}

/// Addresses of this node, and what CNI operations need of them.
pub(crate) struct IpamHandle {
    ipam: Arc<Ipam>,
    records: Records,
    locks: Arc<ContainerLocks>,
}

impl Node {
    /// Connects to the API server and starts the watches. All of it only reads.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub(crate) fn connect(
        settings: Settings,
        config: kube::Config,
        supervisor: &mut Supervisor,
    ) -> anyhow::Result<Self> {
        let host = config.cluster_url.host().unwrap_or_default().to_owned();
        let port = config.cluster_url.port_u16().unwrap_or(HTTPS);
        let metrics = Arc::new(Metrics::default());
        let client = api_requests::counting_client(config, metrics.requests.clone())
            .context("cannot make a Kubernetes client")?;
        let subsystem = supervisor.subsystem("caches");
        let caches = Caches::start(subsystem, &client, &settings);
        let (endpoints, api_server) = watch::channel(None);
        subsystem.spawn("API server endpoints", api_server::run(client.clone(), host, port, endpoints));
        Ok(Self { settings, client, caches, api_server, metrics })
    }

    /// Forwarding and the rule for local pods, which every node needs.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) async fn prepare_kernel(&self) -> anyhow::Result<()> {
        if !self.settings.enable_ipam {
            return Ok(());
        }
        let numbers = self.settings.numbers;
        tokio::task::spawn_blocking(move || {
            uplink::enable_forwarding().context("cannot switch forwarding on")?;
            dataplane_routes::ensure_rules(&dataplane_routes::pod_rules(numbers))
                .map(drop)
                .context("cannot add the rule for local pods")
        })
        .await
        .context("preparing the kernel stopped before it finished")?
    }

    /// Publishes Events in the name of this node.
    pub(crate) fn start_events(&self, supervisor: &mut Supervisor) -> EventPublisher {
        let instance = Some(self.settings.node.clone());
        let reporter = Reporter { controller: "fairlead-node".to_owned(), instance };
        let metrics = self.metrics.events.clone();
        EventPublisher::start(supervisor.subsystem("events"), self.client.clone(), reporter, metrics)
    }

    /// Adopts the pods in the kernel, and allocates addresses for new ones.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub(crate) async fn start_ipam(&self, supervisor: &mut Supervisor) -> anyhow::Result<IpamHandle> {
        let (settings, caches) = (&self.settings, &self.caches);
        let records = Records::beside(&settings.socket);
        let ipam = self.adopt_pods(&records).await?;
        let locks = Arc::<ContainerLocks>::default();
        if settings.enable_ipam {
            let deps = ipam::Deps {
                client: self.client.clone(),
                nodes: caches.nodes.store.clone(),
                blocks: Arc::clone(&caches.blocks),
                pools: Arc::clone(&caches.pools),
                locks: Arc::clone(&locks),
                metrics: Arc::clone(&self.metrics),
                block_grace: settings.block_grace,
            };
            ipam::start(&ipam, deps, supervisor);
        }
        Ok(IpamHandle { ipam, records, locks })
    }

    async fn adopt_pods(&self, records: &Records) -> anyhow::Result<Arc<Ipam>> {
        let numbers = self.settings.numbers;
        let blocks = Api::all(self.client.clone());
        let ipam = Ipam::new(&self.settings.node, numbers, self.caches.pools.store.clone(), blocks);
        let records = records.clone();
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
        tracing::info!(pods = present.len(), "adopted the running pods");
        ipam.adopt(present);
        Ok(Arc::new(ipam))
    }

    /// Joins the mesh. A node without a usable key stays outside: its pods start and stop, and reach each other.
    pub(crate) fn start_mesh(&self, events: &EventPublisher, supervisor: &mut Supervisor) -> MeshHandle {
        let (settings, caches) = (&self.settings, &self.caches);
        let keys = match keys(&settings.state_dir) {
            Ok(keys) => keys,
            Err(error) => {
                tracing::error!(%error, "this node is not in the mesh");
                let failure = MeshFailure::KeyUnusable(error.to_string());
                events.warn(PendingEvent {
                    regarding: node_reference(&settings.node),
                    reason: failure.reason(),
                    action: "ReadKey",
                    note: error.to_string(),
                });
                return MeshHandle::outside(failure);
            }
        };
        let deps = MeshDeps {
            client: self.client.clone(),
            node: settings.node.clone(),
            keys,
            preference: settings.wireguard.into(),
            handover: handover::socket(&settings.state_dir),
            nodes: Arc::clone(&caches.nodes),
            meshes: Arc::clone(&caches.meshes),
            peers: Arc::clone(&caches.peers),
            blocks: Arc::clone(&caches.blocks),
            api_server: self.api_server.clone(),
            events: events.clone(),
            metrics: self.metrics.mesh.clone(),
        };
        mesh::start(deps, supervisor)
    }

    /// The built-in router; `None` where it is off.
    pub(crate) fn start_router(&self, supervisor: &mut Supervisor) -> Option<RoutesHandle> {
        let deps = || RoutesDeps {
            client: self.client.clone(),
            node: self.settings.node.clone(),
            blocks: Arc::clone(&self.caches.blocks),
            meshes: Arc::clone(&self.caches.meshes),
            metrics: self.metrics.router.clone(),
        };
        self.settings.router.then(|| routes::start(deps(), supervisor))
    }

    /// Metrics and health.
    pub(crate) fn start_http(&self, ipam: &IpamHandle, supervisor: &mut Supervisor) {
        let (metrics, ipam) = (Arc::clone(&self.metrics), Arc::clone(&ipam.ipam));
        let scrape = move || {
            metrics.ipam.blocks(&ipam.usage());
            metrics.text()
        };
        let probes = http::probes(supervisor.health());
        let subsystem = supervisor.subsystem("http");
        subsystem.spawn("metrics", http::serve("metrics", self.settings.metrics, http::metrics(scrape)));
        subsystem.spawn("health", http::serve("health", self.settings.health, probes));
    }

    /// Serves the socket, as soon as the API server has answered or is known to be away.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) async fn start_cni(
        &self,
        ipam: IpamHandle,
        mesh: &MeshHandle,
        router: Option<RoutesHandle>,
        events: EventPublisher,
        supervisor: &mut Supervisor,
    ) -> anyhow::Result<()> {
        let (settings, caches) = (&self.settings, &self.caches);
        let deps = CniDeps {
            enable_ipam: settings.enable_ipam,
            ipam: Arc::clone(&ipam.ipam),
            namespaces: Arc::clone(&caches.namespaces),
            pools: Arc::clone(&caches.pools),
            blocks: Arc::clone(&caches.blocks),
            meshes: Arc::clone(&caches.meshes),
            client: self.client.clone(),
            locks: Arc::clone(&ipam.locks),
            mesh: Arc::new(mesh.view()),
            calico_names: settings.calico_names,
            records: ipam.records.clone(),
            events,
            metrics: Arc::clone(&self.metrics),
        };
        let cni = cni::start(deps, supervisor);
        let inventory = Inventory {
            enable_ipam: settings.enable_ipam,
            ipam: ipam.ipam,
            records: ipam.records,
            locks: ipam.locks,
            cni: cni.clone(),
            pools: Arc::clone(&caches.pools),
            blocks: Arc::clone(&caches.blocks),
            pods: Arc::clone(&caches.pods),
        };
        let status = status::Service { node: settings.node.clone(), mesh: mesh.view(), router, inventory };
        caches.wait_for_first_lists().await;
        server::start(supervisor.subsystem("cni"), &settings.socket, cni, status)
    }

    /// Empties the export table if that is wanted and the Node was deleted. Nothing may write it any more.
    pub(crate) async fn clear_routes(&self) {
        if !self.settings.clear_routes_on_shutdown {
            return;
        }
        let (node, nodes) = (&self.settings.node, &self.caches.nodes);
        let watched = nodes.is_ready().then(|| nodes.store.get(&ObjectRef::new(node)).is_some());
        shutdown::clear_if_deleted(&self.client, node, self.settings.numbers, watched).await;
    }
}

fn keys(state_dir: &Path) -> Result<(PrivateKey, PublicKey), IdentityError> {
    let private = identity::load_or_create(state_dir, rand::random())?;
    let public = fairlead_tunnel::public_key(&private);
    Ok((private, public))
}

impl MeshState for MeshView {
    fn mtu(&self) -> Option<u32> {
        self.mtu()
    }

    fn problem(&self) -> Option<String> {
        self.problem().map(|failure| failure.to_string())
    }
}

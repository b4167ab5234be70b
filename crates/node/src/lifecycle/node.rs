//! The node with its subsystems: the parts that they share, and the inputs of each at its start.

use std::sync::Arc;

use anyhow::Context as _;
use fairlead_api::names::WIREGUARD_INTERFACE;
use fairlead_cluster::events::{EventPublisher, PendingEvent, node_reference};
use fairlead_cluster::http::{Limits, Plain};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_cluster::{http, local_api, requests as api_requests, resumption};
use fairlead_dataplane::kernel_watch::KernelWatch;
use fairlead_dataplane::pods::PodOnNode;
use fairlead_dataplane::source_addresses::Found;
use fairlead_dataplane::uplink::{Ignored, has_ipv6};
use fairlead_egress_client::{self as egress, Egress, EgressProblems, SourceAddresses};
use fairlead_mesh::gather::identity;
use fairlead_mesh::model::problem::MeshFailure;
use fairlead_mesh::{self as mesh, MeshCaches, MeshDeps, MeshHandle, MeshNode, MeshOutputs, SourceWatches};
use fairlead_pods::cni;
use fairlead_pods::cni::CniDeps;
use fairlead_pods::cni::records::Records;
use fairlead_pods::container_locks::ContainerLocks;
use fairlead_pods::inventory::Inventory;
use fairlead_pods::ipam::{self, Ipam};
use fairlead_pods::pod_network::{self, PodNetwork, PodNetworkProblems};
use fairlead_wire::spool;
use kube::runtime::events::Reporter;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use tokio::sync::watch;

use super::adopt::{self, Adopted};
use super::api_server::Endpoints;
use super::mesh_of_pods::MeshOfPods;
use super::settings::{Access, Settings};
use super::standalone::Objects;
use super::watches::Caches;
use super::{api_server, early_mesh, handover, server, shutdown};
use crate::metrics::Metrics;
use crate::routes::{RoutesDeps, RoutesHandle};
use crate::{routes, status};

/// Port of a URL that names none (RFC 9110, section 4.2.2).
const HTTPS: u16 = 443;

/// Parts that the subsystems of this node share.
pub(crate) struct Node {
    pub(crate) settings: Settings,
    client: Client,
    /// There is no Kubernetes: nothing is published.
    is_standalone: bool,
    caches: Arc<Caches>,
    api_server: watch::Receiver<Endpoints>,
    metrics: Arc<Metrics>,
    kernel: KernelWatch,
    pod_network: PodNetworkProblems,
    egress: EgressProblems,
    sources: SourceAddresses,
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
        access: Access,
        supervisor: &mut Supervisor,
    ) -> anyhow::Result<Self> {
        let metrics = Arc::new(Metrics::default());
        let is_standalone = matches!(access, Access::Standalone(_));
        let (client, host, port) = match access {
            Access::Cluster(config) => {
                let host = config.cluster_url.host().unwrap_or_default().to_owned();
                let port = config.cluster_url.port_u16().unwrap_or(HTTPS);
                let client = api_requests::counting_client(*config, metrics.requests.clone())
                    .context("cannot create a Kubernetes client")?;
                (resumption::checking_client(client), host, port)
            }
            Access::Standalone(standalone) => {
                let objects = Objects { node: settings.node.clone(), settings: *standalone };
                (local_api::client(objects), String::new(), HTTPS)
            }
        };
        let subsystem = supervisor.subsystem("caches");
        let caches = Caches::start(subsystem, &client, &settings);
        let (endpoints, api_server) = watch::channel(None);
        subsystem.spawn("API server endpoints", api_server::run(client.clone(), host, port, endpoints));
        let (kernel, changes) =
            KernelWatch::open().context("cannot subscribe to the kernel's network changes")?;
        supervisor.subsystem("kernel").spawn("kernel changes", changes);
        Ok(Self {
            settings,
            client,
            is_standalone,
            caches,
            api_server,
            metrics,
            kernel,
            pod_network: PodNetworkProblems::default(),
            egress: EgressProblems::default(),
            sources: SourceAddresses::default(),
        })
    }

    /// Forwarding and the rule for local pods, which every node needs.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) async fn prepare_kernel(&self) -> anyhow::Result<()> {
        let numbers = self.settings.numbers;
        let read = tokio::task::spawn_blocking(move || Found::read(numbers, Ignored::default())).await?;
        let found = read.context("cannot read the routes to source addresses of egress gateways")?;
        self.sources.adopt(found.addresses());
        if !self.settings.enable_ipam {
            return Ok(());
        }
        if !has_ipv6() {
            tracing::warn!("the kernel has IPv6 disabled: pods of this node have IPv4 only");
        }
        tokio::task::spawn_blocking(move || {
            pod_network::prepare(numbers).map(drop).context("cannot prepare the network of the pods")
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
    pub(crate) async fn start_ipam(
        &self,
        events: &EventPublisher,
        supervisor: &mut Supervisor,
    ) -> anyhow::Result<IpamHandle> {
        let settings = &self.settings;
        let caches = &self.caches;
        let records = Records::beside(&settings.socket);
        let ipam = self.adopt_pods(&records, events).await?;
        let locks = Arc::<ContainerLocks>::default();
        if settings.enable_ipam {
            let deps = ipam::Deps {
                client: self.client.clone(),
                nodes: caches.nodes.store.clone(),
                blocks: caches.own_blocks.clone(),
                interruptions: caches.blocks.interruptions(),
                pools: Arc::clone(&caches.pools),
                locks: Arc::clone(&locks),
                metrics: self.metrics.ipam.clone(),
                block_grace: settings.block_grace,
                positions: spool::search_positions(&settings.socket),
                block_record: spool::block_record(&settings.socket),
            };
            ipam::start(&ipam, deps, supervisor);
        }
        Ok(IpamHandle { ipam, records, locks })
    }

    /// Keeps the pods connected, where this program makes their interfaces.
    pub(crate) fn start_pod_network(
        &self,
        ipam: &IpamHandle,
        mesh: &MeshHandle,
        supervisor: &mut Supervisor,
    ) {
        if !self.settings.enable_ipam {
            return;
        }
        let network = PodNetwork {
            ipam: Arc::clone(&ipam.ipam),
            locks: Arc::clone(&ipam.locks),
            pools: Arc::clone(&self.caches.pools),
            meshes: Arc::clone(&self.caches.meshes),
            peers: Arc::clone(&self.caches.peers),
            mesh: self.mesh_of_pods(mesh),
            metrics: self.metrics.pod_network.clone(),
            problems: self.pod_network.clone(),
        };
        network.start(&self.kernel, supervisor.subsystem("pod network"));
    }

    fn mesh_of_pods(&self, mesh: &MeshHandle) -> Arc<MeshOfPods> {
        Arc::new(MeshOfPods { view: mesh.view(), caches: Arc::clone(&self.caches) })
    }

    async fn adopt_pods(&self, records: &Records, events: &EventPublisher) -> anyhow::Result<Arc<Ipam>> {
        let node = &self.settings.node;
        let numbers = self.settings.numbers;
        let records = records.clone();
        let pools = Api::all(self.client.clone());
        let ipam = Ipam::new(node, numbers, self.caches.pools.store.clone(), pools);
        let adopted = tokio::task::spawn_blocking(move || adopt::running_pods(&records, numbers));
        if !has_ipv6() {
            ipam.allocate_ipv4_only();
        }
        let Adopted { pods, unclear } = adopted.await?.context("cannot read the pods' links")?;
        tracing::info!(pods = pods.len(), "adopted the running pods");
        ipam.restore_positions(&spool::search_positions(&self.settings.socket));
        ipam.adopt(pods);
        for (pod, why) in unclear {
            let PodOnNode { container_id, pool, host_name, .. } = &pod;
            let note = format!(
                "the addresses of container {container_id} (link {host_name}, pool {pool}) are not known: {why}"
            );
            tracing::error!(container = container_id, link = host_name, pool, %why, "the addresses of a pod are not known");
            ipam.hold_back(&pod, why.to_string());
            let regarding = node_reference(node);
            events.warn(PendingEvent { regarding, reason: "AddressUnclear", action: "AdoptPod", note });
        }
        if self.settings.enable_ipam {
            let restored = ipam.restore_blocks(&spool::block_record(&self.settings.socket));
            restored.context("cannot read which blocks the kernel exports")?;
        }
        Ok(Arc::new(ipam))
    }

    /// Joins the mesh. A node without a usable key stays outside: its pods start and stop, and reach each other.
    pub(crate) fn start_mesh(&self, events: &EventPublisher, supervisor: &mut Supervisor) -> MeshHandle {
        let settings = &self.settings;
        let caches = &self.caches;
        let stop_refusing =
            early_mesh::stop_refusing(early_mesh::state_file(settings), Arc::clone(&caches.meshes));
        supervisor.subsystem("mesh").spawn("early refusals", stop_refusing);
        let private_key = match identity::load_or_create(&settings.state_dir, rand::random()) {
            Ok(private_key) => private_key,
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
            node: MeshNode {
                name: settings.node.clone(),
                private_key,
                preference: settings.wireguard.into(),
                state_directory: settings.state_dir.clone(),
                handover: handover::socket(&settings.state_dir),
                table_pods: settings.numbers.table_pods(),
                publishes: !self.is_standalone,
                peers_file: settings.peers.clone(),
            },
            caches: MeshCaches {
                nodes: Arc::clone(&caches.nodes),
                meshes: Arc::clone(&caches.meshes),
                service_ranges: Arc::clone(&caches.service_ranges),
                peers: Arc::clone(&caches.peers),
                deleted_peers: caches.deleted_peers.clone(),
                blocks: Arc::clone(&caches.blocks),
                external_peers: Arc::clone(&caches.external_peers),
                preshared_keys: Arc::clone(&caches.preshared_keys),
                api_server: self.api_server.clone(),
            },
            sources: SourceWatches { announced: self.sources.announced(), nodes: self.sources.nodes() },
            kernel: self.kernel.clone(),
            outputs: MeshOutputs {
                events: events.clone(),
                metrics: self.metrics.mesh.clone(),
                metrics_per_peer: settings.metrics_per_peer,
            },
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
            source_nodes: self.sources.nodes(),
            kernel: self.kernel.subscribe(routes::concerns),
            metrics: self.metrics.router.clone(),
        };
        self.settings.router.then(|| routes::start(deps(), supervisor))
    }

    /// Egress gateways of this node's pods.
    pub(crate) fn start_egress(
        &self,
        ipam: &IpamHandle,
        events: &EventPublisher,
        supervisor: &mut Supervisor,
    ) -> Egress {
        let settings = &self.settings;
        let caches = &self.caches;
        let meshes = Arc::clone(&caches.meshes);
        let mesh_devices = move || {
            let named =
                meshes.store.state().iter().map(|mesh| mesh.spec.interface_name.clone()).collect::<Vec<_>>();
            [named, vec![WIREGUARD_INTERFACE.to_owned()]].concat()
        };
        let deps = egress::Deps {
            client: self.client.clone(),
            node: settings.node.clone(),
            ids: settings.numbers,
            switches: settings.egress,
            socket: settings.socket.clone(),
            namespaces: Arc::clone(&caches.namespaces),
            pods: Arc::clone(&caches.pods),
            ipam: Arc::clone(&ipam.ipam),
            locks: Arc::clone(&ipam.locks),
            mesh_devices: Box::new(mesh_devices),
            events: events.clone(),
            metrics: self.metrics.egress.clone(),
            problems: self.egress.clone(),
            sources: self.sources.clone(),
        };
        egress::start(deps, supervisor.subsystem("egress"))
    }

    /// Metrics and health.
    ///
    /// # Errors
    /// Metrics are to be served with TLS, and the cryptography library fails.
    pub(crate) fn start_http(&self, ipam: &IpamHandle, supervisor: &mut Supervisor) -> anyhow::Result<()> {
        let metrics = Arc::clone(&self.metrics);
        let ipam = Arc::clone(&ipam.ipam);
        let scrape = move |exposition| {
            metrics.ipam.blocks(&ipam.usage());
            metrics.text(exposition)
        };
        let probes = http::probes(supervisor.health());
        let subsystem = supervisor.subsystem("http");
        http::serve_metrics(subsystem, self.settings.metrics, http::metrics(scrape), &self.client)?;
        let health = self.settings.health;
        subsystem.spawn("health", http::serve("health", health, Limits::PROBES, Plain, probes));
        Ok(())
    }

    /// Serves the socket, as soon as the API server has answered or is known to be away.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) async fn start_cni(
        &self,
        ipam: IpamHandle,
        egress: Egress,
        mesh: &MeshHandle,
        router: Option<RoutesHandle>,
        events: EventPublisher,
        supervisor: &mut Supervisor,
    ) -> anyhow::Result<()> {
        let settings = &self.settings;
        let caches = &self.caches;
        let deps = CniDeps {
            enable_ipam: settings.enable_ipam,
            ipam: Arc::clone(&ipam.ipam),
            namespaces: Arc::clone(&caches.namespaces),
            pods: Arc::clone(&caches.pods),
            pools: Arc::clone(&caches.pools),
            blocks: Arc::clone(&caches.blocks),
            meshes: Arc::clone(&caches.meshes),
            client: self.client.clone(),
            locks: Arc::clone(&ipam.locks),
            mesh: self.mesh_of_pods(mesh),
            calico_names: settings.calico_names,
            records: ipam.records.clone(),
            events: events.clone(),
            metrics: self.metrics.cni.clone(),
            addresses: self.metrics.ipam.clone(),
        };
        let stages = egress.stages(Arc::clone(&caches.pods), self.client.clone(), events);
        let cni = cni::start(deps, stages, supervisor);
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
        let status = status::Service {
            node: settings.node.clone(),
            mesh: mesh.view(),
            router,
            inventory,
            pod_network: self.pod_network.clone(),
            egress: self.egress.clone(),
            sources: self.sources.clone(),
            caches: Arc::clone(caches),
        };
        caches.wait_for_first_lists().await;
        server::start(supervisor.subsystem("cni"), &settings.socket, cni, status)
    }

    /// Empties the export table if that is wanted and the Node was deleted. Nothing may write it any more.
    pub(crate) async fn clear_routes(&self) {
        if !self.settings.clear_routes_on_shutdown {
            return;
        }
        let node = &self.settings.node;
        let nodes = &self.caches.nodes;
        let watched = nodes.is_ready().then(|| nodes.store.get(&ObjectRef::new(node)).is_some());
        shutdown::clear_if_deleted(&self.client, node, self.settings.numbers, watched).await;
    }
}

//! The Node service, which `fairlead status` and `fairlead ipam` call.

mod key;
mod netcheck;
mod ping;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use fairlead_dataplane::wireguard::PortAccess;
use fairlead_egress_client::{EgressProblems, Shown, SourceAddresses};
use fairlead_members::provenance::{DiscoveryStatus, ServiceStatus, SourceAge};
use fairlead_mesh::apply::relay::{RelayReport, RelayTransport};
use fairlead_mesh::apply::report::{PeerReport, Report};
use fairlead_mesh::model::problem::MeshFailure;
use fairlead_mesh::plan::external::ExternalReport;
use fairlead_mesh::tell::publish::{backend_name, nat_name};
use fairlead_mesh::{MeshView, Snapshot};
use fairlead_path::State;
use fairlead_pods::inventory::Inventory;
use fairlead_pods::pod_network::PodNetworkProblems;
use fairlead_port_mapping::{Failure, Mapping};
use fairlead_wire::node::node_server::Node;
use fairlead_wire::node::{
    BlockRoute, DiscoveryService, ExternalPeer, IpamCheckRequest, IpamCheckResponse, IpamReleaseRequest,
    IpamReleaseResponse, IpamShowRequest, IpamShowResponse, MemberSource, NetcheckRequest, NetcheckResponse,
    Peer, PingRequest, PingResponse, PortMapping, Relay, ReleasedBlock, RotateKeyRequest, RotateKeyResponse,
    Router, SourceAddress, StatusRequest, StatusResponse,
};
use ipnet::IpNet;
use tonic::{Request, Response, Status};

use crate::lifecycle::watches::Caches;
use crate::routes::RoutesHandle;

/// Serves the node's status.
pub struct Service {
    /// This node's name.
    pub node: String,
    /// The mesh.
    pub mesh: MeshView,
    /// The built-in router; `None` where it is off.
    pub router: Option<RoutesHandle>,
    /// The addresses.
    pub inventory: Inventory,
    /// Problems of the network of the pods.
    pub pod_network: PodNetworkProblems,
    /// Problems of the egress of pods.
    pub(crate) egress: EgressProblems,
    /// Source addresses of egress gateways.
    pub(crate) sources: SourceAddresses,
    /// Watch caches: a refusal of the API server is a problem of this node.
    pub(crate) caches: Arc<Caches>,
}

#[tonic::async_trait]
impl Node for Service {
    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let StatusRequest { peer } = request.into_inner();
        let Snapshot { report, failure, unpublished, .. } = self.mesh.snapshot();
        let mut answer = StatusResponse {
            node: self.node.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            blocks: self.inventory.ipam.describe_blocks(),
            netlink_changes: fairlead_netlink::changes_sent(),
            ..StatusResponse::default()
        };
        if let Some(keys) = self.mesh.keys() {
            key::describe(&keys.current(), &mut answer);
        }
        // With the built-in router, a missing mesh is no problem.
        let failure = failure.filter(|why| self.router.is_none() || *why != MeshFailure::NoMesh);
        // Refusals are listed with all that follows from them.
        let failure = failure.filter(|why| !matches!(why, MeshFailure::Forbidden(_)));
        answer.problems.extend(failure.map(|failure| failure.to_string()));
        answer.problems.extend(self.caches.refusals());
        answer.problems.extend(unpublished);
        if let Some(router) = &self.router {
            let report = router.report();
            answer.router = Some(Router { routes: report.routes.iter().map(describe_route).collect() });
            answer.problems.extend(report.problems.iter().map(ToString::to_string));
        }
        let discovery = self.mesh.discovery();
        answer.discovery_affiliate_id.clone_from(&discovery.affiliate_id);
        answer.discovery_services = describe_discovery(discovery);
        answer.problems.extend(self.inventory.ipam.problems());
        answer.problems.extend(self.egress.get());
        let sources = self.sources.report();
        answer.problems.extend(sources.problems);
        answer.source_addresses = sources.announced.iter().map(describe_source).collect();
        // The mesh says of firewalls what the network of the pods says.
        let of_mesh: Vec<String> =
            report.iter().flat_map(|report| &report.problems).map(ToString::to_string).collect();
        let of_pods = self.pod_network.get().into_iter();
        answer
            .problems
            .extend(of_pods.filter(|problem| !of_mesh.iter().any(|known| problem.ends_with(known))));
        if let Some(report) = report {
            describe(&report, &mut answer, SystemTime::now());
            let heard = self.mesh.heard(report.saved_at);
            for (peer, known) in answer.peers.iter_mut().zip(&report.peers) {
                peer.sources = describe_sources(&heard.sources(&known.name, known.sources, Instant::now()));
            }
            if !peer.is_empty() {
                self.keep_only(&peer, &report, &mut answer)?;
            }
        }
        Ok(Response::new(answer))
    }

    async fn netcheck(&self, _: Request<NetcheckRequest>) -> Result<Response<NetcheckResponse>, Status> {
        let Snapshot { report, failure, .. } = self.mesh.snapshot();
        let Some(report) = report else {
            let why =
                failure.map_or_else(|| "there is no mesh yet".to_owned(), |failure| failure.to_string());
            return Err(Status::failed_precondition(why));
        };
        Ok(Response::new(netcheck::netcheck(&self.node, &report)))
    }

    async fn ping(&self, request: Request<PingRequest>) -> Result<Response<PingResponse>, Status> {
        ping::ping(&self.mesh, request.into_inner()).await.map(Response::new)
    }

    async fn rotate_key(
        &self,
        request: Request<RotateKeyRequest>,
    ) -> Result<Response<RotateKeyResponse>, Status> {
        key::rotate(&self.node, &self.mesh, request.into_inner()).await.map(Response::new)
    }

    async fn ipam_show(&self, _: Request<IpamShowRequest>) -> Result<Response<IpamShowResponse>, Status> {
        self.inventory.show().await.map(Response::new)
    }

    async fn ipam_check(&self, _: Request<IpamCheckRequest>) -> Result<Response<IpamCheckResponse>, Status> {
        self.inventory.check().await.map(Response::new)
    }

    async fn ipam_release(
        &self,
        request: Request<IpamReleaseRequest>,
    ) -> Result<Response<IpamReleaseResponse>, Status> {
        let IpamReleaseRequest { subject, force } = request.into_inner();
        self.inventory.release(&subject, force).await.map(Response::new)
    }
}

impl Service {
    /// Leaves one peer in the answer, with the changes of its path.
    fn keep_only(&self, subject: &str, report: &Report, answer: &mut StatusResponse) -> Result<(), Status> {
        let found = ping::find(&report.peers, subject).ok_or_else(|| ping::no_peer(subject))?;
        answer.peers.retain(|peer| peer.name == found.name);
        for peer in &mut answer.peers {
            peer.path_changes = ping::path_changes(&self.mesh, report, found);
        }
        Ok(())
    }
}

fn describe_route(route: &fairlead_topology::BlockRoute) -> BlockRoute {
    BlockRoute {
        destination: route.destination.to_string(),
        node: route.node.clone(),
        gateway: route.gateway.to_string(),
    }
}

fn describe_source(shown: &Shown) -> SourceAddress {
    SourceAddress {
        address: shown.address.to_string(),
        egress: shown.egress.clone(),
        gateway: shown.gateway.clone(),
        term: shown.term,
        links: shown.links.clone(),
    }
}

fn describe(report: &Report, answer: &mut StatusResponse, now: SystemTime) {
    answer.wireguard = backend_name(report.device.backend).to_owned();
    answer.wireguard_reason = report.device.backend_reason.unwrap_or_default().to_owned();
    answer.port_access = report.device.port_access.map(PortAccess::name).unwrap_or_default().to_owned();
    answer.interface = report.device.interface.clone();
    answer.listen_port = u32::from(report.device.port);
    answer.mtu = report.device.mtu;
    answer.nat_type = nat_name(report.translation.nat).to_owned();
    let on_mesh = report.own.mesh_addresses.iter().copied().map(IpNet::from);
    answer.prefixes = report.own.prefixes.iter().copied().chain(on_mesh).map(|it| it.to_string()).collect();
    answer.problems.extend(report.problems.iter().map(ToString::to_string));
    answer.relay = report.relay.as_ref().map(describe_relay);
    answer.port_mappings = describe_port_mappings(report);
    answer.released_blocks = describe_released(&report.released, (Instant::now(), now));
    answer.nat64_prefixes = report.translation.nat64.iter().map(ToString::to_string).collect();
    answer.peers = report.peers.iter().map(|peer| describe_peer(peer, now)).collect();
    answer.external_peers = report.external.iter().map(|peer| describe_external(peer, now)).collect();
    if let Some(relay) = &answer.relay {
        for (peer, known) in answer.peers.iter_mut().zip(&report.peers) {
            match known.relay {
                Some(RelayTransport::Tcp) => peer.endpoint.clone_from(&relay.endpoint),
                Some(RelayTransport::Udp) => peer.endpoint.insert_str(0, "udp://"),
                None => {}
            }
        }
    }
}

fn describe_port_mappings(report: &Report) -> Vec<PortMapping> {
    let describe = |(gateway, outcome): (&IpAddr, &Result<Mapping, Failure>)| {
        let gateway = gateway.to_string();
        match outcome {
            Ok(Mapping { protocol, external, lifetime }) => PortMapping {
                gateway,
                protocol: protocol.to_string(),
                external: external.to_string(),
                error: String::new(),
                lifetime_seconds: Some(lifetime.as_secs()),
            },
            Err(failure) => PortMapping { gateway, error: failure.to_string(), ..PortMapping::default() },
        }
    };
    report.translation.port_mappings.0.iter().map(describe).collect()
}

/// Blocks that are guarded still; `now` is the present time by both clocks.
fn describe_released(released: &[(IpNet, Instant)], now: (Instant, SystemTime)) -> Vec<ReleasedBlock> {
    let describe = |(block, until): &(IpNet, Instant)| {
        let left = until.checked_duration_since(now.0).filter(|left| !left.is_zero())?;
        let until = now.1.checked_add(left)?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        Some(ReleasedBlock { prefix: block.to_string(), until_seconds: until.as_secs_f64().round() })
    };
    released.iter().filter_map(describe).collect()
}

fn describe_discovery(status: DiscoveryStatus) -> Vec<DiscoveryService> {
    let describe = |service: ServiceStatus| DiscoveryService {
        server: service.server,
        connected: service.is_connected,
        published: service.is_published,
        members: service.members as u64,
        error: service.error,
    };
    status.services.into_iter().map(describe).collect()
}

fn describe_relay(relay: &RelayReport) -> Relay {
    Relay {
        endpoint: relay.endpoint.to_string(),
        connected: relay.status.is_up,
        error: relay.status.error.clone().unwrap_or_default(),
        round_trip_seconds: relay.status.round_trip.map(|round_trip| round_trip.as_secs_f64()),
        rx_bytes: relay.counters.received_bytes,
        tx_bytes: relay.counters.sent_bytes,
    }
}

fn describe_external(peer: &ExternalReport, now: SystemTime) -> ExternalPeer {
    let device = peer.device.as_ref();
    let endpoint = device.and_then(|device| device.config.endpoint);
    let handshake = device.and_then(|device| device.last_handshake);
    ExternalPeer {
        name: peer.name.clone(),
        public_key: peer.public_key.to_string(),
        connected: peer.is_connected(now),
        endpoint: endpoint.map(|endpoint| endpoint.to_string()).unwrap_or_default(),
        handshake_age_seconds: handshake.map(|at| now.duration_since(at).unwrap_or_default().as_secs_f64()),
        rx_bytes: device.map_or(0, |device| device.rx_bytes),
        tx_bytes: device.map_or(0, |device| device.tx_bytes),
        prefixes: peer.prefixes.iter().map(ToString::to_string).collect(),
        standby: peer.is_standby(),
    }
}

fn describe_sources(sources: &[SourceAge]) -> Vec<MemberSource> {
    let describe = |it: &SourceAge| MemberSource {
        source: it.source.clone(),
        age_seconds: it.age.map(|age| age.as_secs_f64()),
    };
    sources.iter().map(describe).collect()
}

fn describe_peer(peer: &PeerReport, now: SystemTime) -> Peer {
    let device = peer.device.as_ref();
    let endpoint = device.and_then(|device| device.config.endpoint).or(peer.path.endpoint);
    let handshake = device.and_then(|device| device.last_handshake);
    Peer {
        name: peer.name.clone(),
        public_key: peer.public_key.to_string(),
        state: peer.path.state.to_string(),
        endpoint: endpoint.map(|endpoint| endpoint.to_string()).unwrap_or_default(),
        endpoint_source: peer.path.source.map(|source| source.to_string()).unwrap_or_default(),
        handshake_age_seconds: handshake.map(|at| now.duration_since(at).unwrap_or_default().as_secs_f64()),
        rx_bytes: device.map_or(0, |device| device.rx_bytes),
        tx_bytes: device.map_or(0, |device| device.tx_bytes),
        prefixes: peer.prefixes.iter().map(ToString::to_string).collect(),
        round_trip_seconds: peer.path.round_trip.map(|round_trip| round_trip.as_secs_f64()),
        relay_reason: peer.relay_reason.map(|reason| reason.to_string()).unwrap_or_default(),
        path_changes: Vec::new(),
        sources: Vec::new(),
        plain_prefixes: peer.plain.iter().map(ToString::to_string).collect(),
        encapsulated_prefixes: peer.encapsulated.iter().map(ToString::to_string).collect(),
        reason: if peer.path.state == State::Up { String::new() } else { peer.path.message.clone() },
    }
}

#[cfg(test)]
pub(crate) mod tests;

//! Reports of the state of the mesh, for status, metrics and the publisher.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_address::{AddressFilter, Endpoint, InterfaceId, Nat64Prefix};
use fairlead_api::resources::Granularity;
use fairlead_dataplane::wireguard::{Backend, PortAccess};
use fairlead_keys::{PeerState, PublicKey};
use fairlead_members::departures::Session;
use fairlead_path::{NatType, State, Status};
use fairlead_port_mapping::task::PortMappings;
use fairlead_relay::client;
use fairlead_topology::Sources;
use ipnet::IpNet;

use super::path_port::PathCounters;
use super::relay::{RelayReport, RelayTransport};
use crate::model::problem::MeshProblem;
use crate::plan::desired::{OwnEndpoints, StunAnswers};
use crate::plan::external::ExternalReport;
use crate::plan::relay_reason::RelayReason;

/// No session of WireGuard is older (`REJECT_AFTER_TIME`, WireGuard paper 6.1).
const SESSION: Duration = Duration::from_secs(180);

/// The state of one peer.
#[derive(Debug, Clone)]
pub struct PeerReport {
    /// Name of the peer.
    pub name: String,
    /// Public key of the peer.
    pub public_key: PublicKey,
    /// Up, connecting or down, and why.
    pub path: Status,
    /// Reason why packets to the peer go by way of the relay; `None` if they do not.
    pub relay_reason: Option<RelayReason>,
    /// State of the peer in the device, without prefixes; `None` only before it was configured.
    pub device: Option<Arc<PeerState>>,
    /// Sources that know of the peer.
    pub sources: Sources,
    /// Prefixes that are sent to the peer.
    pub prefixes: Vec<IpNet>,
    /// Prefixes among these that leave without the tunnel, inside of the location.
    pub plain: Vec<IpNet>,
    /// Prefixes among these that go through an IP tunnel.
    pub encapsulated: Vec<IpNet>,
    /// The endpoint in use as other nodes know it, if they learn something from it: the peer did not publish it itself, or it
    /// is a public address of its own, which shows that no NAT is in front of it.
    pub published_endpoint: Option<SocketAddr>,
    /// Transport of its packets to the relay; `None` where they go directly.
    pub relay: Option<RelayTransport>,
}

impl PeerReport {
    /// Whether its packets go by way of a relay.
    pub fn is_relayed(&self) -> bool {
        self.relay.is_some()
    }

    /// Properties of the peer on which the node's own WireKubePeer depends.
    fn published(&self) -> (&str, PublicKey, State, [Option<SocketAddr>; 2]) {
        let endpoint = self.device.as_ref().and_then(|device| device.config.endpoint);
        (&self.name, self.public_key, self.path.state, [endpoint, self.published_endpoint])
    }
}

/// The WireGuard device of this node.
#[derive(Debug, Clone)]
pub struct DeviceReport {
    /// WireGuard implementation in use.
    pub backend: Backend,
    /// Reason why it has to be the embedded one, whether or not the kernel has WireGuard.
    pub backend_reason: Option<&'static str>,
    /// Way in which path probes share the port of the device; `None` where they cannot be sent.
    pub port_access: Option<PortAccess>,
    /// Name of the interface.
    pub interface: String,
    /// MTU of the device.
    pub mtu: u32,
    /// The smallest MTU of the uplinks.
    pub uplink_mtu: u32,
    /// UDP port of the device.
    pub port: u16,
}

/// Address translation in front of this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TranslationReport {
    /// The kind of NAT, as others see it.
    pub nat: NatType,
    /// Ports that a symmetric NAT gave to new mappings, in that order; empty where that was not measured.
    pub measured_ports: Vec<u16>,
    /// Answers of STUN servers.
    pub stun: StunAnswers,
    /// Answers of gateways.
    pub port_mappings: PortMappings,
    /// The prefixes of the NAT64 of this node's network.
    pub nat64: Vec<Nat64Prefix>,
}

/// This node as a member of the mesh.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnReport {
    /// Prefixes of this node.
    pub prefixes: Vec<IpNet>,
    /// Addresses of this node among these prefixes, which it publishes.
    pub claims: Vec<IpAddr>,
    /// Addresses of this node on the mesh.
    pub mesh_addresses: Vec<IpAddr>,
    /// Interface identifier (modified EUI-64) of the first link-layer address of this host.
    pub interface_id: Option<InterfaceId>,
    /// Whether it has tunnels with nodes of other locations.
    pub is_gateway: bool,
}

/// Settings of this node by an administrator, as it publishes them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConfiguredReport {
    /// Filter of this node's endpoints that nodes may publish.
    pub published: AddressFilter,
    /// The endpoint that is to be used.
    pub manual: Option<Endpoint>,
    /// Additional endpoints of this node.
    pub extra_endpoints: Vec<SocketAddr>,
    /// Seconds between keepalives that this node asks for.
    pub keepalive: Option<u16>,
}

/// The state of the mesh.
#[derive(Debug, Clone)]
pub struct Report {
    /// The device.
    pub device: DeviceReport,
    /// This node's endpoints.
    pub endpoints: OwnEndpoints,
    /// Address translation in front of it.
    pub translation: TranslationReport,
    /// Prefixes and addresses of this node.
    pub own: OwnReport,
    /// Settings by an administrator.
    pub configured: ConfiguredReport,
    /// Time at which the cluster's state in use was saved; `None` if the API server has shown it.
    pub saved_at: Option<Instant>,
    /// Nodes by name.
    pub peers: Vec<PeerReport>,
    /// Peers outside of the cluster by name.
    pub external: Vec<ExternalReport>,
    /// The granularity for which this node is prepared: that in use, or the one that the mesh resource asks for.
    pub prepared_granularity: Option<Granularity>,
    /// Problems for status and Events.
    pub problems: Vec<MeshProblem>,
    /// Blocks that were released, with the times until which what is sent there is dropped.
    pub released: Vec<(IpNet, Instant)>,
    /// Packets for the mesh that were about to leave outside of it, and were dropped.
    pub guarded: u64,
    /// Counters of the paths.
    pub paths: PathCounters,
    /// The relay; `None` where none is to be used.
    pub relay: Option<RelayReport>,
}

impl PeerReport {
    /// The problem of a path that loses long packets, where there is no better one.
    pub(crate) fn path_mtu(&self, mtu: u32) -> Option<MeshProblem> {
        let Status { state, loses_long, route_mtu, endpoint, .. } = self.path;
        let endpoint = endpoint.filter(|_| state == State::Up && (loses_long || route_mtu.is_some()))?;
        Some(MeshProblem::PathMtu { peer: self.name.clone(), endpoint, mtu, route_mtu })
    }
}

impl Report {
    /// Session with a member, as its state and the age of its last handshake show.
    pub fn session(&self, key: &PublicKey, now: SystemTime) -> Session {
        let Some(peer) = self.peers.iter().find(|peer| peer.public_key == *key) else {
            return Session::Never;
        };
        let handshake = peer.device.as_ref().and_then(|device| device.last_handshake);
        let age = handshake.map(|at| now.duration_since(at).unwrap_or_default());
        match age {
            // The state needs no clock that is set right.
            _ if peer.path.state == State::Up => Session::Alive,
            Some(age) if age < SESSION => Session::Alive,
            Some(_) => Session::Ended,
            None => Session::Never,
        }
    }

    /// The Peers that have come to this node, with their keys and its terms.
    pub fn entry_terms(&self) -> impl Iterator<Item = (&str, PublicKey, u64)> {
        let taken = |peer: &&ExternalReport| peer.entry.is_some_and(|entry| entry.own_term > 0);
        let term = |peer: &ExternalReport| peer.entry.map_or(0, |entry| entry.own_term);
        self.external.iter().filter(taken).map(move |peer| (peer.name.as_str(), peer.public_key, term(peer)))
    }

    fn relay_endpoint(&self) -> Option<&client::Endpoint> {
        self.relay.as_ref().map(|relay| &relay.endpoint)
    }

    /// Whether this node publishes the same of both: counters, ages of handshakes and reasons do not count.
    pub fn publishes_the_same(&self, other: &Self) -> bool {
        let own = &self.own;
        let others = &other.own;
        let nat = &self.translation;
        let others_nat = &other.translation;
        (self.device.backend, self.device.port) == (other.device.backend, other.device.port)
            && self.endpoints == other.endpoints
            && self.configured == other.configured
            && (&own.claims, &own.mesh_addresses) == (&others.claims, &others.mesh_addresses)
            && (nat.nat, &nat.measured_ports) == (others_nat.nat, &others_nat.measured_ports)
            && self.problems == other.problems
            && self.prepared_granularity == other.prepared_granularity
            && self.entry_terms().eq(other.entry_terms())
            && self.relay_endpoint() == other.relay_endpoint()
            && self.peers.iter().map(PeerReport::published).eq(other.peers.iter().map(PeerReport::published))
    }
}

//! Everything the mesh is decided from, as the cluster and this node's network say it. What the kernel says comes later, in `plan`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use fairlead_address::{Endpoint, EndpointFilters, InterfaceId, PrefixSet};
use fairlead_api::resources::NodeFilters;
use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_members::SourceProblem;
use fairlead_members::departures::Departures;
use fairlead_members::discovery_client::Shared;
use fairlead_members::settings::MeshSettings;
use fairlead_port_mapping::task::PortMappings;
use fairlead_topology::{Member, SourceNodes};
use ipnet::IpNet;

use super::nat64::Nat64Answer;

/// Shortest prefix that is taken for a network of pods: the plan leaves out shorter ones.
const MIN_POD_NETWORK_LENGTH: u8 = 8;

/// Keys of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnKeys {
    /// Private key, the identity of the node.
    pub private: PrivateKey,
    /// The public half.
    pub public: PublicKey,
    /// The public key before, if this program has replaced it.
    pub previous: Option<PublicKey>,
}

/// This node as its object, its annotations and its host say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnNode {
    /// Addresses of the Node object, at which others may reach it.
    pub addresses: Vec<IpAddr>,
    /// Addresses among them at which the node is reached through the mesh.
    pub claims: Vec<IpAddr>,
    /// The endpoint that an administrator chose.
    pub manual: Option<Endpoint>,
    /// Additional endpoints that an administrator gives.
    pub extra_endpoints: Vec<SocketAddr>,
    /// The UDP port on which it listens, if that is not the mesh's.
    pub port: Option<u16>,
    /// Filters of endpoints instead of those of the mesh.
    pub filters: NodeFilters,
    /// Seconds between keepalives to every peer; what each peer asks for when `None`.
    pub keepalive: Option<u16>,
    /// Interface identifier (modified EUI-64) of the first link-layer address of this host.
    pub interface_id: Option<InterfaceId>,
}

/// The network that this node is in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetworkFacts {
    /// Grants and refusals of gateways that were asked to map the WireGuard port.
    pub port_mappings: PortMappings,
    /// The public address that EC2 translates to this node's own.
    pub public_ipv4: Option<Ipv4Addr>,
    /// The resolver's answer about a NAT64.
    pub nat64: Nat64Answer,
}

/// State of the cluster, parsed and merged, that the mesh is planned from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inputs {
    /// This node's name.
    pub node: String,
    /// Keys of this node.
    pub keys: OwnKeys,
    /// Object and host of this node.
    pub own: OwnNode,
    /// Network of this node.
    pub network: NetworkFacts,
    /// The mesh resource.
    pub settings: MeshSettings,
    /// All members, this node included, sorted by their names. Those that are as they were in the inputs before are the same allocations.
    pub members: Vec<Arc<Member>>,
    /// TCP endpoints of the API server; nodes reach them past the mesh, or a broken tunnel could not be repaired.
    pub api_server: Vec<SocketAddr>,
    /// Endpoints given as host names, resolved.
    pub resolved: BTreeMap<Endpoint, Vec<SocketAddr>>,
    /// Prefixes of Services; empty where the API server does not say.
    pub services: Vec<IpNet>,
    /// Nodes that may claim each source address of egress gateways.
    pub sources: Arc<BTreeMap<IpAddr, SourceNodes>>,
    /// Members that left.
    pub departures: Departures,
    /// Problems with objects and files that could not be read.
    pub problems: Vec<SourceProblem>,
    /// Time at which the cluster's state in use was saved; `None` if the API server has shown it.
    pub saved_at: Option<Instant>,
    /// Secrets that the nodes of the cluster share for discovery, if they are known.
    pub(crate) cluster: Option<Shared>,
}

impl Inputs {
    /// The UDP port on which this node is to listen.
    pub fn listen_port(&self) -> u16 {
        self.own.port.unwrap_or(self.settings.device.port)
    }

    /// Filters of the endpoints that this node publishes of itself, and of those that it tries. Those of the node replace those of the
    /// mesh.
    pub fn filters(&self) -> EndpointFilters {
        let NodeFilters { published, tried, .. } = &self.own.filters;
        let mesh = &self.settings.filters;
        EndpointFilters {
            published: published.as_ref().unwrap_or(&mesh.published).clone(),
            tried: tried.as_ref().unwrap_or(&mesh.tried).clone(),
        }
    }

    /// The addresses of this node on the mesh, with the lengths of their subnets.
    pub fn mesh_addresses(&self) -> Vec<IpNet> {
        let own = self.members.iter().filter(|member| member.name == self.node);
        let with_length = |address: &IpAddr| match (address, self.settings.mesh_ipv4) {
            (IpAddr::V4(it), Some(subnet)) if subnet.contains(it) => {
                IpNet::new(*address, subnet.prefix_len()).ok()
            }
            (IpAddr::V4(_), _) => None,
            (IpAddr::V6(_), _) => IpNet::new(*address, 64).ok(),
        };
        own.flat_map(|member| &member.addresses.mesh).filter_map(with_length).collect()
    }

    /// Prefixes of pods: blocks and, although the mesh may not carry them, networks of other plugins. No node is reached there: these plugins
    /// lead packets to the pods of a node to an address of that node, which is in the mesh.
    pub fn pod_prefixes(&self) -> impl Iterator<Item = &IpNet> {
        self.members.iter().flat_map(|member| member.blocks.iter().chain(plausible_networks(member)))
    }

    /// Prefixes of the member's pods that the mesh carries.
    pub fn pods_in_mesh<'a>(&self, member: &'a Member) -> impl Iterator<Item = &'a IpNet> {
        let includes = self.settings.routing.includes_pod_networks;
        member.blocks.iter().chain(plausible_networks(member).filter(move |_| includes))
    }

    /// Prefixes of this node in the mesh.
    pub fn own_prefixes(&self) -> Vec<IpNet> {
        let mut prefixes: Vec<IpNet> = self.own.claims.iter().copied().map(IpNet::from).collect();
        let own = self.members.iter().filter(|member| member.name == self.node);
        prefixes.extend(own.flat_map(|member| self.pods_in_mesh(member)));
        prefixes
    }

    /// Addresses of pods and Services, and those of nodes on the mesh.
    pub fn cluster_addresses(&self) -> PrefixSet {
        let on_mesh = self.members.iter().flat_map(|member| &member.addresses.mesh);
        let on_mesh: Vec<IpNet> = on_mesh.copied().map(IpNet::from).collect();
        self.pod_prefixes().chain(&self.services).chain(&on_mesh).collect()
    }

    /// The addresses of the STUN servers: of a name those that the resolver prefers of either family.
    pub fn stun_servers(&self) -> Vec<SocketAddr> {
        let of_server = |server: &Endpoint| {
            let resolved = self.resolved.get(server).map(Vec::as_slice).unwrap_or_default();
            let of_family = |ipv4: bool| resolved.iter().find(|address| address.is_ipv4() == ipv4).copied();
            server.address().into_iter().chain(of_family(true)).chain(of_family(false)).collect::<Vec<_>>()
        };
        self.settings.traversal.stun_servers.iter().flat_map(of_server).collect()
    }
}

/// Networks of pods; what is so wide that no node has it says nothing about where nodes are.
fn plausible_networks(member: &Member) -> impl Iterator<Item = &IpNet> {
    member.pod_networks.iter().filter(|network| network.prefix_len() >= MIN_POD_NETWORK_LENGTH)
}

//! Problems of the mesh, and why a node has none.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use fairlead_address::IpFamily;
use fairlead_api::names::ANNOTATION_KILO_FORCE_ENDPOINT;
use fairlead_cluster::naming::some_of;
use fairlead_dataplane::forwarding::ForwardingProblem;
use fairlead_dataplane::mesh::{Foreign, GuardProblem};
use fairlead_dataplane::uplink::SysctlError;
use fairlead_dataplane::wireguard;
use fairlead_port_mapping::Failure;
use fairlead_topology::Problem;

use fairlead_members::SourceProblem;

/// Most names in a sentence.
const MAX_NAMES: usize = 3;

/// Something that does not work while the mesh does. `Display` is a sentence for status and Events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MeshProblem {
    /// Left out by the plan.
    Plan(Problem),
    /// Not readable in a source.
    Source(SourceProblem),
    /// The resolver names a NAT64 that cannot be used.
    Nat64Refused {
        /// The prefix, or the address that shows none.
        answer: String,
        /// Reason why it is not used.
        reason: String,
    },
    /// No STUN server answered.
    NoStunAnswer {
        /// The servers.
        servers: Vec<SocketAddr>,
    },
    /// The answer of a STUN server is of no use.
    StunServer {
        /// The server.
        server: SocketAddr,
        /// Answer, as the end of a sentence about the server.
        what: String,
    },
    /// Nothing but WireGuard's packets can be sent from its port in one address family.
    PathProbesUnavailable {
        /// The family; `None` for both.
        family: Option<IpFamily>,
        /// Reason why nothing else can be sent.
        reason: String,
    },
    /// Probes can be sent in no address family, and STUN servers are to be asked.
    StunUnavailable,
    /// The default gateway does not lead the port to this node, or in a way that is of no use.
    PortMappingRefused {
        /// The gateway.
        gateway: IpAddr,
        /// Failure or refusal of the gateway.
        failure: Failure,
    },
    /// The relay is away.
    RelayUnavailable {
        /// Endpoint of the relay.
        endpoint: String,
        /// Reason why the relay cannot be used.
        error: String,
    },
    /// Another program registers this node's key with the relay.
    DuplicateKey {
        /// Endpoint of the relay.
        endpoint: String,
    },
    /// A node does not answer through an IP tunnel inside of the location.
    EncapsulationBlocked {
        /// The node.
        node: String,
        /// Address of the node's end of the tunnel.
        remote: IpAddr,
    },
    /// This node has no IP tunnel of a family for its location.
    EncapsulationMissing {
        /// The family.
        family: IpFamily,
        /// Reason why there is none.
        reason: String,
    },
    /// A rule of another program works against the mesh.
    Foreign(Foreign),
    /// A firewall of this host drops what it forwards.
    Forwarding(ForwardingProblem),
    /// A gateway does not forward.
    GatewayDown {
        /// The node.
        gateway: String,
    },
    /// Nodes have not prepared for the granularity that the mesh resource asks for.
    GranularityPending {
        /// Sentence of the controller that names these nodes.
        message: String,
    },
    /// The kernel's WireGuard drops what comes through another gateway of a location than the one this node uses.
    GatewaysNeedEmbedded {
        /// Names of these other gateways.
        gateways: Vec<String>,
        /// Reason why the embedded one cannot be started; `None` where an administrator wants the kernel's.
        refusal: Option<String>,
    },
    /// Packets for the mesh are led past it, and dropped.
    Guarded(GuardProblem),
    /// Another program has the UDP port on which this node is to listen, or it may not be opened.
    ListenPortUnavailable {
        /// The port.
        port: u16,
        /// Port on which the node listens instead.
        kept: u16,
        /// An annotation of the Node names the port; else the mesh does.
        is_of_node: bool,
        /// Reason why the port cannot be used.
        error: String,
    },
    /// This host has addresses of a family, and none that peers accept.
    NoAddressInMesh {
        /// The family.
        family: IpFamily,
    },
    /// Packets to a peer leave in clear text, because its tunnel is down.
    PeerBypassed {
        /// The peer.
        peer: String,
    },
    /// The path to a peer passes short packets only, and there is no other.
    PathMtu {
        /// The peer.
        peer: String,
        /// Endpoint to which packets to the peer go.
        endpoint: SocketAddr,
        /// The MTU of the tunnel.
        mtu: u32,
        /// MTU of routes to the peer, which the path passes; `None` if no such MTU is known.
        route_mtu: Option<u32>,
    },
}

impl MeshProblem {
    /// One word for conditions, Events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Plan(problem) => problem.reason(),
            Self::Source(problem) => problem.reason(),
            Self::Nat64Refused { .. } => "NAT64PrefixUnusable",
            Self::NoStunAnswer { .. } => "NoSTUNAnswer",
            Self::StunServer { .. } => "STUNServerUnusable",
            Self::PathProbesUnavailable { .. } => "PathProbesUnavailable",
            Self::StunUnavailable => "STUNUnavailable",
            Self::PortMappingRefused { .. } => "PortMappingRefused",
            Self::RelayUnavailable { .. } => "RelayUnavailable",
            Self::DuplicateKey { .. } => "DuplicateKey",
            Self::EncapsulationBlocked { .. } | Self::EncapsulationMissing { .. } => {
                "EncapsulationUnavailable"
            }
            Self::Foreign(problem) => problem.reason(),
            Self::Forwarding(problem) => problem.reason(),
            Self::GatewayDown { .. } => "GatewayNotForwarding",
            Self::GatewaysNeedEmbedded { .. } => "GatewaysNeedEmbedded",
            Self::GranularityPending { .. } => "GranularityPending",
            Self::Guarded(problem) => problem.reason(),
            Self::ListenPortUnavailable { .. } => "ListenPortUnavailable",
            Self::NoAddressInMesh { .. } => "NoAddressInMesh",
            Self::PathMtu { .. } => "PathMTU",
            Self::PeerBypassed { .. } => "PeerBypassed",
        }
    }
}

impl MeshProblem {
    /// Names of the nodes it is about; empty for this Node and the mesh.
    pub fn nodes(&self) -> Vec<&str> {
        match self {
            Self::Plan(problem) => problem.nodes(),
            Self::Source(problem) => problem.peer().into_iter().collect(),
            Self::EncapsulationBlocked { node, .. } | Self::GatewayDown { gateway: node } => vec![node],
            Self::PathMtu { peer, .. } | Self::PeerBypassed { peer } => vec![peer],
            Self::EncapsulationMissing { .. }
            | Self::Foreign(_)
            | Self::Forwarding(_)
            | Self::GatewaysNeedEmbedded { .. }
            | Self::GranularityPending { .. }
            | Self::Guarded(_)
            | Self::ListenPortUnavailable { .. }
            | Self::Nat64Refused { .. }
            | Self::NoAddressInMesh { .. }
            | Self::NoStunAnswer { .. }
            | Self::StunServer { .. }
            | Self::PathProbesUnavailable { .. }
            | Self::StunUnavailable
            | Self::PortMappingRefused { .. }
            | Self::RelayUnavailable { .. }
            | Self::DuplicateKey { .. } => Vec::new(),
        }
    }
}

impl fmt::Display for MeshProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan(problem) => problem.fmt(f),
            Self::Source(problem) => problem.fmt(f),
            Self::Foreign(problem) => problem.fmt(f),
            Self::Forwarding(problem) => problem.fmt(f),
            Self::Guarded(problem) => problem.fmt(f),
            Self::Nat64Refused { answer, reason } => write!(
                f,
                "the resolver says that IPv4 is reached through the NAT64 at {answer}, which is not used ({reason}): correct the DNS64 of this network"
            ),
            Self::NoStunAnswer { servers } => {
                let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
                let servers = servers.join(", ");
                write!(f, "no STUN server answers ({servers}): does a firewall block UDP? Other nodes still report where they see this one")
            }
            Self::StunServer { server, what } => write!(f, "STUN server {server} {what}; name another one"),
            Self::StunUnavailable => f.write_str(
                "no STUN request can be sent from the WireGuard port, so stunServers have no effect on this node; other nodes report where they see it",
            ),
            Self::PathProbesUnavailable { family, reason } => {
                let family = family.map(|family| format!(" over {family}")).unwrap_or_default();
                write!(f, "no path probe can be sent from the WireGuard port{family} ({reason}): endpoints of peers are tried in turn")
            }
            Self::PortMappingRefused { gateway, failure } => write!(
                f,
                "the gateway {gateway} maps no port to this node ({failure}): {}, or set natTraversal.portMapping to disabled",
                failure.advice()
            ),
            Self::RelayUnavailable { endpoint, error } => write!(
                f,
                "cannot use the relay {endpoint}: {error}; peers that are not reached directly are not reached"
            ),
            Self::DuplicateKey { endpoint } => write!(
                f,
                "another program registers this node's WireGuard key with the relay {endpoint}: was the node's disk copied? Delete the key file of one of them and restart it"
            ),
            Self::EncapsulationBlocked { node, remote } => write!(
                f,
                "node {node} does not answer ICMP echo requests in an IP tunnel to {remote}, so packets to it take the encrypted tunnel: \
                 has it such a tunnel, and do the network and firewalls let IP protocol {} pass?",
                if remote.is_ipv4() { "4 (IPIP)" } else { "41 (IPv6 in IPv6)" }
            ),
            Self::EncapsulationMissing { family, reason } => write!(
                f,
                "this node has no {family} tunnel for its location ({reason}): packets to nodes of the location take the encrypted tunnel"
            ),
            Self::GatewayDown { gateway } => write!(
                f,
                "no node behind the gateway {gateway} answers through it, so this node uses another gateway of the location if there is one: does it run, and does its firewall (FORWARD) let packets of the mesh pass?"
            ),
            Self::GatewaysNeedEmbedded { gateways, refusal } => {
                let gateways = some_of(gateways, MAX_NAMES);
                write!(f, "the kernel's WireGuard takes packets of a location from one gateway only, and drops those that come through another one ({gateways}): ")?;
                match refusal {
                    Some(reason) => write!(f, "the embedded one cannot be started ({reason}); once it can be, the node program changes to it by itself"),
                    None => f.write_str(
                        "run the node program of this node without --wireguard=kernel; it then changes to the embedded one by itself, which interrupts its tunnels for a moment",
                    ),
                }
            }
            Self::GranularityPending { message } => f.write_str(message),
            Self::ListenPortUnavailable { port, kept, is_of_node, error } => write!(
                f,
                "WireGuard cannot listen on port {port} of {} ({error}), and listens on port {kept}: stop the program that has the port, or \
                 name another one",
                if *is_of_node { ANNOTATION_KILO_FORCE_ENDPOINT } else { "spec.listenPort of the WireKubeMesh" }
            ),
            Self::NoAddressInMesh { family } => write!(
                f,
                "this node has no {family} address that other nodes accept, so they drop what its host sends to {family} addresses in the mesh (API server, kubelet, \
                 pods on the host's network, NodePorts): set spec.autoAllowedIPs.includeNodeInternalIP or spec.meshCIDR of the WireKubeMesh, or grant it an address in spec.grants"
            ),
            Self::PeerBypassed { peer } => write!(
                f,
                "the tunnel to {peer} is down, and packets to it leave IN CLEAR TEXT by the other routes of this host, as spec.routing.allowDownPeerBypass \
                 of the WireKubeMesh says; where they are to be dropped, set it to false"
            ),
            Self::PathMtu { peer, endpoint, mtu, route_mtu: None } => write!(
                f,
                "packets of {mtu} bytes to {peer} are lost on the way to {endpoint}, and shorter ones are not: lower spec.mtu of the mesh, or have a relay"
            ),
            Self::PathMtu { peer, endpoint, mtu, route_mtu: Some(passes) } => write!(
                f,
                "packets of {mtu} bytes to {peer} are lost on the way to {endpoint}, and those of {passes} bytes are not: routes to it have an MTU of {passes}; \
                 mend the network between them, or lower spec.mtu of the mesh"
            ),
        }
    }
}

/// Reason why this node is not in the mesh, or why the last change was not applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshFailure {
    /// The WireGuard device.
    #[error("{0}")]
    DeviceFailed(String),
    /// The API server does not allow the node program to read what the mesh consists of.
    #[error("this node is not in the mesh: {0}; grant what deploy/rbac/node.yaml grants")]
    Forbidden(String),
    /// This node has no usable WireGuard key.
    #[error("{0}")]
    KeyUnusable(String),
    /// nftables, rules, routes, links, addresses or switches of the kernel.
    #[error("{0}")]
    KernelRefused(String),
    /// The cluster has no mesh.
    #[error("there is no WireKubeMesh: this node routes only its own pods")]
    NoMesh,
    /// Another program uses the marks, the table or the rule of the mesh.
    #[error(
        "{0}, with the marks and table 180 of the mesh, so this node leaves them alone and is not in the mesh: \
         stop that program (on Talos: machine.network.kubespan.enabled: false), or do not run Fairlead's mesh on this host"
    )]
    NumbersTaken(String),
    /// There is no Node object of this name.
    #[error("Node {0} does not exist: is the node name right?")]
    NodeNotFound(String),
    /// A watch has not shown its first list.
    #[error("waiting for the first answer of the API server")]
    WaitingForApiServer,
}

impl MeshFailure {
    /// One word for conditions, Events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::DeviceFailed(_) => "DeviceFailed",
            Self::Forbidden(_) => "Forbidden",
            Self::KernelRefused(_) => "KernelRefused",
            Self::KeyUnusable(_) => "WireGuardKeyUnusable",
            Self::NoMesh => "NoMesh",
            Self::NumbersTaken(_) => "NumbersTaken",
            Self::NodeNotFound(_) => "NodeNotFound",
            Self::WaitingForApiServer => "WaitingForAPIServer",
        }
    }
}

impl From<wireguard::Error> for MeshFailure {
    fn from(error: wireguard::Error) -> Self {
        Self::DeviceFailed(error.to_string())
    }
}

impl From<fairlead_netlink::Error> for MeshFailure {
    fn from(error: fairlead_netlink::Error) -> Self {
        Self::KernelRefused(error.to_string())
    }
}

impl From<SysctlError> for MeshFailure {
    fn from(error: SysctlError) -> Self {
        Self::KernelRefused(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use fairlead_port_mapping::Protocol;

    use super::*;

    #[test]
    fn a_gateway_that_refuses_is_named_with_its_reason() {
        let (gateway, address) = ("192.168.1.1".parse().unwrap(), "10.9.8.7".parse().unwrap());
        let failure = Failure::PrivateOuterAddress { protocol: Protocol::Pcp, address };
        let problem = MeshProblem::PortMappingRefused { gateway, failure };
        assert_eq!(problem.reason(), "PortMappingRefused");
        assert!(problem.to_string().starts_with(
            "the gateway 192.168.1.1 maps no port to this node (PCP: the gateway's outer address 10.9.8.7 is private: it is behind another NAT): put one"
        ));
    }

    #[test]
    fn a_sentence_names_some_gateways_and_counts_the_others() {
        let problem = |count| {
            let gateways = (1..=count).map(|number| format!("g{number}")).collect();
            MeshProblem::GatewaysNeedEmbedded { gateways, refusal: None }.to_string()
        };
        assert!(problem(3).contains("(g1, g2, g3)"), "{}", problem(3));
        assert!(problem(9).contains("(g1, g2, g3 and 6 more)"), "{}", problem(9));
    }
}

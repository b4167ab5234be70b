//! Networks of a cluster, and the nodes in them.

use std::net::IpAddr;

use ipnet::{Ipv4Net, Ipv6Net};
use testbed_lab::{Host, Ipv6, Nat};

/// Address families of nodes and pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Families {
    /// IPv4 and IPv6, IPv4 first.
    Dual,
    /// IPv4 alone.
    Ipv4,
}

impl Families {
    /// Addresses of a machine in these families, IPv4 first.
    pub(crate) fn addresses(self, host: &Host) -> Vec<IpAddr> {
        let ipv6 = host.address6().filter(|_| self == Self::Dual);
        std::iter::once(IpAddr::from(host.address())).chain(ipv6.map(IpAddr::from)).collect()
    }
}

/// Nodes that run the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Process 1 of each node keeps an etcd and an API server running, which die with the node and are the only ones that its kubelet and
    /// kube-proxy use. Controllers and scheduler are on the first node.
    EveryNode,
    /// All of it runs beside the first node of the first site, and is not off when that node is. A router that translates addresses
    /// forwards the API server's port to it.
    FirstNode,
}

/// Network plugin of the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// None yet: the user of the cluster installs one. Pods will have addresses of these ranges.
    Installed {
        /// All ranges, separated by commas; kube-proxy must know which sources are pods.
        pods: &'static str,
    },
    /// The reference plugins ptp, host-local and portmap, and routes between nodes of one site.
    Stock,
}

/// A router and the nodes behind it.
#[derive(Debug, Clone)]
pub struct Site {
    /// Name of the site; nodes are `NAME-1`, `NAME-2` and so on.
    pub name: &'static str,
    /// Translation of IPv4 by the router.
    pub nat: Nat,
    /// IPv4 range of the LAN.
    pub lan: Ipv4Net,
    /// IPv6 of the site, if the cluster has it.
    pub ipv6: Ipv6,
    /// Number of nodes.
    pub nodes: usize,
}

/// Cluster to build.
#[derive(Debug, Clone)]
pub struct Topology {
    /// Networks with nodes.
    pub sites: Vec<Site>,
    /// Nodes with the control plane.
    pub control_plane: Placement,
    /// Address families of nodes and pods.
    pub families: Families,
    /// Network of the pods.
    pub network: Network,
}

/// Public addresses (TEST-NET-2, RFC 5737).
fn cloud(nodes: usize) -> Site {
    let lan = Ipv4Net::new_assert([198, 51, 100, 0].into(), 24);
    Site { name: "cloud", nat: Nat::None, lan, ipv6: Ipv6::Global, nodes }
}

/// A usual home router: a private range, and an IPv6 prefix that is not routed.
fn home(nodes: usize) -> Site {
    let lan = Ipv4Net::new_assert([192, 168, 1, 0].into(), 24);
    let ipv6 = Ipv6::Local(Ipv6Net::new_assert([0xfd00, 0x1a, 0, 0, 0, 0, 0, 0].into(), 64));
    Site { name: "home", nat: Nat::PortRestricted, lan, ipv6, nodes }
}

/// Two nodes on one network with public addresses, the third behind a NAT router.
pub fn two_and_one_behind_nat(families: Families, network: Network) -> Topology {
    Topology { sites: vec![cloud(2), home(1)], control_plane: Placement::FirstNode, families, network }
}

/// All nodes on one network.
pub fn one_network(nodes: usize, families: Families, network: Network) -> Topology {
    Topology { sites: vec![cloud(nodes)], control_plane: Placement::FirstNode, families, network }
}

/// All nodes on one network, each with etcd and an API server ("stacked etcd", kubeadm).
pub fn stacked(nodes: usize, families: Families, network: Network) -> Topology {
    Topology { control_plane: Placement::EveryNode, ..one_network(nodes, families, network) }
}

/// Each node behind a symmetric NAT of its own: no node reaches another one directly.
pub fn each_behind_symmetric_nat(families: Families, network: Network) -> Topology {
    let site = |(name, number): (&'static str, u8)| {
        let lan = Ipv4Net::new_assert([192, 168, number, 0].into(), 24);
        let ipv6 = Ipv6::Local(Ipv6Net::new_assert([0xfd00, 0x1a, number.into(), 0, 0, 0, 0, 0].into(), 64));
        Site { name, nat: Nat::SymmetricRandom, lan, ipv6, nodes: 1 }
    };
    let sites = [("east", 1), ("north", 2), ("west", 3)].map(site).to_vec();
    Topology { sites, control_plane: Placement::FirstNode, families, network }
}

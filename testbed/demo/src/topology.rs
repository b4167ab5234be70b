//! Sites of a world, the NATs of their routers, and their nodes.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use testbed_lab::{Ipv6, Nat};

/// A site behind a router.
#[derive(Debug, Clone)]
pub struct SitePlan {
    /// Name of the site; nodes are named after it.
    pub name: &'static str,
    /// Translation of IPv4 by the router.
    pub nat: Nat,
    /// IPv4 range of the LAN.
    pub lan: Ipv4Net,
    /// Addresses of its nodes.
    pub nodes: Vec<Ipv4Addr>,
    /// IPv6 of the site.
    pub ipv6: Ipv6,
    /// MTU of the uplink, 1500 if `None`.
    pub uplink_mtu: Option<u32>,
    /// The carrier that translates for it and for other sites that name it.
    pub carrier: Option<&'static str>,
}

/// All sites. The first has the API server.
#[derive(Debug, Clone)]
pub struct Topology {
    /// Name on the command line.
    pub name: &'static str,
    /// Description in a line.
    pub about: &'static str,
    /// Sites; the first is the cloud.
    pub sites: Vec<SitePlan>,
    /// More arguments of every node program.
    pub node_arguments: &'static [&'static str],
}

fn lan(a: u8, b: u8, c: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, 0), 24)
}

fn hosts(lan: Ipv4Net, last: &[u8]) -> Vec<Ipv4Addr> {
    let [a, b, c, _] = lan.network().octets();
    last.iter().map(|last| Ipv4Addr::new(a, b, c, *last)).collect()
}

fn unique_local() -> Ipv6 {
    Ipv6::Local(Ipv6Net::new_assert(Ipv6Addr::new(0xfd00, 0x1a, 0, 0, 0, 0, 0, 0), 64))
}

fn site(name: &'static str, nat: Nat, lan: Ipv4Net, last: &[u8]) -> SitePlan {
    SitePlan { name, nat, lan, nodes: hosts(lan, last), ipv6: Ipv6::Off, uplink_mtu: None, carrier: None }
}

/// A cloud with public addresses, and a home and an office behind port-restricted NAT with one private range. One
/// address (192.168.1.10) is used in both, so the mesh leaves it out.
pub fn three_sites() -> Topology {
    Topology {
        name: "three-sites",
        about: "cloud (public), home and office (port-restricted NAT, the same 192.168.1.0/24)",
        sites: vec![
            site("cloud", Nat::None, lan(198, 51, 100), &[11, 12]),
            site("home", Nat::PortRestricted, lan(192, 168, 1), &[10, 11]),
            site("office", Nat::PortRestricted, lan(192, 168, 1), &[10, 12]),
        ],
        node_arguments: &[],
    }
}

/// Harder ways to the Internet: double NAT with a smaller uplink, an address-restricted NAT, and IPv6 behind a
/// firewall beside IPv4.
pub fn rough_edges() -> Topology {
    Topology {
        name: "rough-edges",
        about: "cloud (public, IPv6), cafe (behind carrier-grade NAT, MTU 1400), farm (address-restricted NAT, IPv6)",
        sites: vec![
            SitePlan { ipv6: Ipv6::Global, ..site("cloud", Nat::None, lan(198, 51, 100), &[11, 12]) },
            SitePlan { uplink_mtu: Some(1400), ..site("cafe", Nat::Cgnat, lan(192, 168, 1), &[10, 11]) },
            SitePlan { ipv6: Ipv6::Global, ..site("farm", Nat::AddressRestricted, lan(10, 0, 0), &[20, 21]) },
        ],
        node_arguments: &[],
    }
}

/// A public node and one behind a NAT, for tests that add nodes of their own.
pub fn two_sites() -> Topology {
    Topology {
        name: "two-sites",
        about: "cloud (public) and office (port-restricted NAT) with a node each",
        sites: vec![
            site("cloud", Nat::None, lan(198, 51, 100), &[11]),
            site("office", Nat::PortRestricted, lan(192, 168, 1), &[10]),
        ],
        node_arguments: &[],
    }
}

/// No node has a public address, so that none observes another first: two behind port-restricted NATs, and one behind a
/// symmetric one, with an API server in the cloud.
pub fn behind_nats() -> Topology {
    Topology {
        name: "behind-nats",
        about: "home and office (port-restricted NAT) and hotel (symmetric NAT) with a node each",
        sites: vec![
            site("cloud", Nat::None, lan(198, 51, 100), &[]),
            site("home", Nat::PortRestricted, lan(192, 168, 1), &[11]),
            site("office", Nat::PortRestricted, lan(192, 168, 1), &[12]),
            site("hotel", Nat::SymmetricRandom, lan(10, 0, 0), &[20]),
        ],
        node_arguments: &[],
    }
}

/// Nodes of which some can only reach each other by way of a relay: two behind symmetric NATs, one without UDP, and one with a
/// public address.
pub fn relayed() -> Topology {
    Topology {
        name: "relayed",
        about: "cloud (public), hotel and club (symmetric NAT), fort (no UDP) with a node each",
        sites: vec![
            site("cloud", Nat::None, lan(198, 51, 100), &[11]),
            site("hotel", Nat::SymmetricRandom, lan(10, 0, 0), &[20]),
            site("club", Nat::SymmetricRandom, lan(10, 0, 1), &[20]),
            site("fort", Nat::UdpBlocked, lan(10, 0, 2), &[20]),
        ],
        node_arguments: &[],
    }
}

/// Paths that become better while they are in use: a cloud with IPv6 of its own, a home with two nodes, an office, and a cafe to
/// which the node of the office may move.
pub fn moving() -> Topology {
    Topology {
        name: "moving",
        about: "cloud (public) and home (port-restricted NAT) with two nodes each, office (the same) with one, cafe (the same)",
        sites: vec![
            SitePlan { ipv6: unique_local(), ..site("cloud", Nat::None, lan(198, 51, 100), &[11, 12]) },
            site("home", Nat::PortRestricted, lan(192, 168, 1), &[11, 12]),
            site("office", Nat::PortRestricted, lan(10, 0, 0), &[20]),
            site("cafe", Nat::PortRestricted, lan(10, 0, 1), &[]),
        ],
        node_arguments: &[],
    }
}

/// Three locations of three nodes each, of which two are behind NATs.
pub fn three_by_three() -> Topology {
    Topology {
        name: "three-by-three",
        about: "cloud (public), home (port-restricted NAT) and farm (address-restricted NAT) with three nodes each",
        sites: vec![
            site("cloud", Nat::None, lan(198, 51, 100), &[11, 12, 13]),
            site("home", Nat::PortRestricted, lan(192, 168, 1), &[11, 12, 13]),
            site("farm", Nat::AddressRestricted, lan(10, 0, 0), &[21, 22, 23]),
        ],
        node_arguments: &[],
    }
}

/// Three nodes on one network, with IPv6 of its own, for tests that need no mesh.
pub fn one_network(node_arguments: &'static [&'static str]) -> Topology {
    let ipv6 = unique_local();
    Topology {
        name: "one-network",
        about: "rack (one layer-2 network) with three nodes",
        sites: vec![SitePlan { ipv6, ..site("rack", Nat::None, lan(198, 51, 100), &[11, 12, 13]) }],
        node_arguments,
    }
}

/// Every topology of the demo by name.
pub fn all() -> Vec<Topology> {
    vec![three_sites(), rough_edges()]
}

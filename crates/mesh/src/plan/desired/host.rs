//! This host's links and addresses, as far as the mesh depends on them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_address::IpFamily;
use fairlead_dataplane::uplink::{self, HostNetwork, Ignored};
use fairlead_topology::OwnAddress;
use ipnet::{IpNet, Ipv4Net};

use crate::model::inputs::Inputs;

/// MTU of an uplink for which the kernel gives none (IEEE 802.3).
const ETHERNET_MTU: u32 = 1500;

/// Links, addresses and routes of this host, as far as the mesh needs them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The UDP port on which WireGuard listens.
    pub(crate) port: u16,
    pub(super) uplink_mtu: u32,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) networks: Vec<IpNet>,
    pub(super) ipv4_routes: Vec<Ipv4Net>,
    /// Families without a default route.
    pub(super) without_default: Vec<IpFamily>,
    pub(super) gateways: BTreeSet<IpAddr>,
    pub(super) name_servers: BTreeSet<IpAddr>,
    pub(super) own: Vec<OwnAddress>,
    /// Names of the links that have them.
    pub(super) links: BTreeMap<u32, String>,
}

impl Host {
    /// The smallest MTU of its uplinks.
    pub fn uplink_mtu(&self) -> u32 {
        self.uplink_mtu
    }

    /// Addresses at which others may reach this host.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Leaves out what does not belong to the node itself: the mesh device and everything in pod networks.
    pub fn new(network: &HostNetwork, inputs: &Inputs) -> Self {
        let ignored = Ignored {
            links: vec![inputs.settings.device.interface.clone()],
            link_prefixes: Vec::new(),
            networks: inputs.pod_prefixes().chain(&inputs.services).copied().collect(),
        };
        let (own, links) = own_addresses(network, &ignored);
        Self {
            port: inputs.listen_port(),
            uplink_mtu: network.uplink_mtu(&ignored).unwrap_or(ETHERNET_MTU),
            addresses: network.node_addresses(&ignored),
            networks: network.connected_prefixes(&ignored),
            ipv4_routes: network.ipv4_routes(),
            without_default: network.families_without_default(),
            gateways: network.default_gateways(),
            name_servers: network.name_servers.clone(),
            own,
            links,
        }
    }
}

/// This host's addresses, and the names of the links that have them.
fn own_addresses(network: &HostNetwork, ignored: &Ignored) -> (Vec<OwnAddress>, BTreeMap<u32, String>) {
    let own = network.own_addresses(ignored).map(|it| OwnAddress { link: it.link, prefix: it.prefix });
    let own: Vec<OwnAddress> = own.collect();
    let links = network.links.iter().filter(|link| own.iter().any(|it| it.link == link.index));
    let links = links.map(|link| (link.index, link.name.clone())).collect();
    (own, links)
}

/// MTU of the device on this host.
pub fn mtu(inputs: &Inputs, host: &Host) -> u32 {
    uplink::mesh_mtu(inputs.settings.device.mtu, host.uplink_mtu)
}

//! The node's own links: the MTU towards other nodes, the addresses at which they may reach it, sysctls of forwarding.
//!
//! [`HostNetwork`] is a snapshot of the kernel; all results are computed from the snapshot alone.

mod sysctl;

use std::collections::BTreeSet;
use std::net::IpAddr;

use fairlead_address::PrefixSet;
use fairlead_api::names::{IPV6_MIN_MTU, LINK_ALIAS_PREFIX, WIREGUARD_OVERHEAD_IPV6};
use fairlead_netlink::route::{
    Address, AddressFlags, IpFamily, Link, LinkLayer, MacAddress, Route, RouteKind, RouteSocket, Scope,
    TABLE_MAIN,
};
use ipnet::{IpNet, Ipv4Net};
use nix::libc::{RTPROT_BOOT, RTPROT_KERNEL, RTPROT_STATIC};

pub use sysctl::{
    SysctlError, accept_ipv6, answer_by_mark, answer_for_neighbours, enable_forwarding, forward_in_gateway,
    forwards, has_ipv6, is_reverse_path_strict, loosen_reverse_path_filter, refuse_advertisements,
    relax_reverse_path_filter,
};

/// MTU of the mesh device: the configured one, unless the uplink cannot carry it with WireGuard's 80 bytes over IPv6; never
/// less than IPv6 needs (RFC 8200, section 5). All in bytes.
pub fn mesh_mtu(configured: u32, uplink: u32) -> u32 {
    configured.min(uplink.saturating_sub(WIREGUARD_OVERHEAD_IPV6)).max(IPV6_MIN_MTU)
}

/// Links and networks that do not belong to the node itself: the mesh device, pod networks, bridges of other programs.
/// Pod links (known by their alias) and the loopback device need not be listed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ignored {
    /// Names of links.
    pub links: Vec<String>,
    /// Beginnings of names of links: "veth", "cali".
    pub link_prefixes: Vec<String>,
    /// Networks whose addresses do not count, wherever they are.
    pub networks: Vec<IpNet>,
}

impl Ignored {
    fn link(&self, link: &Link) -> bool {
        self.links.contains(&link.name)
            || self.link_prefixes.iter().any(|prefix| link.name.starts_with(prefix.as_str()))
            || link.alias.as_ref().is_some_and(|alias| alias.starts_with(LINK_ALIAS_PREFIX))
    }

    fn address(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(&address))
    }
}

/// Links, addresses and the main routing table of the kernel at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostNetwork {
    /// All links.
    pub links: Vec<Link>,
    /// All addresses.
    pub addresses: Vec<Address>,
    /// Routes of the main table.
    pub routes: Vec<Route>,
    /// Name servers that this host asks.
    pub name_servers: BTreeSet<IpAddr>,
}

/// Name servers of the host: resolv.conf(5). The one of the program's own pod is the host's with `dnsPolicy: Default`.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// `nameserver` of resolv.conf(5); an address with a zone is on its link.
pub fn name_servers(resolv_conf: &str) -> impl Iterator<Item = IpAddr> + '_ {
    resolv_conf.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        words.next().filter(|word| *word == "nameserver")?;
        words.next()?.parse().ok()
    })
}

impl HostNetwork {
    /// Reads it in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses, or its answer cannot be decoded.
    pub fn read() -> fairlead_netlink::Result<Self> {
        let mut socket = RouteSocket::open()?;
        Ok(Self {
            links: socket.links()?,
            addresses: socket.addresses()?,
            routes: socket.routes(TABLE_MAIN)?,
            // A host without the file asks none.
            name_servers: name_servers(&std::fs::read_to_string(RESOLV_CONF).unwrap_or_default()).collect(),
        })
    }

    /// The routers of the default routes.
    pub fn default_gateways(&self) -> BTreeSet<IpAddr> {
        let several =
            |route: &Route| route.next_hops.iter().filter_map(|hop| hop.gateway).collect::<Vec<_>>();
        self.default_routes().flat_map(|route| several(route).into_iter().chain(route.gateway)).collect()
    }

    /// MTU towards other nodes in bytes: the least of the links (and routes) that the default routes use, IPv4 and
    /// IPv6. Without a default route, the least of the physical links that are up; without those, unknown.
    pub fn uplink_mtu(&self, ignored: &Ignored) -> Option<u32> {
        let usable = |link: &&Link| link.up && link.layer != LinkLayer::Loopback && !ignored.link(link);
        let by_route = self.default_routes().flat_map(|route| {
            let links = self.links.iter().filter(|link| route.links().any(|index| index == link.index));
            links.filter(usable).map(|link| route.mtu.map_or(link.mtu, |mtu| mtu.min(link.mtu)))
        });
        let physical =
            || self.links.iter().filter(|link| link.is_physical()).filter(usable).map(|link| link.mtu);
        by_route.min().or_else(|| physical().min())
    }

    /// The link-layer address of the first physical link by name, as KubeSpan chooses it; without one, of the first link that a default
    /// route uses.
    pub fn first_mac(&self, ignored: &Ignored) -> Option<MacAddress> {
        let defaults = self.routes.iter().filter(|route| route.destination.prefix_len() == 0);
        let uplinks: Vec<u32> = defaults.flat_map(Route::links).collect();
        let first = |is: &dyn Fn(&&Link) -> bool| {
            let named =
                self.links.iter().filter(|link| link.layer == LinkLayer::Ethernet && !ignored.link(link));
            let with_mac = named.filter(is).filter_map(|link| Some((&link.name, link.mac?)));
            with_mac.filter(|(_, mac)| mac.0 != [0; 6]).min_by_key(|(name, _)| *name).map(|(_, mac)| mac)
        };
        first(&|link| link.is_physical()).or_else(|| first(&|link| uplinks.contains(&link.index)))
    }

    fn default_routes(&self) -> impl Iterator<Item = &Route> {
        let is_default = |route: &&Route| route.destination.prefix_len() == 0;
        self.routes.iter().filter(is_default).filter(|route| route.kind == RouteKind::UNICAST)
    }

    /// Whether the main table has a default route of the family.
    pub fn has_default_route(&self, is_ipv4: bool) -> bool {
        let destinations = self.unicast_destinations();
        destinations.into_iter().any(|it| it.prefix_len() == 0 && it.addr().is_ipv4() == is_ipv4)
    }

    /// The families of which the main table has no default route.
    pub fn families_without_default(&self) -> Vec<IpFamily> {
        let lacks = |family: &IpFamily| !self.has_default_route(*family == IpFamily::V4);
        IpFamily::BOTH.into_iter().filter(lacks).collect()
    }

    /// The IPv4 destinations that the main table has routes to, as few prefixes as cover them.
    pub fn ipv4_routes(&self) -> Vec<Ipv4Net> {
        if self.has_default_route(true) {
            return vec![Ipv4Net::default()];
        }
        self.unicast_destinations().collect::<PrefixSet>().ipv4_prefixes()
    }

    fn unicast_destinations(&self) -> impl Iterator<Item = &IpNet> {
        self.routes.iter().filter(|route| route.kind == RouteKind::UNICAST).map(|route| &route.destination)
    }

    /// The addresses at which other nodes might reach this one: of global scope, ready for use, not about to be replaced,
    /// on links that are up. In the kernel's order, without repetition.
    pub fn node_addresses(&self, ignored: &Ignored) -> Vec<IpAddr> {
        let mut found = Vec::new();
        for address in self.own_addresses(ignored).map(|address| address.prefix.addr()) {
            if !found.contains(&address) {
                found.push(address);
            }
        }
        found
    }

    /// The networks this node is connected to directly, by the same addresses; host prefixes are left out.
    pub fn connected_prefixes(&self, ignored: &Ignored) -> Vec<IpNet> {
        let networks = self.own_addresses(ignored).map(|address| address.prefix.trunc());
        let mut found: Vec<_> = networks.filter(|it| it.prefix_len() < it.max_prefix_len()).collect();
        found.sort();
        found.dedup();
        found
    }

    /// Networks that the main table leads straight onto a link: those of [`Self::connected_prefixes`], and those that administrators and VPNs have made
    /// routes for. Routes of routing daemons may be those of other nodes' pods, and are left out, as host prefixes are and halves of all addresses.
    pub fn networks_on_links(&self, ignored: &Ignored) -> Vec<IpNet> {
        let is_made_by_hand =
            |route: &&Route| [RTPROT_KERNEL, RTPROT_BOOT, RTPROT_STATIC].contains(&route.protocol);
        let leads_onto = |route: &&Route| {
            let on = self.links.iter().find(|link| Some(link.index) == route.link);
            route.kind == RouteKind::UNICAST
                && route.gateway.is_none()
                && on.is_some_and(|link| link.up && link.layer != LinkLayer::Loopback && !ignored.link(link))
        };
        let is_network = |it: &IpNet| (2..it.max_prefix_len()).contains(&it.prefix_len());
        let routes = self.routes.iter().filter(is_made_by_hand).filter(leads_onto);
        let routes = routes.map(|route| route.destination).filter(is_network);
        let mut found = self.connected_prefixes(ignored);
        found.extend(routes.filter(|it| !is_local_only(it.addr())));
        found.sort();
        found.dedup();
        found
    }

    /// The node's own addresses of global scope that are ready for use, on links that are up, in the kernel's order.
    pub fn own_addresses<'a>(&'a self, ignored: &'a Ignored) -> impl Iterator<Item = &'a Address> {
        self.addresses.iter().filter(move |address| {
            let ip = address.prefix.addr();
            let on = self.links.iter().find(|link| link.index == address.link);
            address.scope == Scope::UNIVERSE
                && is_ready(address)
                && !is_local_only(ip)
                && !ignored.address(ip)
                && on.is_some_and(|link| link.up && !ignored.link(link))
        })
    }
}

fn is_ready(address: &Address) -> bool {
    let unready = AddressFlags::TENTATIVE.union(AddressFlags::DADFAILED).union(AddressFlags::DEPRECATED);
    // In IPv4 the same bit says "second address of its network", which is no reason to leave it out.
    let temporary = address.prefix.addr().is_ipv6() && address.flags.intersects(AddressFlags::TEMPORARY);
    !address.flags.intersects(unready) && !temporary
}

/// Addresses that mean something else on every link or host, whatever scope they were configured with.
fn is_local_only(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(it) => it.is_loopback() || it.is_link_local() || it.is_multicast() || it.is_unspecified(),
        IpAddr::V6(it) => {
            it.is_loopback() || it.is_unicast_link_local() || it.is_multicast() || it.is_unspecified()
        }
    }
}

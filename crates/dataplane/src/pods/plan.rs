//! Everything about a pod's link that can be said before the kernel is asked.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use fairlead_address::DualStackAddrs;
use fairlead_api::names::{IPV6_MIN_MTU, LINK_ALIAS_PREFIX, POD_GATEWAY_IPV4, POD_GATEWAY_IPV6};
use fairlead_netlink::Message;
use fairlead_netlink::route::{
    Address, AddressFlags, IpFamily, MacAddress, Route, Rule, Scope, TABLE_MAIN, add_address, add_route,
    disable_address_generation, permanent_neighbour, presumed_neighbour, set_up,
};
use ipnet::IpNet;

use super::additional;
use super::error::{Error, Result};
use crate::routing_ids::RoutingIds;

/// `IFNAMSIZ` without the terminating zero (`linux/if.h`).
const NAME_MAX: usize = 15;
/// `IFALIASZ` without the terminating zero (`linux/if.h`).
const ALIAS_MAX: usize = 255;
/// Least MTU of IPv4 (RFC 791, section 3.2).
const IPV4_MIN_MTU: u32 = 68;
/// `RTPROT_BOOT`, what `ip route add` says: routes in the pod have no owner to distinguish.
pub(super) const PROTOCOL_BOOT: u8 = 3;

/// The attachment of a pod that [`add`](super::add) makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSpec {
    /// The runtime's name for the sandbox (`CNI_CONTAINERID`).
    pub container_id: String,
    /// Name of the interface in the pod (`CNI_IFNAME`).
    pub ifname: String,
    /// File of the pod's network namespace (`CNI_NETNS`).
    pub netns: PathBuf,
    /// Pool its addresses are from.
    pub pool: String,
    /// Addresses of the pod.
    pub addresses: DualStackAddrs,
    /// MTU of both ends in bytes; the kernel's default is 1500.
    pub mtu: Option<u32>,
    /// Name of the link on the host, if others rely on one; otherwise it is made of the container's.
    pub link_name: Option<String>,
    /// Table, priority and protocol of the pod's routes and rules on the host.
    pub ids: RoutingIds,
}

/// The alias of a pod's link on the host: the one record of who it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAlias {
    /// Pool its addresses are from.
    pub pool: String,
    /// The runtime's name for the sandbox.
    pub container_id: String,
    /// Name of the interface in the pod.
    pub ifname: String,
}

impl PodAlias {
    /// Reads `COIL:<pool>:<container ID>:<interface>`; anything else, also with an empty part, is no pod of ours.
    pub fn parse(alias: &str) -> Option<Self> {
        let mut parts = alias.strip_prefix(LINK_ALIAS_PREFIX)?.split(':').map(str::to_owned);
        let alias = Self { pool: parts.next()?, container_id: parts.next()?, ifname: parts.next()? };
        let complete = [&alias.pool, &alias.container_id, &alias.ifname].iter().all(|part| !part.is_empty());
        (complete && parts.next().is_none()).then_some(alias)
    }
}

impl fmt::Display for PodAlias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{LINK_ALIAS_PREFIX}{}:{}:{}", self.pool, self.container_id, self.ifname)
    }
}

/// A checked request with the names and addresses that follow from it.
#[derive(Debug)]
pub(super) struct Plan {
    container_id: String,
    ifname: String,
    addresses: DualStackAddrs,
    link_name: Option<String>,
    ids: RoutingIds,
    /// Rules of earlier interfaces to be removed, if another interface has the pod's default route.
    pub(super) additional: Option<Vec<Rule>>,
    pub(super) alias: String,
    pub(super) container_mac: MacAddress,
    pub(super) host_mac: MacAddress,
}

impl Plan {
    pub(super) fn new(spec: &PodSpec) -> Result<Self> {
        check(spec)?;
        let identity = identity(&spec.container_id, &spec.ifname);
        let alias = PodAlias {
            pool: spec.pool.clone(),
            container_id: spec.container_id.clone(),
            ifname: spec.ifname.clone(),
        }
        .to_string();
        if alias.len() > ALIAS_MAX {
            return Err(invalid("link alias", &alias, "is longer than the kernel's 255 bytes"));
        }
        Ok(Self {
            container_mac: mac(&format!("{identity}:container")),
            host_mac: mac(&format!("{identity}:host")),
            container_id: spec.container_id.clone(),
            ifname: spec.ifname.clone(),
            addresses: spec.addresses,
            link_name: spec.link_name.clone(),
            ids: spec.ids,
            additional: None,
            alias,
        })
    }

    pub(super) fn host_name(&self, attempt: u32) -> String {
        // The name that others rely on is that of the first interface.
        let fixed = self.link_name.clone().filter(|_| self.additional.is_none());
        fixed.unwrap_or_else(|| host_name(&self.container_id, &self.ifname, attempt))
    }

    /// Messages for the end in the pod, to be sent inside its namespace.
    pub(super) fn in_pod(&self, link: u32) -> Vec<Message> {
        let Some(stale) = &self.additional else { return self.with_default_routes(link) };
        let mut messages = self.bring_up(link);
        for ip in self.addresses.iter() {
            if ip.is_ipv6() {
                let own = self.container_mac.link_local().into();
                messages.push(add_address(&address(link, link_local_prefix(own), Scope::LINK)));
            }
            messages.push(add_address(&address(link, host_prefix(ip), Scope::UNIVERSE)));
        }
        messages.extend(
            gateways(self.addresses, link).iter().map(|it| self.gateway_neighbour(link, it.prefix.addr())),
        );
        messages.extend(additional::messages(self.addresses, link, stale));
        messages
    }

    fn with_default_routes(&self, link: u32) -> Vec<Message> {
        let mut messages = self.bring_up(link);
        let route = |prefix, gateway: Option<IpAddr>| {
            let route = match gateway {
                None => Route::onto(TABLE_MAIN, PROTOCOL_BOOT, prefix, link),
                Some(gateway) => Route::via(TABLE_MAIN, PROTOCOL_BOOT, prefix, gateway, link),
            };
            add_route(&route)
        };
        if let Some(ip) = self.addresses.ipv4 {
            let gateway = POD_GATEWAY_IPV4.into();
            messages.push(add_address(&address(link, host_prefix(ip.into()), Scope::UNIVERSE)));
            messages.push(self.gateway_neighbour(link, gateway));
            messages.push(route(host_prefix(gateway), None));
            messages.push(route(IpFamily::V4.everything(), Some(gateway)));
        }
        if let Some(ip) = self.addresses.ipv6 {
            let gateway = POD_GATEWAY_IPV6.into();
            let own = self.container_mac.link_local().into();
            messages.push(add_address(&address(link, link_local_prefix(own), Scope::LINK)));
            messages.push(add_address(&address(link, host_prefix(ip.into()), Scope::UNIVERSE)));
            messages.push(self.gateway_neighbour(link, gateway));
            messages.push(route(IpFamily::V6.everything(), Some(gateway)));
        }
        messages
    }

    /// Messages for the end on the host.
    pub(super) fn on_host(&self, link: u32) -> Vec<Message> {
        let mut messages = self.bring_up(link);
        messages.extend(gateways(self.addresses, link).iter().map(add_address));
        // The neighbour is not fixed as it is in the pod: a chained plugin may change the pod's link-layer address.
        messages.extend(self.addresses.iter().map(|ip| presumed_neighbour(link, ip, self.container_mac)));
        messages.extend(pod_routes(self.ids, self.addresses, link).iter().map(add_route));
        messages
    }

    /// The kernel's own link-local address would be tentative for a second or two and hold up every IPv6 pod; we set
    /// both ends' ourselves, without duplicate address detection: no other host can be on this link.
    fn bring_up(&self, link: u32) -> Vec<Message> {
        let quiet = self.addresses.ipv6.map(|_| disable_address_generation(link));
        quiet.into_iter().chain([set_up(link, true)]).collect()
    }

    /// The first packet need not wait for an answer, and host settings such as `arp_ignore` cannot suppress one.
    fn gateway_neighbour(&self, link: u32, gateway: IpAddr) -> Message {
        permanent_neighbour(link, gateway, self.host_mac)
    }
}

/// The addresses of the end on the host: the gateways of the pod.
pub(super) fn gateways(pod: DualStackAddrs, link: u32) -> Vec<Address> {
    // Every pod link has this same IPv4 address. Scope host keeps it from ever becoming the source of a packet to the
    // pod: the route has scope link, and the kernel takes no source address that reaches less far than the route, so it
    // goes on to the node's own address.
    let ipv4 = |_| address(link, host_prefix(POD_GATEWAY_IPV4.into()), Scope::HOST);
    let ipv6 = |_| address(link, link_local_prefix(POD_GATEWAY_IPV6.into()), Scope::LINK);
    pod.ipv4.map(ipv4).into_iter().chain(pod.ipv6.map(ipv6)).collect()
}

/// The routes to a pod, in the table of pods.
pub(super) fn pod_routes(ids: RoutingIds, pod: DualStackAddrs, link: u32) -> Vec<Route> {
    let route = |ip| Route::onto(ids.table_pods(), ids.protocol(), host_prefix(ip), link);
    pod.iter().map(route).collect()
}

fn identity(container_id: &str, ifname: &str) -> String {
    format!("{container_id}:{ifname}")
}

/// Name of a pod's link on the host: "veth" and eight hexadecimal digits, always the same for the same pod and attempt.
pub(super) fn host_name(container_id: &str, ifname: &str, attempt: u32) -> String {
    let hash = fnv1a(&format!("{}:{attempt}", identity(container_id, ifname)));
    format!("veth{:08x}", (hash ^ (hash >> 32)) & 0xffff_ffff)
}

fn host_prefix(ip: IpAddr) -> IpNet {
    IpNet::from(ip)
}

fn link_local_prefix(ip: IpAddr) -> IpNet {
    IpNet::new(ip, 64).unwrap_or_else(|_| IpNet::from(ip))
}

fn address(link: u32, prefix: IpNet, scope: Scope) -> Address {
    let flags = if prefix.addr().is_ipv6() { AddressFlags::NODAD } else { AddressFlags::default() };
    Address { link, prefix, scope, flags }
}

/// FNV-1a, 64 bits: the same on every machine and in every version, which the standard library's hashes are not.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A locally administered unicast address (IEEE 802, U/L and I/G bits). We choose it because then we need not ask for
/// it, and because device managers change only those that the kernel drew.
fn mac(identity: &str) -> MacAddress {
    let [a, b, c, d, e, f, ..] = fnv1a(identity).to_be_bytes();
    MacAddress([(a | 0x02) & 0xfe, b, c, d, e, f])
}

fn invalid(field: &'static str, value: &str, reason: &'static str) -> Error {
    Error::Invalid { field, value: value.to_owned(), reason }
}

fn check(spec: &PodSpec) -> Result<()> {
    for (field, value) in [("container ID", &spec.container_id), ("pool", &spec.pool)] {
        if value.is_empty() {
            return Err(invalid(field, value, "is empty"));
        }
        if value.contains(|c: char| c == ':' || c.is_control() || c.is_whitespace()) {
            return Err(invalid(field, value, "contains a colon, a space or a control character"));
        }
    }
    let link_name = spec.link_name.iter().map(|name| ("name of the host's link", name));
    for (field, name) in [("interface name", &spec.ifname)].into_iter().chain(link_name) {
        if let Some(reason) = bad_interface_name(name) {
            return Err(invalid(field, name, reason));
        }
    }
    if spec.addresses.is_empty() {
        return Err(invalid(
            "addresses of container",
            &spec.container_id,
            "are missing: neither IPv4 nor IPv6",
        ));
    }
    let least = if spec.addresses.ipv6.is_some() { IPV6_MIN_MTU } else { IPV4_MIN_MTU };
    match spec.mtu {
        Some(mtu) if mtu < least => {
            Err(invalid("MTU", &mtu.to_string(), "is less than the address family needs"))
        }
        _ => Ok(()),
    }
}

/// The kernel's own conditions (`dev_valid_name`, `net/core/dev.c`), so that a name is also safe inside a path.
fn bad_interface_name(name: &str) -> Option<&'static str> {
    if name.is_empty() || name.len() > NAME_MAX {
        Some("is not 1 to 15 bytes long")
    } else if name == "." || name == ".." {
        Some("is not a name")
    } else if name.contains(|c: char| matches!(c, '/' | ':' | '%') || c.is_control() || c.is_whitespace()) {
        Some("contains a character that interface names cannot have")
    } else {
        None
    }
}

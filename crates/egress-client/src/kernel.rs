//! Brings the network namespace of a client pod to what it should have, and says what differs. All of it blocks on the kernel.
//!
//! Nothing here opens a way by `eth0`: whatever fails, routes that refuse packets are set first and deleted last
//! ([`fairlead_dataplane::egress_client`]), and a tunnel link without its BPF program drops what it gets.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use fairlead_address::{DualStack, IntervalSet, IpFamily};
use fairlead_api::client_routing::ClientRouting;
use fairlead_api::fou::is_link_name;
use fairlead_dataplane::egress_client::{self, Replies, Step};
use fairlead_dataplane::uplink::{self, SysctlError};
use fairlead_egress::client::plan::{Desired, Tunnel};
use fairlead_egress::client::replies_by_uplink;
use fairlead_fou::{Peer, Settings, TunnelLink, Tunnels, link_mtu};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{
    ChangeSignal, FilterHook, KIND_IFB, KIND_IP6TNL, KIND_IPIP, Link, RouteSocket, delete_link,
};

use super::programs::ProgramStock;

/// Reason why a pod does not have what it should have.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The pod has no interface by which packets of tunnels could leave.
    #[error("network namespace {}: the pod has no interface {ifname}", .netns.display())]
    NoInterface {
        /// File of the namespace.
        netns: PathBuf,
        /// The interface.
        ifname: String,
    },
    /// Links or filters could not be read or changed.
    #[error("{0}")]
    Netlink(#[from] fairlead_netlink::Error),
    /// Rules or routes were refused.
    #[error("{0}")]
    Routing(#[from] egress_client::Error),
    /// A sysctl was refused.
    #[error("{0}")]
    Sysctl(#[from] SysctlError),
    /// A tunnel was refused.
    #[error("{0}")]
    Tunnels(#[from] fairlead_fou::Error),
}

type Result<T> = std::result::Result<T, Error>;

/// Network namespace and interface of a pod.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// Network namespace of the pod.
    pub(crate) netns: &'a Netns,
    /// Name of the interface by which its packets leave.
    pub(crate) ifname: &'a str,
}

/// Brings the namespace to `desired` and returns what was changed, one sentence each; nothing is sent where nothing differs. Tunnels
/// and filters of an earlier program are adopted; otherwise programs are taken from `programs`.
///
/// # Errors
/// The first failure, after rules and routes have been tried: packets to destinations without a tunnel are refused.
pub(crate) fn apply(place: Place<'_>, desired: &Desired, programs: &ProgramStock) -> Result<Vec<String>> {
    // One thread for all of it.
    place.netns.run(|| apply_inside(place, desired, programs))?
}

fn apply_inside(place: Place<'_>, desired: &Desired, programs: &ProgramStock) -> Result<Vec<String>> {
    let routing = kept(place, desired)?;
    let tunnels = open_tunnels(place, desired, &routing, programs);
    let (links, mut done, failure) = match tunnels {
        Ok((links, changes)) => (links, changes, None),
        // A link without a program drops packets, so those that are there may stay.
        Err(error) => (existing(place, desired)?, Vec::new(), Some(error)),
    };
    let open = open_links(desired, &links);
    let replies = replies(place, &routing);
    // A route into a tunnel must not take the replies of connections that are open by then.
    let by_uplink = replies.is_any();
    if by_uplink {
        done.extend(egress_client::sync_replies(place.netns, &replies)?);
    }
    let steps = egress_client::sync(place.netns, &routing, &open)?;
    done.extend(steps.iter().map(describe));
    if !by_uplink {
        done.extend(egress_client::sync_replies(place.netns, &replies)?);
    }
    if let Some(error) = failure {
        return Err(error);
    }
    let stale = remove_stale(desired)?;
    done.extend(stale.iter().map(|link| format!("delete link {link}")));
    Ok(done)
}

/// Differences that [`apply`] would correct, one sentence each, apart from what the maps of the BPF programs hold.
///
/// # Errors
/// The namespace cannot be read.
pub(crate) fn differences(place: Place<'_>, desired: &Desired) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut socket = RouteSocket::open_in(place.netns)?;
    let uplink = uplink(&mut socket, place)?;
    let mut links = BTreeMap::new();
    if !desired.tunnels.is_empty() {
        for (hook, name) in [(FilterHook::Egress, "egress"), (FilterHook::Ingress, "ingress")] {
            if !has_program(&mut socket, uplink.index, hook)? {
                found.push(format!("interface {} has no tunnel program at {name}", place.ifname));
            }
        }
    }
    for tunnel in desired.tunnels.values() {
        match socket.link_by_name(&tunnel.link)? {
            Some(link) if is_kernel_tunnel(&link) && link.up => drop(links.insert(link.name, link.index)),
            Some(link) if link.kind.as_deref() == Some(KIND_IFB) && link.up => {
                if (link.mtu, &link.mac) != (link_mtu(IpFamily::of(tunnel.local), uplink.mtu), &uplink.mac) {
                    found.push(format!(
                        "link {} has not the MTU and address that follow from {}",
                        link.name, place.ifname
                    ));
                }
                if !has_program(&mut socket, link.index, FilterHook::Egress)? {
                    found.push(format!("link {} has no tunnel program", link.name));
                }
                links.insert(link.name, link.index);
            }
            Some(_) => found.push(format!("link {} is down or of another type", tunnel.link)),
            None => found.push(format!("there is no link {}", tunnel.link)),
        }
    }
    let routing = kept(place, desired)?;
    let steps = egress_client::differences(place.netns, &routing, &open_links(desired, &links))?;
    found.extend(steps.iter().map(missing));
    let replies = egress_client::reply_differences(place.netns, &replies(place, &routing))?;
    found.extend(replies.into_iter().map(|what| format!("the pod is to answer by {}: {what}", place.ifname)));
    let wanted: BTreeSet<&str> = desired.tunnels.values().map(|tunnel| tunnel.link.as_str()).collect();
    let stale = tunnel_links(&mut socket)?.into_iter().filter(|link| !wanted.contains(link.name.as_str()));
    found.extend(stale.map(|link| format!("link {} is of no Egress", link.name)));
    Ok(found)
}

/// Removes everything of egress from a namespace whose pod asks for it no more, and returns what was changed.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn remove(place: Place<'_>) -> Result<Vec<String>> {
    let nothing = DualStack::default();
    let steps = egress_client::sync(place.netns, &nothing, &BTreeMap::new())?;
    let mut done: Vec<String> = steps.iter().map(describe).collect();
    done.extend(egress_client::sync_replies(place.netns, &replies(place, &nothing))?);
    let removed = place.netns.run(|| -> Result<Vec<String>> {
        let mut socket = RouteSocket::open()?;
        let Some(uplink) = socket.link_by_name(place.ifname)? else { return Ok(Vec::new()) };
        let mut removed = Vec::new();
        for link in tunnel_links(&mut socket)? {
            delete(&mut socket, &link)?;
            removed.push(format!("delete link {}", link.name));
        }
        let is_attached = has_program(&mut socket, uplink.index, FilterHook::Ingress)?
            || has_program(&mut socket, uplink.index, FilterHook::Egress)?;
        if is_attached {
            let settings = Settings { port: fairlead_api::names::FOU_PORT, drop_unknown: false, own: None };
            Tunnels::open(uplink.index, settings)?.remove()?;
            removed.push(format!("detach the tunnel programs from {}", place.ifname));
        }
        Ok(removed)
    })?;
    done.extend(removed?);
    Ok(done)
}

/// Peers whose connections are answered by `eth0` although routes of this routing have their addresses.
fn replies(place: Place<'_>, routing: &DualStack<ClientRouting, ClientRouting>) -> Replies {
    let peers = |family: IpFamily, of: Option<&ClientRouting>| match of {
        Some(of) if of.routes.iter().any(|route| !route.target.lets_pass() && route.originating_only) => {
            replies_by_uplink(family, &of.routes)
        }
        Some(_) | None => IntervalSet::empty(family),
    };
    let peers = [peers(IpFamily::V4, routing.ipv4.as_ref()), peers(IpFamily::V6, routing.ipv6.as_ref())];
    Replies { uplink: place.ifname.to_owned(), peers }
}

/// Whether a namespace has rules or routes of egress.
///
/// # Errors
/// The namespace cannot be read.
pub(crate) fn has_egress(netns: &Netns) -> Result<bool> {
    Ok(!egress_client::differences(netns, &DualStack::default(), &BTreeMap::new())?.is_empty())
}

/// Sets what a gateway needs, which is not privileged enough to do it itself, and returns what was changed.
///
/// # Errors
/// A setting cannot be written.
pub(crate) fn make_gateway(place: Place<'_>) -> Result<Vec<String>> {
    let changed = place.netns.run(|| uplink::forward_in_gateway(place.ifname))??;
    Ok(changed.iter().map(|file| format!("set {}", file.display())).collect())
}

/// Report changes of the namespace, with `nftables` of these, too.
///
/// # Errors
/// The namespace cannot be entered.
pub(crate) fn signals(netns: &Netns, nftables: bool) -> Result<Vec<ChangeSignal>> {
    let mut signals = vec![netns.run(ChangeSignal::open)??];
    if nftables {
        signals.push(netns.run(ChangeSignal::open_nftables)??);
    }
    Ok(signals)
}

/// MTU of an interface in bytes; `None` if there is no such interface.
///
/// # Errors
/// The namespace cannot be read.
pub(crate) fn mtu(netns: &Netns, ifname: &str) -> Result<Option<u32>> {
    Ok(RouteSocket::open_in(netns)?.link_by_name(ifname)?.map(|link| link.mtu))
}

/// Links by name, and what was changed. Inside the namespace.
fn open_tunnels(
    place: Place<'_>,
    desired: &Desired,
    routing: &DualStack<ClientRouting, ClientRouting>,
    programs: &ProgramStock,
) -> Result<(BTreeMap<String, u32>, Vec<String>)> {
    if desired.tunnels.is_empty() {
        return Ok((BTreeMap::new(), Vec::new()));
    }
    programs.used();
    let mut socket = RouteSocket::open()?;
    let uplink = uplink(&mut socket, place)?.index;
    let settings = Settings { port: desired.port, drop_unknown: false, own: None };
    let mut tunnels = Tunnels::open_with(uplink, settings, || programs.take())?;
    let mut links = BTreeMap::new();
    let mut own = BTreeMap::new();
    let mut peers = BTreeMap::new();
    for (cluster_ip, tunnel) in &desired.tunnels {
        let kernel = socket.link_by_name(&tunnel.link)?.filter(is_kernel_tunnel);
        let peer = match kernel {
            // Coil's, made by `ip`: it encapsulates by itself, and only the choice of the gateway is added.
            Some(link) => {
                links.insert(tunnel.link.clone(), link.index);
                Peer::KernelGateway { service: *cluster_ip }
            }
            None => {
                let link = tunnels.add_link(*cluster_ip)?;
                links.insert(tunnel.link.clone(), link);
                own.insert(link, tunnel_link(*cluster_ip, tunnel));
                Peer::Gateway { link, service: *cluster_ip }
            }
        };
        // The Service itself, which answers through its translation where it chooses the gateway.
        peers.insert(*cluster_ip, peer);
        let gateways = tunnel.service.iter().flat_map(|service| &service.gateways);
        peers.extend(gateways.map(|gateway| (gateway.address, peer)));
        peers.extend(tunnel.answering.iter().map(|gateway| (*gateway, peer)));
    }
    let services: BTreeMap<IpAddr, _> = desired
        .tunnels
        .iter()
        .filter_map(|(cluster_ip, tunnel)| Some((*cluster_ip, tunnel.service.clone()?)))
        .collect();
    let mut done = Vec::new();
    for (what, count) in [
        ("peers", tunnels.set_peers(&peers)?),
        ("gateways of Services", tunnels.set_services(&services)?),
        ("tunnel links", tunnels.set_links(&own)?),
        // Behind the peers, which may lack their Service if an earlier program has set them, and before the routes. The largest map is the
        // last: what the kernel refuses of it must not keep packets from gateways that are new.
        ("sources of gateways", tunnels.set_origins(&desired.origins(routing))?),
    ] {
        done.extend((count > 0).then(|| format!("set {count} {what}")));
    }
    Ok((links, done))
}

fn tunnel_link(cluster_ip: IpAddr, tunnel: &Tunnel) -> TunnelLink {
    TunnelLink { local: tunnel.local, remote: Some(cluster_ip), source_port: tunnel.source_port }
}

/// Links of the tunnels that exist and are up.
fn existing(place: Place<'_>, desired: &Desired) -> Result<BTreeMap<String, u32>> {
    let mut socket = RouteSocket::open_in(place.netns)?;
    let mut links = BTreeMap::new();
    for tunnel in desired.tunnels.values() {
        let found = socket.link_by_name(&tunnel.link)?;
        links.extend(found.filter(|link| link.up).map(|link| (link.name, link.index)));
    }
    Ok(links)
}

fn open_links(desired: &Desired, links: &BTreeMap<String, u32>) -> BTreeMap<String, u32> {
    let open = desired.tunnels.values().filter(|tunnel| tunnel.is_open());
    open.filter_map(|tunnel| Some((tunnel.link.clone(), *links.get(&tunnel.link)?))).collect()
}

/// The routing, with the destinations that an Egress had which is not there any more.
fn kept(place: Place<'_>, desired: &Desired) -> Result<DualStack<ClientRouting, ClientRouting>> {
    if !desired.keeps_destinations {
        return Ok(desired.routing.clone());
    }
    Ok(desired.clone().refusing(&egress_client::destinations(place.netns)?).routing)
}

/// Deletes links to Services that are no longer used. Inside the namespace.
fn remove_stale(desired: &Desired) -> Result<Vec<String>> {
    let mut socket = RouteSocket::open()?;
    let wanted: BTreeSet<&str> = desired.tunnels.values().map(|tunnel| tunnel.link.as_str()).collect();
    let mut removed = Vec::new();
    for link in tunnel_links(&mut socket)? {
        if !wanted.contains(link.name.as_str()) {
            delete(&mut socket, &link)?;
            removed.push(link.name);
        }
    }
    Ok(removed)
}

/// Links with the names of tunnels, ours and the kernel's own.
fn tunnel_links(socket: &mut RouteSocket) -> Result<Vec<Link>> {
    let mut links = socket.links()?;
    links.retain(|link| {
        is_link_name(&link.name) && (link.kind.as_deref() == Some(KIND_IFB) || is_kernel_tunnel(link))
    });
    Ok(links)
}

fn delete(socket: &mut RouteSocket, link: &Link) -> Result<()> {
    match socket.apply(&[delete_link(link.index)]) {
        Err(error) if !error.is_missing() => Err(error.into()),
        _ => Ok(()),
    }
}

/// A Foo-over-UDP link of the kernel, as Coil makes it.
fn is_kernel_tunnel(link: &Link) -> bool {
    matches!(link.kind.as_deref(), Some(KIND_IPIP | KIND_IP6TNL))
}

fn uplink(socket: &mut RouteSocket, place: Place<'_>) -> Result<Link> {
    let missing =
        || Error::NoInterface { netns: place.netns.path().to_owned(), ifname: place.ifname.to_owned() };
    socket.link_by_name(place.ifname)?.ok_or_else(missing)
}

/// Whether a program of tunnels is attached.
fn has_program(socket: &mut RouteSocket, link: u32, hook: FilterHook) -> Result<bool> {
    Ok(socket.bpf_filters(link, hook)?.iter().any(fairlead_fou::is_own_filter))
}

fn describe(step: &Step) -> String {
    match step {
        Step::AddRoute(route) => format!("add {route}"),
        Step::AddRule(rule) => format!("add {rule}"),
        Step::DeleteRoute(route) => format!("delete {route}"),
        Step::DeleteRule(rule) => format!("delete {rule}"),
        Step::ReplaceRoute(route) => format!("set {route}"),
    }
}

fn missing(step: &Step) -> String {
    match step {
        Step::AddRoute(route) | Step::ReplaceRoute(route) => format!("the pod lacks {route}"),
        Step::AddRule(rule) => format!("the pod lacks {rule}"),
        Step::DeleteRoute(route) => format!("the pod should not have {route}"),
        Step::DeleteRule(rule) => format!("the pod should not have {rule}"),
    }
}

#[cfg(test)]
mod tests;

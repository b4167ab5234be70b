//! The link of a pod: a veth pair with one end in the pod, addresses and routes on both ends, and what the kernel
//! says of the pods that exist.
//!
//! The record of a pod is the alias of its link on the host, `COIL:<pool>:<container ID>:<interface>`, and its routes
//! in table 116; nothing is kept anywhere else, so a restarted node program finds every pod again with [`list`].
//!
//! All functions act in the calling thread's network namespace, the host's.

mod additional;
mod error;
mod inspect;
mod moved;
mod plan;
mod recover;
mod removal;
mod repair;
mod source_check;

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use fairlead_address::DualStackAddrs;
use fairlead_api::names::{LINK_ALIAS_PREFIX, LINK_GROUP_PODS};
use fairlead_limits::Backoff;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{
    IpFamily, Link, MacAddress, Route, RouteSocket, TABLE_LOCAL, VethEnd, add_veth, delete_link, set_alias,
};
use ipnet::IpNet;
use tracing::trace_span;

use crate::routes;
use crate::routing_ids::RoutingIds;
use crate::uplink::{self, SysctlError};

pub use error::{Error, Result};
pub use inspect::{End, Inspection, inspect};
pub use moved::gather_routes;
use plan::Plan;
pub use plan::{PodAlias, PodSpec};
pub use recover::{Unclear, recover};
pub use removal::{Removal, remove};
pub use repair::{Attached, HostEnds, Repair, repairs};
pub use source_check::check_sources;

/// Names on the host that are tried when others have ours.
const NAME_TRIES: u32 = 8;
/// Tries, and the first and longest pause between them, while a link becomes ready: ten seconds altogether.
const SETTLE_TRIES: u32 = 10_000;
const SETTLE_PAUSE: Duration = Duration::from_micros(50);
const SETTLE_PAUSE_MAX: Duration = Duration::from_millis(1);

/// The links that were made for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLinks {
    /// Link-layer address in the pod.
    pub container_mac: MacAddress,
    /// Index of the interface in the pod.
    pub container_index: u32,
    /// Name of the other end, on the host.
    pub host_name: String,
    /// Link-layer address on the host.
    pub host_mac: MacAddress,
    /// Index on the host.
    pub host_index: u32,
    /// MTU of both ends in bytes.
    pub mtu: u32,
    /// Whether another interface of the pod has its default route.
    pub is_additional: bool,
}

/// A pod as the kernel shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOnNode {
    /// Pool its addresses are from.
    pub pool: String,
    /// The runtime's name for the sandbox.
    pub container_id: String,
    /// Name of the interface in the pod.
    pub ifname: String,
    /// Name of the other end, on the host.
    pub host_name: String,
    /// Index on the host.
    pub host_index: u32,
    /// Addresses of the pod, as far as routes lead to them.
    pub addresses: DualStackAddrs,
}

/// Connects a pod. What was there for the same container and interface is replaced, so a runtime may repeat the call.
/// There is no wait for duplicate address detection: when this returns the pod can talk. An interface beside another with the
/// pod's default route gets a table of its own.
///
/// # Errors
/// See [`Error`]; nothing that was made is left then.
pub fn add(spec: &PodSpec) -> Result<PodLinks> {
    let mut plan = Plan::new(spec)?;
    let netns = open_netns(spec)?;
    let kernel = |source| kernel_error(spec, source);
    let mut host = RouteSocket::open().map_err(kernel)?;
    // Inside the namespace, so that a file that is none is noticed before anything is made.
    let Pair { host_link, container_index, mut pod } =
        netns.run(|| make_pair(spec, &mut plan, &netns, &mut host)).map_err(kernel)??;
    let connected = trace_span!("host's end").in_scope(|| connect_host(spec, &plan, &mut host, &host_link));
    if let Err(error) = connected {
        discard(&mut host, &host_link);
        return Err(error);
    }
    trace_span!("until ready")
        .in_scope(|| wait_ready(spec, &mut pod, container_index, &mut host, &host_link));
    Ok(PodLinks {
        container_mac: plan.container_mac,
        container_index,
        host_name: host_link.name,
        host_mac: plan.host_mac,
        host_index: host_link.index,
        mtu: host_link.mtu,
        is_additional: plan.additional.is_some(),
    })
}

/// The pods on this node, from the kernel alone.
///
/// # Errors
/// Links or routes cannot be read.
pub fn list(ids: RoutingIds) -> Result<Vec<PodOnNode>> {
    let read = || {
        let mut host = RouteSocket::open()?;
        Ok(pods_among(&host.links_by_alias(LINK_ALIAS_PREFIX)?, &host.routes(ids.table_pods())?))
    };
    read().map_err(Error::List)
}

/// Finds the pods among links and routes of table 116. Links of other programs, and aliases without a pool (they mark
/// other plugins' links that only use egress gateways), are no pods of ours.
pub fn pods_among(links: &[Link], table: &[Route]) -> Vec<PodOnNode> {
    let addresses = |index| {
        table
            .iter()
            .filter(move |route| route.link == Some(index) && !routes::is_source(route))
            .map(|route| route.destination)
            .filter(|prefix| prefix.prefix_len() == prefix.max_prefix_len())
            .map(|prefix| prefix.addr())
    };
    let pod = |link: &Link| {
        let alias = PodAlias::parse(link.alias.as_deref()?)?;
        Some(PodOnNode {
            pool: alias.pool,
            container_id: alias.container_id,
            ifname: alias.ifname,
            host_name: link.name.clone(),
            host_index: link.index,
            addresses: addresses(link.index).collect(),
        })
    };
    links.iter().filter_map(pod).collect()
}

fn kernel_error(spec: &PodSpec, source: fairlead_netlink::Error) -> Error {
    match source {
        fairlead_netlink::Error::Namespace { path, source, .. } => {
            Error::Netns { container_id: spec.container_id.clone(), path, reason: source }
        }
        source => {
            Error::Kernel { container_id: spec.container_id.clone(), ifname: spec.ifname.clone(), source }
        }
    }
}

fn sysctl_error(spec: &PodSpec, source: SysctlError) -> Error {
    Error::Sysctl { container_id: spec.container_id.clone(), ifname: spec.ifname.clone(), source }
}

fn open_netns(spec: &PodSpec) -> Result<Netns> {
    let kernel = |source| kernel_error(spec, source);
    let netns = Netns::open(&spec.netns).map_err(kernel)?;
    if Netns::current().and_then(|own| own.is_same(&netns)).map_err(kernel)? {
        // A pod on the host's network must never get this far; its addresses would become the node's.
        return Err(Error::Netns {
            container_id: spec.container_id.clone(),
            path: spec.netns.clone(),
            reason: io::Error::new(io::ErrorKind::InvalidInput, "it is the host's own"),
        });
    }
    Ok(netns)
}

/// A pair whose end in the pod is ready.
struct Pair {
    host_link: Link,
    container_index: u32,
    pod: RouteSocket,
}

/// Makes the pair and configures the end in the pod. Runs inside the pod's namespace; `host` is a socket outside.
fn make_pair(spec: &PodSpec, plan: &mut Plan, netns: &Netns, host: &mut RouteSocket) -> Result<Pair> {
    let mut pod = RouteSocket::open().map_err(|source| kernel_error(spec, source))?;
    let survey = trace_span!("other interfaces").in_scope(|| additional::survey(&mut pod, &spec.ifname));
    let (is_additional, stale) = survey.map_err(|source| kernel_error(spec, source))?;
    plan.additional = is_additional.then_some(stale);
    let host_link = trace_span!("veth pair").in_scope(|| make_links(spec, plan, netns, host))?;
    match trace_span!("pod's end").in_scope(|| connect_pod(spec, plan, host, &host_link, &mut pod)) {
        Ok(container_index) => Ok(Pair { host_link, container_index, pod }),
        Err(error) => {
            discard(host, &host_link);
            Err(error)
        }
    }
}

/// A link of an earlier ADD of the same container is in the way of one of the two names, so it is looked for only when
/// the kernel says that one is taken: the search reads every pod's link.
fn make_links(spec: &PodSpec, plan: &Plan, netns: &Netns, host: &mut RouteSocket) -> Result<Link> {
    let kernel = |source| kernel_error(spec, source);
    let container = VethEnd { name: &spec.ifname, mac: Some(plan.container_mac), mtu: spec.mtu, group: 0 };
    let mut attempt = 0;
    let mut searched = false;
    while attempt < NAME_TRIES {
        let name = plan.host_name(attempt);
        let end = VethEnd { name: &name, mac: Some(plan.host_mac), mtu: spec.mtu, group: LINK_GROUP_PODS };
        match host.apply(&[add_veth(&end, &container, netns.as_fd())]) {
            Err(error) if error.is_existing() => {
                if !std::mem::replace(&mut searched, true) {
                    let stale = removal::links_of(host, &spec.container_id, &spec.ifname).map_err(kernel)?;
                    stale.iter().try_for_each(|link| removal::delete(host, *link)).map_err(kernel)?;
                    if !stale.is_empty() {
                        continue;
                    }
                }
                // The kernel does not say which of the two names is taken.
                let Some(other) = host.link_by_name(&name).map_err(kernel)? else {
                    return Err(Error::InterfaceExists {
                        ifname: spec.ifname.clone(),
                        netns: spec.netns.clone(),
                    });
                };
                if spec.link_name.as_ref() == Some(&name) {
                    make_way(spec, host, &other)?;
                }
                attempt += 1;
            }
            other => {
                other.map_err(kernel)?;
                return expect_link(host, &name).map_err(kernel);
            }
        }
    }
    Err(Error::Invalid {
        field: "container ID",
        value: spec.container_id.clone(),
        reason: "gives only names for the host's link that other links have",
    })
}

/// A name that is the pod's and not the container's may still be that of the container before, whose DEL is to come.
fn make_way(spec: &PodSpec, host: &mut RouteSocket, other: &Link) -> Result<()> {
    let alias = other.alias.as_deref().and_then(PodAlias::parse);
    if alias.is_some_and(|alias| alias.ifname == spec.ifname) {
        return removal::delete(host, other.index).map_err(|source| kernel_error(spec, source));
    }
    let reason = "is that of another program's link, or of another interface of the pod";
    Err(Error::Invalid { field: "name of the host's link", value: other.name.clone(), reason })
}

/// The alias comes first of all: whatever happens later, the link can be found by it.
fn connect_pod(
    spec: &PodSpec,
    plan: &Plan,
    host: &mut RouteSocket,
    host_link: &Link,
    pod: &mut RouteSocket,
) -> Result<u32> {
    let kernel = |source| kernel_error(spec, source);
    host.apply(&[set_alias(host_link.index, &plan.alias)]).map_err(kernel)?;
    let link = expect_link(pod, &spec.ifname).map_err(kernel)?;
    if spec.addresses.ipv6.is_some() {
        uplink::accept_ipv6(&spec.ifname).map_err(|source| sysctl_error(spec, source))?;
    }
    pod.apply(&plan.in_pod(link.index)).map_err(kernel)?;
    Ok(link.index)
}

fn connect_host(spec: &PodSpec, plan: &Plan, host: &mut RouteSocket, link: &Link) -> Result<()> {
    // Also of a pod without IPv6: its link has a link-local address where the host has IPv6.
    uplink::refuse_advertisements(&link.name).map_err(|source| sysctl_error(spec, source))?;
    host.apply(&plan.on_host(link.index)).map_err(|source| kernel_error(spec, source))
}

fn expect_link(socket: &mut RouteSocket, name: &str) -> fairlead_netlink::Result<Link> {
    socket.link_by_name(name)?.ok_or_else(|| fairlead_netlink::Error::Malformed {
        what: format!("look up link {name}"),
        reason: "it was deleted right after it had been created".to_owned(),
    })
}

/// Waits for what the kernel does in the background, usually done by the time we look. A pod that is late is no
/// failure, so this gives up after ten seconds with a warning.
fn wait_ready(
    spec: &PodSpec,
    pod: &mut RouteSocket,
    container: u32,
    host: &mut RouteSocket,
    host_link: &Link,
) {
    let mut backoff = Backoff::new(SETTLE_PAUSE, SETTLE_PAUSE_MAX);
    for _ in 0..SETTLE_TRIES {
        let ready = can_send(pod, container)
            .and_then(|pod_sends| Ok(pod_sends && can_send(host, host_link.index)?))
            .and_then(|both_send| Ok(both_send && can_receive(pod, spec.addresses.ipv6)?));
        if ready.unwrap_or(true) {
            return;
        }
        thread::sleep(backoff.next_whole());
    }
    tracing::warn!(
        container = spec.container_id,
        link = host_link.name,
        "the pod's link is slow to get ready"
    );
}

/// Until the kernel has noticed that the other end is there, it drops what is sent. Since Linux 6.8 being asked makes
/// it look at once.
fn can_send(socket: &mut RouteSocket, index: u32) -> fairlead_netlink::Result<bool> {
    Ok(socket.link(index)?.is_none_or(|link| link.operational))
}

/// Even without duplicate address detection the kernel starts to accept packets for a new IPv6 address only in the
/// background: with the route in the table of local addresses (`addrconf_dad_completed`, `net/ipv6/addrconf.c`).
fn can_receive(pod: &mut RouteSocket, ipv6: Option<Ipv6Addr>) -> fairlead_netlink::Result<bool> {
    let Some(ip) = ipv6 else { return Ok(true) };
    Ok(pod
        .routes_of(IpFamily::V6, TABLE_LOCAL)?
        .iter()
        .any(|route| route.destination == IpNet::from(IpAddr::from(ip))))
}

fn discard(host: &mut RouteSocket, link: &Link) {
    match host.apply(&[delete_link(link.index)]) {
        Err(error) if !error.is_missing() => {
            tracing::warn!(link = link.name, %error, "a half-made pod link remains");
        }
        _ => {}
    }
}

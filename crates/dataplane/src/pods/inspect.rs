//! State of one pod's link in the kernel, on both ends. Only reads.

use std::path::Path;

use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{Link, MacAddress, Route, RouteSocket};
use ipnet::IpNet;

use super::{Error, PodAlias, Result, additional};
use crate::routes::is_source;
use crate::routing_ids::RoutingIds;

/// One end of a pod's link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// Name of the link.
    pub name: String,
    /// Link-layer address of the link.
    pub mac: Option<MacAddress>,
    /// Administratively up.
    pub up: bool,
    /// Addresses of the link with their prefix lengths.
    pub addresses: Vec<IpNet>,
}

/// A pod's link as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    /// The end on the host; `None` if no link has the pod's alias.
    pub host: Option<End>,
    /// Destinations that table 116 leads to that end.
    pub led_to_pod: Vec<IpNet>,
    /// The end in the pod; `None` if it has no interface of that name.
    pub pod: Option<End>,
    /// Routes inside the pod: of the tables asked for, and of the one of the interface if another has the pod's default route.
    pub pod_routes: Vec<Route>,
    /// Whether the two are ends of one pair; `false` when one of them is missing.
    pub connected: bool,
}

/// Reads both ends of the link of an interface of a container, and the routes of `tables` inside the pod.
///
/// # Errors
/// The namespace cannot be entered, or the kernel refuses to show something.
pub fn inspect(
    ids: RoutingIds,
    (container_id, ifname): (&str, &str),
    netns: &Path,
    tables: &[u32],
) -> Result<Inspection> {
    let kernel =
        |source| Error::Kernel { container_id: container_id.to_owned(), ifname: ifname.to_owned(), source };
    let open = || RouteSocket::open_in(&Netns::open(netns)?);
    let mut pod_socket = open().map_err(|source| match source {
        fairlead_netlink::Error::Namespace { path, source, .. } => {
            Error::Netns { container_id: container_id.to_owned(), path, reason: source }
        }
        source => kernel(source),
    })?;
    let mut read = || {
        let mut host_socket = RouteSocket::open()?;
        let ours = |link: &Link| {
            let alias = link.alias.as_deref().and_then(PodAlias::parse);
            alias.is_some_and(|alias| alias.container_id == container_id && alias.ifname == ifname)
        };
        let host = host_socket.links_of_kind("veth")?.into_iter().find(ours);
        let pod = pod_socket.link_by_name(ifname)?;
        let mut pod_routes = Vec::new();
        let own = pod.as_ref().map(|link| additional::table(link.index));
        for table in tables.iter().copied().chain(own) {
            pod_routes.extend(pod_socket.routes(table)?);
        }
        Ok(Inspection {
            led_to_pod: host
                .as_ref()
                .map_or(Ok(Vec::new()), |host| led_to(&mut host_socket, ids, host.index))?,
            connected: host.as_ref().zip(pod.as_ref()).is_some_and(|(host, pod)| is_pair(host, pod)),
            host: host.map(|link| end(&mut host_socket, link)).transpose()?,
            pod: pod.map(|link| end(&mut pod_socket, link)).transpose()?,
            pod_routes,
        })
    };
    read().map_err(kernel)
}

fn led_to(host: &mut RouteSocket, ids: RoutingIds, link: u32) -> fairlead_netlink::Result<Vec<IpNet>> {
    let table = host.routes(ids.table_pods())?;
    let of_pod = table.iter().filter(|route| route.link == Some(link) && !is_source(route));
    Ok(of_pod.map(|route| route.destination).collect())
}

fn end(socket: &mut RouteSocket, link: Link) -> fairlead_netlink::Result<End> {
    let addresses = socket.addresses_on(link.index)?.into_iter().map(|address| address.prefix).collect();
    Ok(End { name: link.name, mac: link.mac, up: link.up, addresses })
}

/// Each names the other's index.
fn is_pair(host: &Link, pod: &Link) -> bool {
    host.peer_index == Some(pod.index) && pod.peer_index == Some(host.index)
}

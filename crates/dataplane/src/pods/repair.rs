//! Restores what other programs remove from a pod's link: `ip link set down` removes routes and IPv6 addresses of the
//! link, and `up` does not bring them back; network managers delete routes that they do not know.

use fairlead_address::DualStackAddrs;
use fairlead_api::names::{LINK_ALIAS_PREFIX, LINK_GROUP_PODS};
use fairlead_netlink::Message;
use fairlead_netlink::route::{
    Address, Link, Route, RouteSocket, Scope, add_address, replace_route, set_group, set_up,
};

use super::plan::{gateways, pod_routes};
use super::{Error, PodAlias, Result};
use crate::routing_ids::RoutingIds;

/// A pod that is to be reachable, by the allocation table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// The runtime's name for the sandbox.
    pub container_id: String,
    /// Name of the interface in the pod.
    pub ifname: String,
    /// Addresses of the pod.
    pub addresses: DualStackAddrs,
}

/// State of the pods' links on the host, as the kernel has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostEnds {
    /// Links with our alias.
    pub links: Vec<Link>,
    /// Addresses of all links.
    pub addresses: Vec<Address>,
    /// Routes of the table of pods.
    pub routes: Vec<Route>,
}

impl HostEnds {
    /// Reads it in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses, or its answer cannot be decoded.
    pub fn read(ids: RoutingIds) -> Result<Self> {
        let read = || {
            let mut socket = RouteSocket::open()?;
            Ok(Self {
                links: socket.links_by_alias(LINK_ALIAS_PREFIX)?,
                addresses: socket.addresses()?,
                routes: socket.routes(ids.table_pods())?,
            })
        };
        read().map_err(Error::List)
    }
}

/// Messages that repair the link of one pod.
#[derive(Debug, Clone)]
pub struct Repair {
    /// The runtime's name for the sandbox.
    pub container_id: String,
    /// Name of the link on the host.
    pub host_name: String,
    messages: Vec<Message>,
}

impl Repair {
    /// Missing items, as operations on objects: one for each message.
    pub fn operations(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().map(|message| message.what.as_str())
    }

    /// Sends it; returns the first refusal, after everything else has been tried.
    ///
    /// # Errors
    /// The kernel refused. A link that is gone by now is no error: so is its pod. Nor is what is there by now: the operation that
    /// attaches the pod has added it since the link was read.
    pub fn apply(&self) -> fairlead_netlink::Result<()> {
        let outcomes = RouteSocket::open()?.apply_each(&self.messages)?;
        let mut refused = outcomes.into_iter().filter_map(std::result::Result::err);
        let refusal = refused.find(|it| !it.is_missing() && !it.is_existing());
        refusal.map_or(Ok(()), Err)
    }
}

/// Repairs of the links of these pods; nothing for a pod without a link, whose address has leaked. Pure.
pub fn repairs(ids: RoutingIds, attached: &[Attached], found: &HostEnds) -> Vec<Repair> {
    let aliased = |link: &Link| Some((PodAlias::parse(link.alias.as_deref()?)?, link.clone()));
    let links: Vec<(PodAlias, Link)> = found.links.iter().filter_map(aliased).collect();
    let repair = |pod: &Attached| {
        let of_pod =
            |alias: &PodAlias| (&alias.container_id, &alias.ifname) == (&pod.container_id, &pod.ifname);
        let (_, link) = links.iter().find(|(alias, _)| of_pod(alias))?;
        let messages = missing(ids, pod.addresses, link, found);
        let container_id = pod.container_id.clone();
        let host_name = link.name.clone();
        (!messages.is_empty()).then_some(Repair { container_id, host_name, messages })
    };
    attached.iter().filter_map(repair).collect()
}

fn missing(ids: RoutingIds, addresses: DualStackAddrs, link: &Link, found: &HostEnds) -> Vec<Message> {
    let on_link = |address: &&Address| address.link == link.index;
    let has = |gateway: &Address| match gateway.scope {
        // The kernel's own does too: pods that Coil attached have it as their gateway.
        Scope::LINK => found.addresses.iter().filter(on_link).any(|it| it.scope == Scope::LINK),
        _ => found.addresses.iter().filter(on_link).any(|it| it.prefix.addr() == gateway.prefix.addr()),
    };
    let leads = |route: &Route| {
        found.routes.iter().any(|it| it.destination == route.destination && it.link == Some(link.index))
    };
    let mut messages = Vec::new();
    if link.group != LINK_GROUP_PODS {
        messages.push(set_group(link.index, LINK_GROUP_PODS));
    }
    if !link.up {
        messages.push(set_up(link.index, true));
    }
    messages.extend(gateways(addresses, link.index).iter().filter(|it| !has(it)).map(add_address));
    messages.extend(pod_routes(ids, addresses, link.index).iter().filter(|it| !leads(it)).map(replace_route));
    messages
}

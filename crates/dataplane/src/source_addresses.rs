//! Source addresses of egress gateways that run on this node: packets to them go to the gateway's pod, and hosts on the networks of
//! this node learn that they are here.
//!
//! For each address there is
//!
//! * a route in the table of pods, `ADDRESS via POD dev LINK onlink`. The pod answers no ARP for the address, so the next hop is its own.
//!   The check of source addresses follows routes ([`crate::pods::check_sources`]), so exactly this pod may send with the address;
//! * a route in the export table, `ADDRESS dev lo`, for routing daemons;
//! * on each link whose network contains the address an entry by which the kernel answers ARP and neighbour discovery
//!   ([`fairlead_netlink::route::Proxy`]).
//!
//! The routes are told from others of these tables by their metric, the entries by their protocol number. [`announcement`] has the frames
//! that tell the hosts of a network at once.
//!
//! All functions act in the calling thread's network namespace, the host's.

mod announcement;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

use fairlead_netlink::route::{
    LinkLayer, MacAddress, Proxy, Route, RouteKind, RouteSocket, add_proxy, delete_proxy,
};
use fairlead_netlink::{Message, Result};
use ipnet::IpNet;

use crate::routes::{self, LOOPBACK_INDEX, SOURCE_METRIC, ensure_rules, is_source, pod_rules, sync_some};
use crate::routing_ids::RoutingIds;
use crate::uplink::{HostNetwork, Ignored, answer_for_neighbours, has_ipv6};

pub use announcement::{announce, announcement};
pub use fairlead_api::source_address::Source;

/// A link of this node to a network of other hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    /// Index of the link.
    pub link: u32,
    /// Name of the link.
    pub name: String,
    /// Link-layer address of the link.
    pub mac: MacAddress,
    /// An IPv6 address of the link alone, which it has.
    pub link_local: Option<Ipv6Addr>,
}

/// State of source addresses in the kernel.
#[derive(Debug, Clone, Default)]
pub struct Found {
    host: HostNetwork,
    /// Routes of the table of pods.
    routes: Vec<Route>,
    /// Routes of the export table.
    exported: Vec<Route>,
    /// Proxy entries of this program, and of others.
    proxies: Vec<Proxy>,
    protocol: u8,
    ignored: Ignored,
}

impl Found {
    /// Reads it. Links and networks that are `ignored` are no uplinks.
    ///
    /// # Errors
    /// The kernel refuses, or its answer cannot be decoded.
    pub fn read(ids: RoutingIds, ignored: Ignored) -> Result<Self> {
        let host = HostNetwork::read()?;
        let mut socket = RouteSocket::open()?;
        Ok(Self {
            host,
            routes: socket.routes(ids.table_pods())?,
            exported: socket.routes(ids.table_export())?,
            proxies: socket.proxies()?,
            protocol: ids.protocol(),
            ignored,
        })
    }

    /// The source addresses of which anything is there. Routes to a pod vanish with its link, the others do not.
    pub fn addresses(&self) -> BTreeSet<IpAddr> {
        let routes = self.routes.iter().chain(&self.exported).filter(|route| is_source(route));
        let proxies = self.proxies.iter().filter(|proxy| proxy.protocol == self.protocol);
        let routed = routes.map(|route| route.destination.addr());
        routed.chain(proxies.map(|proxy| proxy.address)).collect()
    }

    /// The link of a pod of this node: a route leads to its address there, without another router.
    pub fn link_of(&self, pod: IpAddr) -> Option<u32> {
        let is_direct = |route: &&Route| {
            route.destination == IpNet::from(pod)
                && route.kind == RouteKind::UNICAST
                && route.gateway.is_none()
                && !is_source(route)
        };
        let links = self.routes.iter().chain(&self.host.routes).filter(is_direct).filter_map(|it| it.link);
        links
            .filter(|link| *link != LOOPBACK_INDEX)
            .find(|link| self.host.links.iter().any(|it| it.index == *link))
    }

    /// Whether this host has the address itself.
    pub fn has(&self, address: IpAddr) -> bool {
        self.host.addresses.iter().any(|own| own.prefix.addr() == address)
    }

    /// The links on whose network the address is.
    pub fn uplinks(&self, address: IpAddr) -> Vec<Uplink> {
        let around = self.host.own_addresses(&self.ignored).filter(|own| {
            own.prefix.prefix_len() < own.prefix.max_prefix_len() && own.prefix.contains(&address)
        });
        let links: BTreeSet<u32> = around.map(|own| own.link).collect();
        let uplink = |index: u32| {
            let link = self.host.links.iter().find(|link| link.index == index)?;
            let mac = link.mac.filter(|_| link.layer == LinkLayer::Ethernet)?;
            Some(Uplink { link: index, name: link.name.clone(), mac, link_local: self.link_local(index) })
        };
        links.into_iter().filter_map(uplink).collect()
    }

    fn link_local(&self, link: u32) -> Option<Ipv6Addr> {
        self.host.addresses.iter().filter(|own| own.link == link).find_map(|own| match own.prefix.addr() {
            IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            _ => None,
        })
    }
}

/// Brings routes and entries to exactly those of `sources`, and returns what was done, one text for each operation. Nothing is sent when
/// nothing differs. What there is of the addresses in `kept` stays as it is. `found` is what was read just before.
///
/// # Errors
/// The first refusal, after everything else has been tried.
pub fn sync(
    ids: RoutingIds,
    sources: &[Source],
    kept: &BTreeSet<IpAddr>,
    found: &Found,
) -> Result<Vec<String>> {
    let is_usable = |source: &&Source| source.address.is_ipv4() || has_ipv6();
    let sources: Vec<Source> = sources.iter().filter(is_usable).copied().collect();
    let mut done = Vec::new();
    // The answers come last, and go first: packets find a route.
    let (added, gone) = proxy_changes(ids, &sources, kept, found);
    let removed = send(gone, &mut done);
    let routed = set_routes(ids, &sources, kept, &mut done);
    for uplink in sources.iter().filter(|it| it.address.is_ipv6()).flat_map(|it| found.uplinks(it.address)) {
        match answer_for_neighbours(&uplink.name) {
            Ok(true) => done.push(format!("set proxy_ndp of {}", uplink.name)),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, "hosts beside this node find no IPv6 source address of egress gateways")
            }
        }
    }
    // Without routes, packets are not to come here: the holder of before may still serve them.
    let answered = if routed.is_ok() { send(added, &mut done) } else { Ok(()) };
    removed.and(routed).and(answered).map(|()| done)
}

fn set_routes(
    ids: RoutingIds,
    sources: &[Source],
    kept: &BTreeSet<IpAddr>,
    done: &mut Vec<String>,
) -> Result<()> {
    if !sources.is_empty() {
        let rules = ensure_rules(&pod_rules(ids))?;
        done.extend(rules.add.iter().map(|rule| format!("add {rule}")));
    }
    let to_pod = |source: &Source| Route {
        metric: SOURCE_METRIC,
        onlink: true,
        ..Route::via(ids.table_pods(), ids.protocol(), source.address.into(), source.pod, source.link)
    };
    let exported = |source: &Source| Route {
        metric: SOURCE_METRIC,
        ..Route::onto(ids.table_export(), ids.protocol(), source.address.into(), LOOPBACK_INDEX)
    };
    let concerns = |route: &Route| is_source(route) && !kept.contains(&route.destination.addr());
    let to_pods: Vec<Route> = sources.iter().map(to_pod).collect();
    let exports: Vec<Route> = sources.iter().map(exported).collect();
    let mut outcome = Ok(());
    for (table, routes) in [(ids.table_pods(), to_pods), (ids.table_export(), exports)] {
        match sync_some(table, ids.protocol(), &routes, concerns) {
            Ok(routes::Difference { add, replace, delete, .. }) => {
                done.extend(add.iter().chain(&replace).map(|route| format!("set {route}")));
                done.extend(delete.iter().map(|route| format!("delete {route}")));
            }
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    outcome
}

/// Messages that add entries, and that delete ours which are not wanted.
fn proxy_changes(
    ids: RoutingIds,
    sources: &[Source],
    kept: &BTreeSet<IpAddr>,
    found: &Found,
) -> (Vec<Message>, Vec<Message>) {
    let on_uplinks = |source: &Source| {
        let address = source.address;
        let protocol = ids.protocol();
        found.uplinks(address).into_iter().map(move |uplink| Proxy { address, link: uplink.link, protocol })
    };
    let wanted: BTreeSet<Proxy> = sources.iter().flat_map(on_uplinks).collect();
    // An entry of another program answers as well.
    let is_there =
        |proxy: &Proxy| found.proxies.iter().any(|it| (it.address, it.link) == (proxy.address, proxy.link));
    let added = wanted.iter().filter(|proxy| !is_there(proxy)).map(add_proxy).collect();
    let is_stale = |proxy: &&Proxy| {
        proxy.protocol == ids.protocol() && !wanted.contains(proxy) && !kept.contains(&proxy.address)
    };
    (added, found.proxies.iter().filter(is_stale).map(delete_proxy).collect())
}

/// Sends messages, and returns the first refusal that is none of something that is gone.
fn send(messages: Vec<Message>, done: &mut Vec<String>) -> Result<()> {
    if messages.is_empty() {
        return Ok(());
    }
    let mut outcome = Ok(());
    for (message, sent) in messages.iter().zip(RouteSocket::open()?.apply_each(&messages)?) {
        match sent {
            Ok(()) => done.push(message.what.clone()),
            Err(error) if error.is_missing() => {}
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    outcome
}

/// Removes all of it.
///
/// # Errors
/// The first refusal, after everything else has been tried.
pub fn remove_all(ids: RoutingIds) -> Result<()> {
    let found = Found::read(ids, Ignored::default())?;
    sync(ids, &[], &BTreeSet::new(), &found).map(drop)
}

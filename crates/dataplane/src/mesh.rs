//! The way of packets into the mesh: an nftables table that marks them, rules that look the mark up, and a routing
//! table with the mesh device as default. Behind it stands an `unreachable` default: while the device is down or missing,
//! marked packets are dropped and never follow the main table in clear text. Where the host has no default route, the table also has
//! routes to the targets, for the lookup before packets of this host are marked ([`mesh_rules`]). Packets that are not marked are kept in the
//! mesh by [`guard_routes`].
//!
//! The table that should be is computed in `table`, which is pure; [`Applier`] reads the kernel's state and sends what differs.
//! Only bits of `MARK_MASK` are ever changed; the others belong to other programs.
//!
//! All of this may be gone, or rules of other programs may come first. So a second table, `guard`, which needs neither marks nor rules, drops
//! what is for a target and leaves by another device.

use std::net::IpAddr;
use std::time::{Instant, SystemTime};

use fairlead_address::IntervalSet;
use fairlead_api::names;
use fairlead_netlink::route::{
    Address, AddressFlags, IpFamily, Link, Route, RouteKind, RouteSocket, Scope, add_address, delete_address,
    delete_link, delete_route, delete_rule, set_mtu, set_up,
};
use fairlead_netlink::{Error, Result};
use ipnet::IpNet;

use crate::forwarding::{ForwardRules, Forwarding};
use crate::nft_table::{self, Applied, Keeper};
use crate::routes::{self, ensure_rules, mesh_rules, sync_table};
use crate::uplink::{accept_ipv6, has_ipv6, relax_reverse_path_filter};

mod arriving;
mod changes;
mod control_plane;
mod foreign;
mod foreign_packets;
mod foreign_rules;
mod guard;
mod guard_routes;
pub mod numbers;
pub mod sources;
mod state;
mod table;

pub use changes::concerns;
pub use foreign::Foreign;
use foreign_packets::ForeignPacketRules;
pub use foreign_packets::{ForeignPacketRule, Harm};
pub use foreign_rules::ForeignRule;
use foreign_rules::ForeignRules;
use guard::Guard;
pub use guard::{GuardProblem, Guarded};
pub use state::{Bypass, ControlPlane, MeshState, NarrowRoute, OwnSource, PlainRoute};
use state::{narrow_route, plain_route};
use table::table;

/// Leads packets to the other nodes into the mesh. The nftables table can hold a hundred thousand elements: it is read only
/// after other programs have changed any table of the kernel.
#[derive(Debug, Default)]
pub struct Applier {
    /// State that the table was last made from, and whether the table marks forwarded packets.
    done: Option<(MeshState, bool)>,
    table: Keeper,
    guard: Guard,
    foreign_rules: ForeignRules,
    foreign_packets: ForeignPacketRules,
    forward_rules: ForwardRules,
    forwarding: Forwarding,
    /// Addresses that the device was given last.
    addresses: Vec<IpNet>,
    /// Routing table of this node's pods.
    pods: Option<u32>,
}

impl Applier {
    /// One for a node that has routes to its pods in this table.
    pub fn beside_pods(table: u32) -> Self {
        Self { pods: Some(table), ..Self::default() }
    }

    /// Makes packets to the other nodes enter the mesh, and brings the device up; sends nothing when everything is in place.
    ///
    /// # Errors
    /// The device is missing, or the kernel refuses a message. Whatever does not depend on the refused message is done all
    /// the same: without the device, packets to the other nodes are dropped.
    pub fn apply(&mut self, state: &MeshState) -> Result<Applied> {
        self.apply_at(state, Instant::now())
    }

    /// Does what [`Self::apply`] does, at this time: some problems are told once they have lasted.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn apply_at(&mut self, state: &MeshState, now: Instant) -> Result<Applied> {
        // What is no target any more leaves the guard first, and what is one now enters it last: else it would drop packets on their way past
        // the mesh.
        let released = self.guard.release(state);
        self.table.follow(self.guard.keeper());
        if is_down(&state.interface) {
            // As soon as the device is up, packets come by the tunnel, also for pods that are not there. What is refused here is tried again, and
            // reported, below.
            drop(guard_routes::apply(None, state, self.pods));
            drop(self.guard.apply(state));
        }
        let device = ready_device(state, &self.addresses);
        self.addresses.clone_from(&state.addresses);
        // The way first, then what leads packets there.
        let routes = sync_table(
            names::TABLE_MESH,
            names::ROUTE_PROTOCOL,
            &routes(device.as_ref().ok().copied(), state),
        );
        let rules = ensure_rules(&mesh_rules());
        self.forward_rules.set_mesh_device(&state.interface);
        let accepted = accept_uplink_sources(&state.uplinks);
        let held = guard_routes::apply(device.as_ref().ok().copied(), state, self.pods);
        self.forwarding = self.forward_rules.apply(now);
        let applied = self.apply_table(state);
        self.guard.follow(&self.table);
        let guarded = self.guard.apply(state);
        let foreign = self.look_for_foreign_rules(state);
        self.foreign_packets.observe(state, SystemTime::now());
        self.table.follow(self.guard.keeper());
        let applied = applied?;
        device?;
        routes?;
        rules?;
        released?;
        guarded?;
        foreign?;
        accepted?;
        held?;
        Ok(applied)
    }

    /// Rules of other programs that work against the mesh, as of the last [`Self::apply`].
    pub fn foreign(&self) -> Vec<Foreign> {
        let routing = self.foreign_rules.found().iter().cloned().map(|rule| Foreign::Routing(Box::new(rule)));
        let packets = self.foreign_packets.found().iter().cloned();
        routing.chain(packets.map(|rule| Foreign::Packets(Box::new(rule)))).collect()
    }

    /// Packets that the guard has dropped, as of the last [`Self::apply`].
    pub fn guarded(&self) -> &Guarded {
        self.guard.guarded()
    }

    /// Findings about forwarded packets in firewalls of other programs, as of the last [`Self::apply`].
    pub fn forwarding(&self) -> &Forwarding {
        &self.forwarding
    }

    /// Number of times that the nftables table was read.
    pub fn table_reads(&self) -> usize {
        self.table.reads()
    }

    fn look_for_foreign_rules(&mut self, state: &MeshState) -> Result<()> {
        let own = state.bypass.own.iter().collect();
        let targets = state.targets_v4.iter().chain(&state.targets_v6).collect();
        let counted = (self.guard.guarded().packets, SystemTime::now());
        self.foreign_rules.observe(&state.interface, &own, &targets, counted)
    }

    fn apply_table(&mut self, state: &MeshState) -> Result<Applied> {
        let marks = self.forwarding.is_dropped;
        let done = self.done.take();
        if done.as_ref().is_some_and(|(done, marked)| (done, *marked) == (state, marks))
            && self.table.is_in_place()?
        {
            self.done = done;
            return Ok(Applied::Unchanged);
        }
        let applied = self.table.apply(&table(state, marks))?;
        self.done = Some((state.clone(), marks));
        Ok(applied)
    }
}

/// Makes the kernel refuse packets to prefixes until [`Applier::apply`] leads them into the mesh: after a reboot it has nothing of that, and they
/// would leave in clear text. Changes nothing where routes of the mesh are there already, or another program has the same [`numbers`].
/// `wanted` finds the prefixes and the name of our device, `None` for nothing; it is asked only where no route of the mesh is there. `pods` is the table
/// of this node's pods. Returns whether anything was changed.
///
/// # Errors
/// The kernel refuses a message, or `wanted` fails.
pub fn refuse(wanted: impl FnOnce() -> Result<Option<(Vec<IpNet>, String)>>, pods: u32) -> Result<bool> {
    let mut socket = RouteSocket::open()?;
    if !own_routes(&mut socket)?.is_empty() || guard_routes::are_there(&mut socket)? {
        return Ok(false);
    }
    let Some((prefixes, interface)) = wanted()? else { return Ok(false) };
    if prefixes.is_empty() || numbers::taken(&interface)?.is_some() {
        return Ok(false);
    }
    let (targets_v4, targets_v6) = prefixes.into_iter().partition(|prefix| prefix.addr().is_ipv4());
    let state = MeshState { targets_v4, targets_v6, ..MeshState::default() };
    guard_routes::refuse(&state, pods).map(|()| true)
}

/// Takes away what [`refuse`] made, where there is no mesh to wait for. Changes nothing where an [`Applier`] has made routes since. Returns whether
/// anything was refused.
///
/// # Errors
/// The kernel refuses a message.
pub fn stop_refusing() -> Result<bool> {
    let mut socket = RouteSocket::open()?;
    if !own_routes(&mut socket)?.is_empty() || !guard_routes::are_there(&mut socket)? {
        return Ok(false);
    }
    guard_routes::remove().map(|()| true)
}

/// Takes everything away that an [`Applier`] made, the device included. Nothing is touched where none made anything, and nothing of another
/// program with the same [`numbers`].
///
/// # Errors
/// The kernel refuses a message. Whatever does not depend on it is done all the same.
pub fn remove() -> Result<()> {
    guard_routes::remove()?;
    let mut socket = RouteSocket::open()?;
    let ours = mesh_rules();
    let rules: Vec<_> = socket.rules()?.into_iter().filter(|rule| ours.contains(rule)).collect();
    let routes = own_routes(&mut socket)?;
    // It would drop what leaves past the mesh from now on.
    nft_table::remove(names::NFT_TABLE_GUARD)?;
    if rules.is_empty() && routes.is_empty() {
        return Ok(());
    }
    let is_taken = numbers::taken("")?.is_some();
    // In the opposite order: nothing is marked before the way is gone. The routes come last, because they are the record of
    // what is still to be removed.
    let table =
        if is_taken && !numbers::is_table_ours()? { Ok(()) } else { nft_table::remove(names::NFT_TABLE) };
    let table = table.and(nft_table::remove(names::NFT_TABLE_PATH_SOCKET));
    let rules = socket.apply(&rules.iter().map(delete_rule).collect::<Vec<_>>());
    let device = remove_device();
    table?;
    rules?;
    device?;
    if is_taken {
        let routes = own_routes(&mut socket)?;
        return socket.apply(&routes.iter().map(delete_route).collect::<Vec<_>>());
    }
    sync_table(names::TABLE_MESH, names::ROUTE_PROTOCOL, &[]).map(drop)
}

/// Name of the device that [`Applier::apply`] led packets into last; `None` if there is none.
///
/// # Errors
/// The kernel cannot be asked.
pub fn device() -> Result<Option<String>> {
    let mut socket = RouteSocket::open()?;
    let routes = own_routes(&mut socket)?;
    Ok(device_of(&mut socket, &routes)?.map(|link| link.name))
}

/// Removes that device. Packets to the other nodes are dropped until [`Applier::apply`] leads them into another.
///
/// # Errors
/// The kernel refuses.
pub fn remove_device() -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let routes = own_routes(&mut socket)?;
    match device_of(&mut socket, &routes)? {
        Some(link) => socket.apply(&[delete_link(link.index)]),
        None => Ok(()),
    }
}

/// To the kernel, packets of other nodes that come past the mesh have sources that it would answer through the device.
fn accept_uplink_sources(links: &[String]) -> Result<()> {
    for link in links {
        relax_reverse_path_filter(link).map_err(|error| Error::Invalid {
            what: format!("accept packets of other nodes on link {link}"),
            reason: error.to_string(),
        })?;
    }
    Ok(())
}

fn own_routes(socket: &mut RouteSocket) -> Result<Vec<Route>> {
    let mut routes = socket.routes(names::TABLE_MESH)?;
    routes.retain(|route| route.protocol == names::ROUTE_PROTOCOL);
    Ok(routes)
}

/// The link the routes lead onto; else, if it is down and has lost them, the tunnel with the address of
/// [`accept_ipv4_sources`].
fn device_of(socket: &mut RouteSocket, routes: &[Route]) -> Result<Option<Link>> {
    // Other routes lead onto links of the host.
    let is_onto_device =
        |route: &&Route| route.kind == RouteKind::UNICAST && route.destination.prefix_len() == 0;
    let onto: Vec<u32> = routes.iter().filter(is_onto_device).filter_map(|it| it.link).collect();
    let links = socket.links()?;
    if let Some(link) = links.iter().find(|link| onto.contains(&link.index)) {
        return Ok(Some(link.clone()));
    }
    let marker: Vec<u32> =
        socket.addresses()?.into_iter().filter(is_marker).map(|address| address.link).collect();
    let is_tunnel = |link: &Link| matches!(link.kind.as_deref(), Some("tun" | "wireguard"));
    Ok(links
        .into_iter()
        .filter(|_| !routes.is_empty())
        .find(|link| is_tunnel(link) && marker.contains(&link.index)))
}

/// Whether there is a link of this name, which is down.
fn is_down(interface: &str) -> bool {
    let link = RouteSocket::open().and_then(|mut socket| socket.link_by_name(interface));
    link.is_ok_and(|link| link.is_some_and(|link| !link.up))
}

/// The device, up, with its MTU, an IPv4 address and those of the mesh, of which it had `before`.
fn ready_device(state: &MeshState, before: &[IpNet]) -> Result<u32> {
    let mut socket = RouteSocket::open()?;
    let link = socket.link_by_name(&state.interface)?.ok_or_else(|| Error::Invalid {
        what: format!("lead packets into mesh device {}", state.interface),
        reason: "there is no such link; open the WireGuard device first".to_owned(),
    })?;
    let mut messages = Vec::new();
    if link.mtu != state.mtu {
        messages.push(set_mtu(link.index, state.mtu));
    }
    if !link.up {
        messages.push(set_up(link.index, true));
    }
    socket.apply(&messages)?;
    accept_ipv4_sources(&mut socket, link.index)?;
    sync_addresses(&mut socket, &link, &state.addresses, before)?;
    Ok(link.index)
}

/// Gives the device the node's addresses on the mesh, and takes away those that it had before, also from an earlier program.
fn sync_addresses(socket: &mut RouteSocket, link: &Link, wanted: &[IpNet], before: &[IpNet]) -> Result<()> {
    let has_ipv6 = has_ipv6();
    let wanted: Vec<IpNet> = wanted.iter().copied().filter(|it| has_ipv6 || it.addr().is_ipv4()).collect();
    let mut present = socket.addresses_on(link.index)?;
    present.retain(|address| address.scope == Scope::UNIVERSE);
    let is_ours = |prefix: &IpNet| before.contains(prefix) || is_kubespan_address(prefix);
    let excess = present.iter().filter(|it| is_ours(&it.prefix) && !wanted.contains(&it.prefix));
    let excess = excess.map(delete_address);
    let is_missing = |prefix: &&IpNet| !present.iter().any(|address| address.prefix == **prefix);
    let missing: Vec<&IpNet> = wanted.iter().filter(is_missing).collect();
    if missing.iter().any(|prefix| prefix.addr().is_ipv6())
        && let Err(error) = accept_ipv6(&link.name)
    {
        tracing::warn!(interface = link.name, %error, "cannot enable IPv6 on the mesh device");
    }
    // Tunnels have no neighbours that could have the same address.
    let address = |prefix: &IpNet| {
        let flags = if prefix.addr().is_ipv6() { AddressFlags::NODAD } else { AddressFlags::default() };
        add_address(&Address { link: link.index, prefix: *prefix, scope: Scope::UNIVERSE, flags })
    };
    let messages: Vec<_> = excess.chain(missing.into_iter().map(address)).collect();
    if messages.is_empty() { Ok(()) } else { socket.apply(&messages) }
}

/// Gives the device an IPv4 address that is always there. With reverse path filtering on, even when loose, the kernel drops
/// all IPv4 that arrives on a device without one (`__fib_validate_source`, `no_addr`). It is the pods' gateway address
/// with scope host, which is never chosen as the source of a packet.
fn accept_ipv4_sources(socket: &mut RouteSocket, link: u32) -> Result<()> {
    if socket.addresses_on(link)?.iter().any(is_marker) {
        return Ok(());
    }
    let gateway = IpNet::from(IpAddr::from(names::POD_GATEWAY_IPV4));
    let address = Address { link, prefix: gateway, scope: Scope::HOST, flags: AddressFlags::default() };
    socket.apply(&[add_address(&address)])
}

/// Whether it is in a subnet of the form that KubeSpan derives.
fn is_kubespan_address(prefix: &IpNet) -> bool {
    match prefix {
        IpNet::V4(_) => false,
        IpNet::V6(it) => {
            matches!(it.addr().octets(), [0xfd, _, _, _, _, _, _, 2, ..]) && it.prefix_len() == 64
        }
    }
}

fn is_marker(address: &Address) -> bool {
    address.prefix.addr() == IpAddr::from(names::POD_GATEWAY_IPV4) && address.scope == Scope::HOST
}

/// The routes of `TABLE_MESH`: what is plain, what is narrow, everything else into the device, and behind that nowhere.
fn routes(device: Option<u32>, state: &MeshState) -> Vec<Route> {
    let MeshState { plain, narrow, without_default, .. } = state;
    let has_ipv6 = has_ipv6();
    let is_usable = |destination: &IpNet| has_ipv6 || destination.addr().is_ipv4();
    let narrow = narrow.iter().filter(|route| is_usable(&route.destination));
    let narrow =
        device.into_iter().flat_map(|link| narrow.clone().filter_map(move |it| narrow_route(it, link)));
    let plain = plain.iter().filter(|route| is_usable(&route.destination)).map(plain_route);
    let unrouted = without_default.iter().filter(|family| has_ipv6 || **family == IpFamily::V4);
    let targets =
        device.into_iter().flat_map(|link| unrouted.clone().flat_map(move |it| to_targets(*it, state, link)));
    let families = IpFamily::BOTH.into_iter().filter(|family| has_ipv6 || *family == IpFamily::V4);
    let into_mesh = families.flat_map(|family| {
        let table = names::TABLE_MESH;
        let protocol = names::ROUTE_PROTOCOL;
        let everything = family.everything();
        let onto = |link| Route::onto(table, protocol, everything, link);
        let unreachable = routes::unreachable(table, protocol, everything);
        device.map(onto).into_iter().chain([unreachable])
    });
    // Of routes to one prefix the first counts.
    plain.chain(narrow).chain(targets).chain(into_mesh).collect()
}

/// As few routes as cover the targets. None is longer than a plain or narrow one inside of it, since those are to targets as well.
fn to_targets(family: IpFamily, state: &MeshState, link: u32) -> Vec<Route> {
    let targets = state.targets_v4.iter().chain(&state.targets_v6);
    let prefixes = IntervalSet::from_prefixes(family, targets).prefixes();
    // The rule passes over routes to everything.
    let halves =
        |prefix: &IpNet| prefix.subnets(prefix.prefix_len().max(1)).into_iter().flatten().collect::<Vec<_>>();
    let onto = |prefix| Route::onto(names::TABLE_MESH, names::ROUTE_PROTOCOL, prefix, link);
    prefixes.iter().flat_map(halves).map(onto).collect()
}

//! What leads packets into the mesh: an nftables table that marks them, a rule that looks the mark up, and a routing
//! table with the mesh device as default.
//!
//! [`table()`] and [`plan`] are pure: what should be, and the messages from what is to what should be. [`apply`]
//! asks the kernel, plans and sends. Only bits of `MARK_MASK` are ever changed; the others belong to other programs.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use fairlead_address::IntervalSet;
use fairlead_api::names;
use fairlead_netlink::nftables::{self, Table, TableState};
use fairlead_netlink::route::{
    Address, AddressFlags, IpFamily, Route, RouteSocket, Scope, add_address, delete_rule,
};
use fairlead_netlink::{Error, Family, Message, Result, Socket};
use ipnet::IpNet;

use crate::routes::{ensure_rules, mesh_rules, sync_table};

mod table;

pub use table::table;

/// What the mesh is to carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshState {
    /// Name of the WireGuard device; it has to be there and up.
    pub interface: String,
    /// MTU of that device in bytes.
    pub mtu: u32,
    /// IPv4 prefixes of the other nodes, in any order; they may overlap.
    pub targets_v4: Vec<IpNet>,
    /// IPv6 prefixes of the other nodes, in any order; they may overlap.
    pub targets_v6: Vec<IpNet>,
    /// What goes past the mesh although its destination is a target.
    pub bypass: Bypass,
}

/// Connections between nodes and the API server go past the mesh, in both directions, or a tunnel that is down would cut
/// nodes off from the very thing that could mend it: their peers, and the pod that is to run here next. Connections of
/// pods do not: only the mesh leads back to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bypass {
    /// TCP endpoints of the API server, on this node or elsewhere.
    pub servers: Vec<SocketAddr>,
    /// The other nodes' own addresses.
    pub nodes: Vec<IpAddr>,
}

/// What [`apply`] had to do to the nftables table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// Unchanged; nothing was sent.
    Unchanged,
    /// Only elements of the sets differed.
    Elements {
        /// Intervals deleted.
        deleted: usize,
        /// Intervals added.
        added: usize,
    },
    /// It was missing, damaged or made by another version, and was replaced in one step.
    Rebuilt,
}

/// Makes packets to the other nodes enter the mesh; sends nothing when everything is in place.
///
/// # Errors
/// The device is missing, or the kernel refuses a message. Whatever does not depend on the refused message is done all
/// the same.
pub fn apply(state: &MeshState) -> Result<Applied> {
    let defaults = default_routes(&state.interface)?;
    let address = accept_ipv4_sources(&state.interface);
    // The way first, then what leads packets there.
    let routes = sync_table(names::TABLE_MESH, names::ROUTE_PROTOCOL, &defaults);
    let rules = ensure_rules(&mesh_rules());
    let applied = apply_table(state)?;
    address?;
    routes?;
    rules?;
    Ok(applied)
}

/// Takes everything away that [`apply`] made. The device is not touched; it keeps its address.
///
/// # Errors
/// The kernel refuses a message. Whatever does not depend on it is done all the same.
pub fn remove() -> Result<()> {
    // In the opposite order: nothing is marked before the way is gone.
    let table = remove_table();
    let rules = remove_rules();
    let routes = sync_table(names::TABLE_MESH, names::ROUTE_PROTOCOL, &[]);
    table?;
    rules?;
    routes.map(drop)
}

/// Gives the device an IPv4 address if it has none. With reverse path filtering on, even when loose, the kernel drops
/// all IPv4 that arrives on a device without one (`__fib_validate_source`, `no_addr`). It is the pods' gateway address
/// with scope host, which is never chosen as the source of a packet.
fn accept_ipv4_sources(interface: &str) -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let Some(link) = socket.link_by_name(interface)? else { return Ok(()) };
    if socket.addresses_on(link.index)?.iter().any(|address| address.prefix.addr().is_ipv4()) {
        return Ok(());
    }
    let gateway = IpNet::from(IpAddr::from(names::POD_GATEWAY_IPV4));
    let address =
        Address { link: link.index, prefix: gateway, scope: Scope::HOST, flags: AddressFlags::default() };
    socket.apply(&[add_address(&address)])
}

/// The routes of `TABLE_MESH`: everything into the device.
fn default_routes(interface: &str) -> Result<Vec<Route>> {
    let link = RouteSocket::open()?.link_by_name(interface)?.ok_or_else(|| Error::Invalid {
        what: format!("lead packets into mesh device {interface}"),
        reason: "there is no such link; open the WireGuard device first".to_owned(),
    })?;
    let has_ipv6 = Path::new("/proc/sys/net/ipv6").exists();
    let families = IpFamily::BOTH.into_iter().filter(|family| has_ipv6 || *family == IpFamily::V4);
    let route = |family: IpFamily| {
        Route::onto(names::TABLE_MESH, names::ROUTE_PROTOCOL, family.everything(), link.index)
    };
    Ok(families.map(route).collect())
}

fn remove_table() -> Result<()> {
    let mut socket = Socket::open(Family::Netfilter)?;
    match nftables::read(&mut socket, names::NFT_TABLE)? {
        Some(_) => nftables::commit(&mut socket, &nftables::delete(names::NFT_TABLE)?),
        None => Ok(()),
    }
}

fn remove_rules() -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let ours = mesh_rules();
    let present = socket.rules()?;
    let messages: Vec<_> = present.iter().filter(|rule| ours.contains(rule)).map(delete_rule).collect();
    socket.apply(&messages)
}

/// Brings the marks to what they should be: only elements that differ if the table is whole, else all of it at once.
///
/// # Errors
/// The kernel refuses a message; then nothing was changed.
fn apply_table(state: &MeshState) -> Result<Applied> {
    let mut socket = Socket::open(Family::Netfilter)?;
    let wanted = table(state);
    let present = nftables::read(&mut socket, &wanted.name)?;
    let (applied, messages) = plan(&wanted, present.as_ref())?;
    match nftables::commit(&mut socket, &messages) {
        // Another process changed the table after we read it; the transaction was rolled back, so start over.
        Err(error @ Error::Refused { .. }) if applied != Applied::Rebuilt => {
            tracing::warn!(table = wanted.name, %error, "cannot update the mesh table, replacing it");
            nftables::commit(&mut socket, &nftables::create(&wanted)?)?;
            Ok(Applied::Rebuilt)
        }
        outcome => outcome.map(|()| applied),
    }
}

/// The messages that turn the present table into the desired one.
///
/// # Errors
/// Names too long for a message.
pub fn plan(wanted: &Table, present: Option<&TableState>) -> Result<(Applied, Vec<Message>)> {
    let Some(present) = present.filter(|present| present.shape == wanted.shape()) else {
        return Ok((Applied::Rebuilt, nftables::create(wanted)?));
    };
    let (mut messages, mut deleted, mut added) = (Vec::new(), 0usize, 0usize);
    for (name, elements) in &wanted.sets {
        let held = present.sets.get(name).cloned().unwrap_or_else(|| IntervalSet::empty(elements.family()));
        deleted = deleted.saturating_add(held.not_in(elements).len());
        added = added.saturating_add(elements.not_in(&held).len());
        messages.extend(nftables::change_elements(&wanted.name, name, &held, elements)?);
    }
    let applied = if messages.is_empty() { Applied::Unchanged } else { Applied::Elements { deleted, added } };
    Ok((applied, messages))
}

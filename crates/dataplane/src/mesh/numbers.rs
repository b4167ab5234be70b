//! Whether another program uses the numbers of the mesh on this host: marks, the routing table and the names in nftables are those of
//! KubeSpan. Two programs with the same numbers lead the packets of both into one device, and undo each other's changes.
//!
//! Routes and rules of Fairlead, also of an earlier version, have its protocol number, and its device is where its default route
//! in the table leads. An nftables table of the name and a rule prove nothing: KubeSpan that was switched off
//! may have left them, and administrators have rules for marks too.

use fairlead_api::names::{KUBESPAN_INTERFACE, NFT_SET_OWN_IPV4, NFT_TABLE, ROUTE_PROTOCOL, TABLE_MESH};
use fairlead_netlink::nftables;
use fairlead_netlink::route::{Link, Route, RouteSocket};
use fairlead_netlink::{Family, Result, Socket, wireguard};

/// Reports in a sentence for users what another program has in the way; `None` if the numbers are free or ours. `interface` is our device.
///
/// # Errors
/// The kernel cannot be asked.
pub fn taken(interface: &str) -> Result<Option<String>> {
    let mut socket = RouteSocket::open()?;
    let device = socket.link_by_name(KUBESPAN_INTERFACE)?;
    Ok(evidence(interface, device.as_ref(), &socket.routes(TABLE_MESH)?))
}

/// As [`taken`].
fn evidence(interface: &str, device: Option<&Link>, routes: &[Route]) -> Option<String> {
    let (ours, others): (Vec<&Route>, Vec<&Route>) = routes
        .iter()
        .filter(|route| route.destination.prefix_len() == 0)
        .partition(|route| route.protocol == ROUTE_PROTOCOL);
    if let Some(route) = others.first() {
        let protocol = route.protocol;
        return Some(format!(
            "another program (route protocol {protocol}) has a default route in table {TABLE_MESH}"
        ));
    }
    let is_tunnel = |link: &&Link| matches!(link.kind.as_deref(), Some(wireguard::KIND | "tun"));
    let is_ours = |link: &&Link| link.name == interface || ours.iter().any(|it| it.link == Some(link.index));
    let kubespan = device.filter(is_tunnel).filter(|link| !is_ours(link));
    kubespan.map(|link| format!("the device {} shows that KubeSpan runs here", link.name))
}

/// Whether the nftables table of the mesh is one of ours: KubeSpan has no set of this name.
///
/// # Errors
/// The kernel cannot be asked.
pub(super) fn is_table_ours() -> Result<bool> {
    let table = nftables::read(&mut Socket::open(Family::Netfilter)?, NFT_TABLE)?;
    Ok(table.is_some_and(|table| table.sets.contains_key(NFT_SET_OWN_IPV4)))
}

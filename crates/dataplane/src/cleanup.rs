//! Removes everything of Fairlead from a node's kernel: for a node that leaves the cluster, and when Fairlead is uninstalled.
//! Forwarding stays enabled, as other programs may rely on it.

use fairlead_api::names::{
    NFT_TABLE_GUARD, NFT_TABLE_MASQUERADE, NFT_TABLE_PATH_SOCKET, NFT_TABLE_SOURCE_CHECK,
};
use fairlead_netlink::Result;
use fairlead_netlink::route::{RouteSocket, Rule, delete_link, delete_rule};
use fairlead_netlink::wireguard;
use nix::libc;

use crate::pods::PodAlias;
use crate::routes::{mesh_rules, pod_rules, sync_export, sync_router, sync_table};
use crate::routing_ids::RoutingIds;
use crate::{encapsulation, forwarding, mesh, nft_table, source_addresses};

/// Kinds of links that a mesh device can be: the kernel's WireGuard or the embedded one.
const MESH_KINDS: [&str; 2] = [wireguard::KIND, "tun"];

/// Removes links of pods, mesh devices of these names, rules, routes and nftables tables. What does not exist is no error, so
/// it may be repeated. Running pods lose their network.
///
/// # Errors
/// The first refusal of the kernel, after everything else has been tried.
pub fn remove_all(ids: RoutingIds, mesh_devices: &[String]) -> Result<()> {
    let steps: [&dyn Fn() -> Result<()>; 14] = [
        // It would drop what has lost its way into the mesh.
        &|| nft_table::remove(NFT_TABLE_GUARD),
        // The rules and routes that lead packets, then the links they lead to.
        &mesh::remove,
        &encapsulation::remove_all,
        &forwarding::remove,
        &|| remove_rules(&pod_rules(ids)),
        &|| match mesh::numbers::taken("")? {
            Some(_) => Ok(()),
            None => remove_rules(&mesh_rules()),
        },
        &|| source_addresses::remove_all(ids),
        &|| sync_table(ids.table_pods(), ids.protocol(), &[]).map(drop),
        &|| sync_export(ids, &[]).map(drop),
        &|| sync_router(&[]).map(drop),
        &|| nft_table::remove(NFT_TABLE_SOURCE_CHECK),
        &|| nft_table::remove(NFT_TABLE_MASQUERADE),
        &|| nft_table::remove(NFT_TABLE_PATH_SOCKET),
        &|| remove_links(mesh_devices),
    ];
    let mut outcome = Ok(());
    for step in steps {
        let done = step();
        outcome = outcome.and(done);
    }
    outcome
}

fn remove_rules(ours: &[Rule]) -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let present = socket.rules()?;
    let is_ours = |rule: &&Rule| ours.iter().any(|ours| ours.same_effect(rule));
    let messages: Vec<_> = present.iter().filter(is_ours).map(delete_rule).collect();
    socket.apply(&messages)
}

/// Pods' links have an alias of ours.
fn remove_links(mesh_devices: &[String]) -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let mut links = socket.links_of_kind("veth")?;
    links.retain(|link| link.alias.as_deref().and_then(PodAlias::parse).is_some());
    for name in mesh_devices {
        let device = socket.link_by_name(name)?;
        links.extend(
            device.filter(|link| link.kind.as_deref().is_some_and(|kind| MESH_KINDS.contains(&kind))),
        );
    }
    let mut outcome = Ok(());
    for link in links {
        match socket.apply(&[delete_link(link.index)]) {
            // It was deleted with its pod's namespace.
            Err(error) if error.errno() == Some(libc::ENODEV) => {}
            done => outcome = outcome.and(done),
        }
    }
    outcome
}

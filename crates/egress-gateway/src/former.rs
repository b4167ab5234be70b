//! Connections that an earlier process of this gateway has left with source addresses that are of the Egress no longer: the BPF program at the
//! uplink drops their packets, and no other gateway says that they have ended.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_netlink::Result;
use fairlead_netlink::conntrack::{ConnectionTable, Flow, TableChange};
use fairlead_netlink::route::RouteSocket;
use tokio::sync::watch;

use crate::cluster::SlotAddresses;
use crate::data_path::InPlace;
use crate::registry::store::Store;

/// Deletes them once, when the data path translates to none of their addresses any more. Never ends.
pub(crate) async fn delete(
    store: Arc<Store>,
    slots: watch::Receiver<SlotAddresses>,
    mut in_place: watch::Receiver<InPlace>,
    own: Vec<IpAddr>,
) -> Infallible {
    if in_place.wait_for(|in_place| in_place.version.is_some()).await.is_ok() {
        let slots = slots.borrow().clone();
        let mut usable: BTreeSet<IpAddr> = own.into_iter().collect();
        usable.extend(slots.iter().flat_map(|slots| slots.iter()).flatten());
        let work =
            move || delete_other(usable, |client| store.read(|registry| registry.may_be_client(client)));
        match tokio::task::spawn_blocking(work).await {
            Ok(Ok(0)) => {}
            Ok(Ok(connections)) => {
                tracing::info!(
                    connections,
                    "deleted connections with source addresses that the Egress has no longer"
                );
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot delete connections with source addresses that the Egress has no longer; they stay until they time out");
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    std::future::pending().await
}

fn delete_other(mut usable: BTreeSet<IpAddr>, is_client: impl Fn(IpAddr) -> bool) -> Result<usize> {
    // Another program of the pod may translate to an address of another link.
    usable.extend(RouteSocket::open()?.addresses()?.iter().map(|address| address.prefix.addr()));
    let mut table = ConnectionTable::open()?;
    let is_former =
        |flow: &&Flow| !usable.contains(&flow.reply.destination) && is_client(flow.original.source);
    let flows = table.translated()?;
    let changes: Vec<TableChange> =
        flows.iter().filter(is_former).map(|flow| TableChange::DeleteReply(flow.reply)).collect();
    Ok(table.apply(&changes)?.into_iter().filter(std::result::Result::is_ok).count())
}

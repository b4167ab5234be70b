//! The end of a gateway: its flows go on until none is left or the time is over.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use fairlead_netlink::conntrack;
use futures::{Stream, StreamExt as _};
use tokio::time::{Instant, sleep};

use crate::condition::Conditions;
use crate::data_path::connections;
use crate::registry::Registry;
use crate::registry::store::Store;
use crate::source_addresses::holds::announced::Announced;

/// Interval at which flows are counted.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time that node programs get to follow a source address to another gateway.
const HANDOVER: Duration = Duration::from_secs(2);
/// With more tracked connections than this, there are flows; they are not listed, which would take memory.
const MANY: u64 = 16_384;

/// Tells node programs, then waits until no client has a flow, other gateways hold all source addresses, the time is over or another signal comes.
pub(crate) async fn drain(
    conditions: &Conditions,
    store: &Store,
    announced: &Announced,
    limit: Duration,
    mut signals: impl Stream<Item = ()> + Unpin,
) {
    conditions.drain();
    let mut state = conditions.state();
    let start = Instant::now();
    loop {
        if conditions.now().standby {
            // Node programs send them there as soon as both gateways have said so.
            tokio::select! {
                () = sleep(HANDOVER) => {}
                signal = signals.next() => if signal.is_some() {
                    return tracing::warn!("another signal ends the drain while clients follow the source addresses");
                },
            }
            // It may have been given one just when it was told to end.
            if conditions.now().standby {
                return tracing::info!("flows go on at the gateways that hold the source addresses now");
            }
        }
        let clients = store.read(Registry::addresses);
        let copies = announced.floating().not_held;
        let flows = tokio::task::spawn_blocking(move || flows(&clients, &copies)).await.unwrap_or(None);
        // Node programs may still be sending new flows here: they hear of the drain meanwhile.
        if flows == Some(0) && start.elapsed() >= INTERVAL {
            return tracing::info!(seconds = start.elapsed().as_secs(), "no flow is left");
        }
        if start.elapsed() >= limit {
            return tracing::warn!(
                ?flows,
                seconds = limit.as_secs(),
                "the time of the drain is over; flows are lost"
            );
        }
        tracing::debug!(?flows, "draining");
        tokio::select! {
            () = sleep(INTERVAL) => {}
            // It holds no source address any more, perhaps.
            Ok(()) = state.changed() => {}
            signal = signals.next() => if signal.is_some() {
                return tracing::warn!(?flows, "another signal ends the drain");
            },
        }
    }
}

/// Number of connections that clients have opened, without those translated to one of the addresses `copies`, which another gateway has;
/// `None` if that cannot be said or there are very many.
fn flows(clients: &BTreeSet<IpAddr>, copies: &BTreeSet<IpAddr>) -> Option<usize> {
    if connections().is_none_or(|(count, _)| count > MANY) {
        return None;
    }
    match conntrack::connections_by_source(copies) {
        Ok(found) => {
            Some(found.iter().filter(|(source, _)| clients.contains(source)).map(|(_, count)| count).sum())
        }
        Err(error) => {
            tracing::debug!(%error, "cannot list connections");
            None
        }
    }
}

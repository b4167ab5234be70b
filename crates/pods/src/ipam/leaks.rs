//! Frees addresses whose pod is gone although no DEL came, by what the kernel shows.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fairlead_dataplane::pods;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_ipam::Key;

use super::allocator::Ipam;
use super::metrics::IpamMetrics;
use crate::container_locks::ContainerLocks;

/// Pause between two comparisons of links with addresses.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Time without a link after which an address is freed. An ADD makes its link within seconds of taking its address.
const GRACE: Duration = Duration::from_secs(60);

/// Runs forever.
pub(super) async fn run(ipam: Arc<Ipam>, locks: Arc<ContainerLocks>, metrics: IpamMetrics) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let Some(linked) = links(ipam.numbers()).await else { continue };
        for key in ipam.leaked(GRACE, &linked) {
            if free(&ipam, &locks, &key).await {
                metrics.leaked_address_freed();
            }
        }
    }
}

/// Frees the address if the link is still missing while no CNI operation of the container can run.
async fn free(ipam: &Ipam, locks: &ContainerLocks, key: &Key) -> bool {
    let _guard = locks.lock(&key.container_id).await;
    let gone = links(ipam.numbers()).await.is_some_and(|linked| !linked.contains(key));
    if gone {
        tracing::warn!(
            container = key.container_id,
            ifname = key.ifname,
            "freed an address: its pod's link is gone and no DEL came"
        );
        ipam.release(key);
    }
    gone
}

/// The keys that have a link in the kernel; `None` when it cannot be read.
async fn links(numbers: RoutingIds) -> Option<BTreeSet<Key>> {
    match tokio::task::spawn_blocking(move || pods::list(numbers)).await {
        Ok(Ok(pods)) => Some(
            pods.into_iter().map(|pod| Key { container_id: pod.container_id, ifname: pod.ifname }).collect(),
        ),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot search for leaked addresses");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "the search for leaked addresses stopped before it finished");
            None
        }
    }
}

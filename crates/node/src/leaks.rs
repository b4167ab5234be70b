//! Frees addresses whose pod is gone although no DEL came, by what the kernel shows.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fairlead_dataplane::numbers::Numbers;
use fairlead_dataplane::pods;
use fairlead_ipam::Key;
use fairlead_ipam::leaks::Suspects;

use crate::container_locks::ContainerLocks;
use crate::ipam::Ipam;
use crate::metrics::Metrics;

/// How often links are compared with addresses.
const SWEEP: Duration = Duration::from_secs(30);
/// How long an address must have been without a link. An ADD makes its link within seconds of taking its address.
const GRACE: Duration = Duration::from_secs(60);

/// Looks for ever.
pub async fn run(ipam: Arc<Ipam>, locks: Arc<ContainerLocks>, metrics: Arc<Metrics>) {
    let mut suspects = Suspects::default();
    loop {
        tokio::time::sleep(SWEEP).await;
        let Some(linked) = links(ipam.numbers()).await else { continue };
        for key in ipam.leaked(&mut suspects, GRACE, &linked) {
            if free(&ipam, &locks, &key).await {
                metrics.leaked_address_freed();
            }
        }
    }
}

/// Looks once more while no CNI operation of the container can run.
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

/// Whose links the kernel has; `None` when it cannot be read.
async fn links(numbers: Numbers) -> Option<BTreeSet<Key>> {
    match tokio::task::spawn_blocking(move || pods::list(numbers)).await {
        Ok(Ok(pods)) => Some(
            pods.into_iter().map(|pod| Key { container_id: pod.container_id, ifname: pod.ifname }).collect(),
        ),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot look for leaked addresses");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "the look for leaked addresses stopped half-way");
            None
        }
    }
}

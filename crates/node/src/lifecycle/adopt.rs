//! The pods that run when the program starts, read from the kernel.

use std::path::Path;

use fairlead_dataplane::pods::{self, PodOnNode, Unclear};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::uplink::refuse_advertisements;

use fairlead_pods::cni;
use fairlead_pods::cni::records::Records;

/// Directories in which container runtimes keep files of network namespaces: containerd and CRI-O, Docker.
const NAMESPACES: [&str; 2] = ["/run/netns", "/run/docker/netns"];

/// Pods and blocks that the last program has left.
pub(super) struct Adopted {
    /// Pods with their addresses.
    pub(super) pods: Vec<PodOnNode>,
    /// Pods that may have addresses which are not known, and why.
    pub(super) unclear: Vec<(PodOnNode, Unclear)>,
}

/// Finishes pending DELs, then reads the pods. Addresses whose routes are gone are read from the pods' interfaces.
///
/// # Errors
/// The kernel cannot be read.
pub(super) fn running_pods(records: &Records, ids: RoutingIds) -> pods::Result<Adopted> {
    cni::gc::finish_pending(records);
    let mut found = pods::list(ids)?;
    let moved = pods::gather_routes(ids, &found)?;
    if moved > 0 {
        tracing::info!(routes = moved, table = ids.table_pods(), "moved routes of pods from another table");
        found = pods::list(ids)?;
    }
    for pod in &found {
        // Of pods without IPv6, earlier versions left it as it was.
        if let Err(error) = refuse_advertisements(&pod.host_name) {
            tracing::warn!(link = pod.host_name, %error, "the host accepts router advertisements of a pod");
        }
    }
    let complete: Vec<_> = found.iter().map(|pod| pod.addresses).collect();
    let mut unclear = pods::recover(&mut found, &NAMESPACES.map(Path::new))?;
    for (pod, before) in found.iter().zip(complete).filter(|(pod, before)| pod.addresses != *before) {
        let addresses = pod.addresses.to_string();
        tracing::warn!(link = pod.host_name, addresses, had = %before, "recovered addresses from a pod: its routes were gone");
    }
    // With one address the other is safe too: both are at one place of the pool.
    unclear.retain(|(pod, _)| pod.addresses.is_empty());
    found.retain(|pod| !pod.addresses.is_empty());
    Ok(Adopted { pods: found, unclear })
}

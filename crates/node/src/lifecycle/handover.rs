//! Handing the tunnels of this process to its successor.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fairlead_mesh::apply::reconciler::DeviceSlot;

use super::instance_lock::InstanceLock;

/// Longest time until the successor has tunnels of its own: less than the grace kubelet gives a pod.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The socket at which tunnels inside the process are handed over.
pub(crate) fn socket(state_dir: &Path) -> PathBuf {
    state_dir.join("handover.sock")
}

/// Lets the successor begin; the tunnels of this process live on until the successor has its own.
pub(crate) async fn hand_over(device: DeviceSlot, lock: InstanceLock) {
    let pending = match tokio::task::spawn_blocking(|| device.hand_over()).await {
        Ok(Ok(Some(pending))) => pending,
        Ok(Ok(None)) | Err(_) => return,
        Ok(Err(error)) => {
            return tracing::warn!(%error, "tunnels pause until the successor has its own");
        }
    };
    lock.release();
    match tokio::task::spawn_blocking(|| pending.wait(TIMEOUT)).await {
        Ok(true) => tracing::info!("the successor has taken over"),
        _ => tracing::warn!("no successor took over within {} s", TIMEOUT.as_secs()),
    }
}

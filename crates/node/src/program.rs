//! The node program: what starts, in which order, and in which order it ends.

use std::pin::pin;
use std::time::Duration;

use fairlead_cluster::subsystem::Supervisor;

use crate::lifecycle::instance_lock::InstanceLock;
use crate::lifecycle::settings::{Access, Settings};
use crate::lifecycle::{Node, early_mesh, handover};

/// First no CNI operation comes in, then the mesh leaves its device to the successor; then what works for both ends.
const SHUTDOWN_ORDER: [&str; 10] =
    ["cni", "mesh", "router", "egress", "pod network", "ipam", "events", "http", "caches", "kernel"];

/// Longest time in which one subsystem ends: an ADD waits up to 20 s for a block, and kubelet grants a pod 30 s.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25);

/// Runs the node program until `stop` resolves. The kernel's state stays. While another one serves the socket, it waits for
/// the end of that one.
///
/// # Errors
/// The kernel refuses what every node needs, the socket cannot be made, or a task of a subsystem ends or panics.
pub async fn run(settings: Settings, access: Access, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let mut stop = pin!(stop);
    let mut supervisor = Supervisor::default();
    // Only reads, beside a program that still serves; what follows the lock exists once.
    let node = Node::connect(settings, access, &mut supervisor)?;
    let lock = tokio::select! {
        lock = supervisor.run_until(InstanceLock::acquire(&node.settings.socket)) => lock??,
        () = &mut stop => return Ok(()),
    };
    // After a reboot the kernel has nothing of the mesh, which itself waits for the API server.
    early_mesh::refuse(&node.settings).await;
    node.prepare_kernel().await?;
    let events = node.start_events(&mut supervisor);
    let ipam = node.start_ipam(&events, &mut supervisor).await?;
    let mesh = node.start_mesh(&events, &mut supervisor);
    node.start_pod_network(&ipam, &mesh, &mut supervisor);
    let router = node.start_router(&mut supervisor);
    node.start_http(&ipam, &mut supervisor)?;
    let egress = node.start_egress(&ipam, &events, &mut supervisor);
    node.start_cni(ipam, egress, &mesh, router, events, &mut supervisor).await?;

    let ended = supervisor.run_until(stop).await;

    supervisor.shutdown(&SHUTDOWN_ORDER, SHUTDOWN_TIMEOUT).await;
    node.clear_routes().await;
    if let Some(device) = mesh.into_device().await.filter(|_| lock.has_successor()) {
        handover::hand_over(device, lock).await;
    }
    Ok(ended?)
}

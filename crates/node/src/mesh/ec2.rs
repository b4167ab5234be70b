//! Asks the metadata service of EC2 which public address is translated to this node's own.
//!
//! Elsewhere nothing is asked. What was learned stays while the service does not answer: a wrong address costs peers a few probes.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use fairlead_port_mapping::ec2;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::kernel_watch::KernelChanges;

/// An address can be associated and taken away while the instance runs, which no interface shows.
const INTERVAL: Duration = Duration::from_secs(300);
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Least pause, whatever happens to links and addresses.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Keeps the address current.
pub(super) struct Ec2Task {
    pub(super) kernel: KernelChanges,
    pub(super) found: watch::Sender<Option<Ipv4Addr>>,
}

impl Ec2Task {
    /// Runs until it is dropped.
    pub(super) async fn run(mut self) {
        if !ec2::is_instance(Path::new("/sys")) {
            return std::future::pending().await;
        }
        loop {
            let pause = match ec2::public_ipv4(ec2::SERVICE).await {
                Ok(address) => {
                    let is_news = |known: &mut Option<Ipv4Addr>| std::mem::replace(known, address) != address;
                    if self.found.send_if_modified(is_news) {
                        tracing::info!(?address, "the metadata service of EC2 has another public address");
                    }
                    INTERVAL
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot ask the metadata service of EC2");
                    RETRY_INTERVAL
                }
            };
            sleep(MIN_PAUSE).await;
            tokio::select! {
                () = sleep(pause) => {}
                () = self.kernel.changed() => {}
            }
        }
    }
}

//! Learns the prefixes of this network's NAT64 from its DNS (RFC 7050), while this node has no IPv4 default route.
//!
//! A prefix stays while the resolver does not answer, and while there is an IPv4 route: endpoints through the NAT64 may still be in use.
//! The resolver says for how long its answer holds, but `getaddrinfo` does not.

use std::time::Duration;

use fairlead_address::IPV4_ONLY_NAME;
use fairlead_dataplane::kernel_watch::KernelChanges;
use fairlead_dataplane::uplink::HostNetwork;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::model::nat64::Nat64Answer;

/// Interval at which the resolver is asked, and the pause after a failure.
const INTERVAL: Duration = Duration::from_secs(600);
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Least pause, whatever happens to links and addresses.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Keeps the answer current.
pub(crate) struct Nat64Task {
    pub(crate) kernel: KernelChanges,
    pub(crate) found: watch::Sender<Nat64Answer>,
}

impl Nat64Task {
    /// Runs until it is dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let asks = is_asked_for().await;
            if asks {
                tracing::debug!("asking the resolver for the prefix of a NAT64");
            }
            let pause = if asks { self.ask().await } else { Duration::MAX };
            sleep(MIN_PAUSE).await;
            tokio::select! {
                () = sleep(pause) => {}
                () = self.kernel.changed() => {}
            }
        }
    }

    /// Asks the resolver, and returns the pause before the next question.
    async fn ask(&self) -> Duration {
        // With the last dot no search domain is tried.
        let found = timeout(PATIENCE, lookup_host((format!("{IPV4_ONLY_NAME}."), 0))).await;
        let answer = match found {
            Ok(Ok(found)) => Nat64Answer::read(found.map(|address| address.ip())),
            Ok(Err(error)) => {
                tracing::debug!(%error, "cannot ask the resolver for the prefix of a NAT64");
                return RETRY_INTERVAL;
            }
            Err(_) => return RETRY_INTERVAL,
        };
        self.found.send_if_modified(|known| {
            let differs = *known != answer;
            if differs {
                let prefixes: Vec<String> = answer.prefixes.iter().map(ToString::to_string).collect();
                let refused = answer.refused.len();
                tracing::info!(?prefixes, refused, "the resolver says another NAT64");
                *known = answer;
            }
            differs
        });
        INTERVAL
    }
}

/// Whether this node has a default route for IPv6 and none for IPv4.
async fn is_asked_for() -> bool {
    match tokio::task::spawn_blocking(HostNetwork::read).await {
        Ok(Ok(network)) => network.has_default_route(false) && !network.has_default_route(true),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot read the default routes");
            false
        }
        // The end of this task ends the program.
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

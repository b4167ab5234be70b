//! Learns the prefixes of this network's NAT64 from its DNS (RFC 7050), while this node has no IPv4 default route.
//!
//! What was learned stays while the resolver does not answer, and while there is an IPv4 route: endpoints through the NAT64 may still
//! be in use. The resolver says for how long its answer holds, but `getaddrinfo` does not.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use fairlead_address::{IPV4_ONLY_NAME, InvalidNat64Prefix, Nat64Prefix};
use fairlead_dataplane::kernel_watch::KernelChanges;
use fairlead_dataplane::uplink::HostNetwork;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// How often the resolver is asked, and how soon after a failure.
const INTERVAL: Duration = Duration::from_secs(600);
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// Least pause, whatever happens to links and addresses.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Most addresses of an answer that are read.
const MAX_ANSWERS: usize = 16;

/// What the resolver says of [`IPV4_ONLY_NAME`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nat64Answer {
    /// The prefixes of the NAT64.
    pub prefixes: BTreeSet<Nat64Prefix>,
    /// Addresses that show no prefix, and why.
    pub refused: BTreeMap<Ipv6Addr, InvalidNat64Prefix>,
}

/// Keeps the answer current.
pub(crate) struct Nat64Task {
    pub(crate) kernel: KernelChanges,
    pub(crate) found: watch::Sender<Nat64Answer>,
}

impl Nat64Answer {
    /// Reads the addresses of an answer. Those of IPv4 are what the name has everywhere.
    pub(crate) fn read(addresses: impl Iterator<Item = IpAddr>) -> Self {
        let mut answer = Self::default();
        let ipv6 = addresses.filter_map(|address| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => Some(address),
        });
        for address in ipv6.take(MAX_ANSWERS) {
            match Nat64Prefix::of_answer(address) {
                Ok(prefix) => drop(answer.prefixes.insert(prefix)),
                Err(reason) => drop(answer.refused.insert(address, reason)),
            }
        }
        answer
    }
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

    /// Asks, and says when to ask again.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(addresses: &[&str]) -> Nat64Answer {
        Nat64Answer::read(addresses.iter().map(|text| text.parse().unwrap()))
    }

    #[test]
    fn an_answer_has_each_prefix_once_and_ipv4_says_nothing() {
        let answer = read(&[
            "192.0.0.170",
            "64:ff9b::192.0.0.170",
            "2001:db8:64::192.0.0.171",
            "64:ff9b::192.0.0.171",
            "fe80::192.0.0.170",
        ]);
        let prefixes: Vec<String> = answer.prefixes.iter().map(ToString::to_string).collect();
        assert_eq!(
            (prefixes, answer.refused.len()),
            (vec!["64:ff9b::/96".into(), "2001:db8:64::/96".into()], 1)
        );
        assert_eq!(read(&["192.0.0.170", "192.0.0.171"]), Nat64Answer::default());
    }
}

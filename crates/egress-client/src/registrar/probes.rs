//! Sends ICMP echo requests to the gateways in use, once each [`INTERVAL`].

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use fairlead_tunnel::EchoSockets;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::health::{Changes, EARLY, INTERVAL};
use super::registrations::Registrations;

/// Never ends.
pub(super) async fn run(shared: Arc<Registrations>) {
    let mut sockets = EchoSockets::new(rand::random());
    let exchange = |asking: Option<&_>| match asking {
        Some(asking) => sockets.exchange(asking),
        None => sockets.replies(),
    };
    run_with(shared, exchange).await;
}

/// `exchange` returns who has replied since the last call, and asks these, if any. Without gateways in use it waits for some.
pub(super) async fn run_with(
    shared: Arc<Registrations>,
    mut exchange: impl FnMut(Option<&BTreeSet<IpAddr>>) -> BTreeSet<IpAddr>,
) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let asking = shared.registry().in_use();
        if asking.is_empty() {
            let changes = shared.registry().observe(Instant::now(), &BTreeSet::new(), &asking);
            shared.follow(changes);
            shared.probes.notified().await;
            continue;
        }
        ticks.tick().await;
        let replies = exchange(Some(&asking));
        let changes = shared.registry().observe(Instant::now(), &replies, &asking);
        shared.follow(changes);
        sleep(EARLY).await;
        let replies = exchange(None);
        let changes = shared.registry().observe_early(Instant::now(), &replies);
        shared.follow(changes);
    }
}

impl Registrations {
    fn follow(&self, Changes { down, lost, up }: Changes) {
        for gateway in &down {
            tracing::warn!(%gateway, "the egress gateway answers no echo requests; new flows go to others if there are any");
            self.metrics.failed_over();
        }
        for gateway in &lost {
            tracing::warn!(%gateway, "the egress gateway still answers no echo requests; all flows go to others if there are any");
        }
        for gateway in &up {
            tracing::info!(%gateway, "the egress gateway answers echo requests again");
        }
        self.changed(!down.is_empty() || !lost.is_empty() || !up.is_empty());
    }
}

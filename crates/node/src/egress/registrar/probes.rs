//! Sends ICMP echo requests to the gateways in use, once each [`INTERVAL`].

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use fairlead_tunnel::EchoSockets;
use tokio::time::{MissedTickBehavior, interval};

use super::Shared;
use super::health::{Changes, INTERVAL};

/// Never ends.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut sockets = EchoSockets::new(rand::random());
    run_with(shared, |asking| sockets.exchange(asking)).await;
}

/// `exchange` returns who has replied since the last call, and asks these. Without gateways in use it waits for some.
pub(super) async fn run_with(
    shared: Arc<Shared>,
    mut exchange: impl FnMut(&BTreeSet<IpAddr>) -> BTreeSet<IpAddr>,
) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let asking = shared.registry().in_use();
        if asking.is_empty() {
            shared.observe(&BTreeSet::new(), &asking);
            shared.probes.notified().await;
            continue;
        }
        ticks.tick().await;
        let replies = exchange(&asking);
        shared.observe(&replies, &asking);
    }
}

impl Shared {
    fn observe(&self, replies: &BTreeSet<IpAddr>, asking: &BTreeSet<IpAddr>) {
        let Changes { down, lost, up } = self.registry().observe(Instant::now(), replies, asking);
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

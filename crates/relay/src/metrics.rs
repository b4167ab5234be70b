//! Metrics of a relay, read when they are scraped.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::core::DropReason;
use crate::server::{Observer, Snapshot};

/// Declares `fairlead_relay_*` in the registry of all metrics.
pub fn register(all: &mut Registry, relay: Observer) {
    all.sub_registry_with_prefix("fairlead_relay").register_collector(Box::new(Relay(relay)));
}

#[derive(Debug)]
struct Relay(Observer);

impl Collector for Relay {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = self.0.snapshot();
        for (name, help, value) in counters(&snapshot) {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        for (name, help, value) in [
            ("udp_ports", "UDP ports that are open for pairs of clients.", snapshot.relay_ports),
            ("replicas", "Other replicas that this one is connected to.", snapshot.replicas),
            ("links", "Registered connections of clients.", snapshot.links),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        dropped_datagrams(&mut encoder, &snapshot)?;
        refused_clients(&mut encoder, &snapshot)
    }
}

/// Name, help and value of each counter without labels.
fn counters(snapshot: &Snapshot) -> [(&'static str, &'static str, u64); 11] {
    let Snapshot { counters, forwarding, allocations, stun, connections, .. } = snapshot;
    [
        ("connections", "Connections that were accepted.", *connections),
        ("datagrams", "Datagrams queued for their receiver.", counters.datagrams),
        ("datagram_bytes", "Bytes of datagrams queued for their receiver.", counters.bytes),
        (
            "key_changes",
            "Registrations that replaced a link of another client, or of another run of the same one.",
            counters.key_changes,
        ),
        ("stun_answers", "STUN requests that were answered.", stun.answers),
        ("registrations", "Registrations that were accepted.", counters.registrations),
        ("forwarded_datagrams", "Datagrams queued for another replica.", forwarding.datagrams),
        ("forwarded_datagram_bytes", "Bytes of datagrams queued for another replica.", forwarding.bytes),
        (
            "udp_bindings",
            "Addresses of clients that were bound to UDP ports, also again.",
            allocations.bindings,
        ),
        ("udp_datagram_bytes", "Bytes of datagrams passed on over UDP.", allocations.bytes),
        ("udp_datagrams", "Datagrams passed on over UDP.", allocations.datagrams),
    ]
}

/// Datagrams of clients, other replicas, STUN and UDP ports.
fn dropped_datagrams(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot) -> Result<(), fmt::Error> {
    let drops = snapshot.counters.drops().map(|(reason, count)| (reason.label(), count));
    family(encoder, "dropped_datagrams", "Datagrams that were not passed on, by reason.", drops)?;
    // The rate of a client is limited where it is connected.
    let drops = snapshot.forwarding.drops().filter(|(reason, _)| *reason != DropReason::RateLimited);
    let drops = drops.map(|(reason, count)| (reason.label(), count));
    let help = "Datagrams for and of other replicas that were not passed on, by reason.";
    family(encoder, "dropped_forwarded_datagrams", help, drops)?;
    let help = "STUN requests that were not answered, by reason.";
    let unanswered = snapshot.stun.drops().map(|(reason, count)| (reason.label(), count));
    family(encoder, "dropped_stun_requests", help, unanswered)?;
    let help = "Datagrams at UDP ports for pairs of clients that were not passed on, by reason.";
    let drops = snapshot.allocations.drops().map(|(reason, count)| (reason.label(), count));
    family(encoder, "dropped_udp_datagrams", help, drops)
}

/// UDP ports and connections that clients did not get.
fn refused_clients(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot) -> Result<(), fmt::Error> {
    let help = "UDP ports for pairs of clients that were asked for and refused, by reason.";
    let refusals = snapshot.allocations.refusals().map(|(reason, count)| (reason.label(), count));
    family(encoder, "rejected_udp_ports", help, refusals)?;
    let rejections = snapshot.rejections.iter().map(|(reason, count)| (reason.label(), *count));
    let help = "Connections that ended before they were registered, by reason.";
    family(encoder, "rejected_connections", help, rejections)
}

/// A counter with the label `reason`.
fn family(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl Iterator<Item = (&'static str, u64)>,
) -> Result<(), fmt::Error> {
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (reason, count) in values {
        ConstCounter::new(count).encode(encoder.encode_family(&[("reason", reason)])?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fairlead_keys::PublicKey;
    use testbed_metrics::{Exposed, reference};

    use super::*;
    use crate::access::Authorizer;
    use crate::core::{Admission, Limits};
    use crate::server::{Server, Settings};

    struct NoClients;

    impl Authorizer for NoClients {
        fn admit(&self, _: PublicKey, _: [u8; 8], _: &[u8]) -> Option<Admission> {
            None
        }

        fn is_allowed(&self, _: &Admission) -> bool {
            false
        }

        fn refresh(&self) -> bool {
            false
        }
    }

    /// A scrape in the text format, where the family of a counter has the name of its sample.
    async fn scrape() -> String {
        let settings = Settings {
            listen: "127.0.0.1:0".parse().unwrap(),
            stun: None,
            relay_ports: None,
            certificate: None,
            replicas: None,
            names: vec!["localhost".to_owned()],
            limits: Limits::default(),
            drain: std::time::Duration::ZERO,
        };
        let server = Server::bind(settings, Arc::new(NoClients)).unwrap();
        let mut registry = Registry::default();
        register(&mut registry, server.observer());
        testbed_metrics::scrape(&registry).unwrap()
    }

    #[tokio::test]
    async fn the_reference_of_metrics_is_current() {
        reference::check("relay", &Exposed::parse(&scrape().await)).unwrap();
    }

    #[tokio::test]
    async fn every_reason_has_a_value_from_the_start() {
        let text = scrape().await;
        assert!(text.contains("fairlead_relay_dropped_datagrams_total{reason=\"queue_time\"} 0"), "{text}");
        assert!(text.contains("fairlead_relay_rejected_connections_total{reason=\"tls\"} 0"), "{text}");
    }
}

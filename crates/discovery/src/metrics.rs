//! Metrics of a discovery server, read when they are scraped.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::server::{Observer, Snapshot};

/// Declares `fairlead_discovery_*` in the registry of all metrics.
pub fn register(all: &mut Registry, server: Observer) {
    all.sub_registry_with_prefix("fairlead_discovery").register_collector(Box::new(Discovery(server)));
}

#[derive(Debug)]
struct Discovery(Observer);

impl Collector for Discovery {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = self.0.snapshot();
        for (name, help, value) in gauges(&snapshot) {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        for (name, help, value) in counters(&snapshot) {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        let requests = snapshot.requests.iter().map(|(method, count)| (method.label(), *count));
        family(&mut encoder, "requests", "Requests, by gRPC method.", "method", requests)?;
        let rejections = snapshot.etcd.rejections.iter().copied();
        let help = "Values in etcd that were left out, by reason.";
        family(&mut encoder, "etcd_rejected_values", help, "reason", rejections)?;
        let refusals = snapshot.refusals.iter().map(|(reason, count)| (reason.label(), *count));
        let help = "Requests that were refused, by reason.";
        family(&mut encoder, "rejected_requests", help, "reason", refusals)
    }
}

/// Name, help and value of a metric without labels.
type Sample<T> = (&'static str, &'static str, T);

fn gauges(Snapshot { totals, connections, etcd, .. }: &Snapshot) -> [Sample<usize>; 7] {
    [
        ("affiliates", "Affiliates that are stored.", totals.affiliates),
        ("clusters", "Clusters with affiliates or watches.", totals.clusters),
        ("connections", "Open connections.", *connections),
        ("endpoints", "Endpoints of affiliates that are stored.", totals.endpoints),
        (
            "etcd_connected",
            "Whether this replica has read everything from etcd and watches it; 0 without etcd, too.",
            usize::from(etcd.is_connected),
        ),
        (
            "etcd_revision",
            "The last revision of etcd that the watch has told of.",
            usize::try_from(etcd.revision).unwrap_or_default(),
        ),
        ("watches", "Open watches.", totals.watches),
    ]
}

fn counters(snapshot: &Snapshot) -> [Sample<u64>; 14] {
    let Snapshot { counters, etcd, .. } = snapshot;
    [
        ("deleted_affiliates", "Affiliates that a client deleted.", counters.deleted),
        (
            "ended_watches",
            "Watches that were ended because they read nothing while too many affiliates were deleted.",
            counters.watches_ended,
        ),
        ("expired_affiliates", "Affiliates whose time to live ended.", counters.expired),
        (
            "etcd_conflicts",
            "Writes that were made again because another replica had changed the same affiliate.",
            etcd.conflicts,
        ),
        ("etcd_failed_writes", "Writes to etcd that failed; clients were told.", etcd.failed_writes),
        ("etcd_lists", "Times that everything in etcd was listed.", etcd.lists),
        ("etcd_lost_sessions", "Sessions with etcd that ended or could not begin.", etcd.lost),
        ("etcd_writes", "Writes that etcd accepted.", etcd.writes),
        (
            "expired_endpoints",
            "Endpoints whose time to live ended before that of their affiliate.",
            counters.expired_endpoints,
        ),
        ("failed_snapshots", "Snapshots that could not be written.", snapshot.failed_snapshots),
        ("notifications", "Messages to watches.", counters.notifications),
        (
            "rejected_connections",
            "Connections beyond the limit, which were closed at once.",
            snapshot.rejected_connections,
        ),
        ("snapshots", "Snapshots that were written.", snapshot.snapshots),
        ("updates", "Updates of affiliates that were accepted.", counters.updates),
    ]
}

/// A counter with one label.
fn family(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: impl Iterator<Item = (&'static str, u64)>,
) -> Result<(), fmt::Error> {
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (value, count) in values {
        ConstCounter::new(count).encode(encoder.encode_family(&[(label, value)])?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use testbed_metrics::{Exposed, reference};

    use super::*;
    use crate::server::{Server, Settings};

    /// A scrape in the text format, where the family of a counter has the name of its sample.
    async fn scrape() -> String {
        let settings = Settings::new("127.0.0.1:0".parse().unwrap(), (1, 1));
        let server = Server::bind(settings).unwrap();
        let mut registry = Registry::default();
        register(&mut registry, server.observer());
        testbed_metrics::scrape(&registry).unwrap()
    }

    #[tokio::test]
    async fn the_reference_of_metrics_is_current() {
        reference::check("discovery", &Exposed::parse(&scrape().await)).unwrap();
    }
}

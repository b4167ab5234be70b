//! Metrics of a gateway. Names are Coil's where it has the same; its gauges that only grow are counters here.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use fairlead_address::IpFamily;
use fairlead_cluster::metrics::register;
use fairlead_dataplane::egress_gateway::GatewayTraffic;
use fairlead_fou::{Counter as Counted, Counters, link_name};
use fairlead_netlink::conntrack::Statistics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use crate::clients::{ClientUse, Load, Registered, in_metrics};
use crate::health::Outcome;
use crate::probes::NO_TARGET_ANSWERS;
use crate::registry::Refusal;
use crate::review::Rejected;
use crate::source_addresses::holds::metrics::HoldMetrics;
use crate::source_addresses::sync::SyncMetrics;

/// Labels of Coil's metrics of the gateway itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Pod {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) egress: String,
}

impl Pod {
    fn labels(&self) -> Labels {
        let Self { namespace, pod, egress } = self.clone();
        vec![("namespace", namespace), ("pod", pod), ("egress", egress)]
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Metrics of the gateway: counters that grow as events happen, and a snapshot of the rest.
#[derive(Debug, Clone, Default)]
pub(crate) struct Metrics {
    hellos: Family<ResultLabel, Counter>,
    refusals: Family<ReasonLabel, Counter>,
    changes: Counter,
    failures: Counter,
    in_place: Gauge,
    probes: Family<ResultLabel, Counter>,
    unhealthy: Family<ReasonLabel, Gauge>,
    left_out: Counter,
    /// Source addresses.
    pub(crate) holds: HoldMetrics,
    /// Copies of connections.
    pub(crate) copies: SyncMetrics,
    snapshot: Arc<Mutex<Snapshot>>,
}

/// Values that are read at intervals.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    pub(crate) counters: Counters,
    pub(crate) traffic: BTreeMap<IpFamily, GatewayTraffic>,
    /// Tracked connections, and how many there can be.
    pub(crate) connections: Option<(u64, u64)>,
    pub(crate) streams: u64,
    /// Clients, with their traffic and connections.
    pub(crate) registered: Arc<Registered>,
    /// Statistics of connection tracking.
    pub(crate) statistics: Option<Statistics>,
    pub(crate) is_draining: bool,
    /// Seconds by which the clock here differs from the API server's.
    pub(crate) clock_error: Option<i64>,
}

impl Metrics {
    /// Declares them in the registry of all metrics.
    pub(crate) fn register(all: &mut Registry, pod: Pod) -> Self {
        let ours = all.sub_registry_with_prefix("coil_egress");
        let metrics = Self {
            hellos: register(
                ours,
                "registrations",
                "Tokens of node programs: ok, or the reason why one was not accepted",
                Family::default(),
            ),
            refusals: register(ours, "refused_clients", "Clients that were refused", Family::default()),
            changes: register(
                ours,
                "data_path_changes",
                "Changes of links, routes, rules, nftables and BPF maps",
                Counter::default(),
            ),
            failures: register(
                ours,
                "data_path_failures",
                "Attempts to change the data path that failed",
                Counter::default(),
            ),
            in_place: register(
                ours,
                "data_path_in_place",
                "Whether the last attempt succeeded",
                Gauge::default(),
            ),
            probes: register(
                ours,
                "health_probes",
                "Probes of the targets of spec.healthCheck: answered by one at least, silent, or impossible to send",
                Family::default(),
            ),
            unhealthy: register(
                ours,
                "unhealthy",
                "Whether the gateway takes no new connections if another does better, by the reason",
                Family::default(),
            ),
            left_out: register(
                ours,
                "connections_not_kept",
                "Connections that /connections does not know, since too many are open",
                Counter::default(),
            ),
            holds: HoldMetrics::register(ours),
            copies: SyncMetrics::register(ours),
            snapshot: Arc::default(),
        };
        for outcome in Outcome::ALL {
            metrics.probes.get_or_create(&ResultLabel { result: outcome.name() }).inc_by(0);
        }
        metrics.health(None);
        ours.register_collector(Box::new(Collected { pod, snapshot: Arc::clone(&metrics.snapshot) }));
        metrics
    }

    /// A token was reviewed.
    pub(crate) fn hello(&self, rejected: Option<&Rejected>) {
        let result = rejected.map_or("ok", Rejected::reason);
        self.hellos.get_or_create(&ResultLabel { result }).inc();
    }

    /// Clients were refused.
    pub(crate) fn refused(&self, refusals: &[Refusal]) {
        for refusal in refusals {
            self.refusals.get_or_create(&ReasonLabel { reason: refusal.reason.name() }).inc();
        }
    }

    /// The data path was changed; `None` is a failure.
    pub(crate) fn applied(&self, changes: Option<usize>) {
        match changes {
            Some(changes) => drop(self.changes.inc_by(changes as u64)),
            None => drop(self.failures.inc()),
        }
        self.in_place.set(i64::from(changes.is_some()));
    }

    /// All targets were probed.
    pub(crate) fn probed(&self, outcome: Outcome) {
        self.probes.get_or_create(&ResultLabel { result: outcome.name() }).inc();
    }

    /// So many connections are not known by now.
    pub(crate) fn connections_left_out(&self, all: u64) {
        self.left_out.inc_by(all.saturating_sub(self.left_out.get()));
    }

    /// Whether targets answer; `None` if nothing is probed.
    pub(crate) fn health(&self, is_healthy: Option<bool>) {
        let gauge = self.unhealthy.get_or_create(&ReasonLabel { reason: NO_TARGET_ANSWERS });
        gauge.set(i64::from(is_healthy == Some(false)));
    }

    /// Clients, with their traffic and connections.
    pub(crate) fn clients(&self) -> Vec<ClientUse> {
        let registered = Arc::clone(&self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).registered);
        registered.uses.clone()
    }

    /// Load of the gateway, from the snapshot that was read last.
    pub(crate) fn load(&self) -> Load {
        let snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        let clients = snapshot.registered.uses.len() as u64;
        let copies = self.copies.copies();
        let connections = snapshot.connections.map(|(count, _)| count.saturating_sub(copies));
        let unhealthy = self.unhealthy.get_or_create(&ReasonLabel { reason: NO_TARGET_ANSWERS }).get() != 0;
        Load {
            connections,
            clients,
            draining: snapshot.is_draining,
            unhealthy,
            clock_error_seconds: snapshot.clock_error,
        }
    }

    /// Replaces what was read.
    pub(crate) fn set(&self, snapshot: Snapshot) {
        *self.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }
}

/// Packets that the programs drop, by the reason.
const DROPS: [Counted; 7] = [
    Counted::Failed,
    Counted::ForeignSource,
    Counted::Fragment,
    Counted::InnerDestination,
    Counted::InnerSource,
    Counted::Malformed,
    Counted::UnknownSender,
];

/// Value, name and help of a counter of nftables.
type TrafficCounter = (fn(&GatewayTraffic) -> u64, &'static str, &'static str);

/// Counters of nftables with Coil's labels.
const TRAFFIC: [TrafficCounter; 5] = [
    (
        |it| it.masqueraded.packets,
        "nftables_masqueraded_packets",
        "First packets of connections whose source was translated",
    ),
    (
        |it| it.masqueraded.bytes,
        "nftables_masqueraded_bytes",
        "Bytes of the first packets of connections whose source was translated",
    ),
    (
        |it| it.invalid.packets,
        "nftables_invalid_packets",
        "Packets dropped because they belong to no connection",
    ),
    (
        |it| it.invalid.bytes,
        "nftables_invalid_bytes",
        "Bytes of packets dropped because they belong to no connection",
    ),
    (
        |it| it.over_limit.packets,
        "rejected_connections",
        "First packets of connections rejected because the client has as many as spec.maxConnectionsPerClient allows",
    ),
];

/// Writes the snapshot.
#[derive(Debug)]
struct Collected {
    pod: Pod,
    snapshot: Arc<Mutex<Snapshot>>,
}

type Labels = Vec<(&'static str, String)>;

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Snapshot { counters, traffic, connections, streams, registered, statistics, .. } = snapshot;
        let mut to = Writer(&mut encoder);
        to.packets(&counters)?;
        to.traffic(&traffic, &self.pod)?;
        to.traffic_not_held(&traffic)?;
        if let Some((count, limit)) = connections {
            let help = "How many connections can be tracked";
            to.gauges("nf_conntrack_entries_count", "Tracked connections", &[(self.pod.labels(), count)])?;
            to.gauges("nf_conntrack_entries_limit", help, &[(self.pod.labels(), limit)])?;
        }
        to.uses(&registered.uses)?;
        to.pods(&registered.uses, &self.pod)?;
        if let Some(statistics) = statistics {
            to.untracked(statistics)?;
        }
        to.client_counts(&registered, &self.pod)?;
        to.gauges("registration_streams", "Node programs that are connected", &[(Labels::new(), streams)])
    }
}

fn protocol(family: IpFamily) -> String {
    match family {
        IpFamily::V4 => "ipv4",
        IpFamily::V6 => "ipv6",
    }
    .to_owned()
}

struct Writer<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Writer<'_, '_> {
    fn counters(&mut self, name: &str, help: &str, values: &[(Labels, u64)]) -> fmt::Result {
        self.write(name, help, MetricType::Counter, values)
    }

    fn gauges(&mut self, name: &str, help: &str, values: &[(Labels, u64)]) -> fmt::Result {
        self.write(name, help, MetricType::Gauge, values)
    }

    /// Packets that the BPF programs dropped, sent to clients and received from them.
    fn packets(&mut self, counters: &Counters) -> fmt::Result {
        let dropped = DROPS.map(|it| (vec![("reason", it.name().to_owned())], counters.of(it)));
        self.counters("dropped_packets", "Packets that the gateway dropped, by the reason", &dropped)?;
        let sent = [(Labels::new(), counters.of(Counted::Encapsulated))];
        self.counters("encapsulated_packets", "Packets sent to clients", &sent)?;
        let received = [(Labels::new(), counters.of(Counted::Decapsulated))];
        self.counters("decapsulated_packets", "Packets received from clients", &received)?;
        let bytes = [("sent", Counted::SentBytes), ("received", Counted::ReceivedBytes)];
        let bytes = bytes.map(|(direction, it)| (vec![("direction", direction.to_owned())], counters.of(it)));
        let help = "Bytes that all clients sent and received, from their IP headers on";
        self.counters("forwarded_bytes", help, &bytes)
    }

    /// Packets that nftables translated, dropped or rejected.
    fn traffic(&mut self, traffic: &BTreeMap<IpFamily, GatewayTraffic>, own: &Pod) -> fmt::Result {
        for (value, name, help) in TRAFFIC {
            let of = |(family, it): (&IpFamily, &GatewayTraffic)| {
                let mut labels = own.labels();
                labels.push(("protocol", protocol(*family)));
                (labels, value(it))
            };
            self.counters(name, help, &traffic.iter().map(of).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Packets of source addresses that the gateway does not hold.
    fn traffic_not_held(&mut self, traffic: &BTreeMap<IpFamily, GatewayTraffic>) -> fmt::Result {
        let not_held = |(family, it): (&IpFamily, &GatewayTraffic)| {
            [("in", it.not_held_in.packets), ("out", it.not_held_out.packets)].map(|(direction, packets)| {
                let labels = vec![("protocol", protocol(*family)), ("direction", direction.to_owned())];
                (labels, packets)
            })
        };
        let not_held: Vec<_> = traffic.iter().flat_map(not_held).collect();
        let help = "Packets dropped because the gateway does not hold the source address that they have";
        self.counters("nftables_not_held_packets", help, &not_held)?;
        let standby = traffic.values().map(|it| it.standby.packets).fold(0u64, u64::saturating_add);
        let help = "Packets of clients dropped because the gateway holds no source address of an Egress that has some";
        self.counters("nftables_standby_packets", help, &[(Labels::new(), standby)])
    }

    /// Connections that the kernel could not track.
    fn untracked(&mut self, Statistics { insert_failed, drop, early_drop }: Statistics) -> fmt::Result {
        let of = [("insert_failed", insert_failed), ("drop", drop), ("early_drop", early_drop)];
        let of = of.map(|(reason, count)| (vec![("reason", reason.to_owned())], count));
        let help = "New connections that could not be tracked: ports or the table are used up, or connections were forgotten for them";
        self.counters("conntrack_failures", help, &of)
    }

    /// Numbers of clients: in all, of each Node, and of an earlier process.
    fn client_counts(&mut self, registered: &Registered, own: &Pod) -> fmt::Result {
        let Registered { nodes, adopted, .. } = registered;
        let all = nodes.values().fold(*adopted, |sum: u64, count| sum.saturating_add(*count));
        let labels = vec![("namespace", own.namespace.clone()), ("egress", own.egress.clone())];
        self.gauges("client_pod_count", "Client pods", &[(labels, all)])?;
        let of_nodes: Vec<_> =
            nodes.iter().map(|(node, count)| (vec![("node", node.clone())], *count)).collect();
        self.gauges("node_client_pods", "Client pods of each Node that were accepted", &of_nodes)?;
        let help = "Client addresses of an earlier process that no node program has claimed yet";
        self.gauges("adopted_client_addresses", help, &[(Labels::new(), *adopted)])
    }

    /// A bounded number of clients.
    fn uses(&mut self, uses: &[ClientUse]) -> fmt::Result {
        let shown = in_metrics(uses);
        let labels = |client: &ClientUse| {
            vec![("client_namespace", client.namespace.clone()), ("client_pod", client.name.clone())]
        };
        let both = |sent: fn(&ClientUse) -> u64, received: fn(&ClientUse) -> u64| {
            let of = |client: &&ClientUse| {
                [("sent", sent(client)), ("received", received(client))].map(|(direction, count)| {
                    let mut labels = labels(client);
                    labels.push(("direction", direction.to_owned()));
                    (labels, count)
                })
            };
            shown.iter().flat_map(of).collect::<Vec<_>>()
        };
        let bytes = both(|it| it.sent_bytes, |it| it.received_bytes);
        let help = "Bytes that clients sent and received through the gateway, from their IP headers on; at most 256 clients are shown";
        self.counters("client_bytes", help, &bytes)?;
        let packets = both(|it| it.sent_packets, |it| it.received_packets);
        let help =
            "Packets that clients sent and received through the gateway; at most 256 clients are shown";
        self.counters("client_packets", help, &packets)?;
        let open = shown.iter().filter_map(|client| Some((labels(client), client.connections?)));
        let help = "Connections that clients have open; at most 256 clients are shown";
        self.gauges("client_connections", help, &open.collect::<Vec<_>>())
    }

    /// As Coil names them.
    fn pods(&mut self, uses: &[ClientUse], own: &Pod) -> fmt::Result {
        let of = |client: &ClientUse| {
            let label = |address: &IpAddr| {
                vec![
                    ("namespace", client.namespace.clone()),
                    ("pod", client.name.clone()),
                    ("pod_ip", address.to_string()),
                    ("interface", link_name(*address)),
                    ("egress", own.egress.clone()),
                    ("egress_namespace", own.namespace.clone()),
                ]
            };
            client.addresses.iter().map(|address| (label(address), 1)).collect::<Vec<_>>()
        };
        let help = "Addresses of client pods and the links of their tunnels; at most 256 clients are shown";
        let of_shown: Vec<_> = in_metrics(uses).iter().flat_map(|client| of(client)).collect();
        self.gauges("client_pod_info", help, &of_shown)
    }

    fn write(&mut self, name: &str, help: &str, kind: MetricType, values: &[(Labels, u64)]) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, &format!("{help}."), None, kind)?;
        let write = |encoder: MetricEncoder<'_>, value: u64| match kind {
            MetricType::Counter => ConstCounter::new(value).encode(encoder),
            _ => ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(encoder),
        };
        for (labels, value) in values {
            if labels.is_empty() {
                // It is the only one.
                return write(family, *value);
            }
            write(family.encode_family(labels)?, *value)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

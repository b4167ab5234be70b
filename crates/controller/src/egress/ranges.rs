//! Ranges of the cluster itself. Ranges that client pods reach by `eth0`, and that are not in private networks or in a destination there,
//! are for `status.clusterRanges` of Egresses: so one program watches Nodes for it, and not each node program. And no Egress may have a
//! source address in one.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::PrefixSet;
use fairlead_api::resources::AddressPool;
use fairlead_cluster::caches::{self, Cache, config};
use fairlead_cluster::lean;
use fairlead_cluster::nodes::SlimNode;
use fairlead_cluster::subsystem::Subsystem;
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;
use tokio::time::sleep;

/// Changes are collected this long: kubelets write the status of each Node every few minutes.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// The ranges; `None` before they are known.
pub(super) type Ranges = Option<Arc<ClusterRanges>>;

/// The ranges of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClusterRanges {
    /// All of them, joined.
    pub(super) all: PrefixSet,
    /// All of them, each with what it is.
    pub(super) named: Vec<(IpNet, String)>,
}

/// Watches of what ranges are made of.
struct RangeCaches {
    nodes: Cache<SlimNode>,
    pools: Cache<AddressPool>,
    services: Cache<ServiceCIDR>,
}

/// Watches, and returns the ranges, and a number that grows whenever they change.
pub(super) fn start(
    subsystem: &mut Subsystem,
    client: &Client,
) -> (watch::Receiver<Ranges>, watch::Receiver<u64>) {
    let caches = RangeCaches::start(subsystem, client);
    let (ranges, known) = watch::channel(None);
    let (generation, changes) = watch::channel(1);
    subsystem.spawn("ranges of the cluster", run(caches, ranges, generation));
    (known, changes)
}

async fn run(
    caches: RangeCaches,
    ranges: watch::Sender<Ranges>,
    generation: watch::Sender<u64>,
) -> Infallible {
    let mut nodes = caches.nodes.subscribe();
    let mut pools = caches.pools.subscribe();
    let mut services = caches.services.subscribe();
    loop {
        let now = caches.read();
        let replace = |known: &mut Ranges| {
            let differs = *known != now;
            *known = now;
            differs
        };
        if ranges.send_if_modified(replace) {
            generation.send_modify(|count| *count = count.wrapping_add(1));
        }
        tokio::select! {
            _ = nodes.changed() => {}
            _ = pools.changed() => {}
            _ = services.changed() => {}
        }
        sleep(DEBOUNCE).await;
    }
}

impl RangeCaches {
    /// Starts the watches.
    fn start(subsystem: &mut Subsystem, client: &Client) -> Self {
        let nodes = watcher(Api::<SlimNode>::all(client.clone()), config()).modify(lean::identified);
        Self {
            nodes: caches::start(subsystem, "ranges of Nodes", nodes),
            pools: caches::watch_all(subsystem, "AddressPools", client, config()),
            services: caches::watch_all(subsystem, "ServiceCIDRs", client, config()),
        }
    }

    /// All ranges, each with what it is.
    fn named(&self) -> Vec<(IpNet, String)> {
        let mut ranges = Vec::new();
        for pool in self.pools.store.state() {
            let what = format!("AddressPool {}", pool.name_any());
            let subnets = pool.spec.parse_subnets().unwrap_or_default();
            ranges.extend(subnets.iter().flat_map(|nets| nets.iter()).map(|net| (net, what.clone())));
        }
        for service in self.services.store.state() {
            let what = format!("ServiceCIDR {}", service.name_any());
            let cidrs = service.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
            ranges.extend(cidrs.filter_map(|text| text.parse().ok()).map(|net| (net, what.clone())));
        }
        ranges.extend(self.nodes.store.state().iter().flat_map(|node| of_node(node)));
        // The caches have no order.
        ranges.sort_unstable();
        ranges
    }

    /// An API server may have no ServiceCIDRs or AddressPools. Without Nodes nothing is known.
    fn read(&self) -> Ranges {
        let is_known = self.nodes.is_ready() && self.pools.has_answer() && self.services.has_answer();
        is_known.then(|| {
            let named = self.named();
            let all = named.iter().map(|(net, _)| net).collect();
            Arc::new(ClusterRanges { all, named })
        })
    }
}

/// Ranges of a Node: its addresses, and the networks of its pods.
fn of_node(node: &SlimNode) -> Vec<(IpNet, String)> {
    let name = node.name_any();
    let pods = node.pod_cidrs().iter().filter_map(|text| text.parse::<IpNet>().ok());
    let pods = pods.map(|net| (net, format!("a podCIDR of Node {name}")));
    let own = node.addresses().map(|address| (address.into(), format!("an address of Node {name}")));
    pods.chain(own).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_nodes_addresses_and_ranges_of_pods_are_read() {
        let node = json!({
            "metadata": { "name": "n1" },
            "spec": { "podCIDRs": ["10.244.1.0/24"], "podCIDR": "10.244.1.0/24" },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n1" },
            ] },
        });
        let node: SlimNode = serde_json::from_value(node).unwrap();
        let found: Vec<_> =
            of_node(&node).into_iter().map(|(net, what)| format!("{net} is {what}")).collect();
        assert_eq!(found, ["10.244.1.0/24 is a podCIDR of Node n1", "192.0.2.1/32 is an address of Node n1"]);
    }
}

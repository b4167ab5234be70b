//! The ranges of the cluster that client pods reach by `eth0` and that are not in private networks, for `status.clusterRanges` of all Egresses: so
//! one program watches Nodes for it, and not each node program.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::PrefixSet;
use fairlead_api::resources::AddressPool;
use fairlead_cluster::caches::{self, Cache, config};
use fairlead_cluster::lean;
use fairlead_cluster::nodes::SlimNode;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::client::cluster_ranges;
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::sleep;

/// Changes are collected this long: kubelets write the status of each Node every few minutes.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// How soon it is asked again what is known.
const RETRY: Duration = Duration::from_secs(1);

/// The ranges, joined; `None` before they are known.
pub(super) type Ranges = Option<Arc<[String]>>;

/// What they are made of.
struct Sources {
    nodes: Cache<SlimNode>,
    pools: Cache<AddressPool>,
    services: Cache<ServiceCIDR>,
}

/// Watches, and returns the ranges, and a number that grows whenever they change.
pub(super) fn start(
    subsystem: &mut Subsystem,
    client: &Client,
) -> (watch::Receiver<Ranges>, watch::Receiver<u64>) {
    let nodes = watcher(Api::<SlimNode>::all(client.clone()), config()).modify(lean::identified);
    let pools = watcher(Api::<AddressPool>::all(client.clone()), config()).modify(lean::any);
    let services = watcher(Api::<ServiceCIDR>::all(client.clone()), config()).modify(lean::any);
    let sources = Sources {
        nodes: caches::start(subsystem, "ranges of Nodes", nodes),
        pools: caches::start(subsystem, "AddressPools", pools),
        services: caches::start(subsystem, "ServiceCIDRs", services),
    };
    let (ranges, known) = watch::channel(None);
    let (generation, changes) = watch::channel(1);
    subsystem.spawn("ranges of the cluster", run(sources, ranges, generation));
    (known, changes)
}

async fn run(sources: Sources, ranges: watch::Sender<Ranges>, generation: watch::Sender<u64>) -> Infallible {
    let (mut nodes, mut pools) = (sources.nodes.subscribe(), sources.pools.subscribe());
    let mut services = sources.services.subscribe();
    loop {
        let now = sources.ranges();
        let is_known = now.is_some();
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
            // The refusal of a kind that is not served is no change.
            () = sleep(RETRY), if !is_known => {}
        }
        sleep(DEBOUNCE).await;
    }
}

impl Sources {
    /// An API server may have no ServiceCIDRs or AddressPools. Without Nodes nothing is known.
    fn ranges(&self) -> Ranges {
        let is_known = self.nodes.is_ready() && self.pools.has_answer() && self.services.has_answer();
        is_known.then(|| {
            let services = self.services.store.state();
            let services = services.iter().filter_map(|it| it.spec.as_ref()?.cidrs.as_ref()).flatten();
            let services = services.filter_map(|text| text.parse::<IpNet>().ok());
            let pools = self.pools.store.state();
            let pools = pools.iter().flat_map(|pool| {
                pool.spec
                    .parse_subnets()
                    .unwrap_or_default()
                    .iter()
                    .flat_map(|nets| nets.iter())
                    .collect::<Vec<_>>()
            });
            let nodes = self.nodes.store.state();
            let all: PrefixSet =
                services.chain(pools).chain(nodes.iter().flat_map(|node| of_node(node))).collect();
            cluster_ranges(&all).iter().map(IpNet::to_string).collect()
        })
    }
}

/// Its addresses, and the networks of its pods.
fn of_node(node: &SlimNode) -> impl Iterator<Item = IpNet> + '_ {
    let pods = node.pod_cidrs().iter().filter_map(|text| text.parse::<IpNet>().ok());
    node.addresses().map(IpNet::from).chain(pods)
}

//! Addresses inside of the cluster, which no Egress may have as source addresses.

use std::net::IpAddr;

use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_cluster::caches::{self, Cache, config};
use fairlead_cluster::lean;
use fairlead_cluster::subsystem::Subsystem;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::reflector::Store;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;

/// What is watched.
pub(super) struct RangeCaches {
    nodes: Store<Node>,
    blocks: Store<AddressBlock>,
    pools: Store<AddressPool>,
    services: Store<ServiceCIDR>,
}

impl RangeCaches {
    /// Starts the watches, and returns their signals.
    pub(super) fn start(subsystem: &mut Subsystem, client: &Client) -> (Self, [watch::Receiver<u64>; 4]) {
        let nodes = watcher(Api::<Node>::all(client.clone()), config()).modify(slim_node);
        let nodes: Cache<Node> = caches::start(subsystem, "Nodes", nodes);
        let blocks = watcher(Api::<AddressBlock>::all(client.clone()), config()).modify(lean::any);
        let blocks: Cache<AddressBlock> = caches::start(subsystem, "AddressBlocks", blocks);
        let pools = watcher(Api::<AddressPool>::all(client.clone()), config()).modify(lean::any);
        let pools: Cache<AddressPool> = caches::start(subsystem, "AddressPools", pools);
        let services = watcher(Api::<ServiceCIDR>::all(client.clone()), config()).modify(lean::any);
        let services: Cache<ServiceCIDR> = caches::start(subsystem, "ServiceCIDRs", services);
        let signals = [nodes.subscribe(), blocks.subscribe(), pools.subscribe(), services.subscribe()];
        let caches =
            Self { nodes: nodes.store, blocks: blocks.store, pools: pools.store, services: services.store };
        (caches, signals)
    }

    /// The ranges, each with what it is.
    pub(super) fn read(&self) -> Vec<(IpNet, String)> {
        let mut ranges = Vec::new();
        for pool in self.pools.state() {
            let subnets = pool.spec.subnets.iter().filter_map(|subnet| subnet.parse().ok());
            let what = format!("AddressPool {}", pool.name_any());
            ranges.extend(subnets.flat_map(|nets| nets.iter()).map(|net| (net, what.clone())));
        }
        for block in self.blocks.state() {
            let nets = block.parse().map(|nets| nets.iter().collect::<Vec<_>>()).unwrap_or_default();
            let what = format!("AddressBlock {}", block.name_any());
            ranges.extend(nets.into_iter().map(|net| (net, what.clone())));
        }
        for service in self.services.state() {
            let cidrs = service.spec.as_ref().and_then(|spec| spec.cidrs.clone()).unwrap_or_default();
            let what = format!("ServiceCIDR {}", service.name_any());
            let nets = cidrs.iter().filter_map(|text| text.parse().ok());
            ranges.extend(nets.map(|net| (net, what.clone())));
        }
        for node in self.nodes.state() {
            ranges.extend(of_node(&node));
        }
        ranges
    }
}

fn of_node(node: &Node) -> Vec<(IpNet, String)> {
    let (spec, status) = (node.spec.clone().unwrap_or_default(), node.status.clone().unwrap_or_default());
    let pods = spec.pod_cidrs.unwrap_or_default().into_iter().chain(spec.pod_cidr);
    let pods = pods.filter_map(|text| text.parse().ok());
    let pods = pods.map(|net| (net, format!("a podCIDR of Node {}", node.name_any())));
    // Host names are among them.
    let own = status.addresses.unwrap_or_default();
    let own = own.iter().filter_map(|it| it.address.parse::<IpAddr>().ok()).map(IpNet::from);
    pods.chain(own.map(|net| (net, format!("the addresses of Node {}", node.name_any())))).collect()
}

/// A Node without what is not read, which is most of it.
fn slim_node(node: &mut Node) {
    lean::any(node);
    let addresses = node.status.take().and_then(|status| status.addresses);
    node.status = Some(NodeStatus { addresses, ..NodeStatus::default() });
    node.metadata.annotations = None;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_nodes_addresses_and_ranges_of_pods_are_read() {
        let mut node: Node = serde_json::from_value(json!({
            "metadata": { "name": "n1", "annotations": { "a": "b" } },
            "spec": { "podCIDRs": ["10.244.1.0/24"], "podCIDR": "10.244.1.0/24" },
            "status": { "images": [{ "names": ["x"] }], "addresses": [
                { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n1" },
            ] },
        }))
        .unwrap();
        slim_node(&mut node);
        assert_eq!(node.status.as_ref().unwrap().images, None);
        let found: Vec<_> =
            of_node(&node).into_iter().map(|(net, what)| format!("{net} is {what}")).collect();
        assert_eq!(found.last().unwrap(), "192.0.2.1/32 is the addresses of Node n1");
        assert_eq!(found[0], "10.244.1.0/24 is a podCIDR of Node n1");
    }
}

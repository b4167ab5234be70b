//! All nodes, by what the API server has.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::finding::{Finding, Severity, finding};
use super::shared::{Blocks, duplicates, overlap, pool_of_block};
use super::view::{ClusterView, KnownBlock, KnownPod, KnownPool};

/// Compares pods, blocks, pools and Nodes. The worst come first.
pub fn cluster(view: &ClusterView) -> Vec<Finding> {
    let pools: BTreeMap<&str, &KnownPool> =
        view.pools.iter().map(|pool| (pool.name.as_str(), pool)).collect();
    let nodes: BTreeSet<&str> = view.nodes.iter().map(String::as_str).collect();
    let blocks = Blocks::new(&view.blocks);
    let mut found: Vec<Finding> = blocks.overlaps().iter().map(overlap).collect();
    found.extend(duplicates(view.pods.iter()));
    found.extend(view.blocks.iter().filter_map(|block| pool_of_block(block, &pools)));
    found.extend(view.blocks.iter().filter(|block| !nodes.contains(block.node.as_str())).map(orphan));
    for pod in view.pods.iter().filter(|pod| pod.has_network) {
        found.extend(pod.addresses.iter().filter_map(|address| misplaced(pod, *address, &blocks)));
    }
    found.sort();
    found
}

fn orphan(block: &KnownBlock) -> Finding {
    finding(
        Severity::Warning,
        "OrphanBlock",
        &block.name,
        [
            format!("block {} belongs to node {:?}, which does not exist", block.name, block.node),
            "the Node was deleted, and the controller has not collected its blocks yet".to_owned(),
            "see whether `fairlead controller` runs and is elected; it collects such blocks at once"
                .to_owned(),
        ],
    )
}

fn misplaced(pod: &KnownPod, address: IpAddr, blocks: &Blocks<'_>) -> Option<Finding> {
    let subject = pod.full_name();
    match blocks.having(address) {
        Some(block) if block.node == pod.node => None,
        Some(block) => Some(finding(
            Severity::Error,
            "PodInForeignBlock",
            &subject,
            [
                format!(
                    "pod {subject} on {} has {address}, which is in block {} of node {}",
                    pod.node, block.name, block.node
                ),
                "its packets are led to the other node, where another pod may be given the address"
                    .to_owned(),
                format!("delete pod {subject}, so that it gets an address of its node"),
            ],
        )),
        None => Some(finding(
            Severity::Error,
            "PodOutsideBlocks",
            &subject,
            [
                format!("pod {subject} on {} has {address}, which is in no AddressBlock", pod.node),
                "no other node has a way to it; its block was deleted, or another network gave the address"
                    .to_owned(),
                format!("delete pod {subject}, so that it gets an address of a block"),
            ],
        )),
    }
}

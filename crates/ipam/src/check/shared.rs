//! Checks of blocks and pods that a node and the cluster have in common.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::finding::{Finding, Severity, finding};
use super::view::{KnownBlock, KnownPod, KnownPool};

/// Blocks that can be asked which of them has an address.
pub(super) struct Blocks<'a> {
    /// Blocks by first address; a block within another one follows it.
    by_prefix: Vec<(IpNet, &'a KnownBlock)>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(blocks: &'a [KnownBlock]) -> Self {
        let mut by_prefix: Vec<(IpNet, &KnownBlock)> =
            blocks.iter().flat_map(|block| block.nets.iter().map(move |net| (*net, block))).collect();
        by_prefix.sort_by_key(|(net, _)| (net.network(), net.prefix_len()));
        Self { by_prefix }
    }

    /// The smallest block that has the address.
    pub(super) fn having(&self, address: IpAddr) -> Option<&'a KnownBlock> {
        let behind = self.by_prefix.partition_point(|(net, _)| net.network() <= address);
        let before = self.by_prefix.get(..behind).unwrap_or_default();
        // Without overlaps the first candidate is the one; with them an enclosing block may come some places before.
        before.iter().rev().take(64).find(|(net, _)| net.contains(&address)).map(|(_, block)| *block)
    }

    /// Pairs of different blocks that share addresses, each with the smaller prefix.
    pub(super) fn overlaps(&self) -> Vec<(&'a KnownBlock, &'a KnownBlock, IpNet)> {
        let mut found = Vec::new();
        let mut around: Option<(IpNet, &KnownBlock)> = None;
        for (net, block) in &self.by_prefix {
            match around {
                Some((outer, first)) if outer.contains(net) => {
                    if first.name != block.name {
                        found.push((first, *block, *net));
                    }
                }
                _ => around = Some((*net, *block)),
            }
        }
        found
    }
}

/// Blocks of pools that do not exist, and blocks outside of their pool.
pub(super) fn pool_of_block(block: &KnownBlock, pools: &BTreeMap<&str, &KnownPool>) -> Option<Finding> {
    let Some(pool) = pools.get(block.pool.as_str()) else {
        return Some(finding(
            Severity::Warning,
            "UnknownPool",
            &block.name,
            [
                format!("block {} is of pool {:?}, which does not exist", block.name, block.pool),
                "its AddressPool was deleted by force, or its label was changed".to_owned(),
                "make the pool again, or move its pods away; the block goes when it is empty".to_owned(),
            ],
        ));
    };
    let outside = block.nets.iter().find(|net| !pool.nets.iter().any(|subnet| subnet.contains(*net)))?;
    Some(finding(
        Severity::Warning,
        "BlockOutsidePool",
        &block.name,
        [
            format!("block {} has {outside}, which is in no subnet of pool {}", block.name, pool.name),
            "the pool was deleted and made again with other subnets, or the block was made by hand"
                .to_owned(),
            format!("add the subnet to pool {}, or move the pods of the block away", pool.name),
        ],
    ))
}

/// Two blocks with one address: two nodes may allocate it to two pods.
pub(super) fn overlap((first, second, net): &(&KnownBlock, &KnownBlock, IpNet)) -> Finding {
    finding(
        Severity::Error,
        "BlocksOverlap",
        &second.name,
        [
            format!(
                "blocks {} (node {}) and {} (node {}) both have {net}",
                first.name, first.node, second.name, second.node
            ),
            "two pods can be given one address; pools overlap, or a block was made by hand".to_owned(),
            format!(
                "move the pods of one block away, then `kubectl delete addressblock {}`; remove the overlap of the pools",
                second.name
            ),
        ],
    )
}

/// One address of several pods. Only pods that should have one count.
pub(super) fn duplicates<'a>(pods: impl Iterator<Item = &'a KnownPod>) -> Vec<Finding> {
    let mut by_address: BTreeMap<IpAddr, Vec<&KnownPod>> = BTreeMap::new();
    for pod in pods.filter(|pod| pod.has_network) {
        for address in &pod.addresses {
            by_address.entry(*address).or_default().push(pod);
        }
    }
    let several = by_address.into_iter().filter(|(_, pods)| pods.len() > 1);
    several
        .map(|(address, pods)| {
            let names: Vec<String> =
                pods.iter().map(|pod| format!("{} on {}", pod.full_name(), pod.node)).collect();
            finding(
                Severity::Error,
                "DuplicateAddress",
                address.to_string(),
                [
                    format!("{address} is the address of {}", names.join(" and of ")),
                    "blocks overlap, or a node went on with a block that was given to another".to_owned(),
                    "delete all of these pods but one".to_owned(),
                ],
            )
        })
        .collect()
}

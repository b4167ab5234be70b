//! AddressBlocks as the watch cache keeps them.

use std::sync::Arc;

use fairlead_api::resources::AddressBlock;
use fairlead_cluster::lean;
use fairlead_ipam::ExistingBlock;

use fairlead_cluster::cached_by_name;

/// A block, without what is not read of it: a node program keeps those of all nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct CachedBlock {
    existing: ExistingBlock,
    own: Option<Arc<AddressBlock>>,
}

impl CachedBlock {
    /// Parses a block. That of another node is kept without the request that it answered, which is not read either.
    pub fn new(mut block: AddressBlock, own_node: &str) -> Self {
        let existing = ExistingBlock::from(&block);
        if block.node() != Some(own_node) {
            return Self { existing: ExistingBlock { request: None, ..existing }, own: None };
        }
        lean::labelled(&mut block);
        Self { existing, own: Some(Arc::new(block)) }
    }

    /// Name, pool, node and prefixes. The node is empty where the label is missing, and the prefixes where they do not parse.
    pub fn existing(&self) -> &ExistingBlock {
        &self.existing
    }

    /// The object, if the block is this node's.
    pub fn own(&self) -> Option<&Arc<AddressBlock>> {
        self.own.as_ref()
    }
}

cached_by_name!(CachedBlock, AddressBlock, |cached| &cached.existing.name);

#[cfg(test)]
mod tests {
    use super::*;

    fn block(node: &str) -> AddressBlock {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 3, "ipv4": "10.0.0.12/30",
            "metadata": {
                "name": "a-3", "uid": "u", "resourceVersion": "7",
                "labels": {
                    "coil.cybozu.com/pool": "a", "coil.cybozu.com/node": node, "coil.cybozu.com/request": "r",
                },
            },
        }))
        .unwrap()
    }

    #[test]
    fn of_blocks_of_other_nodes_only_what_decisions_take_is_kept() {
        let foreign = CachedBlock::new(block("n2"), "n1");
        assert_eq!(foreign.own(), None);
        let expected = ExistingBlock { request: None, ..ExistingBlock::from(&block("n2")) };
        assert_eq!(foreign.existing(), &expected);
        assert_eq!((expected.node.as_str(), expected.nets.iter().count()), ("n2", 1));
    }

    #[test]
    fn own_blocks_are_kept_with_their_labels_and_uid() {
        let own = CachedBlock::new(block("n1"), "n1");
        assert_eq!(own.own().map(|own| &**own), Some(&block("n1")));
        assert_eq!(own.existing().request.as_deref(), Some("r"));
    }
}

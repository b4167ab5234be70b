//! Custom resources as the decisions take them. What does not parse is left out here and reported by who validates it.

use fairlead_api::names::LABEL_REQUEST;
use fairlead_api::resources::{AddressBlock, AddressPool};

use crate::check::{KnownBlock, KnownPool};
use crate::{Block, BlockError, ExistingBlock, Pool, PoolError, PoolState};

/// Reason why an AddressBlock cannot be used on its node.
#[derive(Debug, thiserror::Error)]
pub enum UnusableBlock {
    /// The prefixes make no block.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The block has no label `coil.cybozu.com/pool`.
    #[error("block {0} has no label coil.cybozu.com/pool: delete it")]
    NoPool(String),
    /// A prefix is not in CIDR notation.
    #[error(transparent)]
    Prefix(#[from] fairlead_api::resources::InvalidSubnet),
}

impl TryFrom<&AddressPool> for Pool {
    type Error = PoolError;

    fn try_from(pool: &AddressPool) -> Result<Self, PoolError> {
        let subnets = pool.spec.subnets.iter().map(|subnet| (subnet.ipv4.as_deref(), subnet.ipv6.as_deref()));
        let name = pool.metadata.name.as_deref().unwrap_or_default();
        Self::parse(name, i64::from(pool.spec.block_size_bits), subnets)
    }
}

impl From<&AddressPool> for PoolState {
    fn from(pool: &AddressPool) -> Self {
        Self {
            parsed: pool.try_into(),
            terminating: pool.metadata.deletion_timestamp.is_some(),
            disabled: pool.spec.disabled,
            created: pool.created_at(),
        }
    }
}

impl From<&AddressPool> for KnownPool {
    fn from(pool: &AddressPool) -> Self {
        let subnets = &pool.spec.subnets;
        let texts = subnets.iter().flat_map(|subnet| subnet.ipv4.iter().chain(&subnet.ipv6));
        Self {
            name: pool.metadata.name.clone().unwrap_or_default(),
            nets: texts.filter_map(|text| text.parse().ok()).collect(),
        }
    }
}

impl From<&AddressBlock> for ExistingBlock {
    /// A block whose prefixes do not parse still occupies its number.
    fn from(block: &AddressBlock) -> Self {
        Self {
            name: block.metadata.name.clone().unwrap_or_default(),
            pool: block.pool().unwrap_or_default().to_owned(),
            node: block.node().unwrap_or_default().to_owned(),
            index: block.spec.index,
            nets: block.parse().unwrap_or_default(),
            request: block.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL_REQUEST).cloned()),
            terminating: block.metadata.deletion_timestamp.is_some(),
        }
    }
}

impl From<&AddressBlock> for KnownBlock {
    fn from(block: &AddressBlock) -> Self {
        Self::from(&ExistingBlock::from(block))
    }
}

impl From<&ExistingBlock> for KnownBlock {
    fn from(block: &ExistingBlock) -> Self {
        Self {
            name: block.name.clone(),
            pool: block.pool.clone(),
            node: block.node.clone(),
            nets: block.nets.iter().collect(),
        }
    }
}

impl TryFrom<&AddressBlock> for Block {
    type Error = UnusableBlock;

    fn try_from(block: &AddressBlock) -> Result<Self, UnusableBlock> {
        let name = block.metadata.name.clone().unwrap_or_default();
        let Some(pool) = block.pool() else { return Err(UnusableBlock::NoPool(name)) };
        let deleting = block.metadata.deletion_timestamp.is_some();
        let own = Self::new(&name, pool, block.parse()?, block.is_reserved(), deleting)?;
        Ok(own.with_uid(block.metadata.uid.as_deref().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(labels: serde_json::Value, ipv4: &str) -> AddressBlock {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 3, "ipv4": ipv4,
            "metadata": { "name": "a-3", "uid": "u", "labels": labels },
        }))
        .unwrap()
    }

    #[test]
    fn a_block_is_read_alike_by_nodes_and_the_controller() {
        let object = block(
            serde_json::json!({
                "coil.cybozu.com/pool": "a", "coil.cybozu.com/node": "n", "coil.cybozu.com/request": "r",
                "coil.cybozu.com/reserved": "true",
            }),
            "10.0.0.12/30",
        );
        let existing = ExistingBlock::from(&object);
        assert_eq!((existing.index, existing.request.as_deref()), (3, Some("r")));
        let own = Block::try_from(&object).unwrap();
        assert_eq!((own.name(), own.uid(), own.is_reserved()), ("a-3", "u", true));
        assert_eq!(own.nets(), existing.nets);
        assert_eq!(KnownBlock::from(&object).nets, own.nets().iter().collect::<Vec<_>>());
    }

    #[test]
    fn a_block_that_no_pod_can_use_still_occupies_its_number() {
        for (labels, ipv4) in [
            (serde_json::json!({ "coil.cybozu.com/pool": "a" }), "10.0.0.0/300"),
            (serde_json::json!({}), "10.0.0.12/30"),
        ] {
            let object = block(labels, ipv4);
            assert_eq!(ExistingBlock::from(&object).index, 3);
            assert!(Block::try_from(&object).is_err());
        }
    }
}

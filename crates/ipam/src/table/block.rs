//! AddressBlocks of one node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fairlead_address::DualStackNets;

use crate::pool::MAX_BLOCK_SIZE_BITS;

/// Reason why an AddressBlock cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// Neither family.
    #[error("block {name} has neither ipv4 nor ipv6: delete it")]
    NoFamily {
        /// Name of the block.
        name: String,
    },
    /// The families have different sizes.
    #[error("block {name} has {nets}, which differ in size: delete it")]
    SizesDiffer {
        /// Name of the block.
        name: String,
        /// Prefixes of the block.
        nets: DualStackNets,
    },
    /// More than 2^[`MAX_BLOCK_SIZE_BITS`] addresses.
    #[error("block {name} ({nets}) has {bits} host bits; at most {MAX_BLOCK_SIZE_BITS} are supported")]
    TooLarge {
        /// Name of the block.
        name: String,
        /// Prefixes of the block.
        nets: DualStackNets,
        /// Host bits of the prefixes.
        bits: u8,
    },
}

/// An AddressBlock of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    pub(super) name: String,
    pub(super) pool: String,
    pub(super) nets: DualStackNets,
    /// Number of offsets.
    pub(super) size: u32,
    pub(super) reserved: bool,
    pub(super) deleting: bool,
    /// Empty when unknown.
    pub(super) uid: String,
}

impl Block {
    /// Parses a block: its name, its pool, its prefixes, whether it carries the label `coil.cybozu.com/reserved`
    /// with the value `true`, and whether it has a deletion timestamp.
    ///
    /// # Errors
    /// When its prefixes do not make a block; see [`BlockError`].
    pub fn new(
        name: &str,
        pool: &str,
        nets: DualStackNets,
        reserved: bool,
        deleting: bool,
    ) -> Result<Self, BlockError> {
        let name = name.to_owned();
        let host_bits_v4 = nets.ipv4.map(|net| 32u8.saturating_sub(net.prefix_len()));
        let host_bits_v6 = nets.ipv6.map(|net| 128u8.saturating_sub(net.prefix_len()));
        let bits = match (host_bits_v4, host_bits_v6) {
            (None, None) => return Err(BlockError::NoFamily { name }),
            (Some(v4), Some(v6)) if v4 != v6 => return Err(BlockError::SizesDiffer { name, nets }),
            (Some(bits), _) | (None, Some(bits)) => bits,
        };
        if bits > MAX_BLOCK_SIZE_BITS {
            return Err(BlockError::TooLarge { name, nets, bits });
        }
        let nets = nets.trunc();
        let size = 1u32.checked_shl(bits.into()).unwrap_or(1);
        Ok(Self { name, pool: pool.to_owned(), nets, size, reserved, deleting, uid: String::new() })
    }

    /// Sets the UID of its object, which tells it from another block of the same name.
    #[must_use]
    pub fn with_uid(mut self, uid: &str) -> Self {
        uid.clone_into(&mut self.uid);
        self
    }

    /// Name of the AddressBlock.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether pods never get addresses from it.
    pub fn is_reserved(&self) -> bool {
        self.reserved
    }

    /// Whether it has a deletion timestamp.
    pub fn is_deleting(&self) -> bool {
        self.deleting
    }

    /// Name of the pool.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// Prefixes of the block, without host bits.
    pub fn nets(&self) -> DualStackNets {
        self.nets
    }

    /// The UID of its object; empty when unknown.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    pub(super) fn offset_of(&self, address: IpAddr) -> Option<u32> {
        match address {
            IpAddr::V4(address) => {
                let net = self.nets.ipv4.filter(|net| net.contains(&address))?;
                address.to_bits().checked_sub(net.network().to_bits())
            }
            IpAddr::V6(address) => {
                let net = self.nets.ipv6.filter(|net| net.contains(&address))?;
                address.to_bits().checked_sub(net.network().to_bits())?.try_into().ok()
            }
        }
    }

    pub(super) fn addresses_at(&self, offset: u32) -> (Option<Ipv4Addr>, Option<Ipv6Addr>) {
        let ipv4 = self.nets.ipv4.and_then(|net| net.network().to_bits().checked_add(offset));
        let ipv6 = self.nets.ipv6.and_then(|net| net.network().to_bits().checked_add(offset.into()));
        (ipv4.map(Ipv4Addr::from_bits), ipv6.map(Ipv6Addr::from_bits))
    }
}

//! AddressPools: subnets cut into blocks of equal size.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use fairlead_address::{DualStack, DualStackAddrs, DualStackNets, Interval};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Largest `blockSizeBits`: 2^20 addresses in a block.
///
/// A block belongs to one node, and no node runs a million pods (the kernel's neighbour and link tables end long
/// before): more bits would only burn the pool. The bound also keeps every offset in a `u32`, every count of a
/// node's addresses in an `i64` gauge, and a set of all offsets of a block, should someone fill it, below 128 KiB
/// as a bitmap.
pub const MAX_BLOCK_SIZE_BITS: u8 = 20;

/// Largest block number: the AddressBlock resource stores it as a non-negative `int32`.
pub const MAX_INDEX: u32 = i32::MAX as u32;

/// Reason why an AddressPool cannot be used. Subnets are counted from 0, as in `spec.subnets[0]`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// `blockSizeBits` is out of bounds.
    #[error("pool {pool}: blockSizeBits is {bits}; it must be between 0 and {MAX_BLOCK_SIZE_BITS}")]
    BlockSize {
        /// Name of the pool.
        pool: String,
        /// Value of `spec.blockSizeBits`.
        bits: i64,
    },
    /// No subnet at all.
    #[error("pool {pool}: spec.subnets is empty; name at least one subnet")]
    NoSubnets {
        /// Name of the pool.
        pool: String,
    },
    /// A subnet with neither family.
    #[error("pool {pool}: spec.subnets[{position}] has neither ipv4 nor ipv6; give it at least one")]
    NoFamily {
        /// Name of the pool.
        pool: String,
        /// Position of the subnet in `spec.subnets`.
        position: usize,
    },
    /// Not a prefix, or one of the other family.
    #[error(
        "pool {pool}: spec.subnets[{position}].{family} is {text:?}; it must be an {family} prefix such as {example}"
    )]
    NotAPrefix {
        /// Name of the pool.
        pool: String,
        /// Position of the subnet in `spec.subnets`.
        position: usize,
        /// `ipv4` or `ipv6`.
        family: &'static str,
        /// Value of the field.
        text: String,
        /// Example of a valid prefix of the family.
        example: &'static str,
    },
    /// Smaller than one block.
    #[error(
        "pool {pool}: too narrow subnet {subnet} in spec.subnets[{position}]: \
         it has {host_bits} host bits and a block needs {bits}"
    )]
    TooNarrow {
        /// Name of the pool.
        pool: String,
        /// Position of the subnet in `spec.subnets`.
        position: usize,
        /// The prefix.
        subnet: IpNet,
        /// Host bits of the prefix.
        host_bits: u8,
        /// Host bits of a block: `spec.blockSizeBits`.
        bits: u8,
    },
    /// The two families of a subnet have different sizes.
    #[error(
        "pool {pool}: {ipv4} and {ipv6} in spec.subnets[{position}] differ in size: \
         both must have the same number of host bits"
    )]
    SizesDiffer {
        /// Name of the pool.
        pool: String,
        /// Position of the subnet in `spec.subnets`.
        position: usize,
        /// The IPv4 prefix.
        ipv4: Ipv4Net,
        /// The IPv6 prefix.
        ipv6: Ipv6Net,
    },
    /// Subnets with different families.
    #[error(
        "pool {pool}: spec.subnets[{position}] has other address families than spec.subnets[0]: \
         all subnets of a pool must have the same, or pods would get different ones"
    )]
    FamiliesDiffer {
        /// Name of the pool.
        pool: String,
        /// Position of the subnet in `spec.subnets`.
        position: usize,
    },
    /// Two subnets share addresses.
    #[error("pool {pool}: subnets {first} and {second} overlap: remove one of them")]
    Overlap {
        /// Name of the pool.
        pool: String,
        /// One of them.
        first: IpNet,
        /// The other.
        second: IpNet,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Subnet {
    nets: DualStackNets,
    /// Number of its first block, counted through the pool.
    first: u128,
    /// Number of blocks in the subnet.
    blocks: u128,
}

/// A usable AddressPool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    name: String,
    block_size_bits: u8,
    subnets: Vec<Subnet>,
}

impl Pool {
    /// Parses the fields of an AddressPool: `spec.blockSizeBits` and (`ipv4`, `ipv6`) of each of `spec.subnets`.
    /// Host bits in a subnet are ignored, as Coil does.
    ///
    /// # Errors
    /// Says which field of which pool is wrong; see [`PoolError`].
    pub fn parse<'a>(
        name: &str,
        block_size_bits: i64,
        subnets: impl IntoIterator<Item = (Option<&'a str>, Option<&'a str>)>,
    ) -> Result<Self, PoolError> {
        let bits = u8::try_from(block_size_bits)
            .ok()
            .filter(|bits| *bits <= MAX_BLOCK_SIZE_BITS)
            .ok_or_else(|| PoolError::BlockSize { pool: name.to_owned(), bits: block_size_bits })?;
        let mut pool = Self { name: name.to_owned(), block_size_bits: bits, subnets: Vec::new() };
        for (position, (ipv4, ipv6)) in subnets.into_iter().enumerate() {
            let subnet = parse_subnet(&pool, position, ipv4, ipv6)?;
            pool.subnets.push(subnet);
        }
        if pool.subnets.is_empty() {
            return Err(PoolError::NoSubnets { pool: pool.name });
        }
        let mut nets: Vec<IpNet> = pool.nets().collect();
        match first_overlap(&mut nets) {
            Some((first, second)) => Err(PoolError::Overlap { pool: pool.name, first, second }),
            None => Ok(pool),
        }
    }

    /// Name of the AddressPool.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Host bits of a block.
    pub fn block_size_bits(&self) -> u8 {
        self.block_size_bits
    }

    /// All its prefixes, in order, IPv4 before IPv6.
    pub fn nets(&self) -> impl Iterator<Item = IpNet> {
        self.subnets.iter().flat_map(|subnet| subnet.nets.iter())
    }

    /// Number of blocks in all subnets, at most `u128::MAX`. Only the first [`MAX_INDEX`]` + 1` can have names.
    pub fn capacity(&self) -> u128 {
        self.subnets.last().map_or(0, |last| last.first.saturating_add(last.blocks))
    }

    /// Name of a block's AddressBlock: `<pool>-<index>`.
    pub fn block_name(&self, index: u32) -> String {
        format!("{}-{index}", self.name)
    }

    /// The block with this number; `None` beyond the last one.
    pub fn block(&self, index: u32) -> Option<DualStackNets> {
        if index > MAX_INDEX {
            return None;
        }
        let (subnet, local) = self.locate(index.into())?;
        Some(subnet.cut(local, self.block_size_bits))
    }

    /// The block that contains all of these addresses, with its number.
    pub fn containing(&self, addresses: DualStackAddrs) -> Option<(u32, DualStackNets)> {
        let first = addresses.iter().next()?;
        let local = |subnet: &Subnet| {
            let net = subnet.nets.iter().find(|net| net.contains(&first))?;
            let offset = Interval::from(IpNet::from(first)).first.checked_sub(Interval::from(net).first)?;
            subnet.first.checked_add(offset.checked_shr(self.block_size_bits.into())?)
        };
        let index = u32::try_from(self.subnets.iter().find_map(local)?).ok()?;
        let nets = self.block(index)?;
        addresses.iter().all(|address| nets.iter().any(|net| net.contains(&address))).then_some((index, nets))
    }

    /// Lowest number, not below `from`, that is not allocated and none of whose addresses is taken. `last_taken` gives the
    /// last address of something that shares addresses with a prefix.
    pub fn first_free(
        &self,
        from: u32,
        is_allocated: impl Fn(u32) -> bool,
        last_taken: impl Fn(IpNet) -> Option<u128>,
    ) -> Option<u32> {
        let mut index = from;
        // Every step passes an allocated number or a taken stretch, so it ends after as many as there are.
        while index <= MAX_INDEX {
            if is_allocated(index) {
                index = index.checked_add(1)?;
                continue;
            }
            let (subnet, local) = self.locate(index.into())?;
            match subnet.next_clear(local, self.block_size_bits, &last_taken) {
                None => return Some(index),
                Some(next) => index = subnet.first.checked_add(next.min(subnet.blocks))?.try_into().ok()?,
            }
        }
        None
    }

    fn locate(&self, index: u128) -> Option<(&Subnet, u128)> {
        let position = self.subnets.partition_point(|subnet| subnet.first <= index).checked_sub(1)?;
        let subnet = self.subnets.get(position)?;
        let local = index.checked_sub(subnet.first)?;
        (local < subnet.blocks).then_some((subnet, local))
    }
}

impl Subnet {
    fn cut(&self, local: u128, bits: u8) -> DualStackNets {
        let offset = local.checked_shl(bits.into()).unwrap_or_default();
        let ipv4 = self.nets.ipv4.and_then(|net| {
            let first = u128::from(net.network().to_bits()).checked_add(offset)?;
            Ipv4Net::new(Ipv4Addr::from_bits(first.try_into().ok()?), 32u8.checked_sub(bits)?).ok()
        });
        let ipv6 = self.nets.ipv6.and_then(|net| {
            let first = net.network().to_bits().checked_add(offset)?;
            Ipv6Net::new(Ipv6Addr::from_bits(first), 128u8.checked_sub(bits)?).ok()
        });
        DualStackNets { ipv4, ipv6 }
    }

    /// `None` if none of the block's addresses is taken, else the first block that may be free, behind the taken stretch.
    fn next_clear(&self, local: u128, bits: u8, last_taken: &impl Fn(IpNet) -> Option<u128>) -> Option<u128> {
        let block = self.cut(local, bits);
        let behind = |block: IpNet, subnet: IpNet| {
            let last = last_taken(block)?;
            let distance = last.saturating_sub(Interval::from(subnet).first);
            Some(distance.checked_shr(bits.into()).unwrap_or_default().saturating_add(1))
        };
        let ipv4 = block.ipv4.zip(self.nets.ipv4).and_then(|(block, net)| behind(block.into(), net.into()));
        let ipv6 = block.ipv6.zip(self.nets.ipv6).and_then(|(block, net)| behind(block.into(), net.into()));
        ipv4.max(ipv6)
    }
}

fn parse_subnet(
    pool: &Pool,
    position: usize,
    ipv4: Option<&str>,
    ipv6: Option<&str>,
) -> Result<Subnet, PoolError> {
    let not_a_prefix = |family, text: &str, example| PoolError::NotAPrefix {
        pool: pool.name.clone(),
        position,
        family,
        text: text.to_owned(),
        example,
    };
    let nets = DualStack { ipv4, ipv6 }.try_map(
        |text| text.parse::<Ipv4Net>().map_err(|_| not_a_prefix("ipv4", text, "10.64.0.0/16")),
        |text| text.parse::<Ipv6Net>().map_err(|_| not_a_prefix("ipv6", text, "fd01::/112")),
    )?;
    let nets = nets.trunc();
    let sizes =
        nets.map(|net| 32u8.saturating_sub(net.prefix_len()), |net| 128u8.saturating_sub(net.prefix_len()));
    if let DualStack { ipv4: Some(ipv4), ipv6: Some(ipv6) } = nets
        && sizes.ipv4 != sizes.ipv6
    {
        return Err(PoolError::SizesDiffer { pool: pool.name.clone(), position, ipv4, ipv6 });
    }
    let (Some(host_bits), Some(subnet)) = (sizes.ipv4.or(sizes.ipv6), nets.iter().next()) else {
        return Err(PoolError::NoFamily { pool: pool.name.clone(), position });
    };
    let bits = pool.block_size_bits;
    let Some(index_bits) = host_bits.checked_sub(bits) else {
        return Err(PoolError::TooNarrow { pool: pool.name.clone(), position, subnet, host_bits, bits });
    };
    if let Some(first) = pool.subnets.first()
        && !first.nets.same_families(&nets)
    {
        return Err(PoolError::FamiliesDiffer { pool: pool.name.clone(), position });
    }
    let blocks = 1u128.checked_shl(index_bits.into()).unwrap_or(u128::MAX);
    Ok(Subnet { nets, first: pool.capacity(), blocks })
}

/// Sorted prefixes overlap exactly when two neighbours do: whatever starts inside a prefix comes right after it.
fn first_overlap(nets: &mut [IpNet]) -> Option<(IpNet, IpNet)> {
    nets.sort_unstable();
    nets.iter().zip(nets.iter().skip(1)).find(|(a, b)| a.contains(*b)).map(|(a, b)| (*a, *b))
}

/// Two pools that share addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlap {
    /// Name of one pool.
    pub first_pool: String,
    /// Subnet of the first pool that shares addresses with the other one.
    pub first_subnet: IpNet,
    /// Name of the other pool.
    pub second_pool: String,
    /// Subnet of the second pool that shares addresses with the other one.
    pub second_subnet: IpNet,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first_pool, first_subnet, second_pool, second_subnet } = self;
        write!(f, "subnet {first_subnet} of pool {first_pool} overlaps {second_subnet} of pool {second_pool}")
    }
}

impl std::error::Error for Overlap {}

/// The first subnets that two pools share addresses in, by address; `None` if they share none.
pub fn overlaps(first: &Pool, second: &Pool) -> Option<Overlap> {
    overlap_of(first, first.nets(), second)
}

/// Whether a pool may be stored beside another one: what it had `before` may overlap, for no subnet can be taken out
/// of a pool and other changes (to disable it) must stay possible; what it gets now may not. `None` for a new pool.
///
/// # Errors
/// The first new overlap, by address.
pub fn admit(pool: &Pool, before: Option<&Pool>, other: &Pool) -> Result<(), Overlap> {
    let had: BTreeSet<IpNet> = before.into_iter().flat_map(Pool::nets).collect();
    overlap_of(pool, pool.nets().filter(|net| !had.contains(net)), other).map_or(Ok(()), Err)
}

fn overlap_of(first: &Pool, nets: impl Iterator<Item = IpNet>, second: &Pool) -> Option<Overlap> {
    let of_first = nets.map(|net| (net, false));
    let mut nets: Vec<(IpNet, bool)> = of_first.chain(second.nets().map(|net| (net, true))).collect();
    nets.sort_unstable();
    // Within a pool nothing overlaps, so overlapping neighbours are of different pools.
    let (a, b) = nets.iter().zip(nets.iter().skip(1)).find(|(a, b)| a.0.contains(&b.0))?;
    let (first_subnet, second_subnet) = if a.1 { (b.0, a.0) } else { (a.0, b.0) };
    Some(Overlap {
        first_pool: first.name.clone(),
        first_subnet,
        second_pool: second.name.clone(),
        second_subnet,
    })
}

#[cfg(test)]
mod tests;

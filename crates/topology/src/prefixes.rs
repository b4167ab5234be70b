//! Prefixes that a mesh can carry, and arithmetic on sets of them.

use fairlead_address::PrefixSet;
pub use fairlead_address::UnusablePrefix as Unusable;
pub(crate) use fairlead_address::{is_host, unusable};
use ipnet::IpNet;

/// The fewest prefixes that cover exactly those addresses of `prefix` that are not in `holes`.
pub(crate) fn without(prefix: IpNet, holes: &PrefixSet) -> Vec<IpNet> {
    PrefixSet::from_iter([prefix]).subtract(holes).prefixes().collect()
}

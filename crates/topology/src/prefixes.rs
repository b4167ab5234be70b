//! Prefixes that a mesh can carry, and arithmetic on sets of them.

use fairlead_address::PrefixSet;
pub use fairlead_address::UnusablePrefix as Unusable;
pub(crate) use fairlead_address::{is_host, unusable};
use ipnet::IpNet;

/// The fewest prefixes that cover exactly those addresses of `prefix` that are not in `holes`.
pub(crate) fn without(prefix: IpNet, holes: &PrefixSet) -> Vec<IpNet> {
    all(&PrefixSet::from_iter([prefix]).subtract(holes)).collect()
}

/// The fewest prefixes that cover exactly the set, of both families.
pub(crate) fn all(set: &PrefixSet) -> impl Iterator<Item = IpNet> {
    let ipv4 = set.ipv4_prefixes().into_iter().map(IpNet::from);
    ipv4.chain(set.ipv6_prefixes().into_iter().map(IpNet::from))
}

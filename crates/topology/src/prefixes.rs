//! Which prefixes a mesh can carry, and arithmetic on sets of them.

use fairlead_address::PrefixSet;
pub use fairlead_address::UnusablePrefix as Unusable;
pub(crate) use fairlead_address::{is_host, outermost, unusable};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The smallest lists of prefixes that cover `prefixes` and nothing of `without`.
pub(crate) fn cover_without<'a>(
    prefixes: impl Iterator<Item = &'a IpNet>,
    without: &[IpNet],
) -> (Vec<Ipv4Net>, Vec<Ipv6Net>) {
    let rest = prefixes.collect::<PrefixSet>().subtract(&without.iter().collect());
    (rest.ipv4_prefixes(), rest.ipv6_prefixes())
}

//! Pods send with their own addresses only. A packet is dropped where it enters the host if no route leads to its source by
//! the link it came from (RFC 3704, "strict reverse path forwarding"), before a connection is tracked for it.
//!
//! `nft list table inet fairlead_source_check` prints:
//!
//! ```text
//! iifgroup 116 fib saddr . iif oif missing counter packets 0 bytes 0 drop
//! ```
//!
//! The table of pods has a route for each address, so the rule needs no list of its own that an ADD or DEL would have to
//! change. Links are matched by their group: a link outside of it is not checked, as one of a gateway that forwards packets of
//! others would have to be. Sources of IPv6 neighbour discovery without an address pass (`nft_fib_v6_skip_icmpv6`,
//! `net/ipv6/netfilter/nft_fib_ipv6.c`), and link-local ones have a route per link.

use std::collections::BTreeMap;

use fairlead_api::names::{LINK_GROUP_PODS, NFT_TABLE_SOURCE_CHECK};
use fairlead_netlink::Result;
use fairlead_netlink::nftables::{Chain, Comparison, Expression, Hook, Meta, Rule, Table};

use crate::nft_table::{self, Applied};

/// `raw`: before connections are tracked (`NF_IP_PRI_RAW`).
const PRIORITY: i32 = -300;

/// Brings the table to what it should be; sends nothing if it is there.
///
/// # Errors
/// The kernel refuses.
pub fn check_sources() -> Result<Applied> {
    let rule = Rule(vec![
        Expression::LoadMeta(Meta::InputInterfaceGroup),
        Expression::Compare(Comparison::Equal, LINK_GROUP_PODS.to_ne_bytes().to_vec()),
        Expression::LoadSourceIsReachable,
        Expression::Compare(Comparison::Equal, vec![0; 4]),
        Expression::Counter,
        Expression::Drop,
    ]);
    let chain = Chain { hook: Hook::FilterPrerouting, priority: PRIORITY, rules: vec![rule] };
    nft_table::apply(&Table {
        name: NFT_TABLE_SOURCE_CHECK.to_owned(),
        sets: BTreeMap::new(),
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains: BTreeMap::from([("prerouting".to_owned(), chain)]),
    })
}

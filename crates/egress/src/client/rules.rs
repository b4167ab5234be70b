//! The rules of a client pod.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fairlead_address::{IntervalSet, IpFamily, PrefixSet, overlap};
use fairlead_api::client_routing::ClientRule;
use fairlead_api::names::{
    RULE_PRIORITIES_EGRESS_IN_CLUSTER, RULE_PRIORITY_EGRESS_LINK_LOCAL, RULE_PRIORITY_EGRESS_NARROW,
    RULE_PRIORITY_EGRESS_PRIVATE, RULE_PRIORITY_EGRESS_WIDE, TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE,
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::destinations::Destinations;

/// The routing table `main` (`RT_TABLE_MAIN`, linux/rtnetlink.h).
pub const TABLE_MAIN: u32 = 254;

/// RFC 3927 and RFC 4291, section 2.5.6.
const LINK_LOCAL_IPV4: IpNet = ipv4(169, 254, 16);
const LINK_LOCAL_IPV6: IpNet = ipv6(0xfe80, 10);
/// RFC 1918, in the order of Coil's rules.
const PRIVATE_IPV4: &[IpNet] = &[ipv4(10, 0, 8), ipv4(172, 16, 12), ipv4(192, 168, 16)];
/// RFC 4193.
const PRIVATE_IPV6: &[IpNet] = &[ipv6(0xfc00, 7)];

const fn ipv4(first: u8, second: u8, length: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(first, second, 0, 0), length))
}

const fn ipv6(first: u16, length: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, 0), length))
}

/// The table of the route to a destination of an Egress: where its base address lies in a private network, the one that comes
/// before the rules for these, as in Coil.
pub(super) fn table_of(destination: IpNet) -> u32 {
    let is_private =
        private(IpFamily::of(destination.addr())).iter().any(|range| range.contains(&destination.network()));
    if is_private { TABLE_EGRESS_NARROW } else { TABLE_EGRESS_WIDE }
}

/// All rules of a family by priority.
///
/// # Errors
/// The number of ranges of the cluster, if there are more than rules for them.
pub(super) fn rules(family: IpFamily, in_cluster: &PrefixSet) -> Result<Vec<ClientRule>, usize> {
    let main = |priority, destination| ClientRule { priority, destination, table: TABLE_MAIN };
    let lookup = |priority, table| ClientRule { priority, destination: family.everything(), table };
    let ranges = ranges(family, in_cluster);
    if ranges.len() > RULE_PRIORITIES_EGRESS_IN_CLUSTER.count() {
        return Err(ranges.len());
    }
    let mut rules = vec![
        main(RULE_PRIORITY_EGRESS_LINK_LOCAL, link_local(family)),
        lookup(RULE_PRIORITY_EGRESS_NARROW, TABLE_EGRESS_NARROW),
    ];
    let private = (RULE_PRIORITY_EGRESS_PRIVATE..).zip(private(family).iter().copied());
    let in_cluster = RULE_PRIORITIES_EGRESS_IN_CLUSTER.zip(ranges);
    rules.extend(private.chain(in_cluster).map(|(priority, range)| main(priority, range)));
    rules.push(lookup(RULE_PRIORITY_EGRESS_WIDE, TABLE_EGRESS_WIDE));
    Ok(rules)
}

/// The fewest prefixes for the ranges of the cluster, of both families, that matter to client pods of an Egress with these destinations, for its
/// status: those that need a rule of their own, and those that overlap a destination in private networks, whose table comes before the rules.
pub fn cluster_ranges(in_cluster: &PrefixSet, destinations: &Destinations) -> Vec<IpNet> {
    let narrow: Vec<IpNet> = destinations.used().filter(|it| is_narrow(*it)).collect();
    let matters = |range: &IpNet| {
        !is_kept_by_others(range) || narrow.iter().any(|destination| overlap(range, destination))
    };
    let all = IpFamily::BOTH.into_iter().flat_map(|family| in_cluster.family(family).prefixes());
    all.filter(|range| matters(range)).collect()
}

/// Whether the route to a destination is in the table that comes before the rules for ranges of the cluster.
pub(super) fn is_narrow(destination: IpNet) -> bool {
    table_of(destination) == TABLE_EGRESS_NARROW
}

/// The fewest prefixes for the ranges of the cluster that no other rule keeps in the table `main`.
fn ranges(family: IpFamily, in_cluster: &PrefixSet) -> Vec<IpNet> {
    let prefixes = in_cluster.family(family).prefixes();
    let new: Vec<IpNet> = prefixes.into_iter().filter(|range| !is_kept_by_others(range)).collect();
    IntervalSet::from_prefixes(family, &new).prefixes()
}

/// Whether the rules for private networks and link-local addresses have all of a range.
fn is_kept_by_others(range: &IpNet) -> bool {
    let family = IpFamily::of(range.addr());
    private(family).iter().chain([&link_local(family)]).any(|kept| kept.contains(range))
}

/// Whether a rule before that of `table` keeps packets to this address in the table `main`.
pub(super) fn is_kept(rules: &[ClientRule], destination: IpAddr, table: u32) -> bool {
    let before = rules.iter().take_while(|rule| rule.table != table);
    before.filter(|rule| rule.table == TABLE_MAIN).any(|rule| rule.destination.contains(&destination))
}

fn link_local(family: IpFamily) -> IpNet {
    match family {
        IpFamily::V4 => LINK_LOCAL_IPV4,
        IpFamily::V6 => LINK_LOCAL_IPV6,
    }
}

fn private(family: IpFamily) -> &'static [IpNet] {
    match family {
        IpFamily::V4 => PRIVATE_IPV4,
        IpFamily::V6 => PRIVATE_IPV6,
    }
}

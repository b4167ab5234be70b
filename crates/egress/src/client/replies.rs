//! Connections that others open to a client pod and that `eth0` answers although their peers are destinations of an Egress: those
//! of peers that the pod reaches through an Egress with `spec.originatingOnly`.

use std::collections::BTreeMap;

use fairlead_address::{Interval, IntervalSet, IpFamily};
use fairlead_api::client_routing::ClientRoute;
use fairlead_api::names::TABLE_EGRESS_NARROW;
use ipnet::IpNet;

/// The addresses of such peers, of one family, where a pod has these routes.
///
/// For addresses that rules leave to the table `main` it may say either: these leave by `eth0` in any case.
pub fn replies_by_uplink(family: IpFamily, routes: &[ClientRoute]) -> IntervalSet {
    let (mut narrow, mut wide) = (BTreeMap::new(), BTreeMap::new());
    for ClientRoute { table, destination, target, originating_only } in routes {
        if IpFamily::of(destination.addr()) == family {
            let of = if *table == TABLE_EGRESS_NARROW { &mut narrow } else { &mut wide };
            let originating_only = (!target.lets_pass()).then_some(*originating_only);
            of.insert((destination.prefix_len(), *destination), originating_only);
        }
    }
    let by_narrow = of_table(family, &narrow, |it| it.is_some());
    let by_wide = of_table(family, &wide, |it| it == Some(true)).subtract(&by_narrow);
    union(&of_table(family, &narrow, |it| it == Some(true)), &by_wide)
}

/// Addresses whose longest route is such a one. The routes are ordered by their length, each with whether it is of an Egress that only takes
/// connections which the pod opens; `None` for those that leave packets to the rules after the table.
fn of_table(
    family: IpFamily,
    routes: &BTreeMap<(u8, IpNet), Option<bool>>,
    is_such: impl Fn(Option<bool>) -> bool,
) -> IntervalSet {
    let mut found = IntervalSet::empty(family);
    for ((_, destination), originating_only) in routes {
        let it = IntervalSet::from_prefixes(family, [destination]);
        found = if is_such(*originating_only) { union(&found, &it) } else { found.subtract(&it) };
    }
    found
}

fn union(a: &IntervalSet, b: &IntervalSet) -> IntervalSet {
    let all: Vec<Interval> = a.intervals().iter().chain(b.intervals()).copied().collect();
    IntervalSet::from_intervals(a.family(), all)
}

//! Mark of what comes from other nodes past the mesh. Firewalls check sources as the kernel does with `rp_filter`: firewalld for all of IPv6
//! (`fib saddr . mark . iif oif missing drop`), others with iptables' match `rpfilter`. The rules of [`super::guard_routes`] lead answers to other
//! nodes' own addresses into the device, so the check would drop what these send by an uplink, WireGuard's packets among it. The lookup has the
//! mark of the packet: with that of what goes past the mesh it finds the way that there would be without one.
//!
//! ```text
//! iifname "eth0" ip saddr @fairlead_nodes_ipv4 meta mark set meta mark | 0x60
//! ```
//!
//! Nothing that leaves is told by this mark: what is forwarded into the mesh gets another one, and the guard does not look at it.

use std::collections::BTreeMap;

use fairlead_address::IntervalSet;
use fairlead_netlink::nftables::{AddressEnd, Chain, Expression, Hook, Meta, Rule};
use ipnet::IpNet;

use super::state::MeshState;
use super::table::{HALVES, mark_past_mesh};

/// Before `raw` (`NF_IP_PRI_RAW`, -300), the first table of iptables in which sources may be checked.
const PRIORITY: i32 = -310;

/// The chain, if packets of other nodes may come past the mesh.
pub(super) fn chain(state: &MeshState) -> Option<Chain> {
    let rules = state.uplinks.iter().flat_map(|uplink| {
        HALVES.iter().filter(move |half| half.has_nodes(&state.bypass)).map(move |half| {
            let from_node = Expression::address_in(half.addresses, AddressEnd::Source, half.nodes);
            let by_uplink = [Expression::LoadMeta(Meta::InputInterface), Expression::is_interface(uplink)];
            Rule(by_uplink.into_iter().chain(from_node).chain(mark_past_mesh()).collect())
        })
    });
    let rules: Vec<Rule> = rules.collect();
    (!rules.is_empty()).then_some(Chain { hook: Hook::FilterPrerouting, priority: PRIORITY, rules })
}

/// The sets that it looks up.
pub(super) fn sets(state: &MeshState) -> BTreeMap<String, IntervalSet> {
    let nodes: Vec<IpNet> = state.bypass.nodes.iter().copied().map(IpNet::from).collect();
    let halves = HALVES.iter().filter(|half| !state.uplinks.is_empty() && half.has_nodes(&state.bypass));
    halves.map(|half| (half.nodes.to_owned(), IntervalSet::from_prefixes(half.addresses, &nodes))).collect()
}

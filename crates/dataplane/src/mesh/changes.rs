//! Changes of the kernel that may concern the mesh: those of what leads packets into its device.

use std::net::IpAddr;

use fairlead_api::names::{
    NFT_TABLE, NFT_TABLE_ENCAPSULATION, NFT_TABLE_GUARD, NFT_TABLE_PATH_SOCKET, RULE_PRIORITY_MESH,
    RULE_PRIORITY_MESH_LAST, RULE_PRIORITY_MESH_PAST, TABLE_MESH, TABLES_MESH_GUARD,
};
use fairlead_netlink::route::{Change, TABLE_MAIN};

/// nftables tables of the mesh.
const TABLES: [&str; 4] = [NFT_TABLE, NFT_TABLE_ENCAPSULATION, NFT_TABLE_GUARD, NFT_TABLE_PATH_SOCKET];

/// Whether a change of the kernel may concern the mesh: this host's own links and addresses, the reverse path filter, and
/// what leads packets into the device. Those of pods do not.
pub fn concerns(change: &Change) -> bool {
    match change {
        Change::Address { address, .. } => match address.prefix.addr() {
            IpAddr::V4(address) => !address.is_link_local(),
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        },
        Change::Link { link, .. } => link.kind.as_deref() != Some("veth"),
        Change::Missed => true,
        Change::Netconf(it) => it.reverse_path_filter.is_some(),
        Change::Route { route, gone } => {
            route.table == TABLE_MESH
                || (route.table == TABLE_MAIN && route.destination.prefix_len() == 0)
                || (*gone && TABLES_MESH_GUARD.contains(&route.table))
        }
        Change::Table(name) => TABLES.contains(&name.as_str()),
        Change::Rule { rule, .. } => {
            rule.priority <= RULE_PRIORITY_MESH_PAST
                || [RULE_PRIORITY_MESH, RULE_PRIORITY_MESH_LAST].contains(&rule.priority)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_programs_take_from_the_mesh_wakes_it_and_links_of_pods_do_not() {
        use fairlead_netlink::route::{IpFamily, Rule};
        let rule = |priority| Change::Rule {
            rule: Rule::lookup(IpFamily::V4, priority, TABLE_MESH, 30),
            gone: true,
        };
        assert!(concerns(&rule(RULE_PRIORITY_MESH)) && concerns(&rule(RULE_PRIORITY_MESH_LAST)));
        assert!(concerns(&rule(102)) && !concerns(&rule(2000)));
        let route = |table| Change::Route {
            route: fairlead_netlink::route::Route::onto(table, 30, "0.0.0.0/0".parse().unwrap(), 7),
            gone: true,
        };
        assert!(concerns(&route(TABLE_MESH)) && concerns(&route(TABLE_MAIN)) && !concerns(&route(116)));
        assert!(concerns(&route(181)) && concerns(&route(183)));
        let address = |text: &str| {
            let (scope, flags) = (fairlead_netlink::route::Scope::UNIVERSE, Default::default());
            let address =
                fairlead_netlink::route::Address { link: 7, prefix: text.parse().unwrap(), scope, flags };
            Change::Address { address, gone: false }
        };
        assert!(concerns(&address("192.0.2.1/24")) && concerns(&address("fd00::1/64")));
        assert!(!concerns(&address("169.254.1.1/32")) && !concerns(&address("fe80::1/64")));
    }
}

//! Pools that share addresses with networks on links of this host, such as the bridge of a container engine or the device of a VPN: only the host knows
//! them. Pure.

use std::sync::Arc;

use fairlead_address::overlap;
use fairlead_api::resources::AddressPool;
use ipnet::IpNet;
use kube::ResourceExt as _;

use super::desired::subnets;

/// Sentences about the pools that share addresses with one of these networks.
pub(super) fn problems(pools: &[Arc<AddressPool>], on_links: &[IpNet]) -> Vec<String> {
    let shared = |net: &IpNet| on_links.iter().find(|network| overlap(net, network)).copied();
    let of_pool = |pool: &Arc<AddressPool>| {
        let found = subnets(pool).into_iter().find_map(|net| Some((net, shared(&net)?)));
        found.map(|(net, network)| {
            format!(
                "RangeInUse: {net} of AddressPool {} shares addresses with {network}, which is on a link of this host (ip route): pods with such addresses and hosts of \
                 that network cannot reach each other; use another network there, or another pool",
                pool.name_any()
            )
        })
    };
    pools.iter().filter_map(of_pool).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_bridge_inside_of_a_pool_is_named_with_the_pool() {
        let pool = |name: &str, subnets: &[&str]| -> Arc<AddressPool> {
            let subnets: Vec<_> = subnets.iter().map(|net| json!({ "ipv4": net })).collect();
            let pool = json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
                "spec": { "subnets": subnets },
            });
            Arc::new(serde_json::from_value(pool).unwrap())
        };
        let on_links = ["192.0.2.0/24", "172.17.0.0/16", "fd00::/64"].map(|net| net.parse().unwrap());
        let pools = [pool("apart", &["10.64.0.0/16"]), pool("wide", &["10.65.0.0/16", "172.16.0.0/12"])];
        let found = problems(&pools, &on_links);
        let words = "RangeInUse: 172.16.0.0/12 of AddressPool wide shares addresses with 172.17.0.0/16, which is on a link";
        assert!(found.len() == 1 && found[0].starts_with(words), "{found:?}");
    }
}

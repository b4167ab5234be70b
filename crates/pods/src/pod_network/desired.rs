//! Desired masquerading of pods' connections. Pure.

use std::sync::Arc;

use fairlead_api::names::{LINK_IP6TNL, LINK_IPIP};
use fairlead_api::resources::{AddressPool, Encapsulation, WireKubeMesh};
use fairlead_dataplane::masquerade::Masquerade;
use ipnet::IpNet;

/// Connections of pods to destinations outside of the cluster: with a mesh unless it says no, without one only those of pools
/// that say so. A pool's word counts before the mesh's.
///
/// Without a mesh nodes are on networks of this one, so `connected` counts as the cluster; with a mesh they are behind its
/// device. `pod_networks` are those of other plugins in the mesh.
pub fn masquerade(
    pools: &[Arc<AddressPool>],
    mesh: Option<&WireKubeMesh>,
    pod_networks: &[IpNet],
    connected: Vec<IpNet>,
) -> Masquerade {
    let by_default = mesh.is_some_and(|mesh| mesh.spec.masquerade);
    let masqueraded = pools.iter().filter(|pool| pool.spec.masquerade.unwrap_or(by_default));
    let pods = masqueraded.flat_map(|pool| subnets(pool)).collect();
    let mut cluster: Vec<IpNet> = pools.iter().flat_map(|pool| subnets(pool)).collect();
    match mesh {
        Some(mesh) => {
            cluster.extend(pod_networks);
            // The API server has checked them.
            cluster
                .extend(mesh.spec.non_masquerade_cidrs.iter().filter_map(|text| text.parse::<IpNet>().ok()));
        }
        None => cluster.extend(connected),
    }
    Masquerade { pods, cluster, mesh_devices: mesh.map(mesh_devices).unwrap_or_default() }
}

/// Names of the links by which packets enter the mesh.
fn mesh_devices(mesh: &WireKubeMesh) -> Vec<String> {
    let encapsulation =
        mesh.spec.topology.as_ref().map(|topology| topology.encapsulation).unwrap_or_default();
    let has_tunnels = encapsulation != Encapsulation::Never;
    let tunnels = [LINK_IPIP, LINK_IP6TNL].into_iter().filter(|_| has_tunnels).map(str::to_owned);
    [mesh.spec.interface_name.clone()].into_iter().chain(tunnels).collect()
}

/// All prefixes of a pool.
pub(super) fn subnets(pool: &AddressPool) -> Vec<IpNet> {
    // A pool with an invalid subnet has no blocks.
    let nets = pool.spec.parse_subnets().unwrap_or_default();
    nets.into_iter().flat_map(|net| net.iter().collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pool(name: &str, subnet: &str, masquerade: Option<bool>) -> Arc<AddressPool> {
        let mut pool = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
            "spec": { "subnets": [{ "ipv4": subnet }] },
        });
        if let Some(masquerade) = masquerade {
            pool["spec"]["masquerade"] = masquerade.into();
        }
        Arc::new(serde_json::from_value(pool).unwrap())
    }

    fn mesh(spec: serde_json::Value) -> WireKubeMesh {
        let (version, kind) = ("wirekube.io/v1alpha1", "WireKubeMesh");
        let mesh = json!({ "apiVersion": version, "kind": kind, "metadata": { "name": "m" }, "spec": spec });
        serde_json::from_value(mesh).unwrap()
    }

    fn prefixes(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    const A: &str = "10.1.0.0/16";
    const B: &str = "10.2.0.0/16";

    #[test]
    fn what_goes_through_tunnels_of_the_location_keeps_its_source() {
        let mesh = mesh(json!({ "topology": { "granularity": "cross", "encapsulation": "always" } }));
        let devices = masquerade(&[], Some(&mesh), &[], vec![]).mesh_devices;
        assert_eq!(devices, ["wire_kube", "fairlead_ipip", "fairlead_ip6tnl"]);
    }

    #[test]
    fn the_mesh_decides_unless_a_pool_does() {
        let (on, off) = (mesh(json!({})), mesh(json!({ "masquerade": false })));
        let cases: [(Option<&WireKubeMesh>, Option<bool>, &[&str]); 6] = [
            (Some(&on), None, &[A, B]),
            (Some(&on), Some(false), &[A]),
            (Some(&off), None, &[]),
            (Some(&off), Some(true), &[B]),
            (None, None, &[]),
            (None, Some(true), &[B]),
        ];
        for (mesh, of_pool, masqueraded) in cases {
            let pools = [pool("a", A, None), pool("b", B, of_pool)];
            assert_eq!(masquerade(&pools, mesh, &[], vec![]).pods, prefixes(masqueraded), "{of_pool:?}");
        }
    }

    #[test]
    fn pods_of_all_pools_and_the_listed_prefixes_see_pods_themselves() {
        let pools = [pool("a", A, None), pool("b", B, Some(false))];
        let mesh =
            mesh(json!({ "nonMasqueradeCIDRs": ["192.168.0.0/16", "fd00::/8"], "interfaceName": "wg9" }));
        let connected = prefixes(&["192.0.2.0/24"]);
        let networks = prefixes(&["10.244.1.0/24"]);
        let wanted = masquerade(&pools, Some(&mesh), &networks, connected.clone());
        assert_eq!(wanted.cluster, prefixes(&[A, B, "10.244.1.0/24", "192.168.0.0/16", "fd00::/8"]));
        assert_eq!(wanted.mesh_devices, ["wg9"]);
        let wanted = masquerade(&pools, None, &[], connected);
        assert_eq!(wanted.cluster, prefixes(&[A, B, "192.0.2.0/24"]), "nodes are there");
    }
}

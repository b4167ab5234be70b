//! Peers outside of the cluster (`kilo.squat.ai/v1alpha1`) as far as their prefixes are compared. Their preshared keys are not kept.

use fairlead_api::resources::KiloPeer;
use fairlead_cluster::cached_by_name;
use fairlead_cluster::caches::{self, Cache, config};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_ipam::used::{RangeUser, UsedRange};
use ipnet::IpNet;
use kube::api::{ApiResource, DynamicObject};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use serde_json::Value;

/// Name and prefixes of a Peer.
#[derive(Debug, Clone)]
pub(crate) struct PeerPrefixes {
    name: String,
    prefixes: Vec<IpNet>,
}

impl PeerPrefixes {
    /// Starts to watch all Peers. A cluster may not have the resource.
    pub(crate) fn watch(subsystem: &mut Subsystem, client: &Client) -> Cache<Self> {
        let peers = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::erase::<KiloPeer>(&()));
        let peers = caches::parsed(watcher(peers, config()), |peer: DynamicObject| Self::new(&peer));
        caches::start(subsystem, "Peers", peers)
    }

    /// Reads a Peer of any content: Kilo's own definition of the resource lets more pass than ours.
    fn new(peer: &DynamicObject) -> Self {
        let texts = peer.data.pointer("/spec/allowedIPs").and_then(Value::as_array);
        let texts = texts.into_iter().flatten().filter_map(Value::as_str);
        let prefixes = texts.filter_map(|text| text.parse::<IpNet>().ok());
        Self { name: peer.name_any(), prefixes: prefixes.map(|prefix| prefix.trunc()).collect() }
    }

    /// Ranges that the Peer uses.
    pub(super) fn ranges(&self) -> Vec<UsedRange> {
        let used = |net: &IpNet| UsedRange { user: RangeUser::Peer(self.name.clone()), net: *net };
        self.prefixes.iter().map(used).collect()
    }
}

cached_by_name!(PeerPrefixes, KiloPeer, |peer| &peer.name);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn peer(spec: &Value) -> PeerPrefixes {
        let object = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "laptop" }, "spec": spec,
        });
        PeerPrefixes::new(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn prefixes_of_a_peer_are_kept_and_its_keys_are_not() {
        let found = peer(&json!({
            "publicKey": "public", "presharedKey": "secret", "allowedIPs": ["10.9.0.7/24", "10.9.0.1", 7, "fd00::1/128"],
        }));
        let nets: Vec<String> = found.ranges().iter().map(|range| range.net.to_string()).collect();
        assert_eq!(nets, ["10.9.0.0/24", "fd00::1/128"]);
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
    }

    #[test]
    fn a_peer_of_another_shape_has_no_prefixes() {
        for spec in [json!(null), json!([]), json!({}), json!({ "allowedIPs": "10.0.0.0/8" })] {
            assert!(peer(&spec).ranges().is_empty(), "{spec}");
        }
    }
}

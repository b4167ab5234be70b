//! Source addresses, their gateways and their nodes, as the API server shows them.

use std::collections::BTreeMap;

use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::client::known::EgressInfo;
use fairlead_egress::endpoints::GatewayPlace;
use fairlead_source_addresses::announcements::{Gateway, Permitted};

use super::outputs::Nodes;

/// Source addresses of all Egresses that have some.
pub(super) fn permitted<'a>(egresses: impl IntoIterator<Item = &'a EgressInfo>) -> Permitted {
    let some = egresses.into_iter().filter(|egress| !egress.source_addresses.is_empty());
    some.map(|egress| (egress.name.clone(), egress.source_addresses.clone())).collect()
}

/// Nodes that may have each address. Of an address that two Egresses have, which the controller never permits, the first one counts.
pub(super) fn nodes<'a>(
    permitted: &Permitted,
    places: impl IntoIterator<Item = (&'a EgressName, &'a [GatewayPlace])>,
) -> Nodes {
    let mut by_egress: BTreeMap<&EgressName, BTreeMap<&str, &str>> = BTreeMap::new();
    for (egress, places) in places {
        let of_egress = by_egress.entry(egress).or_default();
        of_egress.extend(places.iter().map(|place| (place.pod.as_str(), place.node.as_str())));
    }
    let mut nodes = Nodes::new();
    for (egress, addresses) in permitted {
        let places = by_egress.get(egress);
        let gateways = || places.into_iter().flat_map(BTreeMap::values).map(|node| (*node).to_owned());
        for (address, gateway) in addresses {
            let known = nodes.entry(*address).or_default();
            if known.gateways.is_empty() {
                let holder = gateway.as_deref().and_then(|pod| places?.get(pod));
                known.holder = holder.map(|node| (*node).to_owned());
                known.gateways = gateways().collect();
            }
        }
    }
    nodes
}

/// The gateway pods of this node whose Egress has source addresses.
pub(super) fn gateways<'a>(
    permitted: &Permitted,
    pods: impl IntoIterator<Item = &'a SlimPod>,
) -> Vec<Gateway> {
    let gateway = |pod: &SlimPod| {
        let name = pod.gateway_of()?.to_owned();
        let egress = EgressName { namespace: pod.namespace().to_owned(), name };
        let is_one = permitted.contains_key(&egress) && !pod.has_ended() && !pod.uses_host_network();
        is_one.then(|| Gateway {
            egress,
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            pod: pod.name().to_owned(),
            addresses: pod.addresses().into_iter().collect(),
        })
    };
    pods.into_iter().filter_map(gateway).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn sources(name: &str, slots: Value) -> EgressInfo {
        let egress = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
            "metadata": {"namespace": "internet-egress", "name": name},
            "spec": {"destinations": ["0.0.0.0/0"]}, "status": {"sourceAddresses": slots},
        });
        EgressInfo::of(&serde_json::from_value(egress).unwrap())
    }

    fn place(pod: &str, node: &str) -> GatewayPlace {
        GatewayPlace { gateway: format!("u-{pod}"), pod: pod.to_owned(), node: node.to_owned() }
    }

    #[test]
    fn the_nodes_of_an_address_are_those_of_its_egress_and_the_holder_is_that_of_the_pod_that_is_named() {
        let nat = sources(
            "nat",
            json!([
                {"addresses": ["192.0.2.40", "2001:db8::40", "127.0.0.1", "fe80::1", "x"], "gateway": "nat-b"},
                {"addresses": ["192.0.2.41"]}, {"addresses": ["192.0.2.42"], "gateway": "gone"},
            ]),
        );
        let permitted = permitted([&nat, &sources("none", json!([]))]);
        assert_eq!(permitted.len(), 1);
        let (egress, other) = (nat.name.clone(), sources("other", json!([])).name);
        let (places, others) = ([place("nat-a", "n1"), place("nat-b", "n2")], [place("x", "n3")]);
        let nodes = nodes(&permitted, [(&egress, &places[..]), (&other, &others[..])]);
        let shown: Vec<String> = nodes
            .iter()
            .map(|(address, it)| format!("{address} {:?} {}", it.holder, it.gateways.len()))
            .collect();
        let expected = [
            "192.0.2.40 Some(\"n2\") 2",
            "192.0.2.41 None 2",
            "192.0.2.42 None 2",
            "2001:db8::40 Some(\"n2\") 2",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn only_gateway_pods_that_run_here_and_whose_egress_has_addresses_are_gateways() {
        let permitted = permitted([&sources("nat", json!([{"addresses": ["192.0.2.40"]}]))]);
        let pod = |name: &str, namespace: &str, of: &str, phase: &str| -> SlimPod {
            let labels = json!({"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress",
                "app.kubernetes.io/instance": of});
            serde_json::from_value(json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "namespace": namespace, "uid": format!("u-{name}"), "labels": labels},
                "status": {"phase": phase, "podIPs": [{"ip": "10.1.0.5"}, {"ip": "fd00:1::5"}]},
            }))
            .unwrap()
        };
        let pods = [
            pod("a", "internet-egress", "nat", "Running"),
            pod("b", "internet-egress", "nat", "Failed"),
            pod("c", "internet-egress", "other", "Running"),
            pod("d", "shop", "nat", "Running"),
        ];
        let found = gateways(&permitted, &pods);
        assert_eq!(found.iter().map(|it| it.uid.as_str()).collect::<Vec<_>>(), ["u-a"]);
        assert_eq!(found[0].addresses.to_string(), "10.1.0.5 and fd00:1::5");
    }
}

//! Every field of a WireKubeMesh is read by the mesh or by the network of the pods, or the API says that it is not.
#![cfg(test)]

use std::sync::Arc;

use fairlead_api::resources::WireKubeMesh;
use fairlead_api::resources::not_implemented::WIREKUBE_MESH;
use fairlead_members::settings::MeshSettings;
use fairlead_pods::pod_network::desired::masquerade;
use serde_json::{Value, json};
use testbed_api::fields::assert_each_is_read_or_listed;

/// `spec.relay` with this external relay.
fn relay(external: Value, others: Value) -> Value {
    let mut relay = json!({ "provider": "external", "external": external });
    relay.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
    relay
}

/// Adds the fields of `other`, at any depth.
fn merge(value: &mut Value, other: Value) {
    match (value, other) {
        (Value::Object(fields), Value::Object(others)) => {
            for (name, other) in others {
                merge(fields.entry(name).or_insert(Value::Null), other);
            }
        }
        (value, other) => *value = other,
    }
}

#[test]
fn every_field_is_read_or_listed_as_not_implemented() {
    let pool = json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": "default" },
        "spec": { "subnets": [{ "ipv4": "10.64.0.0/16" }] },
    });
    let pools = [Arc::new(serde_json::from_value(pool).unwrap())];
    let external = json!({ "endpoint": "a:1", "authSecretRef": { "name": "a" } });
    let read = |spec| {
        let discovery = json!({ "endpoints": ["https://a"], "secretRef": { "name": "a" } });
        let mut with_relay = json!({ "relay": relay(external.clone(), json!({})), "discovery": discovery });
        merge(&mut with_relay, spec);
        let mesh = WireKubeMesh::new("default", serde_json::from_value(with_relay).unwrap());
        (MeshSettings::parse(&mesh, &mut Vec::new()), masquerade(&pools, Some(&mesh), &[], Vec::new()))
    };
    let samples = [
        ("spec.listenPort", json!(51821)),
        ("spec.interfaceName", json!("wg9")),
        ("spec.mtu", json!(1400)),
        ("spec.masquerade", json!(false)),
        ("spec.nonMasqueradeCIDRs", json!(["192.0.2.0/24"])),
        ("spec.autoAllowedIPs.includeNodeInternalIP", json!(false)),
        ("spec.autoAllowedIPs.includePodCIDRs", json!(true)),
        ("spec.routing.allowDownPeerBypass", json!(true)),
        ("spec.routing.excludeCIDRs", json!(["192.0.2.0/24"])),
        ("spec.routing.localSubnetPolicy", json!("bypass")),
        ("spec.endpointFilters", json!(["192.0.2.0/24"])),
        ("spec.harvestExtraEndpoints", json!(false)),
        ("spec.peerEndpointFilters", json!(["192.0.2.0/24"])),
        ("spec.grants", json!([{ "node": "n1", "cidrs": ["192.0.2.0/24"] }])),
        ("spec.stunServers", json!(["a.example.com:3478", "b.example.com:3478"])),
        ("spec.natTraversal.portMapping", json!("disabled")),
        ("spec.relay.mode", json!("always")),
        ("spec.relay.provider", json!("managed")),
        ("spec.relay.handshakeTimeoutSeconds", json!(7)),
        ("spec.relay.directRetryIntervalSeconds", json!(60)),
        ("spec.relay.external.endpoint", json!("b:1")),
        ("spec.relay.external.transport", json!("wss")),
        ("spec.natTraversal.birthdayAttack", json!("disabled")),
        ("spec.natTraversal.birthdayAttack", json!("enabled")),
        ("spec.relay.external.caBundle", json!("bm9uZQ==")),
        ("spec.relay.external.authSecretRef.name", json!("token")),
        ("spec.relay.external.authSecretRef.namespace", json!("other")),
        ("spec.revokedPeers", json!([{ "name": "n1" }])),
        ("spec.discovery.endpoints", json!(["https://b"])),
        ("spec.discovery.caBundle", json!("bm9uZQ==")),
        ("spec.discovery.allowedPrefixes", json!(["10.0.0.0/8"])),
        ("spec.discovery.secretRef.name", json!("other")),
        ("spec.discovery.secretRef.namespace", json!("other")),
        ("spec.topology.granularity", json!("cross")),
        ("spec.topology.granularity", json!("location")),
        ("spec.topology.encapsulation", json!("always")),
        ("spec.topology.encapsulation", json!("crosssubnet")),
        ("spec.topology.label", json!("topology.kubernetes.io/zone")),
        ("spec.topology.internalCIDRs", json!(["10.0.0.0/8"])),
        ("spec.meshCIDR", json!("100.64.0.0/16")),
    ];
    let without_effect = json!({
        "apiServerURL": "https://192.0.2.1:6443",
        "natTraversal": { "handshakeValidWindowSeconds": 60 },
        "relay": { "external": { "controlEndpoint": "192.0.2.1:1" } },
        "routing": { "localSubnetPolicy": "tunnel" },
        "topology": { "granularity": "full", "encapsulation": "never" },
    });
    assert_each_is_read_or_listed::<WireKubeMesh, _>(
        Some(&WIREKUBE_MESH),
        read,
        &samples,
        &without_effect,
        // The controller reads these: `fairlead-controller` has the test.
        Some("spec.relay.managed."),
    );
}

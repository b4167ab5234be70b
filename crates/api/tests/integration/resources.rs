//! The custom resources read and write what users of Coil, WireKube and Kilo have, and `deploy/` is current.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

use fairlead_address::IpFamily;
use fairlead_api::names::{COIL_GROUP, KILO_GROUP, WIREGUARD_PORT, WIREKUBE_GROUP};
use fairlead_api::resources::{
    AddressBlock, AddressPool, AddressPoolSpec, BlockRequest, BlockRequestOutcome, CandidateType, Egress,
    EndpointDiscoveryMethod, InvalidName, InvalidSubnet, KiloPeer, NatTraversal, NatType, PeerTransport,
    SubnetSet, TransportMode, WireGuardImplementation, WireKubeMesh, WireKubeMeshSpec, WireKubePeer,
    WireKubePeerSpec, definitions,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResourceExt, Resource};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn crate_directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read_yaml(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn fixture(name: &str) -> Value {
    read_yaml(&crate_directory().join("tests/fixtures").join(name))
}

/// Reads the fixture as `T`, and asserts that nothing of it got lost.
#[track_caller]
fn round_trip<T: Serialize + DeserializeOwned + Debug>(name: &str) -> T {
    let written = fixture(name);
    let object: T = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(serde_json::to_value(&object).unwrap(), written, "{name}");
    object
}

#[test]
fn address_pool_of_the_coil_design() {
    let pool: AddressPool = round_trip("address_pool.yaml");
    let subnet = pool.spec.parse_subnets().unwrap()[0];
    assert_eq!(pool.spec.block_size_bits, 5);
    assert_eq!(subnet.ipv4.unwrap(), "10.2.0.0/16".parse().unwrap());
    assert_eq!(subnet.ipv6.unwrap(), "fd01:203:405:607::/112".parse().unwrap());
}

#[test]
fn address_block_of_the_coil_design_has_its_fields_on_top() {
    let block: AddressBlock = round_trip("address_block.yaml");
    assert_eq!((block.node(), block.pool(), block.is_reserved()), (Some("node1"), Some("pool1"), false));
    assert_eq!(block.metadata.name, Some(format!("pool1-{}", block.spec.index)));
    let prefixes = block.parse().unwrap();
    assert_eq!(prefixes.ipv4.unwrap(), "10.2.2.0/27".parse().unwrap());
    assert_eq!(prefixes.ipv6.unwrap(), "fd01:203:405:607::200/123".parse().unwrap());
}

#[test]
fn block_request_of_the_coil_design_says_its_outcome() {
    let mut request: BlockRequest = round_trip("block_request.yaml");
    assert_eq!(request.check_names(), Ok(()));
    let invalid = InvalidName { field: "poolName", text: "default/status".to_owned() };
    request.spec.pool_name.clone_from(&invalid.text);
    assert_eq!(request.check_names(), Err(invalid));
    assert_eq!(request.outcome(), BlockRequestOutcome::Granted("pool1-16"));

    // A refusal carries both conditions.
    let status = request.status.as_mut().unwrap();
    let mut failed = status.conditions[0].clone();
    failed.type_ = fairlead_api::resources::BlockRequestConditionType::Failed;
    failed.reason = "out of blocks".to_owned();
    status.conditions.push(failed);
    let refused =
        BlockRequestOutcome::Refused { reason: "out of blocks", message: "a human readable message" };
    assert_eq!(request.outcome(), refused);

    request.status = None;
    assert_eq!(request.outcome(), BlockRequestOutcome::Pending);
}

#[test]
fn block_request_takes_empty_probe_times() {
    let condition =
        json!({"type": "Complete", "status": "True", "lastProbeTime": null, "lastTransitionTime": null});
    let mut request = fixture("block_request.yaml");
    request["status"]["conditions"] = json!([condition]);
    let request: BlockRequest = serde_json::from_value(request).unwrap();
    assert_eq!(request.outcome(), BlockRequestOutcome::Granted("pool1-16"));
}

#[test]
fn egress_of_the_coil_design() {
    let egress: Egress = round_trip("egress.yaml");
    let pod = egress.spec.template.unwrap().pod_spec().unwrap();
    assert!(pod.affinity.unwrap().pod_anti_affinity.is_some());
    assert_eq!(egress.spec.session_affinity_config.unwrap().client_ip.unwrap().timeout_seconds, Some(43200));
}

#[test]
fn egress_of_the_coil_article_gets_defaults() {
    for name in ["egress_dual_stack.yaml", "egress_domestic.yaml"] {
        let mut expected = fixture(name);
        expected["spec"]["sessionAffinity"] = json!("ClientIP");
        let egress: Egress = serde_json::from_value(fixture(name)).unwrap();
        assert_eq!(serde_json::to_value(egress).unwrap(), expected);
    }
}

#[test]
fn egress_keeps_fields_of_a_newer_pod_spec_and_names_wrong_ones() {
    let mut written = fixture("egress.yaml");
    written["spec"]["template"]["spec"]["fieldOfTomorrow"] = json!({"x": [1]});
    let egress: Egress = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(serde_json::to_value(&egress).unwrap(), written);

    written["spec"]["template"]["spec"]["hostNetwork"] = json!("maybe");
    let egress: Egress = serde_json::from_value(written).unwrap();
    let error = egress.spec.template.unwrap().pod_spec().unwrap_err().to_string();
    assert!(error.contains("maybe"), "{error}");
}

#[test]
fn wirekube_objects_with_every_field() {
    let mesh: WireKubeMesh = round_trip("wirekube_mesh.yaml");
    assert_eq!(mesh.spec.nat_traversal.unwrap().direct_connected_window_seconds, Some(300));

    let peer: WireKubePeer = round_trip("wirekube_peer.yaml");
    let (prefixes, rejected) = peer.spec.parse_allowed_ips();
    assert_eq!((prefixes.len(), rejected.len()), (2, 0));
    assert_eq!(peer.spec.parse_public_key().unwrap().to_string(), peer.spec.public_key);
    let published = peer.spec.parse_endpoint().unwrap().and_then(|endpoint| endpoint.address());
    assert_eq!(published, Some("203.0.113.7:40001".parse().unwrap()));
    let status = peer.status.unwrap();
    let seen = status.observed_endpoints["node-worker1"].parse_endpoint().unwrap();
    assert_eq!(seen, "[2001:db8::7]:51820".parse().unwrap());
    assert_eq!(TransportMode::of(status.peer_transports.values()), status.transport_mode);
}

#[test]
fn kilo_peer_with_every_field() {
    let peer: KiloPeer = round_trip("kilo_peer.yaml");
    assert_eq!(peer.spec.parse_public_key().unwrap().to_string(), peer.spec.public_key);
    let endpoint = peer.spec.endpoint.unwrap();
    assert_eq!((endpoint.dns_or_ip.dns.as_deref(), endpoint.port), (Some("laptop.example.com"), 51820));
}

#[test]
fn an_empty_spec_has_the_documented_defaults() {
    let mesh: WireKubeMeshSpec = serde_json::from_value(json!({})).unwrap();
    assert_eq!(mesh, WireKubeMeshSpec::default());
    assert_eq!(
        (mesh.listen_port, mesh.interface_name.as_str(), mesh.mtu),
        (WIREGUARD_PORT, "wire_kube", 1420)
    );
    assert_eq!((mesh.stun_servers, mesh.relay), (vec![], None));

    let traversal: NatTraversal = serde_json::from_value(json!({})).unwrap();
    assert_eq!(traversal, NatTraversal::default());
    assert_eq!(traversal.direct_connected_window_seconds, None);

    let peer: WireKubePeerSpec = serde_json::from_value(json!({})).unwrap();
    assert_eq!(peer, WireKubePeerSpec::default());
    assert_eq!(peer.persistent_keepalive, 25);

    let pool: AddressPoolSpec = serde_json::from_value(json!({"subnets": [{"ipv4": "10.0.0.0/8"}]})).unwrap();
    assert_eq!(pool.block_size_bits, 5);
}

#[test]
fn an_unknown_word_in_a_status_does_not_hide_the_peer() {
    let mut written = fixture("wirekube_peer.yaml");
    written["status"]["natType"] = json!("carrier-grade");
    written["status"]["endpointDiscoveryMethod"] = json!("annotation");
    written["status"]["transportMode"] = json!("teleport");
    written["status"]["wireguard"] = json!("fpga");
    written["status"]["iceCandidates"][0]["type"] = json!("satellite");
    written["status"]["peerTransports"]["node-worker1"] = json!("pigeon");
    let status = serde_json::from_value::<WireKubePeer>(written).unwrap().status.unwrap();
    assert_eq!(status.nat_type, Some(NatType::Unknown));
    assert_eq!(status.endpoint_discovery_method, Some(EndpointDiscoveryMethod::Unknown));
    assert_eq!(status.transport_mode, Some(TransportMode::Unknown));
    assert_eq!(status.wireguard, Some(WireGuardImplementation::Unknown));
    assert_eq!(status.ice_candidates[0].type_, CandidateType::Unknown);
    assert_eq!(status.peer_transports["node-worker1"], PeerTransport::Unknown);
    assert_eq!(serde_json::to_value(NatType::Unknown).unwrap(), json!(""));
}

#[test]
fn transport_mode_is_the_aggregate() {
    use PeerTransport::{Direct, Relay, Unknown};
    assert_eq!(TransportMode::of(&[]), None);
    assert_eq!(TransportMode::of(&[Unknown]), None);
    assert_eq!(TransportMode::of(&[Direct, Unknown, Direct]), Some(TransportMode::Direct));
    assert_eq!(TransportMode::of(&[Relay, Relay]), Some(TransportMode::Relay));
    assert_eq!(TransportMode::of(&[Relay, Direct, Relay]), Some(TransportMode::Mixed));
}

#[test]
fn accessors_name_what_does_not_parse() {
    let wrong_family = SubnetSet { ipv4: Some("fd00::/64".to_owned()), ipv6: None };
    let error = wrong_family.parse().unwrap_err();
    assert_eq!(error, InvalidSubnet { text: "fd00::/64".to_owned(), family: IpFamily::V4 });
    assert_eq!(error.to_string(), "'fd00::/64' is not an IPv4 prefix in CIDR notation");

    let host_bits = SubnetSet { ipv4: Some("10.2.3.4/16".to_owned()), ipv6: Some("fd00::9/112".to_owned()) };
    let subnet = host_bits.parse().unwrap();
    assert_eq!(subnet.ipv4.unwrap(), "10.2.0.0/16".parse().unwrap());
    assert_eq!(subnet.ipv6.unwrap(), "fd00::/112".parse().unwrap());

    let peer = WireKubePeerSpec {
        endpoint: Some("example.com".to_owned()),
        allowed_ips: vec!["10.0.0.1".to_owned(), "10.0.0.9/24".to_owned()],
        ..WireKubePeerSpec::default()
    };
    assert!(peer.parse_endpoint().unwrap_err().to_string().starts_with("not an endpoint: \"example.com\""));
    assert_eq!(peer.parse_allowed_ips(), (vec!["10.0.0.0/24".parse().unwrap()], vec!["10.0.0.1"]));
    assert!(peer.parse_public_key().unwrap_err().to_string().contains("not a WireGuard key"));
}

proptest! {
    #[test]
    fn accessors_never_panic(text in ".{0,60}") {
        let subnet = SubnetSet { ipv4: Some(text.clone()), ipv6: Some(text.clone()) };
        prop_assert!(subnet.parse().is_err(), "no text is a prefix of both families");
        let peer = WireKubePeerSpec {
            public_key: text.clone(),
            endpoint: Some(text.clone()),
            allowed_ips: vec![text],
            ..WireKubePeerSpec::default()
        };
        let (prefixes, rejected) = peer.parse_allowed_ips();
        prop_assert_eq!(prefixes.len() + rejected.len(), 1);
        let _ = (peer.parse_endpoint(), peer.parse_public_key());
    }

    #[test]
    fn a_prefix_is_read_without_its_host_bits(address: u32, length in 0u8..=32) {
        let text = format!("{}/{length}", std::net::Ipv4Addr::from_bits(address));
        let net = SubnetSet { ipv4: Some(text), ipv6: None }.parse().unwrap().ipv4.unwrap();
        prop_assert_eq!(net, net.trunc());
        prop_assert!(net.contains(&std::net::Ipv4Addr::from_bits(address)));
        prop_assert_eq!(net.prefix_len(), length);
    }
}

#[test]
fn groups_are_the_constants() {
    assert_eq!(AddressPool::group(&()), COIL_GROUP);
    assert_eq!(AddressBlock::group(&()), COIL_GROUP);
    assert_eq!(BlockRequest::group(&()), COIL_GROUP);
    assert_eq!(Egress::group(&()), COIL_GROUP);
    assert_eq!(WireKubeMesh::group(&()), WIREKUBE_GROUP);
    assert_eq!(WireKubePeer::group(&()), WIREKUBE_GROUP);
    assert_eq!(KiloPeer::group(&()), KILO_GROUP);
    assert_eq!(WireKubeMesh::shortnames(), ["wkmesh"]);
    assert_eq!(WireKubePeer::shortnames(), ["wkpeer"]);
}

#[test]
fn deployed_definitions_are_current() {
    let directory = crate_directory().join("../../deploy/crds");
    let mut deployed = BTreeMap::new();
    for entry in std::fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap() != "kustomization.yaml" {
            let definition: CustomResourceDefinition = serde_json::from_value(read_yaml(&path)).unwrap();
            deployed.insert(definition.metadata.name.clone().unwrap(), definition);
        }
    }
    let all = definitions();
    assert_eq!(deployed.len(), all.len());
    for definition in all {
        let name = definition.metadata.name.clone().unwrap();
        assert!(deployed[&name] == definition, "{name} is stale: run `cargo xtask generate`");
    }
}

#[test]
fn deployed_examples_are_valid_objects() {
    let example = |name: &str| read_yaml(&crate_directory().join("../../deploy/examples").join(name));
    let pool: AddressPool = serde_json::from_value(example("pool.yaml")).unwrap();
    assert_eq!(pool.metadata.name.as_deref(), Some(fairlead_api::names::DEFAULT_POOL));
    assert_eq!(pool.spec.parse_subnets().unwrap().len(), 1);
    let mesh: WireKubeMesh = serde_json::from_value(example("mesh.yaml")).unwrap();
    assert_eq!(mesh.spec.listen_port, WIREGUARD_PORT);
}

#[test]
fn every_field_is_explained_and_none_is_nullable() {
    for definition in definitions() {
        let name = definition.metadata.name.clone().unwrap();
        let schema = serde_json::to_value(&definition.spec.versions[0].schema).unwrap();
        check_schema(&name, &schema["openAPIV3Schema"]);
    }
}

fn check_schema(path: &str, schema: &Value) {
    assert_ne!(schema["nullable"], json!(true), "{path} is nullable");
    assert!(schema["anyOf"].is_null() && schema["oneOf"].is_null(), "{path} is not structural");
    for (field, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{field}");
        assert!(property["description"].is_string(), "{path} has no description");
        // Kubernetes's own types go without descriptions, because of their size.
        let own = ["strategy", "sessionAffinityConfig", "namespaceSelector", "podSelector"];
        if !own.contains(&field.as_str()) && !path.ends_with("template.spec") {
            check_schema(&path, property);
        }
    }
    for inner in ["items", "additionalProperties"] {
        if schema[inner].is_object() {
            check_schema(&format!("{path}[]"), &schema[inner]);
        }
    }
}

#[test]
fn definitions_fit_into_the_annotation_of_kubectl_apply() {
    for definition in definitions() {
        let bytes = serde_json::to_string(&definition).unwrap().len();
        assert!(bytes < 262_144, "{:?} has {bytes} bytes", definition.metadata.name);
    }
}

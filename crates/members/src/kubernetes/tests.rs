use testbed_api::fields::assert_each_is_read_or_listed;

use super::*;

fn key(byte: u8) -> PublicKey {
    PublicKey([byte; 32])
}

fn peer(json: serde_json::Value) -> WireKubePeer {
    let mut object = serde_json::json!({ "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer" });
    if let (Some(object), Some(more)) = (object.as_object_mut(), json.as_object()) {
        object.extend(more.clone());
    }
    serde_json::from_value(object).unwrap()
}

fn read(json: serde_json::Value) -> ReadPeer {
    read_peer(&peer(json))
}

#[test]
fn what_does_not_parse_is_reported_and_left_out() {
    let (parsed, problems) = read(serde_json::json!({
        "metadata": { "name": "n1" },
        "spec": {
            "publicKey": key(1).to_string(), "allowedIPs": ["10.0.0.1/32", "nonsense"], "endpoint": "300.1.1.1:5",
        },
        "status": { "iceCandidates": [
            { "type": "host", "address": "10.0.0.1:51820", "priority": 100 },
            { "type": "host", "address": "not an address", "priority": 100 },
            { "type": "relay", "address": "relay", "priority": 10 },
        ] },
    }));
    let parsed = parsed.unwrap();
    assert_eq!(parsed.claims, ["10.0.0.1/32".parse().unwrap()]);
    assert_eq!(parsed.endpoints.host, ["10.0.0.1:51820".parse().unwrap()]);
    assert_eq!(problems.iter().filter(|problem| problem.reason() == "InvalidEndpoint").count(), 1);
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert!(
        problems.iter().any(|problem| problem.contains("n1") && problem.contains("nonsense")),
        "{problems:?}"
    );
}

#[test]
fn the_annotation_about_birthday_attempts_has_two_words() {
    let read = |value: &str| {
        let metadata = serde_json::json!({ "name": "n1", "annotations": { ANNOTATION_BIRTHDAY: value } });
        let spec = serde_json::json!({ "publicKey": key(1).to_string() });
        let (member, problems) = self::read(serde_json::json!({ "metadata": metadata, "spec": spec }));
        (member.unwrap().endpoints.birthday_attack, problems)
    };
    assert_eq!(read("enabled"), (Some(true), vec![]));
    assert_eq!(read("disabled"), (Some(false), vec![]));
    let (none, problems) = read("yes");
    assert_eq!((none, problems[0].reason()), (None, "InvalidBirthdayAttack"));
    assert!(problems[0].to_string().contains("\"yes\""), "{}", problems[0]);
}

#[test]
fn addresses_of_the_node_are_those_that_the_controller_copied() {
    let read = |status: serde_json::Value| {
        let spec = serde_json::json!({ "publicKey": key(1).to_string() });
        let peer = serde_json::json!({ "metadata": { "name": "n1" }, "spec": spec, "status": status });
        self::read(peer).0.unwrap().addresses.node
    };
    let node = serde_json::json!({ "node": { "internalIPs": ["192.0.2.1", "nonsense", "fd00::1"] } });
    assert_eq!(read(node), Some(["192.0.2.1", "fd00::1"].map(|text| text.parse().unwrap()).to_vec()));
    assert_eq!(read(serde_json::json!({ "node": {} })), Some(vec![]));
    let spec = serde_json::json!({ "publicKey": key(1).to_string() });
    let node = serde_json::json!({ "meshIPs": ["fd7f:175a:b97c:5602::1", "127.0.0.1", "x"] });
    let metadata = serde_json::json!({ "name": "n1" });
    let peer = serde_json::json!({ "metadata": metadata, "spec": spec, "status": { "node": node } });
    let given = self::read(peer).0.unwrap().addresses.mesh;
    assert_eq!(given, ["fd7f:175a:b97c:5602::1".parse::<IpAddr>().unwrap()]);
    assert_eq!(read(serde_json::json!({})), None, "the controller has not seen it yet");
    let is_unconfirmed = |status: serde_json::Value| {
        let spec = serde_json::json!({ "publicKey": key(1).to_string() });
        let peer = serde_json::json!({ "metadata": { "name": "n1" }, "spec": spec, "status": status });
        self::read(peer).0.unwrap().addresses.is_unconfirmed
    };
    assert!(is_unconfirmed(serde_json::json!({ "connected": true })));
    assert!(!is_unconfirmed(serde_json::json!({ "node": {} })));
}

#[test]
fn where_a_node_is_the_controller_says() {
    let read = |location: serde_json::Value| {
        let spec = serde_json::json!({ "publicKey": key(1).to_string() });
        let status = serde_json::json!({ "node": { "location": location } });
        let (member, problems) =
            read(serde_json::json!({ "metadata": { "name": "n1" }, "spec": spec, "status": status }));
        (member.unwrap().site, problems.iter().map(SourceProblem::reason).collect::<Vec<_>>())
    };
    let (site, problems) =
        read(serde_json::json!({ "name": "lab", "internalIPs": ["10.0.0.5/24", "fd00::5", "rubbish"] }));
    let internal = [("10.0.0.5", Some(24)), ("fd00::5", None)]
        .map(|(address, length)| InternalAddress { address: address.parse().unwrap(), length });
    assert_eq!(
        site,
        Some(Site { location: "lab".to_owned(), internal: internal.to_vec(), ..Site::default() })
    );
    assert_eq!(problems, ["InvalidInternalIP"]);
    let (site, problems) = read(serde_json::json!({ "allowedLocationIPs": ["10.9.0.7/16", "rubbish"] }));
    assert_eq!(site.unwrap().networks, ["10.9.0.0/16".parse().unwrap()]);
    assert_eq!(problems, ["InvalidLocationPrefix"]);
    assert_eq!(read(serde_json::json!({})).0, Some(Site::default()));
    assert_eq!(read(serde_json::json!(null)).0, None, "an earlier controller does not say it");
}

#[test]
fn every_field_of_a_peer_is_read() {
    let read = |mut spec: serde_json::Value| {
        // Without a key nothing else is read.
        if spec.get("publicKey").is_none() {
            spec["publicKey"] = key(1).to_string().into();
        }
        self::read(serde_json::json!({ "metadata": { "name": "n1" }, "spec": spec })).0.unwrap()
    };
    let samples = [
        ("spec.publicKey", serde_json::json!(key(2).to_string())),
        ("spec.nextPublicKey", serde_json::json!(key(3).to_string())),
        ("spec.endpoint", serde_json::json!("192.0.2.1:51820")),
        ("spec.allowedIPs", serde_json::json!(["10.0.0.1/32"])),
        ("spec.persistentKeepalive", serde_json::json!(7)),
    ];
    assert_each_is_read_or_listed::<WireKubePeer, _>(None, read, &samples, &serde_json::json!({}), None);
}

#[test]
fn a_peer_without_a_key_is_an_error_that_names_it() {
    let (parsed, problems) =
        read(serde_json::json!({ "metadata": { "name": "n1" }, "spec": { "publicKey": "" } }));
    assert_eq!(parsed, None);
    assert!(problems[0].to_string().contains("WireKubePeer n1"));
    assert_eq!(problems[0].reason(), "InvalidPublicKey");
}

#[test]
fn what_stun_servers_saw_is_read_and_the_placeholder_of_a_symmetric_nat_is_not() {
    let endpoints = |nat: &str| {
        let (parsed, _) = read(serde_json::json!({
            "metadata": { "name": "n1" },
            "spec": { "publicKey": key(1).to_string(), "endpoint": "192.0.2.1:51820" },
            "status": {
                "endpointDiscoveryMethod": "stun", "natType": nat,
                "iceCandidates": [{ "type": "srflx", "address": "192.0.2.1:4000", "priority": 50 }],
            },
        }));
        parsed.unwrap().endpoints
    };
    assert_eq!(endpoints("symmetric").reflexive, ["192.0.2.1:4000".parse().unwrap()]);
    assert_eq!(endpoints("symmetric").preferred, None);
    assert_eq!(endpoints("cone").preferred, "192.0.2.1:51820".parse().ok());
}

#[test]
fn an_endpoint_counts_as_manual_unless_the_node_discovered_it() {
    let with = |method: Option<&str>| {
        let (parsed, _) = read(serde_json::json!({
            "metadata": { "name": "n1" },
            "spec": { "publicKey": key(1).to_string(), "endpoint": "192.0.2.1:5" },
            "status": { "endpointDiscoveryMethod": method },
        }));
        parsed.unwrap().endpoints
    };
    for manual in [None, Some("manual")] {
        assert_eq!(with(manual).manual, "192.0.2.1:5".parse().ok());
    }
    assert_eq!(with(Some("internal-ip")).manual, None);
    assert_eq!(with(Some("internal-ip")).preferred, "192.0.2.1:5".parse().ok());
}

proptest::proptest! {
    /// Peers are written by other nodes or administrators.
    #[test]
    fn hostile_peers_never_panic(
        texts in proptest::collection::vec("[0-9a-f.:/\\[\\]%+=A-Z-]{0,50}", 6), name: String, keepalive: u16,
    ) {
        let (parsed, _) = read(serde_json::json!({
            "metadata": { "name": name },
            "spec": {
                "publicKey": texts[0], "allowedIPs": [texts[1], "10.0.0.1/32"], "endpoint": texts[2],
                "persistentKeepalive": keepalive,
            },
            "status": {
                "iceCandidates": [{ "type": "host", "address": texts[3], "priority": 1 }],
                "observedEndpoints": { (texts[4].clone()): { "publicKey": key(1).to_string(), "endpoint": texts[5] } },
            },
        }));
        if let Some(parsed) = parsed {
            proptest::prop_assert!(parsed.claims.contains(&"10.0.0.1/32".parse().unwrap()));
        }
    }
}

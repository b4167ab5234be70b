use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// As the node program answers: container link first, host link second, both families, no gateway.
fn answer() -> Value {
    json!({
        "cniVersion": "1.1.0",
        "interfaces": [
            {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/p", "mtu": 1420},
            {"name": "veth0a1b", "mac": "02:00:00:00:00:02"},
        ],
        "ips": [
            {"address": "10.100.0.5/32", "interface": 0},
            {"address": "fd02::5/128", "interface": 0},
        ],
        "dns": {},
    })
}

fn parse(value: &Value) -> Result<CniResult, Failure> {
    CniResult::of_answer(value.to_string().as_bytes())
}

fn rendered(result: &CniResult, version: SpecVersion) -> Value {
    serde_json::from_str(&result.to_json(version)).unwrap()
}

#[test]
fn from_1_0_0_there_is_no_family() {
    let expected = json!({
        "cniVersion": "1.0.0",
        "interfaces": [
            {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/p"},
            {"name": "veth0a1b", "mac": "02:00:00:00:00:02"},
        ],
        "ips": [{"address": "10.100.0.5/32", "interface": 0}, {"address": "fd02::5/128", "interface": 0}],
        "dns": {},
    });
    assert_eq!(rendered(&parse(&answer()).unwrap(), SpecVersion::V1_0_0), expected);
}

#[test]
fn what_1_1_0_added_is_kept_there_and_left_out_before() {
    let newest = json!({
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0", "mtu": 1420, "socketPath": "/s", "pciID": "0000:00:1f.6"}],
        "routes": [{"dst": "10.0.0.0/8", "mtu": 1400, "advmss": 1360, "priority": 7, "table": 0, "scope": 253}],
        "dns": {},
    });
    let result = parse(&newest).unwrap();
    assert_eq!(rendered(&result, SpecVersion::V1_1_0), newest);
    let expected = json!({
        "cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}], "routes": [{"dst": "10.0.0.0/8"}], "dns": {},
    });
    assert_eq!(rendered(&result, SpecVersion::V1_0_0), expected);
}

#[test]
fn older_versions_name_the_family() {
    let result = parse(&answer()).unwrap();
    for version in [SpecVersion::V0_3_1, SpecVersion::V0_4_0] {
        let rendered = rendered(&result, version);
        assert_eq!(rendered["cniVersion"], version.as_str());
        assert_eq!(rendered["ips"][0], json!({"version": "4", "address": "10.100.0.5/32", "interface": 0}));
        assert_eq!(rendered["ips"][1], json!({"version": "6", "address": "fd02::5/128", "interface": 0}));
    }
}

#[test]
fn what_other_plugins_made_is_kept() {
    let other = json!({
        "cniVersion": "0.4.0",
        "interfaces": [{"name": "cni0"}],
        "ips": [{"version": "4", "address": "10.1.2.3/24", "gateway": "10.1.2.1", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "fd00::/8", "gw": "fd00::1"}],
        "dns": {"nameservers": ["10.96.0.10"], "domain": "d", "search": ["s"], "options": ["ndots:5"]},
    });
    assert_eq!(rendered(&parse(&other).unwrap(), SpecVersion::V0_4_0), other);
}

#[test]
fn nulls_of_go_are_empty() {
    let value = json!({"interfaces": null, "ips": null, "routes": null, "dns": {"search": null}});
    assert_eq!(parse(&value).unwrap(), CniResult::default());
    for nothing in ["", " \n", "null", "{}"] {
        assert!(CniResult::of_answer(nothing.as_bytes()).unwrap().is_empty(), "{nothing:?}");
    }
}

#[test]
fn unusable_answers_are_refused() {
    let cases = [
        json!([]),
        json!("x"),
        json!({"ips": {}}),
        json!({"ips": [{"address": "10.0.0.1"}]}),
        json!({"ips": [{"address": "10.0.0.1/33"}]}),
        json!({"ips": [{"address": "10.0.0.1/32", "interface": -1}]}),
        json!({"ips": [{"address": "10.0.0.1/32", "interface": 0}]}),
        json!({"ips": [{"address": "10.0.0.1/32", "gateway": "x"}]}),
        json!({"interfaces": [{}]}),
        json!({"routes": [{"dst": "default"}]}),
        json!({"dns": 1}),
    ];
    for case in cases {
        let failure = parse(&case).unwrap_err();
        assert_eq!(failure.code, code::DECODING, "{case}");
        assert!(failure.msg.starts_with("the node program's answer"), "{}", failure.msg);
    }
}

#[test]
fn a_previous_result_is_returned_unless_the_answer_has_one() {
    let made = parse(&answer()).unwrap();
    let previous = parse(&json!({"interfaces": [{"name": "cni0"}]})).unwrap();
    assert_eq!(of_add(None, made.clone()), made);
    assert_eq!(of_add(Some(&previous), made.clone()), made);
    assert_eq!(of_add(Some(&previous), CniResult::default()), previous);
    assert_eq!(of_add(None, CniResult::default()), CniResult::default());
}

fn any_net() -> impl Strategy<Value = IpNet> {
    (any::<IpAddr>(), any::<u8>()).prop_map(|(address, length)| {
        let longest = if address.is_ipv4() { 32 } else { 128 };
        IpNet::new(address, length % (longest + 1)).unwrap()
    })
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes: Vec<u8>) {
        let _ = CniResult::of_answer(&bytes);
    }

    #[test]
    fn hostile_fields_never_panic(key in "interfaces|ips|routes|dns", field in "\\w{1,9}", text: String, number: i64) {
        for value in [json!(text), json!(number), json!([text]), json!([{ field.clone(): text }]), json!([{ field: number }])] {
            let _ = parse(&json!({ key.clone(): value }));
        }
    }

    #[test]
    fn deep_nesting_never_overflows(depth in 1..100_000usize) {
        let bytes = [b"{\"dns\":".as_slice(), &vec![b'['; depth]].concat();
        prop_assert!(CniResult::of_answer(&bytes).is_err());
    }

    #[test]
    fn every_version_is_read_back(
        nets in prop::collection::vec(any_net(), 0..5),
        dst in any_net(),
        gw: IpAddr,
        mac: String,
        mtu: Option<i64>,
        socket_path: Option<String>,
        table: Option<i64>,
        scope: Option<i64>,
    ) {
        let more = InterfaceMore { mtu, socket_path, pci_id: None };
        let interface = Interface { name: "eth0".into(), mac, sandbox: String::new(), more };
        let more = RouteMore { mtu, advmss: scope, priority: table, table, scope };
        let newest = CniResult {
            interfaces: vec![interface.clone()],
            ips: nets.into_iter().map(|address| IpConfig { address, interface: Some(0), gateway: Some(gw) }).collect(),
            routes: vec![Route { dst, gw: None, more }],
            dns: Dns::default(),
        };
        let older = CniResult {
            interfaces: vec![Interface { more: InterfaceMore::default(), ..interface }],
            routes: vec![Route { dst, gw: None, more: RouteMore::default() }],
            ..newest.clone()
        };
        for version in SpecVersion::ALL {
            let expected = if version < SpecVersion::V1_1_0 { &older } else { &newest };
            prop_assert_eq!(&CniResult::of_answer(newest.to_json(version).as_bytes()).unwrap(), expected);
        }
    }
}

use fairlead_dataplane::pods::{End, Inspection};
use fairlead_netlink::route::{MacAddress, Route as Seen};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const NETNS: &str = "/run/netns/p";

fn differences(
    (ifname, netns): (&str, &Path),
    previous: Option<&Previous>,
    seen: &Inspection,
) -> Vec<String> {
    let allocated = ["10.1.0.5", "fd00:1::5"].map(|ip| ip.parse().unwrap());
    let mut found = link(ifname, &allocated, seen);
    let previous = previous.map(Previous::without_own_default_routes);
    found.extend(previous.iter().flat_map(|previous| as_reported((ifname, netns), previous, seen)));
    found
}

fn end(name: &str, last: u8, addresses: &[&str]) -> End {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    End { name: name.into(), mac: Some(MacAddress([2, 0, 0, 0, 0, last])), up: true, addresses }
}

fn seen() -> Inspection {
    let default = |everything: &str, gateway: &str| {
        Seen::via(TABLE_MAIN, 3, everything.parse().unwrap(), gateway.parse().unwrap(), 2)
    };
    Inspection {
        host: Some(end("veth1", 2, &[])),
        led_to_pod: vec!["10.1.0.5/32".parse().unwrap(), "fd00:1::5/128".parse().unwrap()],
        pod: Some(end("eth0", 1, &["10.1.0.5/32", "fd00:1::5/128", "fe80::1/64"])),
        pod_routes: vec![default("0.0.0.0/0", "169.254.1.1"), default("::/0", "fe80::1")],
        connected: true,
    }
}

fn result() -> Value {
    json!({
        "cniVersion": "1.1.0",
        "interfaces": [
            {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": NETNS, "mtu": 1420},
            {"name": "veth1", "mac": "02:00:00:00:00:02"},
        ],
        "ips": [{"address": "10.1.0.5/32", "interface": 0}, {"address": "fd00:1::5/128", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}, {"dst": "::/0", "gw": "fe80::1"}],
        "dns": {},
    })
}

fn previous(result: &Value) -> Previous {
    let stdin = json!({"cniVersion": "1.1.0", "name": "n", "prevResult": result}).to_string();
    Previous::of_configuration(stdin.as_bytes()).unwrap().unwrap()
}

fn compare(result: &Value, seen: &Inspection) -> Vec<String> {
    differences(("eth0", Path::new(NETNS)), Some(&previous(result)), seen)
}

#[test]
fn what_add_made_passes() {
    assert_eq!(compare(&result(), &seen()), [""; 0]);
    assert_eq!(differences(("eth0", Path::new(NETNS)), None, &seen()), [""; 0]);
}

#[test]
fn what_a_later_plugin_changed_and_reported_passes() {
    let (mut result, mut seen) = (result(), seen());
    result["interfaces"][0]["mac"] = json!("02:00:00:00:00:AA");
    result["interfaces"].as_array_mut().unwrap().push(json!({"name": "bwp1", "mac": "06:00:00:00:00:01"}));
    result["ips"].as_array_mut().unwrap().push(json!({"address": "192.0.2.1/32", "interface": 2}));
    result["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "169.254.1.1", "table": 100}]);
    let extra = Seen::via(100, 3, "10.9.0.0/16".parse().unwrap(), "169.254.1.1".parse().unwrap(), 2);
    seen.pod_routes.push(extra);
    seen.pod.as_mut().unwrap().mac = Some(MacAddress([2, 0, 0, 0, 0, 0xaa]));
    seen.pod_routes[0].gateway = Some("192.0.2.7".parse().unwrap());
    assert_eq!(compare(&result, &seen), [""; 0]);
    assert_eq!(Previous::tables(Some(&previous(&result))), [100, TABLE_MAIN]);
}

#[test]
fn behind_another_plugin_only_what_it_reported_is_demanded() {
    let at = ("eth0", Path::new(NETNS));
    let mut reported = result();
    reported["routes"] = json!([]);
    let reported = previous(&reported);
    // No address of ours, no link of ours, no way out of ours.
    let theirs = Inspection { host: None, led_to_pod: Vec::new(), pod_routes: Vec::new(), ..seen() };
    assert_eq!(chained(at, &reported, &theirs), [""; 0]);
    let gone = Inspection { pod: None, ..theirs.clone() };
    assert_eq!(chained(at, &reported, &gone), ["the pod has no interface eth0"]);
    let mut bare = theirs;
    bare.pod.as_mut().unwrap().addresses.clear();
    let found = chained(at, &reported, &bare);
    assert!(found.iter().any(|line| line.contains("lacks 10.1.0.5/32 of prevResult")), "{found:?}");
}

#[test]
fn every_difference_is_named() {
    type Break = fn(&mut Value, &mut Inspection);
    let cases: [(Break, &str); 13] = [
        (|_, seen| seen.pod = None, "no interface eth0"),
        (|_, seen| seen.host = None, "host's end of the pod's link is gone"),
        (|_, seen| seen.connected = false, "not the other end"),
        (|_, seen| seen.pod.as_mut().unwrap().up = false, "eth0 of the pod is down"),
        (|_, seen| seen.host.as_mut().unwrap().up = false, "veth1 on the host is down"),
        (|_, seen| seen.pod.as_mut().unwrap().addresses.truncate(0), "lacks its allocated address 10.1.0.5"),
        (|_, seen| seen.pod_routes.truncate(1), "no default route for fd00:1::5"),
        (|_, seen| seen.led_to_pod.truncate(0), "no route on the host leads 10.1.0.5 to link veth1"),
        (|result, _| result["interfaces"][0]["mac"] = json!("02:00:00:00:00:99"), "not 02:00:00:00:00:99"),
        (|result, _| result["interfaces"][1]["mac"] = json!("02:00:00:00:00:98"), "not 02:00:00:00:00:98"),
        (|result, _| result["interfaces"][0]["sandbox"] = json!("/run/netns/q"), "made in /run/netns/q"),
        (|result, _| result["ips"][0]["address"] = json!("10.1.0.6/32"), "lacks 10.1.0.6/32 of prevResult"),
        (|result, _| result["routes"] = json!([{"dst": "10.9.0.0/16"}]), "lacks the route 10.9.0.0/16"),
    ];
    for (break_it, named) in cases {
        let (mut result, mut seen) = (result(), seen());
        break_it(&mut result, &mut seen);
        let found = compare(&result, &seen).join("; ");
        assert!(found.contains(named), "{named}: {found}");
    }
}

#[test]
fn a_configuration_without_previous_result_has_none() {
    for nothing in ["", " ", "{}", r#"{"prevResult": null}"#] {
        assert_eq!(Previous::of_configuration(nothing.as_bytes()).unwrap(), None, "{nothing:?}");
    }
    for bad in ["{", r#"{"prevResult": 1}"#, r#"{"prevResult": {"ips": [{"address": "x"}]}}"#] {
        assert!(Previous::of_configuration(bad.as_bytes()).is_err(), "{bad}");
    }
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes: Vec<u8>) {
        let _ = Previous::of_configuration(&bytes);
    }

    #[test]
    fn hostile_positions_never_panic(position: usize, table: Option<u32>) {
        let mut result = result();
        result["ips"][0]["interface"] = json!(position);
        result["routes"] = json!([{"dst": "10.0.0.0/8", "table": table}]);
        let _ = compare(&result, &seen());
    }
}

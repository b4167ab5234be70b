use serde_json::{Value, json};

use super::*;

fn object<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn egress(name: &str, destinations: &[&str], more: Value) -> Egress {
    let mut spec = json!({ "destinations": destinations });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let metadata = json!({ "name": name, "namespace": "n" });
    object(
        json!({ "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": metadata, "spec": spec }),
    )
}

fn service(name: &str, cluster_ips: &[&str]) -> Service {
    object(json!({
        "metadata": { "name": name, "namespace": "n" },
        "spec": {
            "clusterIPs": cluster_ips, "ports": [{ "port": 5555, "protocol": "UDP" }], "sessionAffinity": "ClientIP",
        },
    }))
}

fn slice(of: &str, endpoints: Value) -> EndpointSlice {
    let labels = json!({ "kubernetes.io/service-name": of });
    object(json!({
        "metadata": { "name": format!("{of}-x"), "namespace": "n", "labels": labels },
        "addressType": "IPv4", "endpoints": endpoints,
    }))
}

fn endpoint(pod: &str, address: &str, ready: bool, terminating: bool) -> Value {
    json!({
        "addresses": [address], "nodeName": "gate",
        "conditions": { "ready": ready && !terminating, "serving": ready, "terminating": terminating },
        "targetRef": { "kind": "Pod", "name": pod, "namespace": "n", "uid": format!("uid-{pod}") },
    })
}

/// Two Egresses that work, and one of each kind that does not.
fn known() -> Known {
    let forbidden = json!({ "allowedNamespaces": ["other"] });
    Known::of(&Objects {
        egresses: vec![
            egress("wide", &["0.0.0.0/0"], json!({})),
            egress("narrow", &["192.168.10.0/24", "10.1.9.0/24"], json!({})),
            egress(
                "cut",
                &["0.0.0.0/0"],
                json!({ "excludedDestinations": ["192.0.2.0/24", "192.168.10.128/25"] }),
            ),
            egress("same", &["0.0.0.0/0"], json!({})),
            egress("forbidden", &["203.0.113.0/24"], forbidden),
            egress("bare", &["203.0.113.128/25"], json!({})),
            egress("empty", &["203.0.113.0/24"], json!({})),
            egress("drained", &["203.0.113.0/24"], json!({})),
            egress("six", &["::/0"], json!({})),
        ],
        services: vec![
            service("wide", &["10.68.0.1"]),
            service("narrow", &["10.68.0.2"]),
            service("same", &["10.68.0.3"]),
            service("cut", &["10.68.0.7"]),
            service("forbidden", &["10.68.0.4"]),
            service("empty", &["10.68.0.5"]),
            service("drained", &["10.68.0.6"]),
            service("six", &["fd04::1"]),
        ],
        slices: Some(vec![
            slice(
                "wide",
                json!([
                    endpoint("w2", "10.1.0.3", true, true),
                    endpoint("w1", "10.1.0.2", true, false),
                    endpoint("w3", "10.1.0.4", false, false),
                    endpoint("w4", "10.1.0.8", false, true),
                ]),
            ),
            slice("narrow", json!([endpoint("m1", "10.1.0.5", true, false)])),
            slice("cut", json!([endpoint("c1", "10.1.0.9", true, false)])),
            slice("empty", json!([endpoint("e1", "10.1.0.6", false, false)])),
            slice("drained", json!([endpoint("d1", "10.1.0.7", true, true)])),
        ]),
        namespaces: Vec::new(),
        selection: None,
        node_ranges: ["10.1.0.0/16", "198.51.100.9/32"].map(|range| range.parse().unwrap()).to_vec(),
        pools: Vec::new(),
        service_ranges: vec![object(json!({
            "metadata": { "name": "kubernetes" }, "spec": { "cidrs": ["10.68.0.0/16", "203.0.113.64/26"] },
        }))],
    })
}

fn pod(annotation: Option<&str>) -> PodInfo {
    let annotation = annotation.map(|value| ("egress.coil.cybozu.com/n".to_owned(), value.to_owned()));
    PodInfo {
        namespace: "shop".to_owned(),
        annotations: annotation.into_iter().collect(),
        node: Some("n1".to_owned()),
        addresses: vec!["10.1.2.3".parse().unwrap()],
        ..PodInfo::default()
    }
}

/// The way in one line.
fn way(way: &PacketWay) -> String {
    match way {
        PacketWay::Uplink => "eth0".to_owned(),
        PacketWay::HostNetwork => "host".to_owned(),
        PacketWay::Local => "local".to_owned(),
        PacketWay::NotKnown(why) => format!("? {}", why.reason),
        PacketWay::Refused(why) => format!("refused {}", why.reason),
        PacketWay::Gateways(to) => {
            let gateways = to.gateways.iter().flatten();
            let gateways = gateways.map(|it| format!(" {}={}", it.pod.clone().unwrap(), it.state.as_str()));
            format!("{} {} {} {}{}", to.egress, to.table, to.link, to.prefix, gateways.collect::<String>())
        }
    }
}

#[test]
fn each_destination_has_the_way_that_the_rules_give_it() {
    let wide = "n/wide 118 fou4_0a440001 0.0.0.0/0 w1=ready w2=draining w3=notReady";
    let narrow = "n/narrow 117 fou4_0a440002 192.168.10.0/24 m1=ready";
    for (annotation, destination, expected) in [
        (None, "198.51.100.1", "eth0"),
        (Some("wide"), "198.51.100.1", wide),
        (Some("wide"), "::ffff:198.51.100.1", wide),
        (Some("wide,narrow"), "198.51.100.1", wide),
        (Some("wide,narrow"), "192.168.10.7", narrow),
        (Some("wide,narrow"), "192.168.11.7", "eth0"),
        (Some("narrow"), "198.51.100.1", "eth0"),
        (Some("cut"), "192.0.2.1", "eth0"),
        (Some("cut"), "192.0.3.1", "n/cut 118 fou4_0a440007 0.0.0.0/0 c1=ready"),
        (Some("cut,narrow"), "192.168.10.200", "n/narrow 117 fou4_0a440002 192.168.10.128/25 m1=ready"),
        (Some("wide"), "169.254.169.254", "eth0"),
        (Some("wide"), "10.1.7.7", "eth0"),
        (Some("wide"), "198.51.100.9", "eth0"),
        (Some("wide"), "203.0.113.70", "eth0"),
        (Some("narrow"), "10.1.9.1", "eth0"),
        (Some("wide"), "224.0.0.1", "refused DestinationInCluster"),
        (Some("wide"), "127.0.0.1", "local"),
        (Some("wide"), "10.1.2.3", "local"),
        (Some("wide"), "2001:db8::1", "refused PodHasNoAddress"),
        (Some("wide,same"), "198.51.100.1", "? EgressSamePrefix"),
        (Some("Wide"), "198.51.100.1", "? EgressAnnotationInvalid"),
        (Some("six"), "198.51.100.1", "? EgressNoDestination"),
        (Some("wide,forbidden"), "203.0.113.1", "refused EgressNotAllowed"),
        (Some("wide,forbidden"), "198.51.100.1", wide),
        (Some("forbidden,bare"), "203.0.113.129", "refused EgressServiceMissing"),
        (Some("forbidden,bare"), "203.0.113.1", "refused EgressNotAllowed"),
        (Some("empty"), "203.0.113.1", "refused NoGateway"),
        (Some("drained"), "203.0.113.1", "refused GatewaysDrain"),
        (Some("nothing"), "198.51.100.1", "? EgressUnknown"),
        (Some("nothing"), "169.254.169.254", "eth0"),
        (Some("wide,nothing"), "198.51.100.1", wide),
    ] {
        let found = known().explain(&pod(annotation), destination.parse().unwrap());
        assert_eq!(way(&found.way), expected, "{annotation:?} to {destination}: {found:#?}");
    }
}

#[test]
fn some_pods_send_nothing_through_gateways_whatever_they_ask_for() {
    let wide = || pod(Some("wide"));
    for (pod, expected, problem) in [
        (PodInfo { uses_host_network: true, ..wide() }, "host", Some("EgressHostNetwork")),
        (PodInfo { has_ended: true, ..wide() }, "refused PodHasEnded", None),
        (PodInfo { addresses: Vec::new(), ..wide() }, "refused PodHasNoAddress", None),
        (PodInfo { gateway_of: Some("nat".to_owned()), ..wide() }, "eth0", Some("EgressGatewayIsClient")),
    ] {
        let found = known().explain(&pod, "198.51.100.1".parse().unwrap());
        assert_eq!(way(&found.way), expected, "{found:#?}");
        let reasons: Vec<&str> = found.problems.iter().map(|problem| problem.reason.as_str()).collect();
        assert_eq!(reasons, problem.into_iter().collect::<Vec<_>>());
    }
    let starting = PodInfo { addresses: Vec::new(), ..pod(Some("bare")) };
    let found = known().explain(&starting, "203.0.113.129".parse().unwrap());
    assert_eq!(way(&found.way), "refused EgressServiceMissing", "why it does not start");
}

#[test]
fn the_steps_name_what_decides() {
    let found = known().explain(&pod(Some("wide")), "198.51.100.1".parse().unwrap());
    assert_eq!(
        found.steps,
        [
            "rule 1800 (link-local addresses): none has the address",
            "rule 1900, table 117 (destinations in private networks): no route has the address",
            "rules 2000–2002 (private networks): none has the address",
            "rules 2003–2004 (ranges of the cluster: AddressPools, ServiceCIDRs, Nodes): none has the address",
            "rule 2100, table 118 (all other destinations): 0.0.0.0/0 has it",
        ]
    );
    let in_cluster = known().explain(&pod(Some("wide")), "198.51.100.9".parse().unwrap());
    assert_eq!(
        in_cluster.steps.last().unwrap(),
        "rule 2003 (ranges of the cluster: AddressPools, ServiceCIDRs, Nodes): 198.51.100.9/32 has it: table main"
    );
    assert_eq!(in_cluster.source, Some("10.1.2.3".parse().unwrap()));
}

#[test]
fn gateways_that_may_not_be_read_are_not_missing() {
    let mut known = known();
    known.endpoints = None;
    let found = known.explain(&pod(Some("wide")), "198.51.100.1".parse().unwrap());
    assert!(matches!(&found.way, PacketWay::Gateways(to) if to.gateways.is_none()), "{found:#?}");
    let egress = EgressName { namespace: "n".to_owned(), name: "wide".to_owned() };
    assert_eq!(known.gateways(&egress), None);
}

#[test]
fn all_gateways_of_an_egress_are_shown_with_their_state() {
    let egress = EgressName { namespace: "n".to_owned(), name: "wide".to_owned() };
    let shown = known().gateways(&egress).unwrap();
    let shown: Vec<String> = shown
        .into_iter()
        .map(|it| format!("{} {} {} {}", it.pod.unwrap(), it.node.unwrap(), it.addresses, it.state.as_str()))
        .collect();
    assert_eq!(
        shown,
        [
            "w1 gate 10.1.0.2 ready",
            "w2 gate 10.1.0.3 draining",
            "w3 gate 10.1.0.4 notReady",
            "w4 gate 10.1.0.8 ended"
        ]
    );
}

#[test]
fn a_pod_without_an_annotation_has_no_known_way_while_not_all_egresses_can_be_read() {
    let to: IpAddr = "198.51.100.7".parse().unwrap();
    let unread = |selection: Selection| {
        let objects = Objects { selection: Some(selection), slices: Some(Vec::new()), ..Objects::default() };
        Known::of(&objects).explain(&pod(None), to)
    };
    assert_eq!(unread(Selection::default()).way, PacketWay::Uplink);
    for what in ["the list of Egresses", "the Namespace of the pod"] {
        let explanation = unread(Selection::default().without(what));
        let PacketWay::NotKnown(why) = &explanation.way else { panic!("{explanation:?}") };
        assert_eq!(why.reason, "SelectionNotKnown");
        assert!(why.message.contains(what), "{why:?}");
        assert!(explanation.steps[0].contains("no Egress that could be read selects it"), "{explanation:?}");
    }
    // A gateway is never selected.
    let gateway = PodInfo { gateway_of: Some("wide".to_owned()), ..pod(None) };
    let objects = Objects {
        selection: Some(Selection::default().without("the list of Egresses")),
        ..Objects::default()
    };
    assert_eq!(Known::of(&objects).explain(&gateway, to).way, PacketWay::Uplink);
}

use fairlead_api::resources::Egress;
use fairlead_cluster::pods::SlimPod;
use fairlead_egress::explain::{Known, Objects, Selection};
use k8s_openapi::api::core::v1::Event;
use serde_json::{Value, json};

use super::display::PodEvent;
use super::explain::Answer;
use super::gateways::GatewayUse;
use super::read::pod_info;
use super::status::{Detail, rows, rows_table};
use super::{EgressCommand, who};
use crate::arguments::egress::EgressWho;
use crate::arguments::tests::command;

fn object<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn egress(name: &str, destinations: &[&str], ready: Option<&str>) -> Egress {
    let condition = ready.map(|status| {
        json!({ "type": "Ready", "status": status, "reason": "SomeAvailable", "message": "1 of 2 gateways are available",
            "lastTransitionTime": "2026-01-01T00:00:00Z" })
    });
    object(json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": { "name": name, "namespace": "n" },
        "spec": { "destinations": destinations, "replicas": 2 },
        "status": { "replicas": 1, "conditions": condition.into_iter().collect::<Vec<_>>() },
    }))
}

fn pod(name: &str, asked: &str, phase: &str) -> SlimPod {
    object(json!({
        "metadata": {
            "name": name, "namespace": "shop", "uid": name, "annotations": { "egress.coil.cybozu.com/n": asked },
        },
        "spec": { "nodeName": "n1" }, "status": { "phase": phase, "podIPs": [{ "ip": "10.1.2.3" }] },
    }))
}

fn objects() -> Objects {
    let endpoint = |pod: &str, address: &str| json!({ "addresses": [address], "nodeName": "gate", "targetRef": { "kind": "Pod", "name": pod, "uid": pod } });
    Objects {
        egresses: vec![egress("wide", &["0.0.0.0/0", "::/0", "10.0.0.0/8"], Some("True"))],
        services: vec![object(json!({
            "metadata": { "name": "wide", "namespace": "n" },
            "spec": { "clusterIPs": ["172.16.0.1", "fd04::1"], "sessionAffinity": "ClientIP" },
        }))],
        slices: Some(vec![object(json!({
            "metadata": { "name": "wide-x", "namespace": "n", "labels": { "kubernetes.io/service-name": "wide" } },
            "addressType": "IPv4", "endpoints": [endpoint("w1", "10.1.0.2")],
        }))]),
        ..Objects::default()
    }
}

#[test]
fn the_table_has_a_line_for_each_egress() {
    let egresses =
        [egress("wide", &["0.0.0.0/0", "::/0"], Some("True")), egress("new", &["9.9.9.0/24"], None)];
    let pods = [
        pod("a", "wide", "Running"),
        pod("b", "wide,new", "Pending"),
        pod("c", "wide", "Failed"),
        pod("d", "W", "Running"),
    ];
    let shown = rows_table(&rows(&egresses, &Selection::default(), Some(&pods)), false);
    let lines: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["n/new", "9.9.9.0/24", "1/2", "1", "-"]);
    assert_eq!(lines[2], ["n/wide", "0.0.0.0/0,", "+1", "1/2", "2", "SomeAvailable"]);
    let unknown = rows(&egresses, &Selection::default(), None);
    assert!(rows_table(&unknown, true).contains(" ? "), "{unknown:?}");
    assert_eq!(json!(unknown)[0]["clientCount"], Value::Null);
}

#[test]
fn an_egress_is_shown_with_gateways_clients_and_what_is_wrong() {
    let mut objects = objects();
    objects.egresses[0].spec.excluded_destinations = vec!["203.0.113.0/24".to_owned()];
    let known = Known::of(&objects);
    let event: Event = object(json!({
        "metadata": {}, "involvedObject": { "uid": "a" }, "reason": "EgressNotRegistered", "message": "none answers",
        "eventTime": "2026-01-01T00:00:00.000000Z",
    }));
    let pods = [pod("a", "wide", "Running"), pod("b", "wide,gone", "Running")];
    let detail = Detail::of(&objects.egresses[0], &known, Some(&pods), &[event]);
    assert!(!detail.is_healthy());
    let text = detail.text();
    for line in [
        "Egress:             n/wide",
        "Destinations:       0.0.0.0/0 ::/0 10.0.0.0/8 except 203.0.113.0/24",
        "Service addresses:  172.16.0.1 fd04::1",
        "Allowed namespaces: all",
        "Gateways available: 1 of 2",
        "  Ready=True SomeAvailable: 1 of 2 gateways are available",
        "  shop/b: EgressUnknown: there is no Egress n/gone: ",
        ": none answers",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let data = json!(detail);
    assert_eq!(
        data["gateways"],
        json!([{ "pod": "w1", "node": "gate", "addresses": ["10.1.0.2"], "state": "ready" }])
    );
    assert_eq!(data["clients"][0]["events"][0]["lastSeenUnixSeconds"], 1_767_225_600);
    assert_eq!(
        (&data["name"], &data["wanted"], &data["clusterIPs"][0]),
        (&json!("wide"), &json!(2), &json!("172.16.0.1"))
    );
    let unknown =
        Detail::of(&objects.egresses[0], &Known::of(&Objects { slices: None, ..objects.clone() }), None, &[]);
    assert!(
        unknown.is_healthy() && unknown.text().contains("Gateways: ?\n\nClients: ?\n"),
        "{}",
        unknown.text()
    );
}

#[test]
fn what_gateways_say_of_their_clients_is_summed() {
    let objects = objects();
    let pods = [pod("a", "wide", "Running"), pod("b", "wide", "Running")];
    let mut detail = Detail::of(&objects.egresses[0], &Known::of(&objects), Some(&pods), &[]);
    let unknown = detail.text();
    assert!(unknown.contains("?") && json!(detail)["clients"][0]["use"].is_null(), "{unknown}");
    let says = |sent: u64, connections: Value| {
        json!({ "clients": [{ "namespace": "shop", "name": "a", "node": "n1", "addresses": ["10.1.2.3"], "sentBytes": sent,
            "receivedBytes": 1024, "connections": connections }] })
    };
    let load = json!({ "connections": 7, "clients": 1, "draining": false, "unhealthy": true });
    let uses = [
        GatewayUse::read("w1", load, says(1 << 20, 2.into())),
        GatewayUse::read("w2", json!({}), says(1 << 20, 3.into())),
    ];
    detail.set_uses(Some(&uses));
    let data = json!(detail);
    assert_eq!(
        (&data["clients"][0]["use"]["sentBytes"], &data["clients"][0]["use"]["connections"]),
        (&json!(2 << 20), &json!(5))
    );
    assert_eq!(data["clients"][1]["use"]["sentBytes"], 0);
    assert_eq!(
        (&data["gateways"][0]["state"], &data["gateways"][0]["connections"]),
        (&json!("unhealthy"), &json!(7))
    );
    let text = detail.text();
    assert!(text.contains("2.0 MiB") && text.contains("2.0 KiB") && text.contains("CONNECTIONS"), "{text}");
    let uses = [
        GatewayUse::read("w1", json!({}), says(1, 2.into())),
        GatewayUse::read("w2", json!({}), says(1, Value::Null)),
    ];
    detail.set_uses(Some(&uses));
    assert_eq!(json!(detail)["clients"][0]["use"]["connections"], Value::Null, "one does not know");
}

fn who_query(words: &str) -> EgressWho {
    match command(&format!("who {words}")).unwrap() {
        EgressCommand::Who(query) => query,
        _ => panic!("unexpected command"),
    }
}

#[test]
fn who_asks_for_an_address_a_port_and_a_time() {
    let path = |words: &str| who::path(&who_query(words));
    assert_eq!(path("192.0.2.1 40000"), "/connections?address=192.0.2.1&port=40000");
    assert_eq!(
        path("2001:db8::1 1 --at 2026-01-31T12:00:00+01:00"),
        "/connections?address=2001:db8::1&port=1&at=2026-01-31T11:00:00Z"
    );
    for words in
        ["192.0.2.1", "nat 1", "192.0.2.1 70000", "192.0.2.1 1 --at noon", "192.0.2.1 1 --egress nat"]
    {
        let refused = command::<EgressCommand>(&format!("who {words}")).unwrap_err();
        assert_eq!(refused.exit_code(), 2, "{words}");
    }
}

#[test]
fn who_used_an_address_is_shown_with_the_gateway() {
    let query = who_query("192.0.2.1 40000 --at 2026-01-31T12:00:00Z");
    let gateway = object(
        json!({ "metadata": { "name": "nat-a", "namespace": "n", "labels": { "app.kubernetes.io/instance": "nat" } } }),
    );
    let mut report = who::Report::default();
    report.add(&gateway, object(json!({ "connections": [], "completeSince": "2026-01-31T11:00:00.000Z" })));
    let text = report.text(&query);
    assert!(
        text.starts_with(
            "No gateway knows a connection with the source 192.0.2.1:40000 at 2026-01-31T12:00:00Z.\n"
        ),
        "{text}"
    );
    assert!(text.contains("  n/nat-a: all connections since 2026-01-31T11:00:00.000Z"), "{text}");
    let connection = json!({ "namespace": "shop", "pod": "web", "protocol": 6, "client": "10.1.2.3", "clientPort": 5000,
        "destination": "2001:db8::1", "destinationPort": 443, "source": "192.0.2.1", "sourcePort": 40000,
        "begin": "2026-01-31T11:59:00.000Z", "end": null, "sentBytes": null, "receivedBytes": null });
    report.add(&gateway, object(json!({ "connections": [connection], "completeSince": null })));
    let text = report.text(&query);
    let row: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(
        row,
        [
            "shop/web",
            "TCP",
            "10.1.2.3:5000",
            "[2001:db8::1]:443",
            "2026-01-31T11:59:00.000Z",
            "open",
            "n/nat-a"
        ]
    );
    let data = json!(report);
    assert_eq!(
        (&data["connections"][0]["egress"], &data["connections"][0]["pod"]),
        (&json!("n/nat"), &json!("web"))
    );
}

#[test]
fn the_way_is_said_in_words_and_as_data() {
    let known = Known::of(&objects());
    let explain = |asked: &str, to: &str| {
        let explanation = known.explain(&pod_info(&pod("a", asked, "Running")), to.parse().unwrap());
        let mut answer = Answer::of(explanation);
        (answer.pod, answer.destination) = ("shop/a".to_owned(), to.to_owned());
        answer
    };
    let answer = explain("wide", "198.51.100.1");
    let text = answer.text();
    assert!(answer.has_way());
    assert!(
        text.starts_with("Packets of pod shop/a from 10.1.2.3 to 198.51.100.1:\n  1. rule 1800"),
        "{text}"
    );
    assert!(text.contains("They go to a gateway of Egress n/wide, by link fou4_ac100001 (UDP port 5555 of Service 172.16.0.1): one"), "{text}");
    let data = json!(answer);
    let tunnel = json!({
        "egress": "n/wide", "destination": "0.0.0.0/0", "table": 118, "link": "fou4_ac100001", "clusterIP": "172.16.0.1",
        "port": 5555, "sessionAffinity": "ClientIP",
        "gateways": [{ "pod": "w1", "node": "gate", "addresses": ["10.1.0.2"], "state": "ready" }],
    });
    assert_eq!((&data["way"], &data["tunnel"], &data["notRead"]), (&json!("gateways"), &tunnel, &json!([])));
    for (asked, to, way, words) in [
        ("wide", "169.254.1.1", "eth0", "They leave by eth0, not through an egress gateway."),
        ("wide", "2001:db8::1", "refused", "They are refused.\nPodHasNoAddress: the pod has no IPv6 address"),
        (
            "gone",
            "198.51.100.1",
            "notKnown",
            "which way they take.\nEgressUnknown: there is no Egress n/gone",
        ),
    ] {
        let answer = explain(asked, to);
        assert!(answer.way == way && answer.text().contains(words), "{}", answer.text());
        assert_eq!(answer.has_way(), way == "eth0");
    }
}

#[test]
fn an_event_has_the_time_when_it_was_last_seen() {
    let event = object(json!({
        "metadata": {}, "involvedObject": {}, "eventTime": "2026-01-01T00:00:00.000000Z",
        "series": { "count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z" },
    }));
    assert_eq!(PodEvent::of(&event).last_seen_unix_seconds, Some(1_767_225_660));
}

#[test]
fn arguments_that_name_no_pod_or_address_are_refused() {
    for words in [
        "explain shop/web",
        "explain web 192.0.2.1",
        "explain shop/ 192.0.2.1",
        "explain shop/web x",
        "status nat",
        "status a/b/c",
    ] {
        assert_eq!(command::<EgressCommand>(words).unwrap_err().exit_code(), 2, "{words}");
    }
    let EgressCommand::Explain(query) = command("explain shop/web 2001:db8::1").unwrap() else {
        panic!("unexpected command")
    };
    assert_eq!((query.pod.namespace.as_str(), query.pod.name.as_str()), ("shop", "web"));
}

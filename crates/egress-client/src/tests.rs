//! Egress of pods in real network namespaces, with gateways that a test sets. What tunnels do with packets is tested in
//! `fairlead-fou`.

pub(crate) mod bed;
mod cluster;
mod coil;
mod port;
mod programs;
mod replies;
mod selectors;

use std::time::Duration;

use bed::{BEHIND, Bed, GATEWAY, Objects, Pod, SERVICE, egress, gateways, service, shown, within};
use fairlead_egress::client::plan::NextHop;
use fairlead_egress::problem::EgressReason;
use fairlead_fou::{Settings, Tunnels};
use fairlead_pods::cni::{EgressRequest, Reason};
use nix::libc;
use serde_json::json;
use testbed_netns::Monitor;

const INTERNET: &str = "internet/nat";
const DOMESTIC: &str = "domestic/nat";
const BOTH: &[(&str, &str)] = &[("internet", "nat"), ("domestic", "nat")];
/// As the article about the egress NAT of Coil v2 prints them ("Rules in a client Pod").
const RULES: &str = "0: from all lookup local 1800: from all to 169.254.0.0/16 lookup main 1900: from all lookup 117 \
    2000: from all to 10.0.0.0/8 lookup main 2001: from all to 172.16.0.0/12 lookup main \
    2002: from all to 192.168.0.0/16 lookup main 2100: from all lookup 118 32766: from all lookup main \
    32767: from all lookup default";
const TABLE_117: &str = "192.168.10.0/24 dev fou4_0a440c31 proto 30";
const TABLE_118: &str = "default dev fou4_0a447c91 proto 30";
/// Cluster IPs of the domestic Egress's Service.
const DOMESTIC_SERVICE: [&str; 2] = ["10.68.12.49", "fd04::1"];
const SECOND: Duration = Duration::from_secs(1);

/// The two Egresses of the article, the first one dual stack.
fn article() -> Objects {
    Objects {
        egresses: vec![egress(INTERNET, &["0.0.0.0/0", "::/0"]), egress(DOMESTIC, &["192.168.10.0/24"])],
        services: vec![service(INTERNET, &SERVICE), service(DOMESTIC, &DOMESTIC_SERVICE)],
        pods: vec![shown(BOTH, &json!({}))],
        ..Objects::default()
    }
}

/// A running client of both.
async fn client() -> (Bed, Pod) {
    let (bed, pod) = (Bed::new(article()), Pod::new());
    bed.gateways.set(INTERNET, gateways(&GATEWAY));
    bed.gateways.set(DOMESTIC, gateways(&[GATEWAY[0]]));
    bed.add(&pod, BOTH).await.unwrap();
    (bed, pod)
}

fn has_what_the_article_prints(pod: &Pod) -> bool {
    pod.shown("ip rule") == RULES
        && pod.shown("ip route show table 117") == TABLE_117
        && pod.shown("ip route show table 118") == TABLE_118
}

/// Packets to both families leave encapsulated, and none in clear.
#[track_caller]
fn reaches_gateways(pod: &Pod) {
    let before = pod.counted("encapsulated");
    assert_eq!(BEHIND.map(|to| pod.send(to)), [None, None]);
    assert_eq!((pod.counted("encapsulated"), pod.counted("in_clear")), (before + 2, 0));
}

/// Packets are refused at once, and none leaves.
#[track_caller]
fn is_refused(pod: &Pod, to: &[&str]) {
    let before = pod.counted("encapsulated");
    for to in to {
        assert_eq!(pod.send(to), Some(libc::EHOSTUNREACH), "{to}");
    }
    assert_eq!((pod.counted("encapsulated"), pod.counted("in_clear")), (before, 0));
}

/// A running client of both Egresses, which others reach from outside; `objects` have the Egresses.
async fn client_of_both(objects: Objects) -> (Bed, Pod) {
    let objects = Objects {
        services: vec![service(INTERNET, &SERVICE), service(DOMESTIC, &DOMESTIC_SERVICE)],
        pods: vec![shown(BOTH, &json!({}))],
        ..objects
    };
    let (bed, pod) = (Bed::new(objects), Pod::new());
    pod.open_from_outside();
    bed.gateways.set(INTERNET, gateways(&GATEWAY));
    bed.gateways.set(DOMESTIC, gateways(&GATEWAY));
    bed.add(&pod, BOTH).await.unwrap();
    (bed, pod)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_added_pod_has_what_the_article_prints_and_reaches_its_gateways() {
    let (bed, pod) = client().await;
    assert!(has_what_the_article_prints(&pod), "{}", pod.egress_state());
    reaches_gateways(&pod);
    assert_eq!([INTERNET, DOMESTIC].map(|egress| bed.gateways.clients(egress)), [["u1"], ["u1"]]);
    assert_eq!(bed.egress.check(&pod.key).await.unwrap(), Vec::<String>::new());
    pod.inside.sh("ip rule del pref 2001; ip link set fou4_0a440c31 down");
    let differences = bed.egress.check(&pod.key).await.unwrap().join("\n");
    // The reconciler may have been faster with one of them.
    assert!(differences.is_empty() || differences.contains("2001") || differences.contains("fou4_0a440c31"));
    bed.egress.detach(&pod.key);
    assert!(bed.gateways.clients(INTERNET).is_empty() && bed.gateways.clients(DOMESTIC).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn gateways_may_send_to_a_pod_from_where_it_sends_through_them() {
    let (_bed, pod) = client().await;
    let uplink = pod.inside.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap();
    let settings = Settings { port: 5555, drop_unknown: false, own: None };
    let mut tunnels = pod.inside.run(|| Tunnels::open(uplink, settings)).unwrap();
    let origins = [
        ("0.0.0.0/0", Some(SERVICE[0])),
        ("10.0.0.0/8", None),
        ("169.254.0.0/16", None),
        ("172.16.0.0/12", None),
        ("192.168.0.0/16", None),
        ("192.168.10.0/24", Some(DOMESTIC_SERVICE[0])),
        ("::/0", Some(SERVICE[1])),
        ("fc00::/7", None),
        ("fe80::/10", None),
    ];
    let origins = origins
        .map(|(prefix, service)| (prefix.parse().unwrap(), service.map(|service| service.parse().unwrap())));
    assert_eq!(tunnels.set_origins(&origins.into()).unwrap(), 0, "the programs have them already");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_have_its_gateways_is_refused_with_a_reason() {
    let (bed, pod) = (Bed::new(article()), Pod::new());
    let reason = async |chosen: &[(&str, &str)]| bed.add(&pod, chosen).await.unwrap_err();
    let unknown = reason(&[("internet", "nat, other")]).await;
    assert_eq!(unknown.reason, Reason::Egress(EgressReason::Unknown));
    assert!(unknown.message.contains("internet/other"), "{unknown}");
    assert_eq!(reason(&[("internet", "nat;")]).await.reason, Reason::Egress(EgressReason::AnnotationInvalid));
    // No gateway is ready.
    let closed = reason(BOTH).await;
    assert_eq!(closed.reason, Reason::Egress(EgressReason::NotRegistered), "{closed}");
    bed.gateways.refuse(Some("NotAPodOfThisNode: no"));
    let refused = reason(BOTH).await;
    assert!(refused.message.contains("NotAPodOfThisNode"), "{refused}");
    bed.gateways.refuse(None);
    let mut closed_to_shop = egress(INTERNET, &["0.0.0.0/0"]);
    closed_to_shop.spec.allowed_namespaces = Some(vec!["bank".to_owned()]);
    bed.egresses.apply(closed_to_shop);
    bed.services.delete(service(DOMESTIC, &[]));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(reason(&[("internet", "nat")]).await.reason, Reason::Egress(EgressReason::NotAllowed));
    assert_eq!(reason(&[("domestic", "nat")]).await.reason, Reason::Egress(EgressReason::ServiceMissing));
    assert_eq!(pod.counted("in_clear"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_change_of_one_destination_touches_only_its_routes() {
    let (bed, pod) = client().await;
    tokio::time::sleep(SECOND).await;
    let mut monitor = Monitor::ip(&pod.inside);
    monitor.wait_idle();
    bed.egresses.apply(egress(DOMESTIC, &["192.168.10.0/24", "9.9.9.0/24"]));
    let there = || pod.shown("ip route show table 118").contains("9.9.9.0/24 dev fou4_0a440c31");
    within(2 * SECOND, "the new destination", there).await;
    tokio::time::sleep(SECOND).await;
    let reported = monitor.reported();
    assert!(reported.len() == 2 && reported.iter().all(|line| line.contains("9.9.9.0/24")), "{reported:?}");
    bed.egresses.apply(egress(DOMESTIC, &["192.168.10.0/24"]));
    within(2 * SECOND, "the end of the destination", || has_what_the_article_prints(&pod)).await;
    tokio::time::sleep(SECOND).await;
    let reported = monitor.reported();
    assert!(reported.len() == 2 && reported.iter().all(|line| line.contains("9.9.9.0/24")), "{reported:?}");
    reaches_gateways(&pod);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ranges_of_the_cluster_are_those_of_the_status_of_the_egresses_that_a_pod_uses() {
    let (bed, pod) = client().await;
    let ranges = |of: &str, destinations: &[&str], ranges: Option<&str>| {
        let mut egress = egress(of, destinations);
        egress.status.as_mut().unwrap().cluster_ranges = ranges.map(|range| vec![range.to_owned()]);
        egress
    };
    bed.egresses.apply(ranges(DOMESTIC, &["192.168.10.0/24"], Some("100.64.0.0/10")));
    // Of no pod.
    bed.egresses.apply(ranges("other/nat", &["9.9.9.0/24"], Some("0.0.0.0/0")));
    let has = || pod.shown("ip rule").contains("2003: from all to 100.64.0.0/10 lookup main 2100:");
    within(2 * SECOND, "the range", has).await;
    reaches_gateways(&pod);
    // An older controller writes none: what is there stays.
    bed.egresses.delete(egress("other/nat", &[]));
    bed.egresses.apply(ranges(DOMESTIC, &["192.168.10.0/24"], None));
    bed.egresses.apply(ranges(INTERNET, &["0.0.0.0/0", "::/0"], None));
    tokio::time::sleep(SECOND).await;
    assert!(has() && bed.gateways.clients(INTERNET) == ["u1"]);
    reaches_gateways(&pod);
    bed.egresses.apply(egress(DOMESTIC, &["192.168.10.0/24"]));
    bed.egresses.apply(egress(INTERNET, &["0.0.0.0/0", "::/0"]));
    within(2 * SECOND, "the range is gone", || has_what_the_article_prints(&pod)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_flush_is_back_within_a_second_and_nothing_leaves_in_clear() {
    let (_bed, pod) = client().await;
    // The reconciler has compared once, and watches.
    tokio::time::sleep(SECOND).await;
    let state = pod.egress_state();
    for damage in [
        "ip route flush table 118; ip -6 route flush table 118",
        "ip rule del pref 2100; ip -6 rule del pref 1900",
        "tc filter del dev eth0 egress; tc filter del dev eth0 ingress",
        "tc qdisc del dev eth0 clsact",
        "tc filter del dev fou4_0a447c91 egress",
        "ip link set fou4_0a447c91 down",
        "ip link del fou4_0a440c31",
    ] {
        pod.inside.sh(damage);
        let whole = || {
            has_what_the_article_prints(&pod) && pod.egress_state().lines().count() == state.lines().count()
        };
        let took = within(SECOND, damage, whole).await;
        eprintln!("{damage}: mended after {took:?}");
        reaches_gateways(&pod);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_program_adopts_what_is_there_and_changes_nothing() {
    let (bed, pod) = client().await;
    tokio::time::sleep(SECOND).await;
    let state = pod.egress_state();
    let mut monitor = Monitor::ip(&pod.inside);
    monitor.wait_idle();
    for way in [NextHop::Unknown, gateways(&GATEWAY)] {
        bed.gateways.set(INTERNET, way);
    }
    bed.gateways.set(INTERNET, NextHop::Unknown);
    let bed = bed.restart(article()).await;
    tokio::time::sleep(SECOND).await;
    reaches_gateways(&pod);
    bed.gateways.set(INTERNET, gateways(&GATEWAY));
    tokio::time::sleep(SECOND).await;
    assert_eq!(monitor.reported(), Vec::<String>::new());
    assert_eq!(pod.egress_state(), state);
    reaches_gateways(&pod);
    assert_eq!(bed.gateways.clients(INTERNET), ["u1"]);
    pod.inside.sh("ip rule del pref 2100");
    within(SECOND, "an adopted pod is repaired", || has_what_the_article_prints(&pod)).await;
}

/// Whom gateways are not told of, they drop.
#[tokio::test(flavor = "multi_thread")]
async fn a_later_program_that_cannot_plan_yet_keeps_a_client_registered() {
    let (bed, pod) = client().await;
    let mut later = article();
    // The controller has not written the ranges of one of them yet.
    later.egresses[1].status.as_mut().unwrap().cluster_ranges = None;
    let bed = bed.restart(later).await;
    within(2 * SECOND, "it is said", || bed.problems.get().iter().any(|it| it.contains(DOMESTIC))).await;
    assert_eq!([INTERNET, DOMESTIC].map(|egress| bed.gateways.clients(egress)), [["u1"], ["u1"]]);
    assert!(has_what_the_article_prints(&pod));
    reaches_gateways(&pod);
    bed.egresses.apply(egress(DOMESTIC, &["192.168.10.0/24"]));
    within(2 * SECOND, "there is a plan", || bed.problems.get().is_empty()).await;
    assert_eq!([INTERNET, DOMESTIC].map(|egress| bed.gateways.clients(egress)), [["u1"], ["u1"]]);
    bed.pods.apply(shown(&[("domestic", "nat")], &json!({})));
    within(2 * SECOND, "it is no client", || bed.gateways.clients(INTERNET).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_live_gateway_packets_are_refused_at_once() {
    let (bed, pod) = client().await;
    bed.gateways.set(INTERNET, gateways(&[]));
    // One family after the other.
    let into_links = || {
        ["ip route show table 118", "ip -6 route show table 118"]
            .map(|command| !pod.shown(command).is_empty())
    };
    within(SECOND, "no route leads into a link", || into_links() == [false; 2]).await;
    is_refused(&pod, &BEHIND);
    bed.gateways.set(INTERNET, gateways(&GATEWAY));
    within(SECOND, "there is a gateway again", || into_links() == [true; 2]).await;
    assert!(has_what_the_article_prints(&pod), "{}", pod.egress_state());
    reaches_gateways(&pod);
    // Gateways of Coil are reached through the Service.
    bed.gateways.set(INTERNET, NextHop::Service);
    tokio::time::sleep(Duration::from_millis(500)).await;
    reaches_gateways(&pod);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_service_address_is_followed_within_two_seconds() {
    let (bed, pod) = client().await;
    bed.services.delete(service(INTERNET, &SERVICE));
    within(2 * SECOND, "the Service is gone", || pod.send(BEHIND[0]) == Some(libc::EHOSTUNREACH)).await;
    is_refused(&pod, &BEHIND);
    bed.services.apply(service(INTERNET, &["10.68.200.1", "fd04::9"]));
    let moved = || pod.shown("ip route show table 118") == "default dev fou4_0a44c801 proto 30";
    let took = within(2 * SECOND, "the new link", moved).await;
    eprintln!("followed after {took:?}");
    within(SECOND, "the old link is gone", || !pod.inside.sh("ip -br link").contains("fou4_0a447c91")).await;
    reaches_gateways(&pod);
    assert_eq!(pod.shown("ip route show table 117"), TABLE_117);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_egress_leaves_a_refusal_until_the_annotation_is_gone() {
    let (bed, pod) = client().await;
    bed.egresses.delete(egress(INTERNET, &[]));
    within(2 * SECOND, "the link is gone", || !pod.inside.sh("ip -br link").contains("fou4_0a447c91")).await;
    is_refused(&pod, &BEHIND);
    assert_eq!(pod.shown("ip route show table 117"), TABLE_117, "the other one still works");
    assert!(bed.gateways.clients(INTERNET).is_empty());
    let problems = bed.problems.get();
    assert!(problems.iter().any(|it| it.contains("shop/web") && it.contains(INTERNET)), "{problems:?}");
    // A program that starts later knows the destinations from the kernel only.
    let mut later = article();
    later.egresses.remove(0);
    let bed = bed.restart(later).await;
    tokio::time::sleep(SECOND).await;
    is_refused(&pod, &BEHIND);
    bed.pods.apply(shown(&[("domestic", "nat")], &json!({})));
    within(2 * SECOND, "no refusal is left", || pod.inside.sh("ip route show table 118").is_empty()).await;
    assert!(bed.problems.get().is_empty());
    bed.pods.apply(shown(&[], &json!({})));
    let is_clean =
        || pod.egress_state().lines().count() == 5 && !pod.inside.sh("ip -br link").contains("fou");
    within(2 * SECOND, "nothing of egress is left", is_clean).await;
    assert!(bed.gateways.clients(DOMESTIC).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_annotation_of_a_running_pod_takes_effect_and_a_pod_that_ended_is_no_client() {
    let (bed, pod) = (Bed::new(Objects { pods: vec![shown(&[], &json!({}))], ..article() }), Pod::new());
    bed.gateways.set(INTERNET, gateways(&GATEWAY));
    bed.gateways.set(DOMESTIC, gateways(&GATEWAY));
    bed.add(&pod, &[]).await.unwrap();
    assert_eq!(pod.inside.sh("ip rule").lines().count(), 3);
    bed.pods.apply(shown(BOTH, &json!({})));
    within(2 * SECOND, "the annotation", || has_what_the_article_prints(&pod)).await;
    reaches_gateways(&pod);
    assert_eq!(bed.gateways.clients(INTERNET), ["u1"]);
    bed.pods.apply(shown(BOTH, &json!({ "status": { "phase": "Succeeded" } })));
    within(2 * SECOND, "it is no client", || bed.gateways.clients(INTERNET).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_forwards_and_others_cannot_change_that() {
    let (bed, pod) = (Bed::new(Objects::default()), Pod::new());
    let request = EgressRequest { gateway_of: Some("nat".to_owned()), ..EgressRequest::default() };
    bed.egress.attach(&pod.attachment(), pod.interface(), request).await.unwrap();
    let read = || {
        pod.shown(
            "cd /proc/sys/net; cat ipv4/ip_forward ipv6/conf/all/forwarding ipv4/conf/all/rp_filter \
             ipv4/conf/default/rp_filter ipv4/conf/eth0/rp_filter",
        )
    };
    assert_eq!(read(), "1 1 0 0 0");
    tokio::time::sleep(SECOND).await;
    pod.inside.sh("echo 0 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter");
    within(2 * SECOND, "the settings are back", || read() == "1 1 0 0 0").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_namespace_cannot_be_used_delays_no_other() {
    let (bed, pod) = client().await;
    let request = || EgressRequest { uid: Some("u2".to_owned()), ..EgressRequest::default() };
    // A file that is no namespace.
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut bad = pod.attachment();
    bad.pod.name = "bad".to_owned();
    bad.netns = file.path().to_owned();
    bad.key.container_id = "c2".to_owned();
    bed.egress.attach(&bad, pod.interface(), request()).await.unwrap();
    let mut annotated: serde_json::Value = serde_json::to_value(shown(BOTH, &json!({}))).unwrap();
    annotated["metadata"]["name"] = "bad".into();
    annotated["metadata"]["uid"] = "u2".into();
    bed.pods.apply(serde_json::from_value(annotated).unwrap());
    within(5 * SECOND, "the problem", || bed.problems.get().iter().any(|it| it.contains("shop/bad"))).await;
    pod.inside.sh("ip rule del pref 2100");
    within(SECOND, "the other is repaired", || has_what_the_article_prints(&pod)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_source_port_is_used_by_pods_that_run() {
    let (bed, pod) = client().await;
    let from_fixed_port = || {
        let before = pod.counted("from_fixed_port");
        reaches_gateways(&pod);
        pod.counted("from_fixed_port") - before
    };
    assert_eq!(from_fixed_port(), 2);
    for (auto, expected) in [(true, 0), (false, 2)] {
        let mut changed = egress(INTERNET, &["0.0.0.0/0", "::/0"]);
        changed.spec.fou_source_port_auto = auto;
        bed.egresses.apply(changed);
        within(5 * SECOND, "the source port", || from_fixed_port() == expected).await;
    }
}

/// Prints how long setting up takes, for the limits of the requirements: + 3 ms for one Egress, + 8 ms for four.
#[tokio::test(flavor = "multi_thread")]
async fn setting_up_is_quick() {
    for count in [1, 4] {
        let names: Vec<String> = (0..count).map(|index| format!("n{index}/nat")).collect();
        let destination = |index: usize| format!("203.0.{index}.0/24");
        let objects = Objects {
            egresses: names
                .iter()
                .enumerate()
                .map(|(index, of)| egress(of, &[&destination(index)]))
                .collect(),
            services: names
                .iter()
                .enumerate()
                .map(|(at, of)| service(of, &[&format!("10.68.0.{}", at + 1)]))
                .collect(),
            ..Objects::default()
        };
        let bed = Bed::new(objects);
        let chosen: Vec<(String, &str)> = (0..count).map(|index| (format!("n{index}"), "nat")).collect();
        let chosen: Vec<(&str, &str)> = chosen.iter().map(|(of, name)| (of.as_str(), *name)).collect();
        names.iter().for_each(|of| bed.gateways.set(of, gateways(&[GATEWAY[0]])));
        let mut took: Vec<Duration> = Vec::new();
        for _ in 0..10 {
            let pod = Pod::new();
            let start = std::time::Instant::now();
            bed.add(&pod, &chosen).await.unwrap();
            took.push(start.elapsed());
            bed.egress.detach(&pod.key);
        }
        took.sort();
        eprintln!("{count} Egresses: median {:?}, all {took:?}", took[took.len() / 2]);
        assert!(took[took.len() / 2] < SECOND, "{took:?}");
    }
}

//! `spec.originatingOnly`: who answers connections that others open to a pod.

use fairlead_api::resources::Egress;
use nix::libc;
use serde_json::json;

use super::bed::{BEHIND, Bed, Objects, Pod, egress, gateways, shown, within};
use super::{DOMESTIC, INTERNET, SECOND, client_of_both};
use crate::EgressSwitches;

fn originating(of: &str, destinations: &[&str], only: Option<bool>) -> Egress {
    let mut egress = egress(of, destinations);
    egress.spec.originating_only = only;
    egress
}

fn internet(only: Option<bool>) -> Egress {
    originating(INTERNET, &["0.0.0.0/0", "::/0"], only)
}

/// A running client of both Egresses, to which others open connections from outside.
async fn client(of_internet: Option<bool>, of_domestic: Option<bool>, flag: bool) -> (Bed, Pod) {
    let objects = Objects {
        egresses: vec![
            internet(of_internet),
            originating(DOMESTIC, &["192.168.10.0/24", "fd10::/64"], of_domestic),
        ],
        switches: EgressSwitches { enabled: true, originating_only: flag },
        ..Objects::default()
    };
    client_of_both(objects).await
}

/// Packets that the pod sends on its own go to gateways, and none in clear.
#[track_caller]
fn opens_by_gateways(pod: &Pod) {
    let before = pod.counted("encapsulated");
    assert_eq!(BEHIND.map(|to| pod.send(to)), [None, None]);
    assert_eq!((pod.counted("encapsulated"), pod.counted("in_clear")), (before + 2, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_the_pod_are_answered_by_eth0_and_its_own_go_to_gateways() {
    let (bed, pod) = client(Some(true), None, false).await;
    assert_eq!(pod.answers_tcp(), [true, true]);
    // Of two Egresses the destination decides.
    let sources = ["203.0.113.1", "192.168.10.1", "2001:db8::1", "fd10::1"];
    assert_eq!(sources.map(|from| pod.answers_udp(from)), [true, false, true, false]);
    opens_by_gateways(&pod);
    let index = pod.shown("ip -o link show eth0 | cut -d: -f1");
    let (table, rules) = (1000 + index.parse::<u32>().unwrap(), pod.shown("ip rule"));
    assert!(
        rules.contains(&format!("1000: from all fwmark {:#x} lookup {table}", index.parse::<u32>().unwrap())),
        "{rules}"
    );
    let routes = pod.shown(&format!("ip route show table {table}"));
    assert!(routes.contains("default via 169.254.1.1 dev eth0 proto 30"), "{routes}");
    assert_eq!(bed.egress.check(&pod.key).await.unwrap(), Vec::<String>::new());
    // Also where no gateway is ready.
    bed.gateways.set(INTERNET, gateways(&[]));
    let refused = || BEHIND.map(|to| pod.send(to)) == [Some(libc::EHOSTUNREACH); 2];
    within(SECOND, "no gateway", refused).await;
    assert_eq!(pod.answers_tcp(), [true, true]);
    assert_eq!(pod.counted("in_clear"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_flush_of_it_is_back_within_a_second_and_nothing_is_opened_in_clear() {
    let (bed, pod) = client(Some(true), Some(true), false).await;
    tokio::time::sleep(SECOND).await;
    let index: u32 = pod.shown("ip -o link show eth0 | cut -d: -f1").parse().unwrap();
    let table = 1000 + index;
    for damage in [
        "nft flush ruleset".to_owned(),
        "nft flush chain inet fairlead_egress_client output".to_owned(),
        "nft delete table inet fairlead_egress_client".to_owned(),
        format!("ip route flush table {table}; ip -6 route flush table {table}"),
        "ip rule del pref 1000; ip -6 rule del pref 1000".to_owned(),
        "ip rule del pref 1000; ip -6 rule del pref 1000; nft flush ruleset".to_owned(),
        "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter".to_owned(),
        "conntrack -F 2>/dev/null || true".to_owned(),
    ] {
        pod.inside.sh(&damage);
        for _ in 0..20 {
            let sent = BEHIND.map(|to| pod.send(to));
            assert!(
                sent.iter().all(|error| [None, Some(libc::EHOSTUNREACH)].contains(error)),
                "{damage}: {sent:?}"
            );
        }
        assert_eq!(pod.counted("in_clear"), 0, "{damage}");
        let is_whole = || pod.answers_udp("203.0.113.1") && pod.answers_udp("2001:db8::1");
        let took = within(SECOND, &damage, is_whole).await;
        eprintln!("{damage}: mended after {took:?}");
        opens_by_gateways(&pod);
    }
    // A later program adopts it.
    let differences = bed.egress.check(&pod.key).await.unwrap();
    assert_eq!(differences, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packet_from_outside_opens_no_way_for_a_connection_of_the_pod() {
    let (_bed, pod) = client(Some(true), None, false).await;
    // A connection of the pod, and then a packet by eth0 that seems to belong to it.
    let socket = pod.inside.run(|| std::net::UdpSocket::bind("10.20.30.40:7777").unwrap());
    socket.send_to(b"x", "203.0.113.1:9").unwrap();
    pod.send_from_outside("203.0.113.1:9", "10.20.30.40:7777");
    std::thread::sleep(std::time::Duration::from_millis(50));
    socket.send_to(b"x", "203.0.113.1:9").unwrap();
    assert_eq!(pod.counted("in_clear"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_changed_live_and_what_an_egress_says_wins_over_the_flag() {
    let (bed, pod) = client(None, None, false).await;
    assert_eq!(pod.answers_tcp(), [false, false]);
    bed.egresses.apply(internet(Some(true)));
    within(2 * SECOND, "it is on", || pod.answers_tcp() == [true, true]).await;
    opens_by_gateways(&pod);
    // From now on nftables are watched.
    tokio::time::sleep(SECOND).await;
    pod.inside.sh("nft flush ruleset");
    within(SECOND, "it is mended", || pod.answers_tcp() == [true, true]).await;
    bed.egresses.apply(internet(Some(false)));
    let is_gone = || {
        let left = pod.inside.sh("nft list tables; ip rule; ip -6 rule; ip route show table all");
        !left.contains("fairlead_egress_client") && !left.contains("1000:") && !left.contains("table 100")
    };
    within(2 * SECOND, "it is off", is_gone).await;
    assert_eq!(pod.answers_tcp(), [false, false]);
    opens_by_gateways(&pod);
    drop(bed);
    let (bed, pod) = client(None, Some(false), true).await;
    assert_eq!(["203.0.113.1", "192.168.10.1"].map(|from| pod.answers_udp(from)), [true, false]);
    bed.pods.apply(shown(&[], &json!({})));
    within(2 * SECOND, "it is no client", || is_clean(&pod)).await;
}

fn is_clean(pod: &Pod) -> bool {
    let left = pod.inside.sh("nft list tables; ip rule; ip -br link");
    !left.contains("fairlead") && !left.contains("1000:") && !left.contains("fou")
}

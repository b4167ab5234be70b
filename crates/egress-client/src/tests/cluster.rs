//! Destinations that contain the cluster itself: pods, Services and nodes stay reachable, and so are probes by the node.

use fairlead_api::resources::Egress;
use nix::libc;

use super::bed::{Bed, Objects, Pod, egress, within};
use super::{DOMESTIC, INTERNET, SECOND, client_of_both};

/// Ranges of a cluster with pods and Services in 10.0.0.0/8, and the addresses of its node.
const RANGES: [&str; 5] =
    ["10.20.0.0/16", "10.68.0.0/16", "192.168.10.1/32", "203.0.113.1/32", "2001:db8::1/128"];

fn with_ranges(of: &str, destinations: &[&str]) -> Egress {
    let mut egress = egress(of, destinations);
    egress.status.as_mut().unwrap().cluster_ranges = Some(RANGES.map(str::to_owned).to_vec());
    egress
}

/// A running client of both Egresses, which have the Internet, and the networks of the cluster and around it.
async fn client() -> (Bed, Pod) {
    let objects = Objects {
        egresses: vec![
            with_ranges(INTERNET, &["0.0.0.0/0", "::/0"]),
            with_ranges(DOMESTIC, &["10.0.0.0/8", "192.168.0.0/16"]),
        ],
        ..Objects::default()
    };
    client_of_both(objects).await
}

/// Probes of the node, from each of its addresses, are answered.
#[track_caller]
fn answers_its_node(pod: &Pod) {
    assert_eq!(pod.answers_tcp(), [true, true]);
    let sources = ["203.0.113.1", "192.168.10.1", "2001:db8::1"];
    assert_eq!(sources.map(|from| pod.answers_udp(from)), [true; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_and_the_cluster_are_reached_although_destinations_contain_them() {
    let (bed, pod) = client().await;
    answers_its_node(&pod);
    for (to, by_gateway) in [
        ("10.20.7.7:9", false),
        ("10.68.0.10:9", false),
        ("192.168.10.1:9", false),
        ("10.99.0.1:9", true),
        ("192.168.10.50:9", true),
        ("198.51.100.7:9", true),
    ] {
        let before = ["encapsulated", "in_clear"].map(|counter| pod.counted(counter));
        assert_eq!(pod.send(to), None, "{to}");
        let [encapsulated, in_clear] = ["encapsulated", "in_clear"].map(|counter| pod.counted(counter));
        let expected = if by_gateway { [before[0] + 1, before[1]] } else { [before[0], before[1] + 1] };
        assert_eq!([encapsulated, in_clear], expected, "{to}");
    }
    assert_eq!(bed.egress.check(&pod.key).await.unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cluster_stays_reachable_when_the_egresses_are_deleted() {
    let (bed, pod) = client().await;
    bed.egresses.delete(egress(DOMESTIC, &[]));
    bed.egresses.delete(egress(INTERNET, &[]));
    let refused =
        || ["192.168.10.50:9", "198.51.100.7:9"].map(|to| pod.send(to)) == [Some(libc::EHOSTUNREACH); 2];
    within(2 * SECOND, "destinations are refused", refused).await;
    tokio::time::sleep(SECOND).await;
    answers_its_node(&pod);
    assert_eq!(["10.20.7.7:9", "10.68.0.10:9"].map(|to| pod.send(to)), [None, None]);
}

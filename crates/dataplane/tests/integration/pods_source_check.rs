//! Pods that send with addresses that are not theirs.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use fairlead_dataplane::nft_table::Applied;
use fairlead_dataplane::pods;
use fairlead_netlink::netns::Netns;
use testbed_netns::sh_in;

use crate::pods_common::{Host, NODE, NODE_V6, ping, spec};

const OWN: [&str; 2] = ["10.1.0.5", "fd00:1::5"];
const NEIGHBOUR: [&str; 2] = ["10.1.0.6", "fd00:1::6"];

/// A host with the check, a pod, and its neighbour.
fn bed() -> (Host, Netns, Netns) {
    let (host, pod, neighbour) = (Host::new(), Netns::create().unwrap(), Netns::create().unwrap());
    host.at(|| pods::check_sources().unwrap());
    host.add(&spec(&pod, "a", Some(OWN[0]), Some(OWN[1]))).unwrap();
    host.add(&spec(&neighbour, "b", Some(NEIGHBOUR[0]), Some(NEIGHBOUR[1]))).unwrap();
    (host, pod, neighbour)
}

fn dropped(host: &Host) -> String {
    let table = host.sh("nft list table inet fairlead_source_check");
    let (_, after) = table.split_once("counter packets ").unwrap_or_else(|| panic!("{table}"));
    after.split(' ').next().unwrap().to_owned()
}

/// Sources of what arrives at the node when the pod sends with each of these, its own last.
fn arrives(host: &Host, pod: &Netns, node: &str, sources: &[&str]) -> Vec<IpAddr> {
    // A port of the kernel's choice: a program that another test starts holds the last socket until it runs.
    let server = host.at(|| UdpSocket::bind((node, 0)).unwrap());
    let port = server.local_addr().unwrap().port();
    server.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    for source in sources {
        pod.run(|| UdpSocket::bind((*source, 0)).unwrap().send_to(b"x", (node, port)).unwrap()).unwrap();
    }
    let last: IpAddr = sources.last().unwrap().parse().unwrap();
    let mut seen = Vec::new();
    while seen.last() != Some(&last) {
        seen.push(server.recv_from(&mut [0; 8]).unwrap().1.ip());
    }
    seen
}

#[test]
fn a_pod_cannot_send_as_its_neighbour_or_as_a_host_of_the_network() {
    let (host, pod, _neighbour) = bed();
    for address in NEIGHBOUR.iter().chain(&["192.0.2.77", "2001:db8::77"]) {
        sh_in(&pod, &format!("ip addr add {address} dev lo nodad"));
    }
    let own: Vec<IpAddr> = OWN.iter().map(|text| text.parse().unwrap()).collect();
    assert_eq!(arrives(&host, &pod, NODE, &[NEIGHBOUR[0], "192.0.2.77", OWN[0]]), own[..1]);
    assert_eq!(arrives(&host, &pod, NODE_V6, &[NEIGHBOUR[1], "2001:db8::77", OWN[1]]), own[1..]);
    assert_eq!(dropped(&host), "4");
}

#[test]
fn honest_pods_lose_nothing() {
    let (host, pod, neighbour) = bed();
    for (from, to) in [(&pod, NODE), (&pod, NODE_V6), (&neighbour, OWN[0]), (&neighbour, OWN[1])] {
        ping(from, to);
    }
    ping(&pod, "fe80::1%eth0");
    ping(&host.netns, OWN[0]);
    ping(&host.netns, OWN[1]);
    // Duplicate address detection sends from the unspecified address (RFC 4862, section 5.4.2).
    sh_in(&pod, "ip addr add fd00:1::99/64 dev eth0");
    let tentative = || sh_in(&pod, "ip -6 addr show dev eth0 tentative");
    while !tentative().is_empty() {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(dropped(&host), "0");
}

#[test]
fn the_table_is_made_once_and_again_when_it_was_changed() {
    let (host, _pod, _neighbour) = bed();
    let check = || host.at(|| pods::check_sources().unwrap());
    assert_eq!(check(), Applied::Unchanged);
    let table = host.sh("nft list table inet fairlead_source_check");
    assert!(table.contains("iifgroup 116 fib saddr . iif oif missing counter"), "{table}");
    host.sh("nft flush table inet fairlead_source_check");
    assert_eq!((check(), check()), (Applied::Rebuilt, Applied::Unchanged));
    host.sh("nft flush ruleset");
    assert_eq!((check(), check()), (Applied::Rebuilt, Applied::Unchanged));
}

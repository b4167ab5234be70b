//! A second interface of a pod, as Multus asks for one: beside the first one's default route, and without it.

use std::net::UdpSocket;
use std::time::Duration;

use fairlead_dataplane::pods::{self, PodLinks, PodSpec};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_netlink::netns::Netns;
use testbed_netns::{sh_in, try_sh_in};

use crate::pods_common::{Host, NODE, NODE_V6, links, ping, spec};

const FIRST: [&str; 2] = ["10.1.0.5", "fd00:1::5"];
const SECOND: [&str; 2] = ["10.1.0.6", "fd00:1::6"];

fn second(pod: &Netns) -> PodSpec {
    PodSpec { ifname: "net1".to_owned(), ..spec(pod, "a", Some(SECOND[0]), Some(SECOND[1])) }
}

/// A host that checks sources, as every node does, and a pod with two interfaces.
fn two_interfaces() -> (Host, Netns, [PodLinks; 2]) {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    host.at(|| pods::check_sources().unwrap());
    let first = host.add(&spec(&pod, "a", Some(FIRST[0]), Some(FIRST[1]))).unwrap();
    let second = host.add(&second(&pod)).unwrap();
    (host, pod, [first, second])
}

/// State of the first interface, without what belongs to the second.
fn first_interface(host: &Host, pod: &Netns) -> String {
    let shown = [
        "ip addr show dev eth0",
        "ip route show dev eth0",
        "ip -6 route show dev eth0",
        "ip neigh show dev eth0 nud permanent",
    ];
    let inside: String = shown.iter().map(|command| sh_in(pod, command)).collect();
    let leads_to = |family| {
        host.table(family)
            .lines()
            .filter(|line| line.contains(FIRST[0]) || line.contains(FIRST[1]))
            .collect::<String>()
    };
    inside + &leads_to("-4") + &leads_to("-6")
}

#[test]
fn a_second_interface_has_an_address_that_answers_and_no_default_route() {
    let (host, pod, [first, second]) = two_interfaces();
    assert!(!first.is_additional && second.is_additional);
    for family in ["-4", "-6"] {
        let defaults = sh_in(&pod, &format!("ip {family} route show default"));
        assert!(defaults.contains("dev eth0") && !defaults.contains("net1"), "{defaults}");
        let table = host.table(family);
        assert!(table.contains(&format!("dev {}", first.host_name)), "{table}");
        assert!(table.contains(&format!("dev {}", second.host_name)), "{table}");
    }
    // The host drops a reply from the address of one link that comes by the other.
    for to in FIRST.iter().chain(&SECOND) {
        ping(&host.netns, to);
    }
    for (own, to) in SECOND.iter().zip([NODE, NODE_V6]) {
        sh_in(&pod, &format!("ping -c 1 -W 10 -I {own} {to}"));
        ping(&pod, to);
    }
}

#[test]
fn another_pod_reaches_both_interfaces_and_sees_the_address_it_asked() {
    let (host, pod, _) = two_interfaces();
    let other = Netns::create().unwrap();
    host.add(&spec(&other, "b", Some("10.1.0.7"), Some("fd00:1::7"))).unwrap();
    for address in FIRST.iter().chain(&SECOND) {
        let any = if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        let bound =
            if address.contains(':') { format!("[{address}]:7000") } else { format!("{address}:7000") };
        let server = pod.run(|| UdpSocket::bind(&bound).unwrap()).unwrap();
        let client = other.run(|| UdpSocket::bind(any).unwrap()).unwrap();
        for socket in [&server, &client] {
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        }
        client.send_to(b"x", &bound).unwrap();
        let (_, from) = server.recv_from(&mut [0; 8]).unwrap();
        server.send_to(b"y", from).unwrap();
        let (_, from) = client.recv_from(&mut [0; 8]).unwrap();
        assert_eq!(from.ip().to_string(), *address);
    }
}

#[test]
fn removing_the_second_interface_leaves_the_first_one_alone() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    host.add(&spec(&pod, "a", Some(FIRST[0]), Some(FIRST[1]))).unwrap();
    let rules = |family: &str| sh_in(&pod, &format!("ip {family} rule"));
    let before = (first_interface(&host, &pod), rules("-4"), rules("-6"));
    for _ in 0..3 {
        host.add(&second(&pod)).unwrap();
        assert_eq!(first_interface(&host, &pod), before.0, "it is there");
        // As often as it comes and goes, one rule: those of interfaces that are gone are removed.
        assert_eq!(rules("-4").matches("990:").count(), 1, "{}", rules("-4"));
        assert_eq!(rules("-6").matches("990:").count(), 1, "{}", rules("-6"));
        assert!(host.at(|| pods::remove("a", "net1").unwrap()));
        assert_eq!(first_interface(&host, &pod), before.0, "it is gone");
        assert!(!host.table("-4").contains(SECOND[0]), "{}", host.table("-4"));
    }
    for to in FIRST {
        ping(&host.netns, to);
    }
    assert!(try_sh_in(&host.netns, &format!("ping -c 1 -W 1 {}", SECOND[0])).is_err());
    assert_eq!(links(&pod), 1);
}

#[test]
fn either_interface_may_be_made_again_while_the_other_is_there() {
    let (host, pod, [_, net1]) = two_interfaces();
    let again = host.add(&second(&pod)).unwrap();
    assert!(again.is_additional && again.host_index != net1.host_index);
    let again = host.add(&spec(&pod, "a", Some(FIRST[0]), Some(FIRST[1]))).unwrap();
    assert!(!again.is_additional, "the default route was its own");
    for to in FIRST.iter().chain(&SECOND) {
        ping(&host.netns, to);
    }
    let defaults = sh_in(&pod, "ip route show default");
    assert!(defaults.contains("dev eth0") && !defaults.contains("net1"), "{defaults}");
}

#[test]
fn a_restarted_program_finds_both_interfaces() {
    let (host, _pod, _) = two_interfaces();
    let listed = |host: &Host| {
        let mut pods = host.at(|| pods::list(RoutingIds::default()).unwrap());
        pods.sort_by(|one, other| one.ifname.cmp(&other.ifname));
        pods
    };
    let before = listed(&host);
    let names: Vec<_> = before.iter().map(|pod| (pod.container_id.as_str(), pod.ifname.as_str())).collect();
    assert_eq!(names, [("a", "eth0"), ("a", "net1")]);
    for (found, wanted) in before.iter().zip([FIRST, SECOND]) {
        let found: Vec<_> = found.addresses.iter().map(|ip| ip.to_string()).collect();
        assert_eq!(found, wanted);
    }
}

#[test]
fn check_sees_both_ends_of_a_second_interface_and_its_way_out() {
    let (host, pod, [_, second_links]) = two_interfaces();
    let file = second(&pod).netns;
    let inspect = || host.at(|| pods::inspect(RoutingIds::default(), ("a", "net1"), &file, &[254]).unwrap());
    let seen = inspect();
    assert!(seen.connected && seen.pod.is_some() && seen.host.unwrap().name == second_links.host_name);
    assert_eq!(seen.led_to_pod.len(), 2);
    let ways_out = seen.pod_routes.iter().filter(|route| route.destination.prefix_len() == 0);
    let by_second = ways_out.filter(|route| route.link == Some(second_links.container_index)).count();
    assert_eq!(by_second, 2, "of both families");
}

/// Another program's interface may come first: it keeps the default route.
#[test]
fn beside_the_interface_of_another_plugin_none_of_ours_takes_the_default_route() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    sh_in(
        &pod,
        "ip link add other type veth peer name far && ip link set far up && ip link set other up && ip addr add 172.16.0.2/24 dev other",
    );
    sh_in(&pod, "ip route add default via 172.16.0.1");
    let made = host.add(&second(&pod)).unwrap();
    assert!(made.is_additional);
    assert!(sh_in(&pod, "ip route show default").contains("dev other"));
    assert_eq!(sh_in(&pod, "ip -6 route show default"), "");
    for to in SECOND {
        ping(&host.netns, to);
    }
}

/// The policy program knows the first interface by the name of its link on the host.
#[test]
fn a_name_of_the_hosts_link_that_others_rely_on_is_that_of_the_first_interface() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let named = |spec: PodSpec| PodSpec { link_name: Some("cali0123456789a".to_owned()), ..spec };
    let first = host.add(&named(spec(&pod, "a", Some(FIRST[0]), None))).unwrap();
    let second = host.add(&named(second(&pod))).unwrap();
    assert_eq!(first.host_name, "cali0123456789a");
    assert!(second.host_name.starts_with("veth"), "{}", second.host_name);
}

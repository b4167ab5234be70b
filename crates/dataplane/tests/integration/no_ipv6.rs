//! IPv4 pods on a node without IPv6. `FAIRLEAD_NO_IPV6=1` says that this kernel was booted with `ipv6.disable=1`; otherwise
//! IPv6 is disabled by the switches of a namespace.

use fairlead_dataplane::masquerade::{self, Masquerade};
use fairlead_dataplane::nft_table::Applied;
use fairlead_dataplane::pods::{self, Attached, HostEnds};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::{routes, uplink};
use fairlead_netlink::netns::Netns;
use ipnet::IpNet;

use crate::pods_common::{Host, NODE, ping, spec};

#[test]
fn an_ipv4_pod_is_attached_kept_and_masqueraded() {
    let required = std::env::var("FAIRLEAD_NO_IPV6").is_ok_and(|value| value == "1");
    assert_eq!(uplink::has_ipv6(), !required, "whether this kernel has IPv6");
    let (host, pod) = (Host::without_ipv6(), Netns::create().unwrap());
    let ids = RoutingIds::default();
    let again = host.at(|| routes::ensure_rules(&routes::pod_rules(ids)).unwrap());
    assert!(again.is_empty(), "{again:?}");
    let wanted = spec(&pod, "a", Some("10.1.0.5"), None);
    let name = host.add(&wanted).unwrap().host_name;
    ping(&pod, NODE);
    ping(&host.netns, "10.1.0.5");
    assert_eq!(host.at(|| pods::list(ids).unwrap())[0].addresses, wanted.addresses);
    let attached =
        [Attached { container_id: "a".into(), ifname: "eth0".into(), addresses: wanted.addresses }];
    let repairs = || host.at(|| pods::repairs(ids, &attached, &HostEnds::read(ids).unwrap()));
    assert!(repairs().is_empty());
    host.sh(&format!("ip link set {name} down; ip link set {name} up"));
    host.at(|| repairs()[0].apply().unwrap());
    ping(&host.netns, "10.1.0.5");
    // A dump of IPv6 routes is answered with those of IPv4: taken for more of them, they would be deleted.
    let blocks: [IpNet; 1] = ["10.1.0.0/27".parse().unwrap()];
    for (changes, expected) in [(true, 1), (false, 1)] {
        let difference = host.at(|| routes::sync_export(ids, &blocks).unwrap());
        assert_eq!(difference.is_empty(), !changes, "{difference:?}");
        assert_eq!(host.sh("ip route show table 119").lines().count(), expected);
    }
    let hidden = Masquerade { pods: blocks.to_vec(), cluster: blocks.to_vec(), ..Masquerade::default() };
    for applied in [Applied::Rebuilt, Applied::Unchanged] {
        assert_eq!(host.at(|| pods::check_sources().unwrap()), applied);
        assert_eq!(host.at(|| masquerade::apply(&hidden).unwrap()), Some(applied));
    }
    ping(&pod, NODE);
}

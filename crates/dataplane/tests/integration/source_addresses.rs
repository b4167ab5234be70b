//! Source addresses of a gateway pod, as hosts beside the node and the kernel see them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_dataplane::pods;
use fairlead_dataplane::routes::{sync_blocks, sync_export};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::source_addresses::{self, Found, Source, announce};
use fairlead_dataplane::uplink::Ignored;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::RouteSocket;
use testbed_netns::{sh_in, try_sh_in};

use crate::pods_common::{Host, ping, spec};

const POD: [&str; 2] = ["10.1.0.5", "fd00:1::5"];
/// On the network of the uplink, and on none.
const NEAR: [&str; 2] = ["192.0.2.40", "2001:db8::40"];
const FAR: &str = "198.51.100.40";
/// A host beside the node.
const BESIDE: [&str; 2] = ["192.0.2.20/24", "2001:db8::20/64"];

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A node with the check of sources and a gateway pod that has the source addresses, and a host beside the node.
struct Bed {
    host: Host,
    pod: Netns,
    link: u32,
    uplink_mac: String,
}

impl Bed {
    fn new() -> Self {
        let (host, pod) = (Host::new(), Netns::create().unwrap());
        host.at(|| pods::check_sources().unwrap());
        let link = host.add(&spec(&pod, "gateway", Some(POD[0]), Some(POD[1]))).unwrap().host_index;
        for source in NEAR.iter().chain(&[FAR]) {
            sh_in(&pod, &format!("ip addr add {source} dev lo nodad"));
        }
        sh_in(&host.network, "ip link set far up");
        for own in BESIDE {
            sh_in(&host.network, &format!("ip addr add {own} dev far nodad"));
        }
        let uplink = RouteSocket::open_in(&host.netns).unwrap().link_by_name("uplink").unwrap().unwrap();
        let uplink_mac = uplink.mac.unwrap().to_string();
        Self { host, pod, link, uplink_mac }
    }

    fn source(&self, text: &str) -> Source {
        let pod = if text.contains(':') { POD[1] } else { POD[0] };
        Source { address: address(text), pod: address(pod), link: self.link }
    }

    /// Applies these source addresses; the changes that were made.
    fn sync(&self, sources: &[&str]) -> Vec<String> {
        self.sync_keeping(sources, &[])
    }

    fn sync_keeping(&self, sources: &[&str], kept: &[&str]) -> Vec<String> {
        let sources: Vec<Source> = sources.iter().map(|text| self.source(text)).collect();
        let kept = kept.iter().map(|text| address(text)).collect();
        self.host.at(|| {
            let found = Found::read(RoutingIds::default(), Ignored::default()).unwrap();
            source_addresses::sync(RoutingIds::default(), &sources, &kept, &found).unwrap()
        })
    }

    fn found(&self) -> Found {
        self.host.at(|| Found::read(RoutingIds::default(), Ignored::default()).unwrap())
    }

    fn table(&self, number: u32) -> String {
        self.host.sh(&format!("ip route show table {number}; ip -6 route show table {number}"))
    }

    fn neighbour(&self, of: &str) -> String {
        sh_in(&self.host.network, &format!("ip neigh show {of} dev far"))
    }

    fn is_answered(&self, source: &str) -> bool {
        try_sh_in(&self.host.network, &format!("ping -c 1 -W 2 {source}")).is_ok()
    }
}

#[test]
fn routes_lead_to_the_pod_and_are_exported_and_are_no_record_of_its_addresses() {
    let bed = Bed::new();
    let ids = RoutingIds::default();
    assert_eq!(bed.sync(&[]).len(), 0);
    assert!(!bed.sync(&[NEAR[0], NEAR[1], FAR]).is_empty());
    let pods = bed.table(116);
    for line in [
        "192.0.2.40 via 10.1.0.5 dev veth",
        "198.51.100.40 via 10.1.0.5 dev veth",
        "2001:db8::40 via fd00:1::5 dev veth",
    ] {
        assert!(pods.contains(line), "{line} is not in {pods}");
    }
    let exported = bed.table(119);
    for line in
        ["192.0.2.40 dev lo proto 30", "198.51.100.40 dev lo proto 30", "2001:db8::40 dev lo proto 30"]
    {
        assert!(exported.contains(line), "{line} is not in {exported}");
    }
    assert_eq!(bed.sync(&[NEAR[0], NEAR[1], FAR]), Vec::<String>::new(), "nothing differs");
    let pod = bed.host.at(|| pods::list(ids).unwrap()).remove(0);
    assert_eq!(pod.addresses.to_string(), "10.1.0.5 and fd00:1::5");
    let all: BTreeSet<IpAddr> = NEAR.iter().chain(&[FAR]).map(|text| address(text)).collect();
    assert_eq!(bed.found().addresses(), all, "the next program finds them");
    assert_eq!(bed.found().link_of(address(POD[1])), Some(bed.link));
    assert_eq!(bed.found().link_of(address(FAR)), None, "it is no pod's");
    // Blocks are brought to the same tables.
    let block = "10.1.0.0/27".parse().unwrap();
    bed.host.at(|| (sync_export(ids, &[block]).unwrap(), sync_blocks(ids, &[block]).unwrap()));
    assert_eq!((bed.table(119).lines().count(), bed.sync(&[NEAR[0], NEAR[1], FAR]).len()), (4, 0));
    // Those that are kept stay, and all others go.
    bed.sync_keeping(&[NEAR[0]], &[FAR]);
    assert_eq!(bed.found().addresses(), [NEAR[0], FAR].map(address).into());
    bed.host.at(|| source_addresses::remove_all(ids).unwrap());
    assert_eq!(bed.found().addresses(), BTreeSet::new());
    assert_eq!(bed.table(119).trim(), "10.1.0.0/27 dev lo proto 30 scope link");
    assert_eq!(bed.host.sh("ip neigh show proxy; ip -6 neigh show proxy"), "");
}

#[test]
fn hosts_of_the_network_find_the_address_while_it_is_announced_and_not_after() {
    let bed = Bed::new();
    assert!(!bed.is_answered(NEAR[0]));
    bed.sync(&NEAR);
    for source in NEAR {
        sh_in(&bed.host.network, "ip neigh flush dev far; ip -6 neigh flush dev far");
        assert!(bed.is_answered(source), "{source}");
        let neighbour = bed.neighbour(source);
        assert!(neighbour.contains(&bed.uplink_mac), "{neighbour}");
    }
    // Another address of the network is not answered for.
    assert!(!bed.is_answered("192.0.2.41"));
    bed.sync(&[]);
    for source in NEAR {
        sh_in(&bed.host.network, "ip neigh flush dev far; ip -6 neigh flush dev far");
        assert!(!bed.is_answered(source), "{source}");
    }
}

#[test]
fn an_announcement_changes_what_hosts_of_the_network_know() {
    let bed = Bed::new();
    bed.sync(&NEAR);
    for source in NEAR {
        sh_in(
            &bed.host.network,
            &format!("ip neigh replace {source} lladdr 02:00:00:00:00:99 dev far nud reachable"),
        );
        let uplinks = bed.found().uplinks(address(source));
        assert_eq!(uplinks.iter().map(|uplink| uplink.name.as_str()).collect::<Vec<_>>(), ["uplink"]);
        bed.host.at(|| announce(&uplinks[0], address(source)).unwrap());
        let limit = Instant::now() + Duration::from_secs(5);
        while !bed.neighbour(source).contains(&bed.uplink_mac) {
            assert!(Instant::now() < limit, "{}", bed.neighbour(source));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert_eq!(bed.found().uplinks(address(FAR)), []);
}

#[test]
fn exactly_the_holder_sends_with_the_address() {
    let bed = Bed::new();
    let other = Netns::create().unwrap();
    bed.host.add(&spec(&other, "other", Some("10.1.0.6"), Some("fd00:1::6"))).unwrap();
    let sends = |pod: &Netns, source: &str, to: &str| {
        try_sh_in(pod, &format!("ping -c 1 -W 1 -I {source} {to}")).is_ok()
    };
    let to = BESIDE.map(|own| own.split('/').next().unwrap());
    for source in NEAR {
        sh_in(&other, &format!("ip addr add {source} dev lo nodad"));
    }
    assert!(!sends(&bed.pod, NEAR[0], to[0]) && !sends(&bed.pod, NEAR[1], to[1]), "nothing is announced");
    bed.sync(&NEAR);
    for (source, to) in NEAR.iter().zip(to) {
        assert!(sends(&bed.pod, source, to), "{source}");
        assert!(!sends(&other, source, to), "{source} is another pod's");
    }
    assert!(!sends(&bed.pod, FAR, to[0]), "it does not hold this one");
    ping(&bed.host.netns, POD[0]);
}

#[test]
fn what_others_delete_is_put_back() {
    let bed = Bed::new();
    bed.sync(&NEAR);
    for command in [
        "ip route flush table 116",
        "ip -6 route flush table 119",
        "ip neigh del proxy 192.0.2.40 dev uplink",
        "ip -6 neigh del proxy 2001:db8::40 dev uplink",
        "echo 0 >/proc/sys/net/ipv6/conf/uplink/proxy_ndp",
        "ip rule del priority 2000",
    ] {
        bed.host.sh(command);
        assert!(!bed.sync(&NEAR).is_empty(), "{command}");
        assert_eq!(bed.sync(&NEAR).len(), 0, "{command}");
    }
}

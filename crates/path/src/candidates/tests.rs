use proptest::prelude::*;

use super::*;

fn end(text: &str) -> SocketAddr {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn own(addresses: &[&str], public_ips: &[&str], prefixes: &[&str]) -> OwnView {
    OwnView {
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        public_ips: public_ips.iter().map(|text| text.parse().unwrap()).collect(),
        prefixes: prefixes.iter().map(|text| text.parse().unwrap()).collect(),
        nat64: Nat64::default(),
    }
}

fn peer(manual: Option<&str>, host: &[&str], observed: &[&str]) -> PeerView {
    PeerView {
        manual: manual.map(end),
        host: host.iter().copied().map(end).collect(),
        observed: observed.iter().copied().map(end).collect(),
    }
}

fn listed(own: &OwnView, peer: &PeerView) -> Vec<String> {
    order(own, peer).iter().map(ToString::to_string).collect()
}

#[test]
fn a_configured_endpoint_comes_first() {
    let cloud = own(&["203.0.113.1"], &["203.0.113.1"], &["203.0.113.0/24"]);
    let node = peer(Some("198.51.100.9:4000"), &["203.0.113.2:51820"], &["198.51.100.7:1024"]);
    assert_eq!(
        listed(&cloud, &node),
        ["198.51.100.9:4000 (manual)", "203.0.113.2:51820 (host)", "198.51.100.7:1024 (observed)"]
    );
}

#[test]
fn a_peer_behind_another_nat_is_tried_at_its_observed_endpoint_first() {
    // Both LANs use the same prefix; the office's private address may belong to another host here.
    let home = own(&["192.168.1.10", "fd00:1::10"], &["198.51.100.1"], &["192.168.1.0/24"]);
    let office =
        peer(None, &["192.168.1.11:51820", "10.9.0.4:51820", "[2001:db8::5]:51820"], &["198.51.100.2:40000"]);
    assert_eq!(
        listed(&home, &office),
        [
            "[2001:db8::5]:51820 (host)",
            "198.51.100.2:40000 (observed)",
            "192.168.1.11:51820 (host)",
            "10.9.0.4:51820 (host)"
        ]
    );
}

#[test]
fn a_peer_behind_the_same_nat_is_tried_on_the_lan_first_and_through_the_nat_last() {
    let home = own(&["192.168.1.10"], &["198.51.100.1"], &["192.168.1.0/24"]);
    let neighbour =
        peer(None, &["10.0.7.2:51820", "192.168.1.11:51820"], &["198.51.100.1:40000", "192.168.1.11:51820"]);
    assert_eq!(
        listed(&home, &neighbour),
        ["192.168.1.11:51820 (host)", "10.0.7.2:51820 (host)", "198.51.100.1:40000 (observed)"]
    );
}

#[test]
fn without_an_own_public_address_the_lan_is_tried_first() {
    let home = own(&["192.168.1.10"], &[], &["192.168.1.0/24"]);
    let unknown = peer(None, &["192.168.1.11:51820", "172.16.0.1:51820"], &["198.51.100.2:40000"]);
    assert_eq!(
        listed(&home, &unknown),
        ["192.168.1.11:51820 (host)", "198.51.100.2:40000 (observed)", "172.16.0.1:51820 (host)"]
    );
}

#[test]
fn a_routed_private_network_needs_no_observation() {
    let rack1 = own(&["10.0.1.5"], &[], &["10.0.1.0/24"]);
    assert_eq!(listed(&rack1, &peer(None, &["10.0.2.5:51820"], &[])), ["10.0.2.5:51820 (host)"]);
}

#[test]
fn unusable_addresses_never_appear() {
    let node = own(&["192.0.2.1", "fe80::1"], &[], &["0.0.0.0/0"]);
    let silly = peer(
        Some("0.0.0.0:51820"),
        &[
            "127.0.0.1:51820",
            "169.254.1.1:51820",
            "224.0.0.1:51820",
            "255.255.255.255:51820",
            "192.0.2.1:51820",
            "192.0.2.2:0",
            "[fe80::1]:51820",
            "[::1]:51820",
            "[::]:51820",
            "[ff02::1]:51820",
            "[::ffff:127.0.0.1]:1",
            "[2001:db8::1]:51820",
            "240.0.0.1:51820",
            "0.1.2.3:51820",
        ],
        &["192.0.2.3:1", "[::ffff:192.0.2.3]:1"],
    );
    assert_eq!(listed(&node, &silly), ["192.0.2.3:1 (observed)"]);
}

#[test]
fn a_family_we_do_not_have_is_left_out_unless_a_person_asks() {
    let v4_only = own(&["192.0.2.1", "fe80::1"], &[], &[]);
    let dual = peer(None, &["[2001:db8::1]:51820", "192.0.2.9:51820"], &[]);
    assert_eq!(listed(&v4_only, &dual), ["192.0.2.9:51820 (host)"]);
    let manual = peer(Some("[2001:db8::1]:51820"), &[], &[]);
    assert_eq!(listed(&v4_only, &manual), ["[2001:db8::1]:51820 (manual)"]);
    assert_eq!(order(&OwnView::default(), &dual).len(), 2, "nothing known of ourselves");
}

#[test]
fn many_addresses_do_not_hide_what_others_saw() {
    let hosts: Vec<String> = (1..100).map(|n| format!("203.0.113.{n}:51820")).collect();
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let all = order(&OwnView::default(), &peer(None, &hosts, &["198.51.100.1:1", "198.51.100.1:2"]));
    assert_eq!(all.len(), 10);
    assert_eq!(all.iter().filter(|candidate| candidate.source == Source::Observed).count(), 2);
}

/// A node without IPv4 routes but these, in a network with a NAT64 for each of the prefixes.
fn behind_nat64(prefixes: &[&str], ipv4_routes: &[&str]) -> OwnView {
    let prefix = |text: &&str| fairlead_address::Nat64Prefix::new(text.parse().unwrap()).unwrap();
    let nat64 = Nat64 {
        prefixes: prefixes.iter().map(prefix).collect(),
        ipv4_routes: ipv4_routes.iter().map(|text| text.parse().unwrap()).collect(),
    };
    OwnView { nat64, ..own(&["2001:db8:1::5"], &[], &["2001:db8:1::/64"]) }
}

#[test]
fn without_an_ipv4_route_ipv4_endpoints_are_tried_through_the_nat64_after_all_others() {
    let mobile = behind_nat64(&["2001:db8:64::/96"], &[]);
    let dual = peer(
        Some("203.0.113.9:4000"),
        &["192.168.1.11:51820", "203.0.113.5:51820", "[2001:db8:2::7]:51820"],
        &["198.51.100.7:1024"],
    );
    assert_eq!(
        listed(&mobile, &dual),
        [
            "[2001:db8:2::7]:51820 (host)",
            "[2001:db8:64::cb00:7109]:4000 (nat64)",
            "[2001:db8:64::cb00:7105]:51820 (nat64)",
            "[2001:db8:64::c633:6407]:1024 (nat64)",
            "[2001:db8:64::c0a8:10b]:51820 (nat64)",
        ]
    );
}

#[test]
fn what_has_an_ipv4_route_is_not_translated() {
    let node = behind_nat64(&["2001:db8:64::/96", "64:ff9b::/96"], &["10.0.0.0/8"]);
    let node = OwnView { addresses: vec!["10.1.0.1".parse().unwrap()], ..node };
    let routed = peer(None, &["10.2.0.1:51820", "9.9.9.9:51820", "192.168.0.1:51820"], &[]);
    assert_eq!(
        listed(&node, &routed),
        [
            "10.2.0.1:51820 (host)",
            "[2001:db8:64::909:909]:51820 (nat64)",
            "[64:ff9b::909:909]:51820 (nat64)",
            // The Well-Known Prefix has no private addresses.
            "[2001:db8:64::c0a8:1]:51820 (nat64)",
        ]
    );
}

#[test]
fn unusable_addresses_never_appear_in_a_nat64_prefix_either() {
    let mobile = behind_nat64(&["2001:db8:64::/96"], &[]);
    let hosts =
        ["127.0.0.1:1", "169.254.169.254:80", "224.0.0.1:1", "192.0.2.1:0", "[2001:db8:64::7f00:1]:9"];
    let silly = peer(Some("[64:ff9b::a9fe:a9fe]:80"), &hosts, &["[2001:db8:64::e000:1]:1"]);
    assert_eq!(listed(&mobile, &silly), [""; 0]);
}

#[test]
fn an_address_that_another_node_sees_behind_its_nat64_is_the_ipv4_address_in_it() {
    let ipv4 = own(&["192.0.2.1"], &[], &[]);
    let seen = peer(None, &[], &["[64:ff9b::cb00:7105]:4000", "203.0.113.5:4000"]);
    assert_eq!(listed(&ipv4, &seen), ["203.0.113.5:4000 (observed)"]);
}

fn any_ip() -> impl Strategy<Value = IpAddr> {
    let near = prop::sample::select(vec![
        "192.168.1.1",
        "192.168.1.2",
        "10.0.0.1",
        "198.51.100.1",
        "198.51.100.2",
        "100.64.0.1",
        "fd00::1",
        "2001:db8::1",
        "::ffff:10.0.0.1",
        "fe80::1",
        "127.0.0.1",
        "2001:db8:64::127.0.0.1",
        "2001:db8:64::198.51.100.1",
        "64:ff9b::9.9.9.9",
    ]);
    prop_oneof![
        4 => near.prop_map(|text| text.parse().unwrap()),
        1 => any::<u32>().prop_map(|bits| IpAddr::from(std::net::Ipv4Addr::from_bits(bits))),
        1 => any::<u128>().prop_map(|bits| IpAddr::from(std::net::Ipv6Addr::from_bits(bits))),
    ]
}

fn any_end() -> impl Strategy<Value = SocketAddr> {
    (any_ip(), prop::sample::select(vec![0u16, 1, 51820])).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

proptest! {
    #[test]
    fn the_list_is_short_usable_and_without_repetition(
        addresses in prop::collection::vec(any_ip(), 0..4),
        public_ips in prop::collection::vec(any_ip(), 0..3),
        manual in prop::option::of(any_end()),
        host in prop::collection::vec(any_end(), 0..24),
        observed in prop::collection::vec(any_end(), 0..24),
        translates: bool,
    ) {
        let nat64 = behind_nat64(if translates { &["2001:db8:64::/96", "64:ff9b::/96"] } else { &[] }, &["10.0.0.0/8"]).nat64;
        let own = OwnView { addresses, public_ips, prefixes: vec!["192.168.1.0/24".parse().unwrap()], nat64 };
        let peer = PeerView { manual, host, observed };
        let list = order(&own, &peer);
        prop_assert!(list.len() <= MAX_CANDIDATES);
        let distinct: BTreeSet<SocketAddr> = list.iter().map(|candidate| candidate.address).collect();
        prop_assert_eq!(distinct.len(), list.len());
        for candidate in &list {
            let ip = candidate.address.ip();
            let original = own.nat64.original(candidate.address).ip();
            prop_assert!(candidate.address.port() != 0 && is_reachable(ip) && is_reachable(original));
            prop_assert!(!own.addresses.iter().any(|address| address.to_canonical() == ip));
        }
        prop_assert!(list.iter().skip(1).all(|candidate| candidate.source != Source::Manual));
    }
}

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
    ) {
        let own = OwnView { addresses, public_ips, prefixes: vec!["192.168.1.0/24".parse().unwrap()] };
        let peer = PeerView { manual, host, observed };
        let list = order(&own, &peer);
        prop_assert!(list.len() <= MAX_CANDIDATES);
        let distinct: BTreeSet<SocketAddr> = list.iter().map(|candidate| candidate.address).collect();
        prop_assert_eq!(distinct.len(), list.len());
        for candidate in &list {
            let ip = candidate.address.ip();
            prop_assert!(candidate.address.port() != 0 && is_reachable(ip));
            prop_assert!(!own.addresses.iter().any(|address| address.to_canonical() == ip));
        }
        prop_assert!(list.iter().skip(1).all(|candidate| candidate.source != Source::Manual));
    }
}

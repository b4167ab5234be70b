use proptest::prelude::*;

use super::*;

fn kind(local: &[&str], seen: &[(&str, &str)]) -> NatType {
    let local: Vec<SocketAddr> = local.iter().map(|text| text.parse().unwrap()).collect();
    let seen: Vec<Seen> = seen
        .iter()
        .map(|(observer, address)| Seen {
            observer: observer.parse().unwrap(),
            address: address.parse().unwrap(),
        })
        .collect();
    classify(&local, &seen)
}

const LAN: &[&str] = &["192.168.1.10:51820", "[2001:db8::10]:51820"];

#[test]
fn nat_types_are_distinguished() {
    let cases: &[(&[(&str, &str)], NatType)] = &[
        (&[], NatType::Unknown),
        (&[("203.0.113.1", "198.51.100.1:40000")], NatType::Unknown),
        (&[("203.0.113.1", "198.51.100.1:40000"), ("203.0.113.2", "198.51.100.1:40000")], NatType::Cone),
        (&[("203.0.113.1", "198.51.100.1:40000"), ("203.0.113.2", "198.51.100.1:40001")], NatType::Symmetric),
        // A carrier with several addresses.
        (&[("203.0.113.1", "198.51.100.1:40000"), ("203.0.113.2", "198.51.100.2:40000")], NatType::Symmetric),
        // Two observers behind one address are one, unless they disagree.
        (&[("203.0.113.1", "198.51.100.1:40000"), ("203.0.113.1", "198.51.100.1:40000")], NatType::Unknown),
        (&[("203.0.113.1", "198.51.100.1:40000"), ("203.0.113.1", "198.51.100.1:40001")], NatType::Symmetric),
        // An observer on the LAN sees no NAT; it does not count if another one sees a public address.
        (&[("192.168.1.11", "192.168.1.10:51820"), ("203.0.113.1", "198.51.100.1:40000")], NatType::Unknown),
        (&[("192.168.1.11", "192.168.1.10:51820")], NatType::Open),
        // Nor does an observer between our router and the carrier's.
        (
            &[
                ("100.64.0.7", "100.64.0.9:1"),
                ("203.0.113.1", "198.51.100.1:4"),
                ("203.0.113.2", "198.51.100.1:4"),
            ],
            NatType::Cone,
        ),
        // IPv6 decides only without IPv4 observations.
        (&[("2001:db8::1", "[2001:db8::10]:51820")], NatType::Open),
        (&[("2001:db8::1", "[2001:db8::10]:51820"), ("203.0.113.1", "198.51.100.1:40000")], NatType::Unknown),
        (
            &[("203.0.113.1", "[::ffff:198.51.100.1]:4"), ("::ffff:203.0.113.2", "198.51.100.1:4")],
            NatType::Cone,
        ),
    ];
    for (seen, expected) in cases {
        assert_eq!(kind(LAN, seen), *expected, "{seen:?}");
    }
    let public = &["203.0.113.9:51820", "10.0.0.9:51820"];
    assert_eq!(kind(public, &[("198.51.100.1", "203.0.113.9:51820")]), NatType::Open);
    // Same address, other port: something translates.
    assert_eq!(
        kind(public, &[("198.51.100.1", "203.0.113.9:4"), ("198.51.100.2", "203.0.113.9:4")]),
        NatType::Cone
    );
}

#[test]
fn unknown_never_replaces_a_known_type() {
    assert_eq!(NatType::Cone.updated(NatType::Unknown), NatType::Cone);
    assert_eq!(NatType::Cone.updated(NatType::Symmetric), NatType::Symmetric);
    assert_eq!(NatType::default().updated(NatType::Open), NatType::Open);
    assert_eq!([NatType::Unknown, NatType::Open].map(|kind| kind.to_string()), ["", "open"]);
}

proptest! {
    #[test]
    fn the_order_of_observers_does_not_matter(
        seen in prop::collection::vec((0u8..4, 0u8..3, 0u16..3), 0..8),
    ) {
        let mut seen: Vec<Seen> = seen.into_iter().map(|(observer, ip, port)| Seen {
            observer: IpAddr::from([203, 0, 113, observer]),
            address: SocketAddr::from(([198, 51, 100, ip], port)),
        }).collect();
        let forwards = classify(&[], &seen);
        seen.reverse();
        prop_assert_eq!(classify(&[], &seen), forwards);
    }
}

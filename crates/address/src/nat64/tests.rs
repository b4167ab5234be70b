use proptest::prelude::*;

use super::*;

fn prefix(text: &str) -> Result<Nat64Prefix, InvalidNat64Prefix> {
    Nat64Prefix::new(text.parse().unwrap())
}

/// RFC 6052, section 2.4, tables 2 and 3.
#[test]
fn the_examples_of_rfc_6052_are_made_and_read() {
    let address: Ipv4Addr = "192.0.2.33".parse().unwrap();
    for (network, expected) in [
        ("2001:db8::/32", "2001:db8:c000:221::"),
        ("2001:db8:100::/40", "2001:db8:1c0:2:21::"),
        ("2001:db8:122::/48", "2001:db8:122:c000:2:2100::"),
        ("2001:db8:122:300::/56", "2001:db8:122:3c0:0:221::"),
        ("2001:db8:122:344::/64", "2001:db8:122:344:c0:2:2100::"),
        ("2001:db8:122:344::/96", "2001:db8:122:344::192.0.2.33"),
    ] {
        let (prefix, expected) = (prefix(network).unwrap(), expected.parse().unwrap());
        assert_eq!(prefix.embed(address), Some(expected), "{network}");
        assert_eq!(prefix.extract(expected), Some(address), "{network}");
    }
    assert_eq!(Nat64Prefix::WELL_KNOWN.extract("64:ff9b::192.0.2.33".parse().unwrap()), Some(address));
}

/// RFC 6052, section 3.1.
#[test]
fn the_well_known_prefix_has_no_address_without_global_meaning() {
    for address in [
        "0.0.0.1",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.0.0.170",
        "192.0.2.33",
        "192.168.1.1",
        "198.18.0.1",
        "203.0.113.1",
        "224.0.0.1",
        "255.255.255.255",
    ] {
        assert_eq!(Nat64Prefix::WELL_KNOWN.embed(address.parse().unwrap()), None, "{address}");
        assert!(prefix("2001:db8:64::/96").unwrap().embed(address.parse().unwrap()).is_some(), "{address}");
    }
    let global = Nat64Prefix::WELL_KNOWN.embed("9.9.9.9".parse().unwrap());
    assert_eq!(global, "64:ff9b::9.9.9.9".parse().ok());
}

#[test]
fn the_prefix_of_an_answer_is_found_at_each_length() {
    for (answer, expected) in [
        ("64:ff9b::192.0.0.170", "64:ff9b::/96"),
        ("64:ff9b::192.0.0.171", "64:ff9b::/96"),
        ("64:ff9b:1:fffe::192.0.0.170", "64:ff9b:1:fffe::/96"),
        ("2001:db8:c000:aa::", "2001:db8::/32"),
        ("2001:db8:122:344:c0:0:aa00::", "2001:db8:122:344::/64"),
    ] {
        let found = Nat64Prefix::of_answer(answer.parse().unwrap());
        assert_eq!(found.map(|prefix| prefix.to_string()), Ok(expected.to_owned()), "{answer}");
    }
}

#[test]
fn an_answer_without_a_usable_prefix_is_refused_with_its_reason() {
    for (answer, expected) in [
        ("2001:db8::1", "it contains no IPv4 address of ipv4only.arpa"),
        ("::", "it contains no IPv4 address of ipv4only.arpa"),
        ("2001:db8:c000:aa::192.0.0.170", "it contains an IPv4 address of ipv4only.arpa more than once"),
        ("::192.0.0.170", "it overlaps addresses that name no host"),
        ("::ffff:192.0.0.170", "it overlaps IPv4-mapped IPv6 addresses"),
        ("fe80::192.0.0.170", "it overlaps link-local addresses"),
        ("ff02::192.0.0.171", "it overlaps multicast or broadcast addresses"),
        ("2001:db8:0:0:100::192.0.0.170", "its bits 64 to 71 are not zero"),
    ] {
        let refusal = Nat64Prefix::of_answer(answer.parse().unwrap()).unwrap_err();
        assert_eq!(refusal.to_string(), expected, "{answer}");
    }
    assert_eq!(prefix("2001:db8::/33"), Err(InvalidNat64Prefix::Length));
}

#[test]
fn only_endpoints_of_a_prefix_lose_it() {
    let own = [prefix("2001:db8:64::/96").unwrap()];
    for (endpoint, expected) in [
        ("[2001:db8:64::203.0.113.5]:7", "203.0.113.5:7"),
        ("[64:ff9b::203.0.113.5]:7", "203.0.113.5:7"),
        ("[2001:db8:65::1]:7", "[2001:db8:65::1]:7"),
        ("203.0.113.5:7", "203.0.113.5:7"),
    ] {
        assert_eq!(without_nat64(&own, endpoint.parse().unwrap()), expected.parse().unwrap());
    }
}

#[test]
fn only_what_has_no_route_and_can_be_reached_goes_through_the_nat64() {
    let nat64 = Nat64 {
        prefixes: vec![prefix("2001:db8:64::/96").unwrap(), Nat64Prefix::WELL_KNOWN],
        ipv4_routes: vec!["10.0.0.0/8".parse().unwrap()],
    };
    let through = |endpoint: &str| {
        let endpoints = nat64.endpoints(endpoint.parse().unwrap());
        endpoints.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(through("9.9.9.9:7"), ["[2001:db8:64::909:909]:7", "[64:ff9b::909:909]:7"]);
    assert_eq!(through("192.168.0.1:7"), ["[2001:db8:64::c0a8:1]:7"]);
    for endpoint in ["10.0.0.1:7", "127.0.0.1:7", "169.254.169.254:80", "[2001:db8::1]:7"] {
        assert_eq!(through(endpoint), [""; 0], "{endpoint}");
    }
}

fn any_prefix() -> impl Strategy<Value = Nat64Prefix> {
    (any::<u128>(), prop::sample::select(LENGTHS.to_vec())).prop_filter_map("unusable", |(bits, length)| {
        Nat64Prefix::new(Ipv6Net::new(Ipv6Addr::from_bits(bits & !RESERVED), length).unwrap()).ok()
    })
}

proptest! {
    #[test]
    fn what_is_embedded_is_extracted(prefix in any_prefix(), address: Ipv4Addr) {
        let Some(embedded) = prefix.embed(address) else { return Ok(()) };
        prop_assert!(prefix.network().contains(&embedded));
        prop_assert_eq!(embedded.to_bits() & RESERVED, 0);
        prop_assert_eq!(prefix.extract(embedded), Some(address));
    }

    #[test]
    fn any_answer_is_refused_or_was_made_with_its_prefix(bits: u128, at in 0_usize..13, last in 170_u8..172) {
        let mut bytes = bits.to_be_bytes();
        bytes[at..at + 4].copy_from_slice(&[192, 0, 0, last]);
        let address = Ipv6Addr::from(bytes);
        if let Ok(prefix) = Nat64Prefix::of_answer(address) {
            let known = prefix.extract(address).unwrap();
            prop_assert!(IPV4_ONLY_ADDRESSES.contains(&known));
            prop_assert!(unusable(&IpNet::V6(prefix.network())).is_none());
        }
    }
}

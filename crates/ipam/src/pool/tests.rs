use fairlead_address::PrefixSet;
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;

type Subnets<'a> = &'a [(Option<&'a str>, Option<&'a str>)];

fn parse(bits: i64, subnets: Subnets<'_>) -> Result<Pool, PoolError> {
    Pool::parse("default", bits, subnets.iter().copied())
}

fn v4(bits: i64, subnets: &[&str]) -> Pool {
    Pool::parse("default", bits, subnets.iter().map(|text| (Some(*text), None))).unwrap()
}

fn show(pool: &Pool, index: u32) -> String {
    pool.block(index).map(|nets| nets.to_string()).unwrap_or_default()
}

fn first_free(pool: &Pool, allocated: &BTreeSet<u32>, taken: &PrefixSet) -> Option<u32> {
    let last_taken = |net| taken.overlapping(net).map(|interval| interval.last);
    pool.first_free(0, |index| allocated.contains(&index), last_taken)
}

fn set(nets: &[&str]) -> PrefixSet {
    nets.iter().map(|text| text.parse::<IpNet>().unwrap()).collect()
}

#[test]
fn blocks_are_numbered_through_the_subnets_in_order() {
    let pool = v4(5, &["10.64.0.0/26", "10.2.0.0/27", "10.64.1.0/26"]);
    let blocks: Vec<String> = (0..6).map(|index| show(&pool, index)).collect();
    let expected = ["10.64.0.0/27", "10.64.0.32/27", "10.2.0.0/27", "10.64.1.0/27", "10.64.1.32/27", ""]
        .map(str::to_owned);
    assert_eq!(blocks, expected);
    assert_eq!(pool.capacity(), 5);
    assert_eq!(pool.block_name(3), "default-3");
}

#[test]
fn both_families_share_the_number() {
    let pool =
        parse(3, &[(Some("10.64.0.0/28"), Some("fd01::/124")), (Some("10.65.0.0/29"), Some("fd02::/125"))]);
    let pool = pool.unwrap();
    assert_eq!(pool.capacity(), 3);
    assert_eq!(show(&pool, 1), "10.64.0.8/29 and fd01::8/125");
    assert_eq!(show(&pool, 2), "10.65.0.0/29 and fd02::/125");
}

#[test]
fn host_bits_are_ignored_and_blocks_may_be_single_addresses() {
    let pool = v4(0, &["192.0.2.77/31"]);
    assert_eq!((show(&pool, 0), show(&pool, 1)), ("192.0.2.76/32".to_owned(), "192.0.2.77/32".to_owned()));
}

#[test]
fn bad_pools_are_refused_in_words_that_name_the_field() {
    let cases: &[(i64, Subnets<'_>, &str)] = &[
        (5, &[], "pool default: spec.subnets is empty; name at least one subnet"),
        (5, &[(None, None)], "pool default: spec.subnets[0] has neither ipv4 nor ipv6; give it at least one"),
        (
            5,
            &[(Some("10.0.0.0/24"), None), (Some("10.0.300.0/24"), None)],
            "pool default: spec.subnets[1].ipv4 is \"10.0.300.0/24\"; it must be an ipv4 prefix such as 10.64.0.0/16",
        ),
        (
            5,
            &[(Some("fd00::/64"), None)],
            "pool default: spec.subnets[0].ipv4 is \"fd00::/64\"; it must be an ipv4 prefix such as 10.64.0.0/16",
        ),
        (
            5,
            &[(None, Some("10.0.0.0/8"))],
            "pool default: spec.subnets[0].ipv6 is \"10.0.0.0/8\"; it must be an ipv6 prefix such as fd01::/112",
        ),
        (
            5,
            &[(Some("10.0.0.0"), None)],
            "pool default: spec.subnets[0].ipv4 is \"10.0.0.0\"; it must be an ipv4 prefix such as 10.64.0.0/16",
        ),
        (
            6,
            &[(Some("10.0.0.0/27"), None)],
            "pool default: too narrow subnet 10.0.0.0/27 in spec.subnets[0]: it has 5 host bits and a block needs 6",
        ),
        (
            5,
            &[(Some("10.0.0.0/24"), Some("fd00::/64"))],
            "pool default: 10.0.0.0/24 and fd00::/64 in spec.subnets[0] differ in size: \
             both must have the same number of host bits",
        ),
        (
            5,
            &[(Some("10.0.0.0/24"), None), (Some("10.0.1.0/24"), Some("fd00::/120"))],
            "pool default: spec.subnets[1] has other address families than spec.subnets[0]: \
             all subnets of a pool must have the same, or pods would get different ones",
        ),
        (
            5,
            &[(Some("10.0.0.0/16"), None), (Some("10.1.0.0/24"), None), (Some("10.0.7.0/24"), None)],
            "pool default: subnets 10.0.0.0/16 and 10.0.7.0/24 overlap: remove one of them",
        ),
        (
            5,
            &[(Some("10.0.0.0/24"), Some("fd00::/120")), (Some("10.0.1.0/24"), Some("fd00::/120"))],
            "pool default: subnets fd00::/120 and fd00::/120 overlap: remove one of them",
        ),
        (-1, &[(Some("10.0.0.0/8"), None)], "pool default: blockSizeBits is -1; it must be between 0 and 20"),
        (21, &[(Some("10.0.0.0/8"), None)], "pool default: blockSizeBits is 21; it must be between 0 and 20"),
    ];
    for (bits, subnets, message) in cases {
        assert_eq!(parse(*bits, subnets).unwrap_err().to_string(), *message);
    }
}

#[test]
fn huge_ipv6_pools_work() {
    let pool = parse(8, &[(None, Some("fd00::/48"))]).unwrap();
    assert_eq!(pool.capacity(), 1 << 72);
    assert_eq!(show(&pool, MAX_INDEX), "fd00::7f:ffff:ff00/120");
    assert_eq!(pool.block(MAX_INDEX + 1), None);
    assert_eq!(first_free(&pool, &BTreeSet::from([0, 1]), &PrefixSet::default()), Some(2));
    let everything = parse(0, &[(None, Some("::/0"))]).unwrap();
    assert_eq!(everything.capacity(), u128::MAX);
    assert_eq!(show(&everything, 5), "::5/128");
    // The whole numbered part is taken: no endless search.
    assert_eq!(first_free(&pool, &BTreeSet::new(), &set(&["fd00::/80"])), None);
}

#[test]
fn the_lowest_free_number_is_found_across_subnets() {
    let pool = v4(5, &["10.64.0.0/26", "10.65.0.0/26"]);
    let none = PrefixSet::default();
    assert_eq!(first_free(&pool, &BTreeSet::new(), &none), Some(0));
    assert_eq!(first_free(&pool, &BTreeSet::from([0, 1, 3]), &none), Some(2));
    assert_eq!(first_free(&pool, &BTreeSet::from([0, 1, 2, 3]), &none), None);
    assert_eq!(first_free(&pool, &BTreeSet::from([7, u32::MAX]), &none), Some(0));
}

#[test]
fn taken_addresses_are_jumped_over() {
    let pool = v4(5, &["10.64.0.0/24", "10.65.0.0/24"]);
    let free = |taken: &[&str]| first_free(&pool, &BTreeSet::new(), &set(taken));
    assert_eq!(free(&["10.64.0.5/32"]), Some(1));
    assert_eq!(free(&["10.64.0.0/26", "10.64.0.64/27"]), Some(3));
    assert_eq!(free(&["10.64.0.0/16"]), Some(8));
    assert_eq!(free(&["10.0.0.0/8"]), None);
    assert_eq!(free(&["192.0.2.0/24", "fd00::/8"]), Some(0));
    let dual = parse(4, &[(Some("10.64.0.0/26"), Some("fd01::/122"))]).unwrap();
    assert_eq!(first_free(&dual, &BTreeSet::new(), &set(&["10.64.0.1/32", "fd01::10/124"])), Some(2));
}

#[test]
fn overlapping_pools_are_named_with_their_subnets() {
    let a = Pool::parse("a", 5, [(Some("10.1.0.0/24"), None), (Some("10.9.0.0/24"), None)]).unwrap();
    let b = Pool::parse("b", 5, [(Some("10.2.0.0/24"), None), (Some("10.8.0.0/15"), None)]).unwrap();
    let found = overlaps(&a, &b).unwrap();
    assert_eq!(found.to_string(), "subnet 10.9.0.0/24 of pool a overlaps 10.8.0.0/15 of pool b");
    let mirrored = overlaps(&b, &a).unwrap();
    assert_eq!((mirrored.first_pool.as_str(), mirrored.first_subnet), ("b", found.second_subnet));
    let c = Pool::parse("c", 5, [(Some("10.3.0.0/24"), None)]).unwrap();
    assert_eq!(overlaps(&a, &c), None);
}

#[test]
fn only_what_a_pool_gets_now_must_be_clear_of_others() {
    let pool = |name, subnets: &[&str]| Pool::parse(name, 5, subnets.iter().map(|net| (Some(*net), None)));
    let other = pool("other", &["10.1.0.0/24", "10.2.0.0/24"]).unwrap();
    let overlapping = pool("p", &["10.1.0.0/16"]).unwrap();
    assert!(admit(&overlapping, None, &other).is_err());
    assert_eq!(admit(&overlapping, Some(&overlapping), &other), Ok(()));
    let clear = pool("p", &["10.1.0.0/16", "10.3.0.0/24"]).unwrap();
    assert_eq!(admit(&clear, Some(&overlapping), &other), Ok(()));
    let worse = pool("p", &["10.1.0.0/16", "10.2.0.128/25"]).unwrap();
    let denied = admit(&worse, Some(&overlapping), &other).unwrap_err();
    assert_eq!(denied.to_string(), "subnet 10.2.0.128/25 of pool p overlaps 10.2.0.0/24 of pool other");
}

#[test]
fn sets_of_addresses_join_and_answer() {
    let set =
        set(&["10.0.0.0/25", "10.0.0.128/25", "10.0.0.7/32", "0.0.0.0/32", "255.255.255.255/32", "::/0"]);
    for (address, inside) in [
        ("10.0.0.200", true),
        ("10.0.1.0", false),
        ("0.0.0.0", true),
        ("255.255.255.255", true),
        ("ff::", true),
    ] {
        assert_eq!(set.contains(address.parse().unwrap()), inside, "{address}");
    }
}

prop_compose! {
    fn any_pool()(bits in 0i64..6, subnets in prop::collection::btree_set(0u8..16, 1..6)) -> Pool {
        let texts: Vec<(String, String)> =
            subnets.iter().rev().map(|n| (format!("10.0.{n}.0/26"), format!("fd00::{n:x}00/122"))).collect();
        let subnets = texts.iter().map(|(ipv4, ipv6)| (Some(ipv4.as_str()), Some(ipv6.as_str())));
        Pool::parse("p", bits, subnets).unwrap()
    }
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(
        bits in any::<i64>(),
        subnets in prop::collection::vec((prop::option::of("[0-9a-f.:/]{0,20}"), prop::option::of(".{0,20}")), 0..4),
        index in any::<u32>(),
    ) {
        let subnets = subnets.iter().map(|(ipv4, ipv6)| (ipv4.as_deref(), ipv6.as_deref()));
        if let Ok(pool) = Pool::parse("p", bits, subnets) {
            let _ = pool.block(index);
        }
    }

    #[test]
    fn any_prefix_length_numbers_without_overflow(length in 0u8..=128, bits in 0i64..=20, index in 0..=MAX_INDEX) {
        let text = format!("fd00::/{length}");
        match Pool::parse("p", bits, [(None, Some(text.as_str()))]) {
            Ok(pool) => {
                let block = pool.block(index);
                prop_assert_eq!(block.is_some(), u128::from(index) < pool.capacity());
                if let Some(net) = block.and_then(|nets| nets.ipv6) {
                    prop_assert!(pool.nets().any(|subnet| subnet.contains(&IpNet::V6(net))));
                }
            }
            Err(error) => prop_assert!(matches!(error, PoolError::TooNarrow { .. }), "{}", error),
        }
    }

    #[test]
    fn blocks_tile_the_pool(pool in any_pool()) {
        let count = u32::try_from(pool.capacity()).unwrap();
        let mut addresses = 0u64;
        let mut nets: Vec<IpNet> = Vec::new();
        for index in 0..count {
            let block = pool.block(index).unwrap();
            let last = DualStackAddrs {
                ipv4: block.ipv4.map(|net| net.broadcast()),
                ipv6: block.ipv6.map(|net| net.broadcast()),
            };
            prop_assert_eq!(pool.containing(last), Some((index, block)));
            addresses += 1 << pool.block_size_bits();
            nets.extend(block.iter());
        }
        prop_assert_eq!(pool.block(count), None);
        prop_assert_eq!(first_overlap(&mut nets), None);
        prop_assert_eq!(addresses, 64 * (pool.nets().count() as u64 / 2));
    }

    #[test]
    fn first_free_is_what_a_walk_over_all_blocks_finds(
        pool in any_pool(),
        allocated in prop::collection::btree_set(0u32..400, 0..300),
        taken in prop::collection::vec((0u8..16, any::<u8>(), 20u8..=32, any::<bool>()), 0..12),
    ) {
        let taken: Vec<IpNet> = taken.into_iter().map(|(n, host, length, ipv4)| {
            let text = if ipv4 { format!("10.0.{n}.{host}/{length}") } else { format!("fd00::{n:x}{host:02x}/{}", 96 + length) };
            text.parse::<IpNet>().unwrap().trunc()
        }).collect();
        let clear = |nets: DualStackNets| {
            nets.iter().all(|net| taken.iter().all(|other| !net.contains(other) && !other.contains(&net)))
        };
        let expected = (0..u32::try_from(pool.capacity()).unwrap())
            .find(|index| !allocated.contains(index) && clear(pool.block(*index).unwrap()));
        prop_assert_eq!(first_free(&pool, &allocated, &taken.iter().copied().collect()), expected);
    }
}

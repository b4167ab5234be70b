use super::*;
use crate::refusal::RefusalReason;

const NONE: [ExistingBlock; 0] = [];

fn grant(request: &Request<'_>, pools: &BTreeMap<String, PoolState>, blocks: &[ExistingBlock]) -> Grant {
    super::grant(request, pools, &blocks.iter().cloned().collect())
}

fn pools(pools: &[(&str, &str, bool)]) -> BTreeMap<String, PoolState> {
    let state = |(name, subnet, terminating): &(&str, &str, bool)| {
        let parsed = Pool::parse(name, 5, [(Some(*subnet), None)]);
        ((*name).to_owned(), PoolState { parsed, terminating: *terminating, disabled: false, created: 0 })
    };
    pools.iter().map(state).collect()
}

fn block(name: &str, pool: &str, index: u32, net: &str, request: Option<&str>) -> ExistingBlock {
    ExistingBlock {
        name: name.to_owned(),
        pool: pool.to_owned(),
        node: "worker-1".to_owned(),
        index,
        nets: DualStackNets { ipv4: Some(net.parse().unwrap()), ipv6: None },
        request: request.map(str::to_owned),
        terminating: false,
    }
}

fn ask<'a>(uid: &'a str, pool: &'a str) -> Request<'a> {
    Request { uid, pool, node: "worker-1", pod_capacity: None, claim: None }
}

#[track_caller]
fn refused(grant: Grant, reason: &str, message: &str) {
    let Grant::Refused(refusal) = grant else { panic!("{grant:?}") };
    assert_eq!((refusal.reason().as_condition(), refusal.to_string().as_str()), (reason, message));
}

#[test]
fn the_lowest_free_block_is_given() {
    let pools = pools(&[("default", "10.64.0.0/24", false)]);
    let blocks = [block("default-0", "default", 0, "10.64.0.0/27", Some("u0"))];
    let answer = grant(&ask("u1", "default"), &pools, &blocks);
    assert_eq!(answer.to_string(), "allocated a block default-1");
    let Grant::New { index, name, nets } = answer else { panic!("{answer:?}") };
    assert_eq!((index, name.as_str(), nets.to_string().as_str()), (1, "default-1", "10.64.0.32/27"));
}

#[test]
fn a_request_is_answered_once() {
    let pools = pools(&[("default", "10.64.0.0/24", true)]);
    let mut blocks = [block("default-7", "default", 7, "10.64.0.224/27", Some("u1"))];
    // Even when the pool is going away: the block exists.
    let answer = grant(&ask("u1", "default"), &pools, &blocks);
    assert_eq!(answer, Grant::Existing { name: "default-7".into() });
    assert_eq!(answer.to_string(), "allocated a block default-7");
    blocks[0].terminating = true;
    assert!(matches!(
        grant(&ask("u1", "default"), &pools, &blocks),
        Grant::Refused(Refusal::Terminating { .. })
    ));
    // An empty UID is no request's.
    let without_request = [block("default-7", "default", 7, "10.64.0.224/27", Some(""))];
    assert!(matches!(grant(&ask("", "default"), &pools, &without_request), Grant::Refused(_)));
}

#[test]
fn a_reason_is_read_back_from_its_condition() {
    for reason in RefusalReason::ALL {
        assert_eq!(RefusalReason::from_condition(reason.as_condition()), Some(reason));
    }
    assert_eq!(RefusalReason::from_condition("not of ours"), None);
}

#[test]
fn refusals_say_why() {
    let mut pools = pools(&[
        ("default", "10.64.0.0/27", false),
        ("going", "10.65.0.0/24", true),
        ("bad", "10.66.0.0/30", false),
        ("second", "10.64.0.0/27", false),
    ]);
    let blocks = [block("default-0", "default", 0, "10.64.0.0/27", None)];
    refused(
        grant(&ask("u", "default"), &pools, &blocks),
        "out of blocks",
        "pool default does not have free blocks",
    );
    refused(
        grant(&ask("u", "nope"), &pools, &blocks),
        "UnknownPool",
        "there is no pool nope: create the AddressPool, or correct the annotation coil.cybozu.com/pool of the pod's namespace",
    );
    refused(
        grant(&ask("u", "going"), &pools, &blocks),
        "PoolTerminating",
        "pool going is being deleted and allocates no more blocks",
    );
    refused(
        grant(&ask("u", "bad"), &pools, &blocks),
        "InvalidPool",
        "pool bad cannot be used: pool bad: too narrow subnet 10.66.0.0/30 in spec.subnets[0]: \
         it has 2 host bits and a block needs 5",
    );
    refused(
        grant(&ask("u", "second"), &pools, &blocks),
        "PoolOverlap",
        "pool second does not have free blocks: the addresses of all that are left, such as 10.64.0.0/27, \
         belong to older pools or are in blocks of others; remove the overlap",
    );
    let disabled = pools.get_mut("default").unwrap();
    disabled.disabled = true;
    refused(
        grant(&ask("u", "default"), &pools, &NONE),
        "PoolDisabled",
        "pool default is disabled and allocates no more blocks: set spec.disabled to false, or use another pool",
    );
    pools.clear();
    assert!(matches!(
        grant(&ask("u", "default"), &pools, &blocks),
        Grant::Refused(Refusal::UnknownPool { .. })
    ));
}

#[test]
fn unexpected_blocks_are_skipped() {
    let pools = pools(&[("default", "10.64.0.0/24", false)]);
    let blocks = [
        // Made by hand: right name, no label.
        block("default-0", "", 9, "192.0.2.0/27", None),
        // Right label and number, strange name.
        block("mine", "default", 1, "192.0.2.32/27", None),
        // Another pool's block over our addresses.
        block("other-0", "other", 0, "10.64.0.64/26", None),
    ];
    assert_eq!(grant(&ask("u", "default"), &pools, &blocks).to_string(), "allocated a block default-4");
}

#[test]
fn a_node_gets_no_more_blocks_than_its_pods_can_need() {
    for (pods, bits, limit) in
        [(None, 5, 12), (Some(250), 5, 20), (Some(110), 0, 224), (Some(0), 5, 4), (Some(u32::MAX), 0, 8196)]
    {
        assert_eq!(block_limit(pods, bits), limit, "{pods:?} {bits}");
    }
    let pools = pools(&[("default", "10.64.0.0/16", false)]);
    let request = Request { pod_capacity: Some(1), ..ask("u", "default") };
    let held = |count: u32| -> Vec<ExistingBlock> {
        let net = |n: u32| format!("10.64.{}.{}/27", n / 8, n % 8 * 32);
        (0..count).map(|n| block(&format!("default-{n}"), "default", n, &net(n), None)).collect()
    };
    assert_eq!(grant(&request, &pools, &held(5)).to_string(), "allocated a block default-5");
    refused(
        grant(&request, &pools, &held(6)),
        "BlockLimitReached",
        "node worker-1 has 6 blocks of pool default and may have 6: the limit follows from the pod capacity of \
         the Node and the pool's block size",
    );
    let other = Request { node: "worker-2", ..request };
    assert_eq!(grant(&other, &pools, &held(6)).to_string(), "allocated a block default-6");
    // The question whether the pool has blocks is of no node.
    assert!(matches!(grant(&Request { node: "", ..request }, &pools, &held(6)), Grant::New { .. }));
}

#[test]
fn a_claimed_block_is_granted_exactly_or_not_at_all() {
    let mut pools = pools(&[("older", "10.64.0.128/26", false), ("default", "10.64.0.0/24", true)]);
    pools.get_mut("default").unwrap().created = 1;
    let claim = |index: u32, net: &str| {
        let nets = DualStackNets { ipv4: Some(net.parse().unwrap()), ipv6: None };
        Request { claim: Some(ClaimedBlock { index, nets }), ..ask("u", "default") }
    };
    let mine = block("default-2", "default", 2, "10.64.0.64/27", None);
    let other = ExistingBlock { node: "worker-2".into(), ..mine.clone() };
    let going = ExistingBlock { terminating: true, ..mine.clone() };
    let by_hand = block("mine", "", 0, "10.64.0.64/28", None);
    let wanted = claim(2, "10.64.0.64/27");
    // Though the pool gives nothing to new pods.
    let Grant::New { index: 2, name, nets } = grant(&wanted, &pools, &NONE) else { panic!("no block") };
    assert_eq!((name.as_str(), nets.to_string().as_str()), ("default-2", "10.64.0.64/27"));
    assert_eq!(grant(&wanted, &pools, &[mine]), Grant::Existing { name: "default-2".into() });
    for (request, blocks, cause) in [
        (wanted, vec![other], "AddressBlock default-2 has these"),
        (wanted, vec![going], "AddressBlock default-2 has these"),
        (wanted, vec![by_hand], "AddressBlock mine has these"),
        (claim(3, "10.64.0.64/27"), vec![], "the pool has no such block"),
        (claim(2, "10.64.0.64/26"), vec![], "the pool has no such block"),
        (claim(4, "10.64.0.128/27"), vec![], "an older pool has"),
    ] {
        let Grant::Refused(refusal) = grant(&request, &pools, &blocks) else { panic!("{cause}") };
        assert_eq!(refusal.reason(), RefusalReason::ClaimConflict);
        assert!(refusal.to_string().contains(cause), "{refusal}");
    }
    let many: Vec<_> = (0..12)
        .map(|n| block(&format!("b-{n}"), "default", 100 + n, &format!("10.65.0.{n}/32"), None))
        .collect();
    let refusal = grant(&wanted, &pools, &many);
    assert!(matches!(refusal, Grant::Refused(Refusal::BlockLimit { .. })), "{refusal:?}");
}

#[test]
fn addresses_in_two_pools_are_given_by_the_older_only() {
    let mut pools = pools(&[("a", "10.64.0.0/26", false), ("b", "10.64.0.0/25", false)]);
    let mut given = |a: i64, b: i64, disabled: bool| {
        pools.get_mut("a").unwrap().created = a;
        pools.get_mut("b").unwrap().created = b;
        pools.get_mut("a").unwrap().disabled = disabled;
        let first = |pool| match grant(&ask("u", pool), &pools, &NONE) {
            Grant::New { nets, .. } => nets.to_string(),
            other => other.to_string(),
        };
        (first("a"), first("b"))
    };
    let nothing_left = "pool a does not have free blocks: the addresses of all that are left, such as 10.64.0.0/27, \
                        belong to older pools or are in blocks of others; remove the overlap";
    assert_eq!(given(1, 2, false), ("10.64.0.0/27".into(), "10.64.0.64/27".into()));
    assert_eq!(given(2, 1, false), (nothing_left.into(), "10.64.0.0/27".into()));
    // Of the same second, the first by name.
    assert_eq!(given(1, 1, false), ("10.64.0.0/27".into(), "10.64.0.64/27".into()));
    // A disabled pool keeps what is its own.
    assert_eq!(given(1, 2, true).1, "10.64.0.64/27");
}

proptest::proptest! {
    /// Two controllers that do not see each other's blocks yet, each granting from another of two pools.
    #[test]
    fn two_pools_never_give_one_address_even_blindly(
        a in (0u32..16, 24u8..=27), b in (0u32..16, 24u8..=27), ages in (0i64..3, 0i64..3), given in 0usize..12,
    ) {
        let subnet = |(at, length): (u32, u8)| {
            let net = std::net::Ipv4Addr::from_bits(0x0a40_0000 + at * 32);
            ipnet::Ipv4Net::new(net, length).unwrap().trunc().to_string()
        };
        let mut pools = pools(&[("a", &subnet(a), false), ("b", &subnet(b), false)]);
        pools.get_mut("a").unwrap().created = ages.0;
        pools.get_mut("b").unwrap().created = ages.1;
        let blindly = |pool: &str| {
            let mut own: Vec<ExistingBlock> = Vec::new();
            while own.len() < given && let Grant::New { index, name, nets } = grant(&ask("u", pool), &pools, &own) {
                own.push(ExistingBlock { name, pool: pool.into(), index, nets, ..ExistingBlock::default() });
            }
            own.iter().flat_map(|block| block.nets.iter()).collect::<Vec<_>>()
        };
        for of_a in blindly("a") {
            for of_b in blindly("b") {
                proptest::prop_assert!(!of_a.contains(&of_b) && !of_b.contains(&of_a), "{of_a} {of_b}");
            }
        }
    }
}

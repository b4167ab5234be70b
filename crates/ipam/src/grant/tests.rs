use super::*;

fn pools(pools: &[(&str, &str, bool)]) -> BTreeMap<String, PoolState> {
    let state = |(name, subnet, terminating): &(&str, &str, bool)| {
        let parsed = Pool::parse(name, 5, [(Some(*subnet), None)]);
        ((*name).to_owned(), PoolState { parsed, terminating: *terminating })
    };
    pools.iter().map(state).collect()
}

fn block(name: &str, pool: &str, index: u32, net: &str, request: Option<&str>) -> ExistingBlock {
    ExistingBlock {
        name: name.to_owned(),
        pool: pool.to_owned(),
        index,
        nets: BlockNets { ipv4: Some(net.parse().unwrap()), ipv6: None },
        request: request.map(str::to_owned),
        terminating: false,
    }
}

fn ask<'a>(uid: &'a str, pool: &'a str) -> Request<'a> {
    Request { uid, pool, node: "worker-1" }
}

#[track_caller]
fn refused(grant: Grant, reason: &str, message: &str) {
    let Grant::Refused(refusal) = grant else { panic!("{grant:?}") };
    assert_eq!((refusal.reason(), refusal.to_string().as_str()), (reason, message));
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
    // An empty UID is nobody's.
    let nobody = [block("default-7", "default", 7, "10.64.0.224/27", Some(""))];
    assert!(matches!(grant(&ask("", "default"), &pools, &nobody), Grant::Refused(_)));
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
        "unknown pool",
        "there is no pool nope: create the AddressPool, or correct the annotation coil.cybozu.com/pool of the pod's namespace",
    );
    refused(
        grant(&ask("u", "going"), &pools, &blocks),
        "pool is being deleted",
        "pool going is being deleted and gives no more blocks",
    );
    refused(
        grant(&ask("u", "bad"), &pools, &blocks),
        "invalid pool",
        "pool bad cannot be used: pool bad: too narrow subnet 10.66.0.0/30 in spec.subnets[0]: \
         it has 2 host bits and a block needs 5",
    );
    refused(
        grant(&ask("u", "second"), &pools, &blocks),
        "overlapping pools",
        "pool second does not have free blocks: the addresses of all that are left, such as 10.64.0.0/27, \
         are in blocks of other pools; remove the overlap",
    );
    pools.clear();
    assert!(matches!(
        grant(&ask("u", "default"), &pools, &blocks),
        Grant::Refused(Refusal::UnknownPool { .. })
    ));
}

#[test]
fn blocks_nobody_expected_are_passed_over() {
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

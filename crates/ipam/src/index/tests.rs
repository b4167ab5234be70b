use proptest::prelude::*;

use super::*;

fn pool(subnet: &str) -> Pool {
    Pool::parse("p", 2, [(Some(subnet), None)]).unwrap()
}

fn block(pool: &Pool, index: u32, node: &str) -> ExistingBlock {
    ExistingBlock {
        name: pool.block_name(index),
        pool: "p".into(),
        node: node.into(),
        index,
        nets: pool.block(index).unwrap_or_default(),
        request: Some(format!("u{index}")),
        terminating: false,
    }
}

fn next(index: &BlockIndex, pool: &Pool) -> Option<u32> {
    index.first_free(pool, &PrefixSet::default())
}

#[test]
fn freed_numbers_are_granted_last_and_the_oldest_first() {
    let pool = pool("10.0.0.0/28");
    let mut index: BlockIndex = (0..3).map(|number| block(&pool, number, "n")).collect();
    index.remove("p-1");
    index.remove("p-0");
    assert_eq!(next(&index, &pool), Some(3));
    index.insert(block(&pool, 3, "n"));
    assert_eq!(next(&index, &pool), Some(1));
    index.insert(block(&pool, 1, "n"));
    assert_eq!(next(&index, &pool), Some(0));
    // A number that is freed beyond what was granted in order waits as well.
    let mut sparse: BlockIndex = [block(&pool, 1, "n")].into_iter().collect();
    sparse.remove("p-1");
    assert_eq!(next(&sparse, &pool), Some(0));
    sparse.insert(block(&pool, 0, "n"));
    assert_eq!(next(&sparse, &pool), Some(2));
}

#[test]
fn a_list_replaces_everything_and_frees_what_it_lacks() {
    let pool = pool("10.0.0.0/28");
    let mut index: BlockIndex = (0..2).map(|number| block(&pool, number, "n")).collect();
    index.replace([block(&pool, 1, "m"), block(&pool, 2, "n")]);
    assert_eq!((index.held("p", "n"), index.held("p", "m")), (1, 1));
    assert_eq!((index.answer_to("u0"), index.answer_to("u2")), (None, Some("p-2")));
    assert_eq!(next(&index, &pool), Some(3));
    index.replace([]);
    assert_eq!((index.held("p", "n"), index.get("p-1")), (0, None));
}

#[test]
fn a_block_answers_its_request_until_it_is_being_deleted() {
    let pool = pool("10.0.0.0/28");
    let mut index: BlockIndex = [block(&pool, 0, "n")].into_iter().collect();
    assert_eq!(index.answer_to("u0"), Some("p-0"));
    index.insert(ExistingBlock { request: None, ..block(&pool, 0, "n") });
    assert_eq!(index.answer_to("u0"), None);
    index.insert(block(&pool, 0, "n"));
    index.insert(ExistingBlock { terminating: true, ..block(&pool, 0, "n") });
    assert_eq!(index.answer_to("u0"), None);
}

/// A block of the pool, or one made by hand over its addresses.
fn any_block() -> impl Strategy<Value = ExistingBlock> {
    let own = (0u32..20, 0u8..3)
        .prop_map(|(number, node)| block(&pool("10.0.0.0/26"), number, &format!("n{node}")));
    let foreign = (0u8..4, 0u8..80, 24u8..=32).prop_map(|(name, host, length)| ExistingBlock {
        name: format!("foreign-{name}"),
        nets: DualStackNets {
            ipv4: format!("10.0.0.{host}/{length}").parse::<ipnet::Ipv4Net>().ok().map(|net| net.trunc()),
            ipv6: None,
        },
        ..ExistingBlock::default()
    });
    prop_oneof![5 => own, 1 => foreign]
}

proptest! {
    /// Property, whatever blocks come and go: the answers are those of a walk over all blocks.
    #[test]
    fn the_index_agrees_with_a_walk_over_all_blocks(
        steps in prop::collection::vec((any_block(), any::<bool>()), 0..120),
        taken in prop::collection::vec((0u8..64, 26u8..=32), 0..3),
    ) {
        let pool = pool("10.0.0.0/26");
        let older = taken.into_iter().filter_map(|(host, length)| format!("10.0.0.{host}/{length}").parse::<IpNet>().ok());
        let older: Vec<IpNet> = older.map(|net| net.trunc()).collect();
        let taken: PrefixSet = older.iter().collect();
        let (mut index, mut all) = (BlockIndex::default(), BTreeMap::<String, ExistingBlock>::new());
        let mut freed: Vec<u32> = Vec::new();
        for (block, inserts) in steps {
            let before = all.get(&block.name).filter(|before| before.pool == "p").map(|before| before.index);
            if inserts {
                freed.retain(|number| block.pool != "p" || *number != block.index);
                index.insert(block.clone());
                all.insert(block.name.clone(), block);
            } else {
                index.remove(&block.name);
                all.remove(&block.name);
                freed.extend(before);
            }
            let clear = |number: u32| {
                let nets = pool.block(number).unwrap_or_default();
                let in_blocks = all.values().flat_map(|block| block.nets.iter());
                !all.contains_key(&pool.block_name(number))
                    && in_blocks.chain(older.iter().copied()).all(|other| nets.iter().all(|net| !fairlead_address::overlap(&net, &other)))
            };
            let fresh = (0..16).find(|number| clear(*number) && !freed.contains(number));
            let expected = fresh.or_else(|| freed.iter().copied().find(|number| *number < 16 && clear(*number)));
            prop_assert_eq!(index.first_free(&pool, &taken), expected);
            for node in ["n0", "n1", "n2"] {
                let held = all.values().filter(|block| block.pool == "p" && block.node == node).count();
                prop_assert_eq!(index.held("p", node) as usize, held);
            }
        }
    }
}

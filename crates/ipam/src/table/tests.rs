use std::collections::BTreeMap;

use fairlead_address::DualStackNets;
use proptest::prelude::*;

use super::*;

fn nets(ipv4: &str, ipv6: &str) -> DualStackNets {
    DualStackNets { ipv4: ipv4.parse().ok(), ipv6: ipv6.parse().ok() }
}

fn block(name: &str, ipv4: &str) -> Block {
    Block::new(name, "default", nets(ipv4, ""), false, false).unwrap()
}

fn key(number: u32) -> Key {
    Key { container_id: format!("c{number}"), ifname: "eth0".into() }
}

fn give(ipam: &mut AllocationTable, number: u32) -> String {
    match ipam.allocate("default", &key(number)) {
        Answer::Allocated(allocation) => allocation.ipv4.unwrap().to_string(),
        Answer::NeedBlock => "none".to_owned(),
    }
}

fn with(blocks: &[(&str, &str)]) -> AllocationTable {
    let mut ipam = AllocationTable::new();
    blocks.iter().for_each(|(name, net)| ipam.upsert_block(block(name, net)));
    ipam
}

fn addr(text: &str) -> Option<Ipv4Addr> {
    Some(text.parse().unwrap())
}

#[test]
fn first_and_last_address_are_used_and_the_next_is_behind_the_last_given() {
    let mut ipam = with(&[("default-0", "10.64.0.0/30")]);
    assert_eq!(give(&mut ipam, 1), "10.64.0.0");
    assert_eq!(give(&mut ipam, 2), "10.64.0.1");
    ipam.release(&key(1)).unwrap();
    assert_eq!(give(&mut ipam, 3), "10.64.0.2");
    assert_eq!(give(&mut ipam, 4), "10.64.0.3");
    assert_eq!(give(&mut ipam, 5), "10.64.0.0");
    assert_eq!(give(&mut ipam, 6), "none");
}

#[test]
fn what_a_pod_with_unknown_addresses_may_have_is_given_to_no_other() {
    let mut ipam = with(&[("default-0", "10.64.0.0/30")]);
    let unclear = Unclear { pool: "default".to_owned(), why: "its namespace is gone".to_owned() };
    ipam.hold_back(key(1), unclear);
    assert_eq!(give(&mut ipam, 2), "none", "10.64.0.0 may be the other pod's");
    assert!(ipam.releasable_blocks().is_empty() && !ipam.close_block("default-0"), "nor another node's");
    let newer = Block::new("default-1", "default", nets("10.64.0.4/30", ""), false, false).unwrap();
    let newer = newer.with_uid("u");
    ipam.mark_newer("u");
    ipam.upsert_block(newer);
    assert_eq!(give(&mut ipam, 2), "10.64.0.4", "a block that was granted afterwards cannot contain it");
    assert!(ipam.release_unclear(&key(1)));
    assert_eq!(give(&mut ipam, 3), "10.64.0.5");
    ipam.release(&key(2)).unwrap();
    ipam.release(&key(3)).unwrap();
    assert_eq!(ipam.releasable_blocks().len(), 2);
}

#[test]
fn a_cordoned_pool_allocates_nothing_new_and_releases_empty_blocks() {
    let mut ipam = with(&[("default-0", "10.64.0.0/30"), ("default-1", "10.64.0.4/30")]);
    ipam.upsert_block(Block::new("kept", "default", nets("10.64.0.8/30", ""), true, false).unwrap());
    assert_eq!(give(&mut ipam, 1), "10.64.0.0");
    ipam.set_cordoned("default", true);
    assert_eq!(give(&mut ipam, 2), "none");
    assert_eq!(give(&mut ipam, 1), "10.64.0.0", "who has an address keeps it");
    assert!(!ipam.wants_spare_block("default"));
    assert!(ipam.usage().iter().all(|usage| !usage.open));
    assert_eq!(ipam.releasable_blocks(), ["default-1"]);
    ipam.release(&key(1)).unwrap();
    assert_eq!(ipam.releasable_blocks(), ["default-0", "default-1"]);
    ipam.set_cordoned("default", false);
    assert_eq!(give(&mut ipam, 2), "10.64.0.1");
}

#[test]
fn asking_again_gives_the_same_even_from_another_pool() {
    let mut ipam = with(&[("default-0", "10.64.0.0/30")]);
    let Answer::Allocated(first) = ipam.allocate("default", &key(1)) else { panic!() };
    assert!(first.is_new);
    assert_eq!((first.pool.as_str(), first.block.as_deref()), ("default", Some("default-0")));
    for pool in ["default", "other"] {
        assert_eq!(
            ipam.allocate(pool, &key(1)),
            Answer::Allocated(Allocation { is_new: false, ..first.clone() })
        );
    }
    assert_eq!(ipam.allocated().count(), 1);
    let second_interface = Key { ifname: "net1".into(), ..key(1) };
    let Answer::Allocated(second) = ipam.allocate("default", &second_interface) else { panic!() };
    assert_ne!(second.ipv4, first.ipv4);
}

#[test]
fn both_families_share_one_offset() {
    let mut ipam = AllocationTable::new();
    let dual = Block::new("default-0", "default", nets("10.64.0.8/30", "fd01::8/126"), false, false).unwrap();
    ipam.upsert_block(dual);
    // A pod from before that has only one of the two blocks the offset for the other as well.
    ipam.adopt(key(9), "default", None, "fd01::8".parse().ok()).unwrap();
    ipam.remove_block("default-0");
    ipam.upsert_block(
        Block::new("default-0", "default", nets("10.64.0.8/30", "fd01::8/126"), false, false).unwrap(),
    );
    let Answer::Allocated(given) = ipam.allocate("default", &key(1)) else { panic!() };
    assert_eq!((given.ipv4, given.ipv6), (addr("10.64.0.9"), "fd01::9".parse().ok()));
}

#[test]
fn a_missing_pool_or_block_is_an_answer() {
    let mut ipam = AllocationTable::new();
    assert_eq!(ipam.allocate("default", &key(1)), Answer::NeedBlock);
    ipam.upsert_block(block("default-0", "10.64.0.0/30"));
    assert_eq!(ipam.allocate("other", &key(1)), Answer::NeedBlock);
    assert_eq!(give(&mut ipam, 1), "10.64.0.0");
}

#[test]
fn late_and_double_releases_change_nothing() {
    let mut ipam = with(&[("default-0", "10.64.0.0/32")]);
    give(&mut ipam, 1);
    let released = ipam.release(&key(1)).unwrap();
    assert_eq!((released.block.as_deref(), released.now_empty), (Some("default-0"), true));
    assert_eq!(ipam.release(&key(1)), None);
    // The block could not be deleted, the address goes to another pod, and the first DEL comes once more.
    assert_eq!(give(&mut ipam, 2), "10.64.0.0");
    assert_eq!(ipam.release(&key(1)), None);
    assert_eq!(ipam.holder(IpAddr::V4(addr("10.64.0.0").unwrap())), Some(&key(2)));
    // The block is gone altogether.
    ipam.remove_block("default-0");
    let released = ipam.release(&key(2)).unwrap();
    assert_eq!((released.block, released.now_empty), (None, false));
    assert_eq!(ipam.release(&key(2)), None);
}

#[test]
fn reserved_and_dying_and_closed_blocks_give_nothing() {
    let mut ipam = AllocationTable::new();
    ipam.upsert_block(Block::new("r", "default", nets("10.64.0.0/30", ""), true, false).unwrap());
    ipam.upsert_block(Block::new("d", "default", nets("10.64.0.4/30", ""), false, true).unwrap());
    ipam.upsert_block(block("c", "10.64.0.8/30"));
    assert!(ipam.close_block("c"));
    assert_eq!(give(&mut ipam, 1), "none");
    assert!(ipam.usage().iter().all(|usage| !usage.open));
    assert_eq!(ipam.releasable_blocks(), ["c", "d"], "a reserved block stays");
    ipam.upsert_block(block("c", "10.64.0.8/30"));
    assert_eq!(give(&mut ipam, 1), "none", "an update of a closed block does not open it");
    ipam.reopen_block("c");
    assert_eq!(give(&mut ipam, 1), "10.64.0.8");
    assert!(!ipam.close_block("c"), "in use");
    assert!(!ipam.close_block("unknown"));
    assert_eq!(give(&mut ipam, 2), "10.64.0.9");
}

#[test]
fn a_block_whose_deletion_began_keeps_its_pods_and_is_given_back_after_the_last() {
    let mut ipam = with(&[("default-0", "10.64.0.0/30")]);
    give(&mut ipam, 1);
    ipam.upsert_block(Block::new("default-0", "default", nets("10.64.0.0/30", ""), false, true).unwrap());
    assert_eq!(give(&mut ipam, 1), "10.64.0.0");
    assert_eq!(give(&mut ipam, 2), "none");
    assert_eq!(ipam.releasable_blocks(), [""; 0]);
    assert!(ipam.release(&key(1)).unwrap().now_empty);
    assert_eq!(ipam.releasable_blocks(), ["default-0"]);
}

#[test]
fn the_fullest_block_is_used_so_that_others_empty() {
    let mut ipam = with(&[("a", "10.64.0.0/30"), ("b", "10.64.1.0/30")]);
    for number in 1..=5 {
        give(&mut ipam, number);
    }
    assert_eq!(ipam.usage().iter().map(|usage| usage.used).collect::<Vec<_>>(), [4, 1]);
    (1..=3).for_each(|number| drop(ipam.release(&key(number))));
    give(&mut ipam, 6);
    ipam.release(&key(4));
    // Equal now: the first by name.
    assert_eq!(give(&mut ipam, 7), "10.64.0.1");
}

#[test]
fn what_runs_is_adopted_before_or_after_its_block_is_known() {
    let mut ipam = AllocationTable::new();
    ipam.adopt(key(1), "default", addr("10.64.0.1"), None).unwrap();
    assert_eq!(ipam.without_block().count(), 1);
    ipam.upsert_block(block("default-0", "10.64.0.0/30"));
    assert_eq!(ipam.without_block().count(), 0);
    ipam.adopt(key(2), "default", addr("10.64.0.2"), None).unwrap();
    ipam.adopt(key(2), "default", addr("10.64.0.2"), None).unwrap();
    // The search goes on behind the highest adopted, not at the start.
    assert_eq!(give(&mut ipam, 3), "10.64.0.3");
    assert_eq!(give(&mut ipam, 4), "10.64.0.0");
    assert_eq!(give(&mut ipam, 5), "none");
}

#[test]
fn nothing_wrong_is_adopted() {
    let mut ipam = with(&[("default-0", "10.64.0.0/30")]);
    ipam.adopt(key(1), "default", addr("10.64.0.1"), None).unwrap();
    let twice = ipam.adopt(key(2), "default", addr("10.64.0.1"), "fd00::1".parse().ok()).unwrap_err();
    assert_eq!(
        twice.to_string(),
        "10.64.0.1 of container c2 is already held by container c1: two pods with one address; delete one of them"
    );
    assert!(matches!(
        ipam.adopt(key(1), "default", addr("10.64.0.2"), None),
        Err(AdoptError::HoldsOthers { .. })
    ));
    assert!(matches!(ipam.adopt(key(3), "default", None, None), Err(AdoptError::NoAddress { .. })));
    assert_eq!(ipam.allocated().count(), 1);
}

#[test]
fn a_vanished_block_takes_no_address_from_its_pod() {
    let mut ipam = with(&[("default-0", "10.64.0.0/31")]);
    give(&mut ipam, 1);
    ipam.remove_block("default-0").unwrap();
    assert_eq!(give(&mut ipam, 1), "10.64.0.0");
    // The same addresses come back under another name and pool.
    let again = Block::new("other-3", "other", nets("10.64.0.0/31", ""), false, false).unwrap();
    ipam.upsert_block(again);
    let Answer::Allocated(given) = ipam.allocate("other", &key(2)) else { panic!() };
    assert_eq!(given.ipv4, addr("10.64.0.1"));
    assert_eq!(ipam.allocate("other", &key(3)), Answer::NeedBlock);
    assert_eq!(ipam.release(&key(1)).unwrap().block.as_deref(), Some("other-3"));
}

#[test]
fn a_block_is_asked_for_before_the_last_one_is_full() {
    let mut ipam = with(&[("default-0", "10.64.0.0/29")]);
    let mut wanted_at = None;
    assert!(!ipam.wants_spare_block("default"), "no pod uses the pool");
    for number in 1..=8 {
        give(&mut ipam, number);
        if ipam.wants_spare_block("default") {
            wanted_at.get_or_insert(number);
        }
    }
    assert_eq!(wanted_at, Some(7), "one of eight left");
    assert!(!ipam.wants_spare_block("unknown"));
    ipam.upsert_block(block("default-1", "10.64.1.0/29"));
    assert!(!ipam.wants_spare_block("default"));
    assert_eq!(ipam.releasable_blocks(), [""; 0], "a spare block is not released at once");
}

#[test]
fn scarce_single_addresses_are_never_asked_for_ahead_and_given_back_at_once() {
    let mut ipam = with(&[("default-0", "192.0.2.1/32"), ("default-1", "192.0.2.2/32")]);
    give(&mut ipam, 1);
    assert_eq!(ipam.releasable_blocks(), ["default-1"]);
    give(&mut ipam, 2);
    assert!(!ipam.wants_spare_block("default"));
}

#[test]
fn unused_pools_give_everything_back() {
    let mut ipam = with(&[("default-0", "10.64.0.0/29"), ("default-1", "10.64.1.0/29")]);
    assert_eq!(ipam.releasable_blocks(), ["default-0", "default-1"]);
    give(&mut ipam, 1);
    assert_eq!(ipam.releasable_blocks(), ["default-1"]);
}

#[test]
fn blocks_that_make_no_sense_are_refused() {
    let new = |ipv4: &str, ipv6: &str| {
        Block::new("b", "p", nets(ipv4, ipv6), false, false).unwrap_err().to_string()
    };
    assert_eq!(new("", ""), "block b has neither ipv4 nor ipv6: delete it");
    assert_eq!(
        new("10.0.0.0/24", "fd00::/64"),
        "block b has 10.0.0.0/24 and fd00::/64, which differ in size: delete it"
    );
    assert_eq!(new("", "fd00::/64"), "block b (fd00::/64) has 64 host bits; at most 20 are supported");
}

#[test]
fn a_full_million_address_block_does_not_overflow() {
    let mut ipam = AllocationTable::new();
    ipam.upsert_block(
        Block::new("b", "default", nets("255.240.0.0/12", "ffff::fff0:0/108"), false, false).unwrap(),
    );
    ipam.adopt(key(0), "default", addr("255.255.255.255"), None).unwrap();
    assert_eq!(give(&mut ipam, 1), "255.240.0.0", "round the end");
}

#[derive(Debug, Clone)]
enum Op {
    Allocate(u8, u32),
    Release(u32),
    Adopt(u32, u8, bool),
    Upsert(u8, u8, bool, bool),
    Remove(u8),
    Close(u8),
    Reopen(u8),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u8..2, 0u32..24).prop_map(|(pool, key)| Op::Allocate(pool, key)),
        4 => (0u32..24).prop_map(Op::Release),
        2 => (0u32..24, 0u8..40, any::<bool>()).prop_map(|(key, host, both)| Op::Adopt(key, host, both)),
        4 => (0u8..8, 0u8..2, prop::bool::weighted(0.1), prop::bool::weighted(0.1))
            .prop_map(|(n, pool, reserved, deleting)| Op::Upsert(n, pool, reserved, deleting)),
        1 => (0u8..8).prop_map(Op::Remove),
        1 => (0u8..8).prop_map(Op::Close),
        1 => (0u8..8).prop_map(Op::Reopen),
    ]
}

/// Everything remembered twice and looked for one by one.
#[derive(Default)]
struct Model {
    /// Name to pool, first host number, open.
    blocks: BTreeMap<String, (String, u8, bool, bool)>,
    /// Key to host numbers by family.
    allocated: BTreeMap<Key, (Option<u8>, Option<u8>)>,
}

impl Model {
    fn taken(&self, host: u8) -> bool {
        self.allocated.values().any(|(v4, v6)| *v4 == Some(host) || *v6 == Some(host))
    }

    fn has_room(&self, pool: &str) -> bool {
        self.blocks.values().any(|(of, first, usable, closed)| {
            of == pool && *usable && !closed && (*first..first + 4).any(|host| !self.taken(host))
        })
    }

    fn in_use(&self, first: u8) -> bool {
        (first..first + 4).any(|host| self.taken(host))
    }
}

fn host_v4(host: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, host)
}

fn host_v6(host: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host.into())
}

fn step(ipam: &mut AllocationTable, model: &mut Model, op: Op) -> Result<(), TestCaseError> {
    let block_name = |n: u8| format!("b{n}");
    match op {
        Op::Allocate(pool, number) => {
            let pool = format!("p{pool}");
            match ipam.allocate(&pool, &key(number)) {
                Answer::NeedBlock => {
                    prop_assert!(!model.allocated.contains_key(&key(number)) && !model.has_room(&pool));
                }
                Answer::Allocated(given) => {
                    prop_assert_eq!(given.is_new, !model.allocated.contains_key(&key(number)));
                    let hosts = (given.ipv4.map(|ip| ip.octets()[3]), given.ipv6.map(|ip| ip.octets()[15]));
                    if given.is_new {
                        prop_assert_eq!(hosts.0, hosts.1);
                        prop_assert!(!model.taken(hosts.0.unwrap()), "given twice: {:?}", given);
                        let (of, first, usable, closed) = &model.blocks[&given.block.unwrap()];
                        prop_assert!(
                            *of == pool
                                && *usable
                                && !closed
                                && (*first..first + 4).contains(&hosts.0.unwrap())
                        );
                        model.allocated.insert(key(number), hosts);
                    } else {
                        prop_assert_eq!(hosts, model.allocated[&key(number)]);
                    }
                }
            }
        }
        Op::Release(number) => {
            let expected = model.allocated.remove(&key(number));
            let released = ipam.release(&key(number));
            prop_assert_eq!(released.is_some(), expected.is_some());
            if let Some(Released { block: Some(name), now_empty, .. }) = released {
                prop_assert_eq!(now_empty, !model.in_use(model.blocks[&name].1));
            }
        }
        Op::Adopt(number, host, both) => {
            let hosts = (Some(host), both.then_some(host));
            let mine = model.allocated.get(&key(number)).copied();
            // Families are distinguished here: only the same family's address is "taken".
            let free = model
                .allocated
                .values()
                .all(|(v4, v6)| *v4 != hosts.0 && (hosts.1.is_none() || *v6 != hosts.1));
            let done = ipam.adopt(key(number), "p0", hosts.0.map(host_v4), hosts.1.map(host_v6));
            prop_assert_eq!(done.is_ok(), mine == Some(hosts) || (mine.is_none() && free));
            if done.is_ok() {
                model.allocated.insert(key(number), hosts);
            }
        }
        Op::Upsert(n, pool, reserved, deleting) => {
            let (name, pool, first) = (block_name(n), format!("p{pool}"), n * 4);
            let nets = nets(&format!("{}/30", host_v4(first)), &format!("{}/126", host_v6(first)));
            ipam.upsert_block(Block::new(&name, &pool, nets, reserved, deleting).unwrap());
            let closed = model.blocks.get(&name).is_some_and(|block| block.3);
            model.blocks.insert(name, (pool, first, !reserved && !deleting, closed));
        }
        Op::Remove(n) => {
            prop_assert_eq!(
                ipam.remove_block(&block_name(n)).is_some(),
                model.blocks.remove(&block_name(n)).is_some()
            );
        }
        Op::Close(n) => {
            let closable = model.blocks.get(&block_name(n)).is_some_and(|block| !model.in_use(block.1));
            prop_assert_eq!(ipam.close_block(&block_name(n)), closable);
            if closable && let Some(block) = model.blocks.get_mut(&block_name(n)) {
                block.3 = true;
            }
        }
        Op::Reopen(n) => {
            ipam.reopen_block(&block_name(n));
            if let Some(block) = model.blocks.get_mut(&block_name(n)) {
                block.3 = false;
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn it_agrees_with_a_model_that_remembers_everything_twice(ops in prop::collection::vec(op(), 1..120)) {
        let (mut ipam, mut model) = (AllocationTable::new(), Model::default());
        for op in ops {
            step(&mut ipam, &mut model, op)?;
            // No key is lost or added, and none share an address.
            prop_assert_eq!(ipam.allocated().map(|(key, _)| key).collect::<Vec<_>>(), model.allocated.keys().collect::<Vec<_>>());
            let addresses: usize = model.allocated.values().map(|(v4, v6)| v4.iter().count() + v6.iter().count()).sum();
            prop_assert_eq!(ipam.holders.len(), addresses);
            for (key, allocated) in ipam.allocated() {
                prop_assert!(allocated.addresses().all(|address| ipam.holder(address) == Some(key)));
            }
            for usage in ipam.usage() {
                let (_, first, ..) = model.blocks[&usage.block];
                prop_assert_eq!(usage.used as usize, (first..first + 4).filter(|host| model.taken(*host)).count());
            }
            for name in ipam.releasable_blocks() {
                prop_assert!(!model.in_use(model.blocks[&name].1));
            }
        }
    }

    #[test]
    fn giving_back_what_may_be_given_back_never_makes_it_ask_again(
        used in prop::collection::vec(0u32..40, 0..40),
        blocks in 1u8..8,
    ) {
        let mut ipam = AllocationTable::new();
        for n in 0..blocks {
            ipam.upsert_block(block(&format!("b{n}"), &format!("10.0.{n}.0/29")));
        }
        (0..40).for_each(|number| drop(give(&mut ipam, number)));
        used.iter().for_each(|number| drop(ipam.release(&key(*number))));
        let wanted = ipam.wants_spare_block("default");
        for name in ipam.releasable_blocks() {
            prop_assert!(ipam.close_block(&name));
            ipam.remove_block(&name);
        }
        prop_assert_eq!(ipam.wants_spare_block("default"), wanted);
        prop_assert_eq!(ipam.releasable_blocks(), [""; 0]);
    }
}

#[test]
fn a_closed_block_stays_closed_for_late_news_and_a_new_one_of_its_name_is_open() {
    let block = |uid: &str| block("default-0", "10.64.0.0/30").with_uid(uid);
    let mut ipam = AllocationTable::new();
    ipam.upsert_block(block("first"));
    assert!(ipam.close_block("default-0"));
    ipam.remove_block("default-0");
    ipam.upsert_block(block("first"));
    assert_eq!(give(&mut ipam, 1), "none", "the watch is behind: another node may have it");
    ipam.upsert_block(block("second"));
    assert_eq!(give(&mut ipam, 1), "10.64.0.0", "granted again to this node");
    ipam.release(&key(1));
    ipam.upsert_block(block("first"));
    assert_eq!(give(&mut ipam, 1), "none");
    ipam.reopen_block("default-0");
    assert_eq!(give(&mut ipam, 1), "10.64.0.1");
}

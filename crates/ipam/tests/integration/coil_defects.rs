//! Defects of Coil v2's address management that can be shown without a node program: each must not be ours. Those about
//! waiting and locks are tested in `crates/pods/src/ipam/tests.rs`.

use std::collections::BTreeMap;

use fairlead_ipam::{
    AllocationTable, Answer, Block, BlockIndex, DualStackNets, ExistingBlock, Grant, Key, Pool, PoolState,
    Request, grant,
};

fn key(id: &str) -> Key {
    Key { container_id: id.to_owned(), ifname: "eth0".to_owned() }
}

fn block(name: &str, ipv4: &str) -> Block {
    let nets = DualStackNets { ipv4: Some(ipv4.parse().unwrap()), ipv6: None };
    Block::new(name, "default", nets, false, false).unwrap()
}

fn address(table: &mut AllocationTable, id: &str) -> Option<String> {
    match table.allocate("default", &key(id)) {
        Answer::Allocated(given) => given.ipv4.map(|ip| ip.to_string()),
        Answer::NeedBlock => None,
    }
}

/// Number 4: the block of a freed address could not be deleted; the DEL that is repeated must not free the address
/// under the pod that has it now, nor end the program when the block is gone.
#[test]
fn a_repeated_del_after_a_failed_block_deletion_frees_nothing_and_kills_nothing() {
    let mut table = AllocationTable::new();
    table.upsert_block(block("default-0", "192.0.2.0/32"));
    assert_eq!(address(&mut table, "old").as_deref(), Some("192.0.2.0"));
    assert!(table.release(&key("old")).unwrap().now_empty);
    assert!(table.close_block("default-0"));
    table.reopen_block("default-0");
    assert_eq!(address(&mut table, "new").as_deref(), Some("192.0.2.0"));
    assert_eq!(table.release(&key("old")), None);
    assert_eq!(table.holder("192.0.2.0".parse().unwrap()), Some(&key("new")));
    table.remove_block("default-0");
    assert_eq!(table.release(&key("old")), None);
    assert!(table.release(&key("new")).is_some());
    assert_eq!(table.release(&key("new")), None, "the second of two DELs of the last address");
}

/// Number 5: the controller says a block was granted, but no list shows it.
#[test]
fn a_granted_block_that_no_list_shows_is_requested_again() {
    let mut table = AllocationTable::new();
    for _ in 0..2 {
        assert_eq!(table.allocate("default", &key("pod")), Answer::NeedBlock);
    }
    table.upsert_block(block("default-7", "10.0.0.28/30"));
    assert_eq!(address(&mut table, "pod").as_deref(), Some("10.0.0.28"));
}

/// Number 7 (cybozu-go/coil#271): the controller died between making the block and answering, and the next one is asked
/// again; and if two blocks came all the same, the surplus one is released.
#[test]
fn a_request_answered_by_two_controllers_gets_one_block_and_a_second_would_not_stay() {
    let pool = Pool::parse("default", 2, [(Some("10.0.0.0/24"), None)]).unwrap();
    let state = PoolState { parsed: Ok(pool), terminating: false, disabled: false, created: 0 };
    let pools = BTreeMap::from([("default".to_owned(), state)]);
    let request = Request { uid: "uid", pool: "default", node: "n1", pod_capacity: None, claim: None };
    let Grant::New { index, name, nets } = grant(&request, &pools, &BlockIndex::default()) else {
        panic!("no block")
    };
    let made = ExistingBlock {
        name: name.clone(),
        pool: "default".to_owned(),
        index,
        nets,
        request: Some("uid".to_owned()),
        ..ExistingBlock::default()
    };
    assert_eq!(grant(&request, &pools, &[made].into_iter().collect()), Grant::Existing { name });

    let mut table = AllocationTable::new();
    table.upsert_block(block("default-0", "10.0.0.0/30"));
    table.upsert_block(block("default-1", "10.0.0.4/30"));
    address(&mut table, "pod").unwrap();
    assert_eq!(table.releasable_blocks(), ["default-1"]);
}

/// Number 8 (cybozu-go/coil#347): a block that is added again while its addresses are in use.
#[test]
fn an_update_of_a_block_in_use_does_not_allocate_its_addresses_again() {
    let mut table = AllocationTable::new();
    let mut given = Vec::new();
    for id in ["a", "b", "c", "d"] {
        table.upsert_block(block("default-0", "10.0.0.0/30"));
        given.push(address(&mut table, id).unwrap());
        // Gone from one list and back in the next.
        table.remove_block("default-0");
        table.upsert_block(block("default-0", "10.0.0.0/30"));
    }
    given.sort();
    given.dedup();
    assert_eq!(given.len(), 4);
    assert_eq!(address(&mut table, "e"), None);
}

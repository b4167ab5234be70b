use fairlead_address::DualStackNets;

use super::*;
use crate::{ClaimedBlock, RefusalReason};

const SMALL: Option<PoolInfo> = Some(PoolInfo::Usable { block_size: 1 });

fn key(id: &str) -> Key {
    Key { container_id: id.to_owned(), ifname: "eth0".to_owned() }
}

fn block(uid: &str) -> Block {
    let nets = DualStackNets { ipv4: Some("10.0.0.0/32".parse().unwrap()), ipv6: None };
    Block::new("a-0", "a", nets, false, false).unwrap().with_uid(uid)
}

fn deletion(uid: &str) -> BlockDeletion {
    BlockDeletion { name: "a-0".into(), uid: uid.into(), version: "1".into() }
}

fn refused() -> RequestFailure {
    RequestFailure { reason: Some(RefusalReason::PoolExhausted), message: "none left".into() }
}

fn demands(state: &mut NodeState<Key>) -> Vec<BlockDemand> {
    std::iter::from_fn(|| state.next_request()).collect()
}

/// Requests that fail one after the other do not replace each other: the pods that wait are refused.
#[test]
fn a_refusal_reaches_the_pods_that_wait_when_the_last_request_has_ended() {
    let (mut state, now, pods) = (NodeState::default(), Instant::now(), [key("x"), key("y")]);
    let attempts =
        |state: &mut NodeState<Key>| pods.clone().map(|pod| state.allocate(now, "a", &pod, SMALL, &pod));
    assert_eq!(attempts(&mut state), [Attempt::Wait, Attempt::Wait]);
    let under_way = demands(&mut state);
    assert_eq!(under_way.len(), 2);
    state.end_request(now, &under_way[0], Err(refused()));
    assert_eq!(state.take_effects().wake, pods);
    assert_eq!(attempts(&mut state), [Attempt::Wait, Attempt::Wait]);
    assert_eq!(demands(&mut state), [], "one is still under way");
    state.end_request(now, &under_way[1], Err(refused()));
    let failed = || Attempt::Failed(AllocationError::NoBlock(refused()));
    assert_eq!(attempts(&mut state), [failed(), failed()]);
    let later = now + REFUSAL_LIFETIME;
    assert_eq!(state.allocate(later, "a", &pods[0], SMALL, &pods[0]), Attempt::Wait);
    assert_eq!(demands(&mut state).len(), 1, "the controller is asked again");
}

/// A program that starts while the API server is away goes on with the block it had, and with nothing once that is listed elsewhere.
#[test]
fn a_restored_block_is_used_until_the_blocks_are_listed() {
    let (mut state, now, pods) = (NodeState::<Key>::default(), Instant::now(), [key("x"), key("y")]);
    state.restore_block(block("old"));
    assert!(!state.are_blocks_known());
    assert!(matches!(state.allocate(now, "a", &pods[0], None, &pods[0]), Attempt::Allocated(_)));
    assert_eq!(state.allocate(now, "a", &pods[1], None, &pods[1]), Attempt::ReadPool, "it is full");
    assert_eq!(state.without_block().count(), 0);
    state.release(&pods[0]);
    state.sync_blocks(Vec::new());
    assert_eq!(state.blocks(), [], "the API server does not have it");
    state.restore_block(block("old"));
    assert_eq!(state.blocks(), [], "what is listed counts");
}

/// A block that was granted again under the same name is neither deleted nor forgotten in place of the old one.
#[test]
fn only_the_block_that_was_read_is_deleted_and_forgotten() {
    let (mut state, now, pod) = (NodeState::<Key>::default(), Instant::now(), key("x"));
    state.assume_block(now, block("old"));
    assert_eq!(state.close_block("a-0", Some(deletion("new"))), None);
    assert_eq!(state.close_block("a-0", Some(deletion("old"))), Some(deletion("old")));
    state.assume_block(now, block("new"));
    assert!(matches!(state.allocate(now, "a", &pod, SMALL, &pod), Attempt::Allocated(_)));
    assert!(!state.deletion_answered(&deletion("old"), DeletionAnswer::Unknown));
    state.forget_block("a-0", "old");
    assert_eq!(state.assumed(), [("a-0".to_owned(), "new".to_owned())]);
    assert_eq!(state.without_block().count(), 0);
    assert_eq!(state.table().block("a-0").map(Block::uid), Some("new"));
}

#[test]
fn a_freed_address_wakes_only_pods_of_its_pool() {
    let (mut state, now) = (NodeState::default(), Instant::now());
    state.assume_block(now, block("u"));
    let [first, waits, other] = ["first", "waits", "other"].map(key);
    assert!(matches!(state.allocate(now, "a", &first, SMALL, &first), Attempt::Allocated(_)));
    for (pool, pod) in [("a", &waits), ("b", &other)] {
        assert_eq!(state.allocate(now, pool, pod, SMALL, pod), Attempt::Wait);
    }
    state.take_effects();
    state.release(&first);
    assert_eq!(state.take_effects().wake, std::slice::from_ref(&waits));
    state.stop_waiting(&waits);
    assert!(demands(&mut state).iter().all(|demand| demand.pool == "b"));
}

fn pool(_: &str) -> Option<crate::Pool> {
    crate::Pool::parse("a", 0, [(Some("10.0.0.0/24"), None)]).ok()
}

fn shown<'a>(uid: &'a str, own: Option<Block>) -> ShownBlock<'a> {
    ShownBlock { name: "a-0", uid, own }
}

/// A block that etcd lost, or an operator deleted by hand: the node asks for exactly this one, once at a time.
#[test]
fn a_block_in_use_that_the_api_server_lost_is_claimed() {
    let (mut state, now, pod) = (NodeState::<Key>::default(), Instant::now(), key("x"));
    state.adopt(pod.clone(), "a", Some("10.0.0.7".parse().unwrap()), None).unwrap();
    assert_eq!(state.next_claim(now, pool), None, "nothing is known of blocks yet");
    state.sync_blocks(vec![]);
    assert!(state.take_effects().request);
    let claim = state.next_claim(now, pool).unwrap();
    let nets = DualStackNets { ipv4: Some("10.0.0.7/32".parse().unwrap()), ipv6: None };
    assert_eq!(claim, BlockDemand { pool: "a".into(), claim: Some(ClaimedBlock { index: 7, nets }) });
    assert_eq!(state.next_claim(now, pool), None, "one is under way");
    state.end_request(now, &claim, Err(refused()));
    assert_eq!(state.next_claim(now, pool), None, "after a pause");
    let later = now + CLAIM_INTERVAL;
    assert_eq!(state.next_claim(later, pool).as_ref(), Some(&claim));
    assert!(
        matches!(state.allocate(later, "a", &key("y"), SMALL, &key("y")), Attempt::Wait),
        "no failure of others"
    );
    let granted = Block::new("a-7", "a", nets, false, false).unwrap().with_uid("new");
    state.end_request(later, &claim, Ok(Some(granted)));
    assert_eq!(state.without_block().count(), 0);
    assert_eq!(state.next_claim(later + CLAIM_INTERVAL, pool), None);
}

#[test]
fn a_block_that_is_lost_stays_lost_while_the_watch_shows_it() {
    let (mut state, now, pod) = (NodeState::<Key>::default(), Instant::now(), key("x"));
    state.sync_blocks(vec![shown("old", Some(block("old")))]);
    assert!(matches!(state.allocate(now, "a", &pod, SMALL, &pod), Attempt::Allocated(_)));
    state.lose_block("a-0", "old");
    state.sync_blocks(vec![shown("old", Some(block("old")))]);
    let claim = state.next_claim(now, pool).unwrap();
    state.end_request(now, &claim, Ok(Some(block("new"))));
    state.sync_blocks(vec![shown("old", Some(block("old")))]);
    assert_eq!(state.table().block("a-0").map(Block::uid), Some("new"));
    state.sync_blocks(vec![shown("new", Some(block("new")))]);
    assert_eq!((state.without_block().count(), state.lost.len()), (0, 0));
}

#[test]
fn the_search_for_addresses_goes_on_after_a_restart() {
    let nets = DualStackNets { ipv4: Some("10.0.0.0/29".parse().unwrap()), ipv6: None };
    let block = || Block::new("a-0", "a", nets, false, false).unwrap().with_uid("u");
    let now = Instant::now();
    let address =
        |state: &mut NodeState<Key>, pod: &str| match state.allocate(now, "a", &key(pod), SMALL, &key(pod)) {
            Attempt::Allocated(allocation) => allocation.ipv4.unwrap().octets()[3],
            other => panic!("{other:?}"),
        };
    let mut state = NodeState::default();
    state.assume_block(now, block());
    assert_eq!(["x", "y", "z"].map(|pod| address(&mut state, pod)), [0, 1, 2]);
    assert!(state.take_effects().positions);
    state.release(&key("y"));
    state.release(&key("z"));
    let positions = state.table().search_positions();

    let mut restarted = NodeState::default();
    restarted.restore_positions(positions);
    restarted.adopt(key("x"), "a", Some("10.0.0.0".parse().unwrap()), None).unwrap();
    assert_eq!(restarted.table().search_positions(), BTreeMap::from([("u".to_owned(), 2)]));
    restarted.sync_blocks(vec![ShownBlock { name: "a-0", uid: "u", own: Some(block()) }]);
    assert_eq!(["y", "z"].map(|pod| address(&mut restarted, pod)), [3, 4]);
    assert_eq!(restarted.table().search_positions(), BTreeMap::from([("u".to_owned(), 4)]));
}

#[test]
fn positions_of_blocks_that_are_gone_are_forgotten() {
    let nets = DualStackNets { ipv4: Some("10.0.0.0/29".parse().unwrap()), ipv6: None };
    let block = Block::new("a-0", "a", nets, false, false).unwrap().with_uid("u");
    let mut state = NodeState::<Key>::default();
    let position = |uid: &str, offset| (uid.to_owned(), offset);
    state.restore_positions(BTreeMap::from([position("gone", 1), position("u", 2)]));
    assert_eq!(state.table().search_positions().len(), 2, "until the watch has shown all blocks");
    state.sync_blocks(vec![ShownBlock { name: "a-0", uid: "u", own: Some(block) }]);
    assert_eq!(state.table().search_positions(), BTreeMap::from([position("u", 2)]));
}

#[test]
fn without_ipv6_a_pair_is_allocated_as_its_ipv4_address_and_not_given_to_another() {
    let pair = DualStackNets { ipv4: "10.0.0.0/32".parse().ok(), ipv6: "fd00::/128".parse().ok() };
    let ipv6 = DualStackNets { ipv4: None, ipv6: "fd00::1/128".parse().ok() };
    let (mut state, now) = (NodeState::<Key>::default(), Instant::now());
    state.allocate_ipv4_only();
    state.assume_block(now, Block::new("a-0", "a", pair, false, false).unwrap());
    state.assume_block(now, Block::new("b-0", "b", ipv6, false, false).unwrap());
    let mut allocate = |pool: &str, pod: &str| match state.allocate(now, pool, &key(pod), SMALL, &key(pod)) {
        Attempt::Allocated(Allocation { ipv4, ipv6, .. }) => Some((ipv4.is_some(), ipv6.is_some())),
        _ => None,
    };
    assert_eq!(allocate("a", "x"), Some((true, false)));
    assert_eq!(allocate("a", "y"), None);
    assert_eq!(allocate("b", "z"), Some((false, true)), "there is nothing else");
}

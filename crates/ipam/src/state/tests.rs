use super::*;
use crate::BlockNets;
use crate::grant::RefusalReason;

const SMALL: Option<PoolInfo> = Some(PoolInfo::Usable { block_size: 1 });

fn key(id: &str) -> Key {
    Key { container_id: id.to_owned(), ifname: "eth0".to_owned() }
}

fn block(uid: &str) -> Block {
    let nets = BlockNets { ipv4: Some("10.0.0.0/32".parse().unwrap()), ipv6: None };
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

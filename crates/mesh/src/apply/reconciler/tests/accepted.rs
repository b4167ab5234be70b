//! Prefixes that peers may send from while a prefix moves from one gateway to another.

use super::*;

/// A device that was just opened.
fn opened() -> (Shared, DeviceSlot) {
    let kernel = Shared::default();
    let mut slot = DeviceSlot::new(Preference::Auto, PathBuf::from("/nonexistent"));
    slot.open(&mut FakeKernel(Arc::clone(&kernel)), paths().port(), "wire_kube", 1420).unwrap();
    (kernel, slot)
}

#[test]
fn a_prefix_is_accepted_from_the_former_gateway_all_the_time() {
    let (kernel, mut slot) = opened();
    let behind: IpNet = "10.244.3.0/24".parse().unwrap();
    let gateways = [key(1), key(2)];
    let of = |owner: PublicKey, prefix: bool| {
        let allowed_ips = prefix.then_some(behind).into_iter().collect();
        (owner, PeerConfig { allowed_ips, ..PeerConfig::default() })
    };
    let mut used = |gateway: PublicKey| {
        let set_peers = gateways.map(|it| of(it, it == gateway)).into();
        let others = gateways.into_iter().filter(|it| *it != gateway).map(|it| (it, vec![behind]));
        slot.change(&DeviceChange { set_peers, ..DeviceChange::default() }, &others.collect()).unwrap();
    };
    used(key(1));
    kernel.lock().unwrap().senders.clear();
    used(key(2));
    used(key(1));
    let record = kernel.lock().unwrap();
    for senders in &record.senders {
        let may_send = gateways.map(|it| senders.get(&it).is_some_and(|sends| sends.contains(&behind)));
        assert_eq!(may_send, [true, true], "{:?}", record.senders);
    }
    assert_eq!((record.senders.len(), record.changes.len()), (6, 3));
    assert_eq!(record.accepted, [(key(2), vec![behind])].into(), "and no longer than it may come");
}

#[test]
fn a_change_of_what_is_accepted_alone_is_one_step_and_the_same_again_is_none() {
    let (kernel, mut slot) = opened();
    let accepted = [(key(1), vec!["10.244.3.0/24".parse().unwrap()])].into();
    for _ in 0..2 {
        slot.change(&DeviceChange::default(), &accepted).unwrap();
    }
    let record = kernel.lock().unwrap();
    assert_eq!((&record.accepted, record.senders.len(), record.changes.len()), (&accepted, 1, 0));
}

//! Nodes that change their keys.

use super::*;
use crate::model::inputs::OwnKeys;

fn seen(kernel: &Shared, key: PublicKey, handshake: bool) {
    let mut kernel = kernel.lock().unwrap();
    let peer = kernel.state.as_mut().unwrap().peers.get_mut(&key).unwrap();
    peer.config.endpoint = "203.0.113.7:9".parse().ok();
    peer.last_handshake = handshake.then(SystemTime::now);
}

#[test]
fn a_node_that_announces_a_key_is_followed_at_its_first_handshake() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    let announcing = Member { next_key: Some(key(20)), ..member(2) };
    let announced = Arc::new(inputs([member(1), announcing, member(3)]));
    mesh.reconcile(&announced, now).unwrap();
    assert_eq!(kernel.lock().unwrap().changes[0].set_peers[&key(20)], PeerConfig::default());
    assert!(mesh.is_standby());
    mesh.reconcile(&announced, now).unwrap();
    mesh.watch_entries(now).unwrap();
    assert!(!mesh.is_outdated());

    seen(&kernel, key(20), true);
    mesh.watch_entries(now).unwrap();
    assert!(mesh.is_outdated());
    kernel.lock().unwrap().forget();
    let report = mesh.reconcile(&announced, now).unwrap();
    {
        let mut kernel = kernel.lock().unwrap();
        let [change] = &kernel.changes[..] else { panic!("{:?}", kernel.changes) };
        assert_eq!((&change.remove_peers[..], change.set_peers.len()), (&[key(2)][..], 1));
        assert_eq!(change.set_peers[&key(20)].allowed_ips, ["10.0.0.2/32".parse().unwrap()]);
        assert_eq!(report.peers[0].public_key, key(20));
        kernel.forget();
    }
    // What it publishes later is no news.
    let published = Member { public_key: Some(key(20)), ..member(2) };
    mesh.reconcile(&Arc::new(inputs([member(1), published, member(3)])), now).unwrap();
    let kernel = kernel.lock().unwrap();
    assert!(kernel.changes.iter().all(|change| change.remove_peers.is_empty()), "{:?}", kernel.changes);
    assert!(kernel.state.as_ref().unwrap().peers.contains_key(&key(20)) && !mesh.is_standby());
}

#[test]
fn a_key_that_was_not_announced_is_called_where_the_old_one_was() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    seen(&kernel, key(2), true);
    kernel.lock().unwrap().forget();
    let replaced = Member { public_key: Some(key(20)), ..member(2) };
    mesh.reconcile(&Arc::new(inputs([member(1), replaced, member(3)])), now).unwrap();
    let kernel = kernel.lock().unwrap();
    let [change] = &kernel.changes[..] else { panic!("{:?}", kernel.changes) };
    assert_eq!(change.set_peers[&key(20)].endpoint, "203.0.113.7:9".parse().ok());
    assert_eq!(change.remove_peers, [key(2)]);
}

#[test]
fn another_key_of_this_node_changes_nothing_else_of_the_device() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    seen(&kernel, key(2), true);
    seen(&kernel, key(3), true);
    mesh.reconcile(&three(), now).unwrap();
    kernel.lock().unwrap().forget();
    let three = inputs([member(1), member(2), member(3)]);
    let private_key = PrivateKey([9; 32]);
    let keys = OwnKeys { private: private_key.clone(), public: key(10), previous: Some(key(1)) };
    let rotated = Inputs { keys, ..three };
    mesh.reconcile(&Arc::new(rotated), now).unwrap();
    let kernel = kernel.lock().unwrap();
    let change = DeviceChange { private_key: Some(private_key), ..DeviceChange::default() };
    assert_eq!(kernel.changes, [change]);
}

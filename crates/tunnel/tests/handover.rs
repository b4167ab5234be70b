//! One process hands its device to the next: what an upgrade of a node is to the traffic of its pods.

mod common;

use std::path::Path;
use std::thread;
use std::time::Duration;

use common::handover::{Handover, Pings, assert_lossless};
use common::{NAME, PATIENCE, PORT, cable, pair, set_peer, until};
use fairlead_api::wireguard::DeviceChange;
use fairlead_tunnel::{Device, Settings};

#[test]
fn no_packet_is_lost_when_either_end_is_handed_over() {
    let (mut a, mut b) = pair();
    let pings = [Pings::start(&a.namespace, b.inner()[0]), Pings::start(&b.namespace, a.inner()[0])];
    for _ in 0..3 {
        let handover = Handover::new();
        handover.complete(&mut a, b.public, Some("192.0.2.2:51820"), &b.inner_prefixes());
        handover.complete(&mut b, a.public, None, &a.inner_prefixes());
        assert!(!handover.path.exists(), "what was listened at is left behind");
    }
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
}

/// Behind a NAT nobody knows its address but the device that hears of it.
#[test]
fn a_successor_knows_where_a_peer_without_an_endpoint_is() {
    let (a, mut b) = pair();
    Handover::new().complete(&mut b, a.public, None, &a.inner_prefixes());
    assert!(b.pings(a.inner()[0]), "the first ping finds its way");
    assert_eq!(b.peer(&a.public).config.endpoint, Some("192.0.2.1:51820".parse().unwrap()));
}

#[test]
fn a_working_address_is_kept_although_another_is_configured() {
    let (mut a, b) = pair();
    Handover::new().complete(&mut a, b.public, Some("192.0.2.77:51820"), &b.inner_prefixes());
    assert!(a.pings(b.inner()[0]));
    assert_eq!(a.peer(&b.public).config.endpoint, Some("192.0.2.2:51820".parse().unwrap()));
}

#[test]
fn where_a_peer_was_is_forgotten_when_everything_is_handed_over() {
    let (mut a, b) = pair();
    let handover = Handover::new();
    let retiring = handover.retire(&mut a);
    let waiting = thread::spawn(move || retiring.wait(PATIENCE));
    a.device = Some(handover.successor(&a).unwrap());
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT),
        ..DeviceChange::default()
    });
    assert!(waiting.join().unwrap());
    a.peer_with(&b, Some("192.0.2.77:51820"));
    assert_eq!(a.peer(&b.public).config.endpoint, Some("192.0.2.77:51820".parse().unwrap()));
}

#[test]
fn a_successor_that_dies_half_way_leaves_the_device_working() {
    let (mut a, b) = pair();
    let (handover, pings) = (Handover::new(), Pings::start(&a.namespace, b.inner()[0]));
    let retiring = handover.retire(&mut a);
    drop(handover.successor(&a).unwrap());
    assert!(!retiring.wait(Duration::from_secs(1)), "nobody took over");
    // Ended with its patience; another one starts as after any restart.
    a.restart();
    a.peer_with(&b, Some("192.0.2.2:51820"));
    a.reaches(b.inner()[0]);
    let (sent, answered) = pings.finish();
    // It worked on for the whole second.
    assert!(answered > 150, "{answered} of {sent}");
}

#[test]
fn a_predecessor_that_dies_half_way_leaves_everything_to_its_successor() {
    let (mut a, b) = pair();
    let handover = Handover::new();
    let retiring = handover.retire(&mut a);
    let successor = handover.successor(&a).unwrap();
    drop(retiring);
    a.device = Some(successor);
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    });
    a.reaches(b.inner()[0]);
}

#[test]
fn with_another_port_the_successor_starts_afresh() {
    let (mut a, b) = pair();
    let handover = Handover::new();
    let retiring = handover.retire(&mut a);
    let waiting = thread::spawn(move || retiring.wait(PATIENCE));
    a.device = Some(handover.successor(&a).unwrap());
    a.change(&DeviceChange {
        private_key: Some(a.private.clone()),
        listen_port: Some(PORT + 1),
        ..set_peer(b.public, Some("192.0.2.2:51820"), &b.inner_prefixes())
    });
    assert!(waiting.join().unwrap());
    a.reaches(b.inner()[0]);
    until("the peer follows", || b.peer(&a.public).config.endpoint.unwrap().port() == PORT + 1);
}

#[test]
fn without_a_predecessor_a_device_starts_as_ever() {
    let (namespace, _other) = cable();
    let path = Path::new("/nonexistent/handover.sock");
    let settings = Settings { predecessor: Some(path.to_owned()), ..Settings::new(NAME, 1420) };
    namespace.run(|| Device::start(settings)).unwrap();
}

#[test]
fn where_nobody_can_listen_is_named() {
    let (namespace, _other) = cable();
    let device = namespace.run(|| Device::start(Settings::new(NAME, 1420))).unwrap();
    let error = device.retire("/nonexistent/handover.sock".into()).err().unwrap().to_string();
    assert!(error.contains("/nonexistent/handover.sock"), "{error}");
}

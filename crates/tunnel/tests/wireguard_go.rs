//! An independent judge: wireguard-go talks to the embedded WireGuard.

#![cfg(test)]

mod common;

use std::fs;

use common::handover::{Handover, Pings, assert_lossless};
use common::wireguard_go::Judge;
use common::{NAME, Node, cable, set_peer, transfer, until};
use fairlead_api::wireguard::PrivateKey;

const INNER: [&str; 2] = ["10.8.0.9/32", "fd00:8::9/128"];

fn exchange(node: &Node, judge: &Judge) {
    for address in ["10.8.0.9", "fd00:8::9"] {
        node.reaches(address.parse().unwrap());
        transfer(&node.namespace, &judge.namespace, address.parse().unwrap(), 4);
    }
    for address in node.inner() {
        transfer(&judge.namespace, &node.namespace, address, 4);
    }
    let latest = judge.namespace.sh(&format!("wg show {NAME} latest-handshakes"));
    assert!(!latest.trim_end().ends_with("\t0"), "{latest}");
}

#[test]
fn we_initiate() {
    for endpoint in ["192.0.2.2:51820", "[2001:db8::2]:51820"] {
        let (a, b) = cable();
        let (node, judge) = (Node::start(a, 1), Judge::start(b));
        judge.peer_with(&node, "");
        node.change(&set_peer(judge.public, Some(endpoint), &INNER));
        exchange(&node, &judge);
    }
}

#[test]
fn wireguard_go_initiates() {
    for endpoint in ["192.0.2.1:51820", "[2001:db8::1]:51820"] {
        let (a, b) = cable();
        let (node, judge) = (Node::start(a, 1), Judge::start(b));
        node.change(&set_peer(judge.public, None, &INNER));
        // Its first keepalive is what makes it begin.
        judge.peer_with(&node, &format!("endpoint {endpoint} persistent-keepalive 25"));
        until("it came to us", || node.peer(&judge.public).last_handshake.is_some());
        exchange(&node, &judge);
    }
}

#[test]
fn a_preshared_key_is_mixed_in() {
    let (a, b) = cable();
    let (node, judge) = (Node::start(a, 1), Judge::start(b));
    let secret = PrivateKey([42; 32]);
    judge.namespace.run(|| fs::write("/run/wireguard/psk", secret.to_base64())).unwrap();
    judge.peer_with(&node, "preshared-key /run/wireguard/psk");
    let mut change = set_peer(judge.public, Some("192.0.2.2:51820"), &INNER);
    change.set_peers.values_mut().for_each(|config| config.preshared_key = Some(secret.0));
    node.change(&change);
    exchange(&node, &judge);
}

#[test]
fn a_device_that_is_handed_over_loses_nothing() {
    let (a, b) = cable();
    let (mut node, judge) = (Node::start(a, 1), Judge::start(b));
    judge.peer_with(&node, "");
    node.change(&set_peer(judge.public, Some("192.0.2.2:51820"), &INNER));
    node.reaches("10.8.0.9".parse().unwrap());
    let pings = [
        Pings::start(&node.namespace, "10.8.0.9".parse().unwrap()),
        Pings::start(&judge.namespace, node.inner()[0]),
    ];
    for _ in 0..3 {
        Handover::new().complete(&mut node, judge.public, Some("192.0.2.2:51820"), &INNER);
    }
    pings.into_iter().map(Pings::finish).for_each(assert_lossless);
}

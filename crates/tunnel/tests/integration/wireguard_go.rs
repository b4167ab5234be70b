//! An independent judge: wireguard-go talks to the embedded WireGuard.

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use crate::common::handover::{Handover, Pings, assert_lossless};
use crate::common::wireguard_go::{INNER, Judge};
use crate::common::{NAME, Namespace, Node, cable, set_peer, transfer, until};
use fairlead_keys::{PresharedKey, PrivateKey};

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
    change.set_peers.values_mut().for_each(|config| config.preshared_key = Some(PresharedKey(secret.0)));
    node.change(&change);
    exchange(&node, &judge);
}

/// The datagrams of the longest inner packets are as long as the path's MTU, but for those of the third case: headers take 60 bytes over
/// IPv4 and 80 over IPv6 (WireGuard paper, section 5.4.6, RFC 768, RFC 791 and RFC 8200). Packets of 1,440 bytes need no padding, those
/// of 1,420 and 8,920 leave too little room for it.
#[test]
fn the_shortest_and_the_longest_packets_cross_and_are_not_fragmented() {
    for (host, endpoint, path, mtu) in [
        (1, "192.0.2.2:51820", 1_500, 1_440),
        (2, "[2001:db8::2]:51820", 1_500, 1_420),
        (2, "192.0.2.2:51820", 9_000, 8_920),
        (1, "[2001:db8::2]:51820", 9_000, 8_920),
    ] {
        let (a, b) = cable();
        for namespace in [&a, &b] {
            namespace.sh(&format!("ip link set veth0 mtu {path}"));
        }
        let (node, judge) = (Node::start_with_mtu(a, host, mtu), Judge::start(b));
        judge.namespace.sh(&format!("ip link set {NAME} mtu {mtu}"));
        judge.peer_with(&node, "");
        node.change(&set_peer(judge.public, Some(endpoint), &INNER));
        let ends = [(&node.namespace, &judge.namespace), (&judge.namespace, &node.namespace)];
        for ((from, to), addresses) in ends.into_iter().zip([judge.inner(), node.inner()]) {
            for address in addresses {
                crosses_in_every_size(from, to, address, mtu as usize);
                transfer(from, to, address, 1);
            }
        }
        for namespace in [&node.namespace, &judge.namespace] {
            let fragments =
                namespace.sh("nstat -asz | grep -E '^Ip6?FragCreates ' | tr -s ' ' | cut -d ' ' -f 2");
            assert_eq!(fragments.trim(), "0\n0", "datagrams for packets of {mtu} bytes were fragmented");
        }
    }
}

/// Packets with DF: IPv6 has no other, and over IPv4 both ping(8) and udp(7) set it.
fn crosses_in_every_size(from: &Namespace, to: &Namespace, address: IpAddr, mtu: usize) {
    let (any, headers) = if address.is_ipv4() { ("0.0.0.0:0", 20 + 8) } else { ("[::]:0", 40 + 8) };
    let longest = mtu - headers;
    // The kernel may need a moment to take packets to a new address.
    let ping = format!("ping -n -c 1 -W 1 -M do -s {longest} {address} > /dev/null && echo answered || true");
    until(&format!("{address} answers"), || !from.sh(&ping).is_empty());
    let mut buffer = vec![0; mtu];
    for length in [0, 1, longest - 1, longest] {
        let sent: Vec<u8> = (0..length).map(|index| (index ^ (index >> 8)) as u8).collect();
        let receiver = to.run(|| UdpSocket::bind((address, 0))).unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        until(&format!("{length} bytes cross to {address}"), || {
            // From another port each time: wireguard-go sends a UDP checksum that comes to 0 as 0, which over IPv6 no receiver takes.
            let sender = from.run(|| UdpSocket::bind(any)).unwrap();
            assert_eq!(sender.send_to(&sent, receiver.local_addr().unwrap()).unwrap(), length);
            receiver.recv(&mut buffer).is_ok_and(|received| {
                assert!(buffer[..received] == sent, "{length} bytes to {address} arrived as {received}");
                true
            })
        });
    }
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

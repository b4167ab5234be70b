//! There and back, and against bytes written by hand from `linux/wireguard.h`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use fairlead_keys::{PeerConfig, PresharedKey};
use proptest::prelude::*;

use super::*;

const FAMILY: u16 = 0x1d;

fn payloads(update: &DeviceUpdate) -> Vec<Vec<u8>> {
    encode::device(FAMILY, "wg0", update).unwrap().into_iter().map(|message| message.payload).collect()
}

fn decode(payloads: &[Vec<u8>]) -> Parsed<DeviceState> {
    decode::device(payloads.iter().map(Vec::as_slice))
}

fn full(key: PublicKey, config: &PeerConfig) -> PeerUpdate {
    PeerUpdate {
        public_key: key,
        only_existing: false,
        preshared_key: config.preshared_key.map(|key| key.0),
        endpoint: config.endpoint,
        persistent_keepalive: config.persistent_keepalive,
        replace_allowed_ips: true,
        allowed_ips: config.allowed_ips.clone(),
    }
}

/// Attributes of a peer as they are in the kernel's answer.
fn attribute(kind: u8, value: &[u8]) -> Vec<u8> {
    let mut bytes = ((value.len() + 4) as u16).to_le_bytes().to_vec();
    bytes.extend([kind, 0]);
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[test]
#[cfg(target_endian = "little")]
fn a_request_is_as_the_header_says() {
    let update = DeviceUpdate {
        private_key: Some(PrivateKey([7; 32])),
        listen_port: Some(51820),
        fwmark: Some(0x20),
        remove: vec![PublicKey([1; 32])],
        set: vec![PeerUpdate {
            public_key: PublicKey([2; 32]),
            only_existing: false,
            preshared_key: None,
            endpoint: Some("192.0.2.1:51820".parse().unwrap()),
            persistent_keepalive: Some(25),
            replace_allowed_ips: true,
            allowed_ips: vec!["10.2.0.0/16".parse().unwrap()],
        }],
    };
    let messages = encode::device(FAMILY, "wg0", &update).unwrap();
    assert_eq!(messages.len(), 1);
    let message = &messages[0];
    assert_eq!((message.kind, message.flags), (FAMILY, 0));
    assert_eq!(
        message.what,
        format!(
            "configure WireGuard device wg0: private key, listen port 51820, mark 0x20, 2 peers (first {})",
            PublicKey([2; 32])
        )
    );
    let mut expected = vec![1, 1, 0, 0]; // WG_CMD_SET_DEVICE, version 1
    expected.extend([8, 0, 2, 0, b'w', b'g', b'0', 0]);
    expected.extend(attribute(3, &[7; 32]));
    expected.extend(attribute(6, &[0x6c, 0xca]));
    expected.extend(attribute(7, &[0x20, 0, 0, 0]));
    let removed = [attribute(1, &[1; 32]), attribute(3, &[5, 0, 0, 0])].concat();
    let prefix = [attribute(1, &[2, 0]), attribute(2, &[10, 2, 0, 0]), attribute(3, &[16])].concat();
    let endpoint = [2, 0, 0xca, 0x6c, 192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let nested = |kind: u8, value: &[u8]| {
        let mut bytes = attribute(kind, value);
        bytes[3] = 0x80;
        bytes
    };
    let added = [
        attribute(1, &[2; 32]),
        attribute(3, &[2, 0, 0, 0]),
        attribute(4, &endpoint),
        attribute(5, &[25, 0]),
        nested(9, &nested(0, &prefix)),
    ]
    .concat();
    expected.extend(nested(8, &[nested(0, &added), nested(0, &removed)].concat()));
    assert_eq!(message.payload, expected);
}

/// Until a peer is gone, its prefixes are no other one's: one that takes them over comes first.
#[test]
fn only_a_peer_that_is_made_anew_is_removed_before_others_are_set() {
    let keys = [1, 2, 3].map(|number| PublicKey([number; 32]));
    let [gone, anew, _] = keys;
    let set = keys[1..].iter().map(|key| PeerUpdate {
        public_key: *key,
        only_existing: false,
        preshared_key: None,
        endpoint: None,
        persistent_keepalive: None,
        replace_allowed_ips: true,
        allowed_ips: Vec::new(),
    });
    let update = DeviceUpdate { remove: vec![gone, anew], set: set.collect(), ..DeviceUpdate::default() };
    let [message] = &encode::device(FAMILY, "wg0", &update).unwrap()[..] else { panic!() };
    let is_key =
        |bytes: &&[u8]| bytes[1..].iter().all(|byte| *byte == bytes[0]) && (1..=3).contains(&bytes[0]);
    let order: Vec<u8> = message.payload.windows(32).filter(is_key).map(|bytes| bytes[0]).collect();
    assert_eq!(order, [2, 2, 3, 1]);
}

#[test]
fn an_answer_in_two_messages_is_joined() {
    let prefix = |third: u8| {
        let family = (libc::AF_INET as u16).to_ne_bytes();
        attribute(0, &[attribute(1, &family), attribute(2, &[10, 0, third, 0]), attribute(3, &[24])].concat())
    };
    let mut moment = 1_700_000_000i64.to_ne_bytes().to_vec();
    moment.extend(500_000_000i64.to_ne_bytes());
    let mut endpoint = (libc::AF_INET6 as u16).to_ne_bytes().to_vec();
    endpoint.extend([0xca, 0x6c, 0, 0, 0, 0, 0xfe, 0x80]);
    endpoint.extend([0; 13]);
    endpoint.push(9);
    endpoint.extend(4u32.to_ne_bytes());
    let first_peer = [
        attribute(1, &[2; 32]),
        attribute(2, &[0; 32]),
        attribute(4, &endpoint),
        attribute(5, &0u16.to_ne_bytes()),
        attribute(6, &moment),
        attribute(7, &11u64.to_ne_bytes()),
        attribute(8, &12u64.to_ne_bytes()),
        attribute(9, &[prefix(2), prefix(1)].concat()),
        attribute(10, &1u32.to_ne_bytes()),
    ]
    .concat();
    let header = [0, 1, 0, 0].to_vec();
    let one = [
        header.clone(),
        attribute(1, &5u32.to_ne_bytes()),
        attribute(2, b"wg0\0"),
        attribute(3, &[7; 32]),
        attribute(6, &51820u16.to_ne_bytes()),
        attribute(7, &0x20u32.to_ne_bytes()),
        attribute(8, &attribute(0, &first_peer)),
    ]
    .concat();
    let continued = [attribute(1, &[2; 32]), attribute(9, &prefix(0))].concat();
    let other = [attribute(1, &[3; 32]), attribute(2, &[4; 32])].concat();
    let two = [header, attribute(8, &[attribute(0, &continued), attribute(0, &other)].concat())].concat();

    let state = decode(&[one, two]).unwrap();
    assert_eq!(state.private_key, Some(PrivateKey([7; 32])));
    assert_eq!((state.listen_port, state.fwmark), (51820, 0x20));
    assert_eq!(state.peers.len(), 2);
    let joined = &state.peers[&PublicKey([2; 32])];
    let prefixes: Vec<String> = joined.config.allowed_ips.iter().map(ToString::to_string).collect();
    assert_eq!(prefixes, ["10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24"]);
    assert_eq!(joined.config.endpoint.unwrap().to_string(), "[fe80::9%4]:51820");
    assert_eq!((joined.config.preshared_key, joined.config.persistent_keepalive), (None, None));
    assert_eq!(
        joined.last_handshake,
        Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_500))
    );
    assert_eq!((joined.rx_bytes, joined.tx_bytes), (11, 12));
    let other = &state.peers[&PublicKey([3; 32])];
    assert_eq!(other.config.preshared_key, Some(PresharedKey([4; 32])));
    assert_eq!(other.last_handshake, None);
}

#[test]
fn large_updates_are_cut_and_complete() {
    let allowed_ips: Vec<IpNet> = (0..5000u32)
        .map(|n| IpNet::new(std::net::Ipv6Addr::from_bits(u128::from(n) << 64).into(), 64).unwrap())
        .collect();
    let large = PeerConfig { allowed_ips, ..PeerConfig::default() };
    let small = PeerConfig { allowed_ips: vec!["10.0.0.0/8".parse().unwrap()], ..large.clone() };
    let mut peers: Vec<(PublicKey, PeerConfig)> =
        (1..=200).map(|n| (PublicKey([n; 32]), small.clone())).collect();
    peers.push((PublicKey([255; 32]), large));
    let update = DeviceUpdate {
        fwmark: Some(1),
        set: peers.iter().map(|(key, config)| full(*key, config)).collect(),
        ..DeviceUpdate::default()
    };
    let payloads = payloads(&update);
    assert!(payloads.len() > 3);
    let state = decode(&payloads).unwrap();
    assert_eq!(state.fwmark, 1);
    let decoded: Vec<_> = state.peers.into_iter().map(|(key, peer)| (key, peer.config)).collect();
    assert_eq!(decoded, peers);
}

#[test]
fn nothing_is_nothing() {
    assert!(payloads(&DeviceUpdate::default()).is_empty());
    assert_eq!(payloads(&DeviceUpdate { fwmark: Some(0), ..DeviceUpdate::default() }).len(), 1);
}

#[test]
fn no_such_family_is_unsupported() {
    let error = match WireGuard::open() {
        // tests/kernel_wireguard.rs of `dataplane` tries it out.
        Ok(_) => return testbed_netns::skipped("this kernel has WireGuard"),
        Err(error) => error,
    };
    assert!(error.is_unsupported(), "{error}");
    assert!(error.to_string().contains("wireguard"), "{error}");
}

fn config() -> impl Strategy<Value = PeerConfig> {
    let endpoint = prop_oneof![
        any::<std::net::SocketAddrV4>().prop_map(SocketAddr::from),
        (any::<std::net::Ipv6Addr>(), any::<u16>(), any::<u32>())
            .prop_map(|(address, port, scope)| std::net::SocketAddrV6::new(address, port, 0, scope).into()),
    ];
    let net = prop_oneof![
        (any::<std::net::Ipv4Addr>(), 0u8..=32).prop_map(|(a, l)| IpNet::new(a.into(), l).unwrap()),
        (any::<std::net::Ipv6Addr>(), 0u8..=128).prop_map(|(a, l)| IpNet::new(a.into(), l).unwrap()),
    ];
    let nets = proptest::collection::btree_set(net.prop_map(|net| net.trunc()), 0..30);
    let key = proptest::option::of(any::<[u8; 32]>().prop_filter("zero is none", |key| *key != [0; 32]));
    (key, proptest::option::of(endpoint), proptest::option::of(1u16..), nets).prop_map(
        |(key, endpoint, persistent_keepalive, nets): (Option<_>, _, _, BTreeSet<IpNet>)| PeerConfig {
            preshared_key: key.map(PresharedKey),
            endpoint,
            persistent_keepalive,
            allowed_ips: nets.into_iter().collect(),
        },
    )
}

use std::net::SocketAddr;

proptest! {
    #[test]
    fn there_and_back(
        peers in proptest::collection::btree_map(any::<[u8; 32]>().prop_map(PublicKey), config(), 0..20),
        private in proptest::option::of(any::<[u8; 32]>().prop_filter("zero is none", |key| *key != [0; 32])),
        listen_port in any::<u16>(), fwmark in any::<u32>(),
    ) {
        let update = DeviceUpdate {
            private_key: private.map(PrivateKey),
            listen_port: Some(listen_port),
            fwmark: Some(fwmark),
            remove: Vec::new(),
            set: peers.iter().map(|(key, config)| full(*key, config)).collect(),
        };
        let state = decode(&payloads(&update)).unwrap();
        prop_assert_eq!(state.private_key, private.map(PrivateKey));
        prop_assert_eq!((state.listen_port, state.fwmark), (listen_port, fwmark));
        let decoded: BTreeMap<_, _> = state.peers.into_iter().map(|(key, peer)| (key, peer.config)).collect();
        prop_assert_eq!(decoded, peers);
    }

    #[test]
    fn broken_answers_are_errors_not_panics(config in config(), cut in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), value: u8) {
        let update = DeviceUpdate { set: vec![full(PublicKey([1; 32]), &config)], ..DeviceUpdate::default() };
        let mut payload = payloads(&update).remove(0);
        let at = at.index(payload.len());
        payload[at] = value;
        payload.truncate(cut.index(payload.len() + 1));
        let _ = decode(&[payload]);
    }

    #[test]
    fn garbage_is_not_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(std::slice::from_ref(&bytes));
        let _ = family_id(&bytes);
    }
}

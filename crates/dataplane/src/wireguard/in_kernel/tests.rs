use fairlead_keys::{DeviceConfig, PresharedKey, PrivateKey};
use proptest::prelude::*;

use super::*;

/// Applies an update as the kernel does (`drivers/net/wireguard/netlink.c`, `set_peer`).
fn apply(state: &mut DeviceState, update: &DeviceUpdate) {
    state.private_key = update.private_key.clone().or(state.private_key.take());
    state.listen_port = update.listen_port.unwrap_or(state.listen_port);
    state.fwmark = update.fwmark.unwrap_or(state.fwmark);
    for key in &update.remove {
        state.peers.remove(key);
    }
    for set in &update.set {
        if set.only_existing && !state.peers.contains_key(&set.public_key) {
            continue;
        }
        for (key, other) in &mut state.peers {
            other.config.allowed_ips.retain(|net| *key == set.public_key || !set.allowed_ips.contains(net));
        }
        let peer =
            &mut state.peers.entry(set.public_key).or_insert_with(|| peer(config(None, None, &[]))).config;
        if let Some(key) = set.preshared_key {
            peer.preshared_key = (key != [0; 32]).then_some(PresharedKey(key));
        }
        if let Some(seconds) = set.persistent_keepalive {
            peer.persistent_keepalive = (seconds != 0).then_some(seconds);
        }
        peer.endpoint = set.endpoint.or(peer.endpoint);
        if set.replace_allowed_ips {
            peer.allowed_ips.clear();
        }
        peer.allowed_ips.extend(&set.allowed_ips);
        peer.allowed_ips.sort();
    }
}

fn config(endpoint: Option<&str>, persistent_keepalive: Option<u16>, nets: &[u8]) -> PeerConfig {
    let nets: BTreeSet<IpNet> = nets.iter().map(|n| IpNet::new([10, *n, 0, 0].into(), 16).unwrap()).collect();
    PeerConfig {
        endpoint: endpoint.map(|text| text.parse().unwrap()),
        persistent_keepalive,
        allowed_ips: nets.into_iter().collect(),
        ..PeerConfig::default()
    }
}

fn peer(config: PeerConfig) -> PeerState {
    PeerState { config, ..PeerState::default() }
}

fn one_peer(state: PeerConfig, wanted: PeerConfig) -> DeviceUpdate {
    let key = PublicKey([1; 32]);
    let state = DeviceState {
        private_key: None,
        listen_port: 0,
        fwmark: 0,
        peers: BTreeMap::from([(key, peer(state))]),
    };
    narrow(
        &DeviceChange { set_peers: BTreeMap::from([(key, wanted)]), ..DeviceChange::default() },
        &state,
        SystemTime::UNIX_EPOCH,
    )
}

#[test]
fn a_new_endpoint_leaves_the_prefixes_alone() {
    let before = config(Some("192.0.2.1:51820"), Some(25), &[1, 2]);
    let after = config(Some("[2001:db8::1]:7"), Some(25), &[1, 2]);
    let update = one_peer(before, after.clone());
    assert_eq!(update.set.len(), 1);
    assert_eq!(update.set[0].endpoint, after.endpoint);
    assert!(!update.set[0].replace_allowed_ips && update.set[0].allowed_ips.is_empty());
    assert_eq!(update.set[0].persistent_keepalive, None);
}

#[test]
fn an_added_prefix_is_sent_alone_and_a_removed_one_replaces_all() {
    let update = one_peer(config(None, None, &[1]), config(None, None, &[1, 2]));
    assert!(!update.set[0].replace_allowed_ips);
    assert_eq!(update.set[0].allowed_ips, config(None, None, &[2]).allowed_ips);
    let update = one_peer(config(None, None, &[1, 2]), config(None, None, &[2]));
    assert!(update.set[0].replace_allowed_ips);
    assert_eq!(update.set[0].allowed_ips, config(None, None, &[2]).allowed_ips);
}

#[test]
fn a_prefix_that_moves_to_another_peer_disturbs_no_other_prefix() {
    let [one, other] = [PublicKey([1; 32]), PublicKey([2; 32])];
    for (from, to) in [(one, other), (other, one)] {
        let of = |from_has: &[u8], to_has: &[u8]| [(from, from_has.to_vec()), (to, to_has.to_vec())];
        let peers = of(&[1, 2], &[3]).map(|(key, nets)| (key, peer(config(None, None, &nets))));
        let mut state =
            DeviceState { private_key: None, listen_port: 0, fwmark: 0, peers: BTreeMap::from(peers) };
        let set_peers = of(&[1], &[2, 3]).map(|(key, nets)| (key, config(None, None, &nets)));
        let change = DeviceChange { set_peers: BTreeMap::from(set_peers.clone()), ..DeviceChange::default() };
        let update = narrow(&change, &state, SystemTime::UNIX_EPOCH);
        assert!(
            matches!(&update.set[..], [set] if set.public_key == to && !set.replace_allowed_ips),
            "{update:?}"
        );
        apply(&mut state, &update);
        for (key, wanted) in set_peers {
            assert_eq!(state.peers[&key].config.allowed_ips, wanted.allowed_ips);
        }
    }
}

#[test]
fn a_peer_that_loses_prefixes_comes_after_those_that_gain_them() {
    let [one, other] = [PublicKey([1; 32]), PublicKey([2; 32])];
    for (from, to) in [(one, other), (other, one)] {
        let of = |from_has: &[u8], to_has: &[u8]| {
            BTreeMap::from(
                [(from, from_has), (to, to_has)].map(|(key, nets)| (key, config(None, None, nets))),
            )
        };
        let peers = of(&[1, 2, 3], &[4]).into_iter().map(|(key, config)| (key, peer(config))).collect();
        let state = DeviceState { private_key: None, listen_port: 0, fwmark: 0, peers };
        let change = DeviceChange { set_peers: of(&[1], &[2, 4]), ..DeviceChange::default() };
        let update = narrow(&change, &state, SystemTime::UNIX_EPOCH);
        let order: Vec<_> = update.set.iter().map(|set| (set.public_key, set.replace_allowed_ips)).collect();
        assert_eq!(order, [(to, false), (from, true)]);
    }
}

#[test]
fn a_peer_that_was_never_heard_is_made_anew_at_another_endpoint() {
    let key = PublicKey([1; 32]);
    let wanted = config(Some("[2001:db8::1]:7"), Some(25), &[1, 2]);
    let asked = PeerState { tx_bytes: 148, ..peer(config(Some("192.0.2.1:51820"), Some(25), &[1, 2])) };
    let update_of = |state: &PeerState| {
        let peers = BTreeMap::from([(key, state.clone())]);
        let present = DeviceState { private_key: None, listen_port: 0, fwmark: 0, peers };
        let set_peers = BTreeMap::from([(key, wanted.clone())]);
        let change = DeviceChange { set_peers, ..DeviceChange::default() };
        narrow(&change, &present, SystemTime::UNIX_EPOCH)
    };
    let update = update_of(&asked);
    assert_eq!((&update.remove[..], &update.set[..]), (&[key][..], &[whole_peer(key, &wanted)][..]));
    let heard = PeerState { rx_bytes: 92, ..asked.clone() };
    let unasked = PeerState { tx_bytes: 0, ..asked.clone() };
    let at_rest = PeerState { config: wanted.clone(), ..asked };
    for stays in [heard, unasked, at_rest] {
        let update = update_of(&stays);
        assert!(update.remove.is_empty() && update.set.iter().all(|set| set.only_existing), "{update:?}");
    }
}

#[test]
fn a_peer_that_says_that_it_has_no_session_is_made_anew_unless_the_session_is_new() {
    let key = PublicKey([1; 32]);
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
    let present = config(Some("192.0.2.1:51820"), Some(25), &[1, 2]);
    let update_after = |age: Option<u64>| {
        let last_handshake = age.map(|age| now - Duration::from_secs(age));
        let state = PeerState { last_handshake, rx_bytes: 92, ..peer(present.clone()) };
        let state = DeviceState {
            private_key: None,
            listen_port: 0,
            fwmark: 0,
            peers: BTreeMap::from([(key, state)]),
        };
        let handshakes = BTreeSet::from([key, PublicKey([9; 32])]);
        narrow(&DeviceChange { handshakes, ..DeviceChange::default() }, &state, now)
    };
    for age in [None, Some(5), Some(100)] {
        let update = update_after(age);
        assert_eq!((&update.remove[..], &update.set[..]), (&[key][..], &[whole_peer(key, &present)][..]));
    }
    assert!(update_after(Some(4)).is_empty());
}

#[test]
fn a_peer_that_is_removed_and_set_in_one_change_is_made_anew() {
    let (key, wanted) = (PublicKey([1; 32]), config(None, None, &[]));
    let peers = BTreeMap::from([(key, peer(config(Some("192.0.2.1:7"), Some(25), &[1])))]);
    let present = DeviceState { private_key: None, listen_port: 0, fwmark: 0, peers };
    let set_peers = BTreeMap::from([(key, wanted.clone())]);
    let change = DeviceChange { set_peers, remove_peers: vec![key], ..DeviceChange::default() };
    let update = narrow(&change, &present, SystemTime::UNIX_EPOCH);
    assert_eq!((&update.remove[..], &update.set[..]), (&[key][..], &[whole_peer(key, &wanted)][..]));
}

#[test]
fn with_another_private_key_the_peers_with_keepalives_are_called_and_keep_their_prefixes() {
    let (called, quiet) = (PublicKey([1; 32]), PublicKey([2; 32]));
    let peers = [(called, Some(25)), (quiet, None)];
    let peers = peers.map(|(key, seconds)| (key, peer(config(Some("192.0.2.1:7"), seconds, &[1]))));
    let update = |private_key| {
        let present =
            DeviceState { private_key, listen_port: 0, fwmark: 0, peers: BTreeMap::from(peers.clone()) };
        let private_key = Some(PrivateKey([9; 32]));
        narrow(&DeviceChange { private_key, ..DeviceChange::default() }, &present, SystemTime::UNIX_EPOCH)
    };
    let update_of = update(Some(PrivateKey([8; 32])));
    let seconds: Vec<_> = update_of.set.iter().map(|it| (it.public_key, it.persistent_keepalive)).collect();
    assert_eq!(seconds, [(called, Some(0)), (called, Some(25))]);
    assert!(update_of.set.iter().all(|it| it.only_existing && !it.replace_allowed_ips));
    assert!(update_of.remove.is_empty());
    assert!(update(None).set.is_empty(), "a new device calls its peers as it gets them");
}

#[test]
fn unchanged_values_are_not_sent() {
    let present = config(Some("192.0.2.1:51820"), None, &[1]);
    let update =
        one_peer(present.clone(), PeerConfig { endpoint: None, persistent_keepalive: Some(0), ..present });
    assert!(update.is_empty(), "{update:?}");
}

fn peers() -> impl Strategy<Value = BTreeMap<PublicKey, PeerConfig>> {
    let endpoint = proptest::option::of(prop_oneof![Just("192.0.2.1:1"), Just("[2001:db8::1]:2")]);
    let settings = (endpoint, proptest::option::of(1u16..3), proptest::option::of(1u8..3));
    // Each prefix belongs to one peer at most, as topology ensures.
    (proptest::collection::btree_map(0u8..6, settings, 0..6), proptest::collection::vec(0u8..6, 8)).prop_map(
        |(peers, owners)| {
            let nets = |owner: u8| (0u8..8).filter(|n| owners[usize::from(*n)] == owner).collect::<Vec<_>>();
            let peer = |(n, (endpoint, keepalive, preshared)): (u8, (Option<&str>, _, Option<u8>))| {
                let preshared_key = preshared.map(|byte| PresharedKey([byte; 32]));
                (PublicKey([n; 32]), PeerConfig { preshared_key, ..config(endpoint, keepalive, &nets(n)) })
            };
            peers.into_iter().map(peer).collect()
        },
    )
}

proptest! {
    #[test]
    fn a_narrowed_change_has_the_effect_of_the_whole_one(before in peers(), after in peers(), port in 1u16..3) {
        let mut state = DeviceState {
            private_key: None,
            listen_port: 1,
            fwmark: 0,
            peers: before.into_iter().map(|(key, config)| (key, peer(config))).collect(),
        };
        let desired = DeviceConfig { private_key: PrivateKey([9; 32]), listen_port: port, fwmark: 0x20, peers: after };
        let DeviceConfig { private_key, listen_port, fwmark, peers } = &desired;
        let change = |state: &DeviceState| {
            state.change_of((private_key, *listen_port, *fwmark), peers, |_, peer| (peer, peer.endpoint))
        };
        let update = narrow(&change(&state), &state, SystemTime::UNIX_EPOCH);
        apply(&mut state, &update);
        prop_assert!(change(&state).is_empty(), "{:?} after {:?}", change(&state), update);
    }
}

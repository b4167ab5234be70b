//! The kernel's WireGuard behind the trait.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_api::wireguard::{DeviceChange, DeviceState, PeerConfig, PeerState, PublicKey};
use fairlead_netlink::route::{self, RouteSocket};
use fairlead_netlink::wireguard::{DeviceUpdate, PeerUpdate, WireGuard, add_link};
use ipnet::IpNet;

use self::path_socket::PathPort;
use super::{Backend, Error, PathSocket, PendingHandover, Settings, WireGuardDevice};

/// Least time between handshakes (WireGuard paper 6.1).
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);

mod path_socket;
mod path_table;
mod retests;
mod self_test;

pub(super) struct Device {
    interface: String,
    sockets: Mutex<Sockets>,
    /// Without nftables there is none.
    path_port: Result<Arc<PathPort>, fairlead_netlink::Error>,
}

/// Both belong to the namespace in which the device was opened, whichever thread uses them.
#[derive(Debug)]
struct Sockets {
    family: WireGuard,
    links: RouteSocket,
}

impl Device {
    /// Adopts the link, or creates it.
    pub(super) fn open(
        settings: &Settings,
        family: WireGuard,
        links: &mut RouteSocket,
        exists: bool,
    ) -> Result<Self, Error> {
        if !exists {
            links.apply(&[add_link(&settings.interface, settings.mtu)?])?;
        }
        let sockets = Mutex::new(Sockets { family, links: RouteSocket::open()? });
        let path_port = PathPort::new().map(Arc::new);
        Ok(Self { interface: settings.interface.clone(), sockets, path_port })
    }

    /// A panic leaves the sockets usable: requests are independent of each other.
    fn sockets(&self) -> MutexGuard<'_, Sockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WireGuardDevice for Device {
    fn backend(&self) -> Backend {
        Backend::Kernel
    }

    fn interface(&self) -> &str {
        &self.interface
    }

    fn state(&self) -> Result<DeviceState, Error> {
        Ok(self.sockets().family.state(&self.interface)?)
    }

    fn change(&self, change: &DeviceChange) -> Result<(), Error> {
        if change.is_empty() {
            return Ok(());
        }
        let mut sockets = self.sockets();
        let present = sockets.family.state(&self.interface)?;
        sockets.family.update(&self.interface, &narrow(change, &present, SystemTime::now()))?;
        let mark = change.fwmark.unwrap_or(present.fwmark);
        if let Ok(path_port) = &self.path_port {
            path_port
                .set_wireguard_port(configured_port(mark, change.listen_port.unwrap_or(present.listen_port)));
        }
        Ok(())
    }

    fn open_path_socket(&self) -> io::Result<Option<Box<dyn PathSocket>>> {
        let path_port = self.path_port.as_ref().map_err(|error| io::Error::other(error.to_string()))?;
        let state = self.state().map_err(io::Error::other)?;
        let port = configured_port(state.fwmark, state.listen_port);
        Ok(path_port.open(port).map(|socket| Box::new(socket) as Box<dyn PathSocket>))
    }

    fn hand_over(self: Box<Self>, _: PathBuf) -> Result<Option<PendingHandover>, Error> {
        Ok(None)
    }

    fn delete(self: Box<Self>) -> Result<(), Error> {
        if let Ok(path_port) = &self.path_port {
            path_port.remove()?;
        }
        let mut sockets = self.sockets();
        match sockets.links.link_by_name(&self.interface)? {
            Some(link) => Ok(sockets.links.apply(&[route::delete_link(link.index)])?),
            None => Ok(()),
        }
    }
}

/// The port of a device that was configured; zero before. The kernel gives a new device that is up a random one, from which
/// nothing may be sent: peers would take it for this node's.
fn configured_port(mark: u32, port: u16) -> u16 {
    if mark == MARK_FROM_WIREGUARD { port } else { 0 }
}

/// Removes from a change what is unchanged.
///
/// Replacing a peer's allowed addresses removes them for a moment, in which packets are lost: neither a change of endpoint alone
/// nor a prefix that another peer takes over must do that.
pub(super) fn narrow(change: &DeviceChange, present: &DeviceState, now: SystemTime) -> DeviceUpdate {
    let mut remove = change.remove_peers.clone();
    let mut set = Vec::new();
    let prefixes = |(key, peer)| trunc(peer).into_iter().map(move |prefix| (prefix, key));
    let owners: BTreeMap<IpNet, &PublicKey> = change.set_peers.iter().flat_map(prefixes).collect();
    for (key, wanted) in &change.set_peers {
        match present.peers.get(key).filter(|_| !change.remove_peers.contains(key)) {
            None => set.push(whole_peer(*key, wanted)),
            Some(state) if waits_in_vain(wanted, state) => {
                remove.push(*key);
                set.push(whole_peer(*key, wanted));
            }
            Some(state) => {
                let is_taken = |prefix: &IpNet| owners.get(prefix).is_some_and(|owner| *owner != key);
                set.extend(changed_peer(*key, wanted, state, is_taken));
            }
        }
    }
    for key in &change.handshakes {
        let stays = !remove.contains(key);
        if let Some(state) = present.peers.get(key).filter(|state| stays && !has_new_session(state, now)) {
            let present = &state.config;
            let wanted = change.set_peers.get(key).unwrap_or(present);
            let endpoint = wanted.endpoint.or(present.endpoint);
            set.retain(|update| update.public_key != *key);
            remove.push(*key);
            set.push(whole_peer(*key, &PeerConfig { endpoint, ..wanted.clone() }));
        }
    }
    if change.private_key.is_some() && present.private_key.is_some() {
        let stays = |key: &PublicKey| !remove.contains(key);
        let called = present.peers.iter().filter(|(key, _)| stays(key)).flat_map(|(key, state)| {
            let wanted = change.set_peers.get(key).unwrap_or(&state.config);
            call(*key, wanted.persistent_keepalive)
        });
        set.extend(called.collect::<Vec<_>>());
    }
    // A peer that loses prefixes comes after those that gain them, so that the kernel moves what goes from one to the other.
    set.sort_by_key(|update| update.only_existing && update.replace_allowed_ips);
    DeviceUpdate {
        private_key: change.private_key.clone(),
        listen_port: change.listen_port,
        fwmark: change.fwmark,
        remove,
        set,
    }
}

/// Makes the kernel call a peer that keepalives are sent to: one is sent when they are switched on (`set_peer`), and the device, which has
/// just taken another private key, has no session for it. Else the peer would learn of the new key with the next packet.
fn call(public_key: PublicKey, keepalive: Option<u16>) -> Vec<PeerUpdate> {
    let Some(seconds) = keepalive.filter(|seconds| *seconds > 0) else { return Vec::new() };
    let switch = |seconds| PeerUpdate {
        public_key,
        only_existing: true,
        preshared_key: None,
        endpoint: None,
        persistent_keepalive: Some(seconds),
        replace_allowed_ips: false,
        allowed_ips: Vec::new(),
    };
    vec![switch(0), switch(seconds)]
}

/// Whether a handshake was sent to another endpoint, and the peer was never heard. The kernel repeats a handshake after 5 s
/// (`REKEY_TIMEOUT`), wherever the peer is by then; one that is made anew is sent a handshake at once. It has no session that
/// it could lose, and not even a handshake of the peer under way: that would count as received.
fn waits_in_vain(wanted: &PeerConfig, state: &PeerState) -> bool {
    let is_moved = wanted.endpoint.is_some() && wanted.endpoint != state.config.endpoint;
    let is_unheard = state.last_handshake.is_none() && state.rx_bytes == 0;
    is_moved && is_unheard && state.config.endpoint.is_some() && state.tx_bytes > 0
}

/// Whether the peer has a session that it may not have known of when it said that it has none. Nothing makes the kernel start a
/// handshake while it takes a session for alive, but to make the peer anew; this session must outlive that.
fn has_new_session(state: &PeerState, now: SystemTime) -> bool {
    let age = state.last_handshake.map(|at| now.duration_since(at));
    age.is_some_and(|age| age.is_ok_and(|age| age < REKEY_TIMEOUT))
}

fn whole_peer(public_key: PublicKey, wanted: &PeerConfig) -> PeerUpdate {
    PeerUpdate {
        public_key,
        only_existing: false,
        preshared_key: wanted.preshared_key,
        endpoint: wanted.endpoint,
        persistent_keepalive: wanted.persistent_keepalive,
        replace_allowed_ips: true,
        allowed_ips: wanted.allowed_ips.clone(),
    }
}

fn trunc(config: &PeerConfig) -> BTreeSet<IpNet> {
    config.allowed_ips.iter().map(IpNet::trunc).collect()
}

/// `None` when the peer is unchanged. The kernel itself takes away a prefix that another peer of the change gets.
fn changed_peer(
    public_key: PublicKey,
    wanted: &PeerConfig,
    state: &PeerState,
    is_taken: impl Fn(&IpNet) -> bool,
) -> Option<PeerUpdate> {
    let present = &state.config;
    let preshared = |config: &PeerConfig| config.preshared_key.unwrap_or_default();
    let keepalive = |config: &PeerConfig| config.persistent_keepalive.unwrap_or_default();
    let (desired, present_prefixes) = (trunc(wanted), trunc(present));
    let replace_allowed_ips =
        present_prefixes.iter().any(|prefix| !desired.contains(prefix) && !is_taken(prefix));
    let allowed_ips = if replace_allowed_ips { desired } else { &desired - &present_prefixes };
    let update = PeerUpdate {
        public_key,
        only_existing: true,
        preshared_key: (preshared(wanted) != preshared(present)).then(|| preshared(wanted)),
        endpoint: wanted.endpoint.filter(|endpoint| present.endpoint != Some(*endpoint)),
        persistent_keepalive: (keepalive(wanted) != keepalive(present)).then(|| keepalive(wanted)),
        replace_allowed_ips,
        allowed_ips: allowed_ips.into_iter().collect(),
    };
    let nothing = PeerUpdate {
        public_key,
        only_existing: true,
        preshared_key: None,
        endpoint: None,
        persistent_keepalive: None,
        replace_allowed_ips: false,
        allowed_ips: Vec::new(),
    };
    (update != nothing).then_some(update)
}

#[cfg(test)]
mod tests {
    use fairlead_api::wireguard::{DeviceConfig, PrivateKey};
    use proptest::prelude::*;

    use super::*;

    /// What the kernel does with an update (`drivers/net/wireguard/netlink.c`, `set_peer`).
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
                other
                    .config
                    .allowed_ips
                    .retain(|net| *key == set.public_key || !set.allowed_ips.contains(net));
            }
            let peer = &mut state
                .peers
                .entry(set.public_key)
                .or_insert_with(|| peer(config(None, None, &[])))
                .config;
            if let Some(key) = set.preshared_key {
                peer.preshared_key = (key != [0; 32]).then_some(key);
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
        let nets: BTreeSet<IpNet> =
            nets.iter().map(|n| IpNet::new([10, *n, 0, 0].into(), 16).unwrap()).collect();
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
            let change =
                DeviceChange { set_peers: BTreeMap::from(set_peers.clone()), ..DeviceChange::default() };
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
            let order: Vec<_> =
                update.set.iter().map(|set| (set.public_key, set.replace_allowed_ips)).collect();
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
        let seconds: Vec<_> =
            update_of.set.iter().map(|it| (it.public_key, it.persistent_keepalive)).collect();
        assert_eq!(seconds, [(called, Some(0)), (called, Some(25))]);
        assert!(update_of.set.iter().all(|it| it.only_existing && !it.replace_allowed_ips));
        assert!(update_of.remove.is_empty());
        assert!(update(None).set.is_empty(), "a new device calls its peers as it gets them");
    }

    #[test]
    fn unchanged_values_are_not_sent() {
        let present = config(Some("192.0.2.1:51820"), None, &[1]);
        let update = one_peer(
            present.clone(),
            PeerConfig { endpoint: None, persistent_keepalive: Some(0), ..present },
        );
        assert!(update.is_empty(), "{update:?}");
    }

    fn peers() -> impl Strategy<Value = BTreeMap<PublicKey, PeerConfig>> {
        let endpoint = proptest::option::of(prop_oneof![Just("192.0.2.1:1"), Just("[2001:db8::1]:2")]);
        let settings = (endpoint, proptest::option::of(1u16..3), proptest::option::of(1u8..3));
        // Each prefix belongs to one peer at most, as topology ensures.
        (proptest::collection::btree_map(0u8..6, settings, 0..6), proptest::collection::vec(0u8..6, 8))
            .prop_map(|(peers, owners)| {
                let nets =
                    |owner: u8| (0u8..8).filter(|n| owners[usize::from(*n)] == owner).collect::<Vec<_>>();
                let peer = |(n, (endpoint, keepalive, preshared)): (u8, (Option<&str>, _, Option<u8>))| {
                    let preshared_key = preshared.map(|byte| [byte; 32]);
                    (
                        PublicKey([n; 32]),
                        PeerConfig { preshared_key, ..config(endpoint, keepalive, &nets(n)) },
                    )
                };
                peers.into_iter().map(peer).collect()
            })
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
            let update = narrow(&state.change_to(&desired), &state, SystemTime::UNIX_EPOCH);
            apply(&mut state, &update);
            prop_assert!(state.change_to(&desired).is_empty(), "{:?} after {:?}", state.change_to(&desired), update);
        }
    }
}

//! WireGuard as desired and as observed, the same for the kernel's and the embedded implementation.
//!
//! Shapes follow `wg(8)` and `include/uapi/linux/wireguard.h`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;

use crate::key::{PresharedKey, PrivateKey, PublicKey};

/// Interval of keepalives (KubeSpan, WireKube).
pub const KEEPALIVE: Duration = Duration::from_secs(25);

/// Configuration of one WireGuard peer. `Debug` never shows the preshared key.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PeerConfig {
    /// Extra symmetric key mixed into handshakes.
    pub preshared_key: Option<PresharedKey>,
    /// Address and port to send to until the peer is heard from another one. `None` leaves the present endpoint alone.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between keepalives; `None` or zero sends none.
    pub persistent_keepalive: Option<u16>,
    /// Prefixes that the peer may send from and is sent for; sorted, without duplicates.
    pub allowed_ips: Vec<IpNet>,
}

impl PeerConfig {
    /// Whether it is `wanted`, with this endpoint if there is one.
    pub fn is_as(&self, wanted: &Self, endpoint: Option<SocketAddr>) -> bool {
        (self.preshared_key, self.persistent_keepalive) == (wanted.preshared_key, wanted.persistent_keepalive)
            && endpoint.is_none_or(|endpoint| self.endpoint == Some(endpoint))
            && self.allowed_ips == wanted.allowed_ips
    }
}

impl fmt::Debug for PeerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerConfig")
            .field("preshared_key", &self.preshared_key.map(|_| "hidden"))
            .field("endpoint", &self.endpoint)
            .field("persistent_keepalive", &self.persistent_keepalive)
            .field("allowed_ips", &self.allowed_ips)
            .finish()
    }
}

/// Configuration of a device: complete, except that endpoints may be left open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The node's identity.
    pub private_key: PrivateKey,
    /// UDP port, the same for IPv4 and IPv6.
    pub listen_port: u16,
    /// `SO_MARK` of everything the device sends; zero for none.
    pub fwmark: u32,
    /// Peers by identity. A peer not named here is removed.
    pub peers: BTreeMap<PublicKey, PeerConfig>,
}

/// State of one peer, as its device reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerState {
    /// The configuration in force; `endpoint` is where packets go now, roaming included.
    pub config: PeerConfig,
    /// Time at which the last handshake completed; `None` before the first.
    pub last_handshake: Option<SystemTime>,
    /// Bytes received and authenticated since the peer was added.
    pub rx_bytes: u64,
    /// Bytes sent since the peer was added.
    pub tx_bytes: u64,
}

/// State of a device, as the device reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// Private key in use; `None` before the first configuration.
    pub private_key: Option<PrivateKey>,
    /// UDP port in use.
    pub listen_port: u16,
    /// Mark in use.
    pub fwmark: u32,
    /// Peers by identity.
    pub peers: BTreeMap<PublicKey, PeerState>,
}

/// The difference between a device and its configuration: what has to be sent, nothing more.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceChange {
    /// New identity.
    pub private_key: Option<PrivateKey>,
    /// New port.
    pub listen_port: Option<u16>,
    /// New mark.
    pub fwmark: Option<u32>,
    /// Peers to add, or to bring to this configuration without losing their session.
    /// Allowed addresses are replaced; an endpoint of `None` is left alone.
    pub set_peers: BTreeMap<PublicKey, PeerConfig>,
    /// Peers to remove.
    pub remove_peers: Vec<PublicKey>,
    /// Peers of the device that say that they have no session: a handshake is started with them although the device may have one.
    pub handshakes: BTreeSet<PublicKey>,
}

impl DeviceChange {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl DeviceState {
    /// Change to send so that this device gets this private key, port and mark, and peers that `config` shows with the endpoint
    /// to set; endpoints differ only where it shows one. Of thousands of peers that stay as they are, nothing is copied.
    pub fn change_of<T>(
        &self,
        (private_key, listen_port, fwmark): (&PrivateKey, u16, u32),
        peers: &BTreeMap<PublicKey, T>,
        config: impl for<'a> Fn(&PublicKey, &'a T) -> (&'a PeerConfig, Option<SocketAddr>),
    ) -> DeviceChange {
        let differing = |(key, peer): (&PublicKey, &T)| {
            let (wanted, endpoint) = config(key, peer);
            let stays = self.peers.get(key).is_some_and(|present| present.config.is_as(wanted, endpoint));
            (!stays).then(|| (*key, PeerConfig { endpoint, ..wanted.clone() }))
        };
        DeviceChange {
            private_key: (self.private_key.as_ref() != Some(private_key)).then(|| private_key.clone()),
            listen_port: (self.listen_port != listen_port).then_some(listen_port),
            fwmark: (self.fwmark != fwmark).then_some(fwmark),
            set_peers: peers.iter().filter_map(differing).collect(),
            remove_peers: self.peers.keys().filter(|key| !peers.contains_key(key)).copied().collect(),
            handshakes: BTreeSet::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(number: u32) -> PublicKey {
        let mut bytes = [1; 32];
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        PublicKey(bytes)
    }

    fn peer(number: u32, endpoint: Option<SocketAddr>) -> PeerConfig {
        let allowed_ips = vec![IpNet::from(std::net::IpAddr::from(number.to_be_bytes()))];
        PeerConfig { endpoint, persistent_keepalive: Some(25), allowed_ips, ..PeerConfig::default() }
    }

    fn device(peers: impl IntoIterator<Item = (u32, Option<SocketAddr>)>) -> DeviceConfig {
        let peers =
            peers.into_iter().map(|(number, endpoint)| (key(number), peer(number, endpoint))).collect();
        DeviceConfig { private_key: PrivateKey([8; 32]), listen_port: 51820, fwmark: 0x20, peers }
    }

    /// State of a device that was configured this way.
    fn state(config: &DeviceConfig) -> DeviceState {
        let peers = config
            .peers
            .iter()
            .map(|(key, config)| (*key, PeerState { config: config.clone(), ..PeerState::default() }));
        DeviceState {
            private_key: Some(config.private_key.clone()),
            listen_port: config.listen_port,
            fwmark: config.fwmark,
            peers: peers.collect(),
        }
    }

    fn change_to(state: &DeviceState, desired: &DeviceConfig) -> DeviceChange {
        let DeviceConfig { private_key, listen_port, fwmark, peers } = desired;
        state.change_of((private_key, *listen_port, *fwmark), peers, |_, peer| (peer, peer.endpoint))
    }

    #[test]
    fn removing_one_of_a_thousand_peers_touches_one_peer() {
        let before = state(&device((0..1000).map(|number| (number, None))));
        let change = change_to(
            &before,
            &device((0..1000).filter(|number| *number != 500).map(|number| (number, None))),
        );
        assert_eq!(change, DeviceChange { remove_peers: vec![key(500)], ..DeviceChange::default() });
    }

    #[test]
    fn an_endpoint_that_roamed_is_left_alone() {
        let roamed = "203.0.113.1:7".parse().ok();
        let before = state(&device([(1, roamed)]));
        assert!(change_to(&before, &device([(1, None)])).is_empty());
        let other = "203.0.113.2:7".parse().ok();
        assert_eq!(change_to(&before, &device([(1, other)])).set_peers.len(), 1);
    }

    #[test]
    fn secrets_are_not_shown() {
        let mut config = device([(1, None)]);
        config.peers.values_mut().for_each(|peer| peer.preshared_key = Some(PresharedKey([77; 32])));
        let text = format!("{config:?}");
        assert!(!text.contains("77, 77") && !text.contains("8, 8, 8"), "{text}");
    }

    proptest! {
        #[test]
        fn a_configured_device_needs_no_change(numbers in prop::collection::btree_set(0u32..50, 0..20)) {
            let config = device(numbers.into_iter().map(|number| (number, None)));
            prop_assert!(change_to(&state(&config), &config).is_empty());
        }

        #[test]
        fn a_change_names_exactly_what_differs(
            before in prop::collection::btree_set(0u32..30, 0..20),
            after in prop::collection::btree_set(0u32..30, 0..20),
        ) {
            let [before_it, after_it] = [&before, &after].map(|numbers| device(numbers.iter().map(|n| (*n, None))));
            let change = change_to(&state(&before_it), &after_it);
            let added: Vec<PublicKey> = after.difference(&before).map(|n| key(*n)).collect();
            let removed: Vec<PublicKey> = before.difference(&after).map(|n| key(*n)).collect();
            prop_assert_eq!(change.set_peers.into_keys().collect::<Vec<_>>(), added);
            prop_assert_eq!(change.remove_peers, removed);
        }
    }
}

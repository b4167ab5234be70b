//! Keys that members are about to use: the device has them before.

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_keys::{PeerConfig, PublicKey};
use fairlead_topology::{NextKey, Plan};
use ipnet::IpNet;

use super::peer::DesiredPeer;

/// The keys to prepare in the device.
pub(super) fn prepared(
    plan: &Plan,
    peers: &BTreeMap<PublicKey, Arc<DesiredPeer>>,
) -> BTreeMap<PublicKey, PeerConfig> {
    let config = |(key, next): (&PublicKey, &NextKey)| {
        let preshared_key = peers.get(&next.current)?.config.preshared_key;
        Some((*key, PeerConfig { preshared_key, ..PeerConfig::default() }))
    };
    plan.next_keys.iter().filter_map(config).collect()
}

/// Lets prepared keys send what the keys may that they will replace: the first packets come before the prefixes follow.
pub(super) fn accepted(
    plan: &Plan,
    mut accepted: BTreeMap<PublicKey, Vec<IpNet>>,
) -> BTreeMap<PublicKey, Vec<IpNet>> {
    for (key, next) in &plan.next_keys {
        let by_gateway = accepted.get(&next.current).cloned().unwrap_or_default();
        accepted.insert(*key, next.allowed_ips.iter().copied().chain(by_gateway).collect());
    }
    accepted
}

//! Members that replace their keys. Pure.
//!
//! A key that a node announces is in the device without prefixes and without an endpoint. A handshake that the device shows of it means that
//! the node uses it now: its prefixes follow at once, and the old key leaves the device.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_keys::{DeviceChange, DeviceState, PeerConfig, PeerState, PublicKey};
use fairlead_topology::Member;
use ipnet::IpNet;

use super::desired::Desired;

/// Keys that are being replaced.
#[derive(Debug, Default)]
pub(crate) struct KeyChanges {
    /// Announced keys that have completed a handshake.
    completed: BTreeSet<PublicKey>,
    /// New keys and those that they replace, until the device has them.
    replaced: BTreeMap<PublicKey, PublicKey>,
}

impl KeyChanges {
    /// See [`fairlead_topology::Policy::completed`].
    pub(crate) fn completed(&self) -> &BTreeSet<PublicKey> {
        &self.completed
    }

    /// Looks for handshakes. Returns whether there is one with a key that was only prepared.
    pub(crate) fn observe(&mut self, desired: &Desired, device: &DeviceState) -> bool {
        let is_in_use =
            |key: &&PublicKey| device.peers.get(*key).is_some_and(|it| it.last_handshake.is_some());
        let before = self.completed.len();
        self.completed.extend(desired.prepared.keys().filter(is_in_use));
        before != self.completed.len()
    }

    /// Before a plan: notes which keys have other successors than in the plan before, and forgets what is no news any more.
    pub(crate) fn follow(&mut self, before: Option<&Desired>, members: &[Arc<Member>]) {
        let announced: BTreeSet<PublicKey> = members.iter().filter_map(|member| member.next_key).collect();
        self.completed.retain(|key| announced.contains(key));
        let Some(before) = before else { return };
        let with_new_key = members.iter().filter(|member| member.external.is_none()).filter_map(|member| {
            let key = self.key_of(member).filter(|key| !before.peers.contains_key(key))?;
            Some((member.name.as_str(), key))
        });
        let new: BTreeMap<&str, PublicKey> = with_new_key.collect();
        let replaced =
            before.peers.iter().filter_map(|(old, peer)| Some((*new.get(peer.name.as_str())?, *old)));
        let replaced: BTreeMap<PublicKey, PublicKey> = replaced.collect();
        if replaced.is_empty() && self.replaced.is_empty() {
            return;
        }
        let current: BTreeSet<PublicKey> = members.iter().filter_map(|member| self.key_of(member)).collect();
        self.replaced.extend(replaced.into_iter().filter(|(_, old)| !current.contains(old)));
        self.replaced.retain(|new, _| current.contains(new));
    }

    fn key_of(&self, member: &Member) -> Option<PublicKey> {
        member.next_key.filter(|next| self.completed.contains(next)).or(member.public_key)
    }

    /// Prefixes that the device has at each key; a new key counts as having those of the old one.
    pub(crate) fn held(
        &self,
        present: &BTreeMap<PublicKey, PeerState>,
    ) -> BTreeMap<PublicKey, BTreeSet<IpNet>> {
        let prefixes = |peer: &PeerState| peer.config.allowed_ips.iter().map(IpNet::trunc).collect();
        let mut held: BTreeMap<PublicKey, BTreeSet<IpNet>> =
            present.iter().map(|(key, peer)| (*key, prefixes(peer))).collect();
        for (new, old) in &self.replaced {
            if let Some(of_old) = held.get(old).cloned() {
                held.entry(*new).or_default().extend(of_old);
            }
        }
        held
    }

    /// Endpoints of new keys that the device has none of: those of the old keys. `relayed` is the endpoint by way of the relay of a key
    /// whose old one was reached so.
    pub(crate) fn endpoints(
        &self,
        device: &DeviceState,
        relayed: impl Fn(SocketAddr, &PublicKey) -> Option<SocketAddr>,
    ) -> BTreeMap<PublicKey, SocketAddr> {
        let endpoint = |key: &PublicKey| device.peers.get(key)?.config.endpoint;
        let unknown = self.replaced.iter().filter(|(new, _)| endpoint(new).is_none());
        unknown
            .filter_map(|(new, old)| {
                let old = endpoint(old)?;
                Some((*new, relayed(old, new).unwrap_or(old)))
            })
            .collect()
    }

    /// The device has the new keys.
    pub(crate) fn applied(&mut self) {
        self.replaced.clear();
    }
}

/// Adds to a change of a device what prepared keys need.
pub(crate) fn complete(
    change: &mut DeviceChange,
    prepared: &BTreeMap<PublicKey, PeerConfig>,
    before: &DeviceState,
) {
    change.remove_peers.retain(|key| !prepared.contains_key(key));
    for (key, wanted) in prepared {
        if !before.peers.get(key).is_some_and(|present| present.config.is_as(wanted, None)) {
            change.set_peers.insert(*key, wanted.clone());
        }
    }
}

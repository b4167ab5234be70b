//! Peers outside of the cluster in the WireGuard device: their configuration, and the endpoints of those that have one.
//!
//! External peers speak WireGuard and nothing else. So no path probe and no relay is used, and the only sign of life is the handshake. A
//! peer without an endpoint is answered where it was heard last, which the device does by itself; nothing here changes that.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_keys::{DeviceChange, DeviceState, PeerConfig, PeerState, PublicKey};
use fairlead_path::Nat64;
use fairlead_topology::{EntryRole, Member, PeerPlan, Plan};
use ipnet::IpNet;

use crate::model::inputs::Inputs;

/// Age of a handshake at which its session ends (WireGuard's `REJECT_AFTER_TIME`).
const SESSION: Duration = Duration::from_secs(180);
/// Time for which an address of a name is tried: three handshakes of the kernel's WireGuard.
const ATTEMPT: Duration = Duration::from_secs(15);

/// Desired state of one external peer in the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredExternal {
    /// Name of the Peer.
    pub name: String,
    /// WireGuard configuration of the peer, without an endpoint.
    pub config: PeerConfig,
    /// Addresses on which the peer listens, the first preferred; empty for a peer that initiates, or whose name is not resolved.
    pub addresses: Vec<SocketAddr>,
    /// Role of this node for a peer that names entry nodes; `None` for other peers.
    pub entry: Option<EntryRole>,
}

impl DesiredExternal {
    /// Whether another entry node is in use: this one waits for a handshake.
    pub fn is_standby(&self) -> bool {
        self.entry.is_some_and(|entry| entry.other_term.is_some())
    }
}

/// The state of one peer.
#[derive(Debug, Clone)]
pub struct ExternalReport {
    /// Name of the Peer.
    pub name: String,
    /// Public key of the peer.
    pub public_key: PublicKey,
    /// State of the peer in the device, without prefixes; `None` only before it was configured.
    pub device: Option<Arc<PeerState>>,
    /// Prefixes that are sent to the peer.
    pub prefixes: Vec<IpNet>,
    /// Role of this node for a peer that names entry nodes; `None` for other peers.
    pub entry: Option<EntryRole>,
}

impl ExternalReport {
    /// Whether another entry node is in use.
    pub fn is_standby(&self) -> bool {
        self.entry.is_some_and(|entry| entry.other_term.is_some())
    }

    /// Whether there is a session.
    pub fn is_connected(&self, now: SystemTime) -> bool {
        self.device.as_ref().is_some_and(|device| is_alive(device, now))
    }
}

/// The external peers of the plan.
pub(crate) fn external_peers(
    inputs: &Inputs,
    plan: &Plan,
    nat64: &Nat64,
) -> BTreeMap<PublicKey, DesiredExternal> {
    let externals = inputs.members.iter().filter(|member| member.external.is_some());
    let by_name: BTreeMap<&str, &Arc<Member>> =
        externals.map(|member| (member.name.as_str(), member)).collect();
    let desired = |(key, planned): (&PublicKey, &Arc<PeerPlan>)| {
        let member = planned.members.iter().find_map(|name| by_name.get(name.as_str()))?;
        let external = member.external.as_ref()?;
        let config = PeerConfig {
            preshared_key: external.preshared_key,
            // Devices say zero as "none".
            persistent_keepalive: Some(planned.keepalive).filter(|seconds| *seconds > 0),
            allowed_ips: planned.allowed_ips.clone(),
            endpoint: None,
        };
        let name = member.peer_name().unwrap_or_default().to_owned();
        let mut desired = DesiredExternal { name, config, addresses: Vec::new(), entry: planned.entry };
        if !desired.is_standby() {
            desired.addresses = endpoints(inputs, member, nat64);
        }
        Some((*key, desired))
    };
    plan.peers.iter().filter_map(desired).collect()
}

fn endpoints(inputs: &Inputs, member: &Member, nat64: &Nat64) -> Vec<SocketAddr> {
    let Some(endpoint) = &member.endpoints.manual else { return Vec::new() };
    let known = inputs.resolved.get(endpoint).cloned().unwrap_or_default();
    let translated = |address| nat64.endpoints(address).into_iter().next().unwrap_or(address);
    endpoint.address().into_iter().chain(known).map(translated).collect()
}

/// Endpoint that was set last for each external peer, to choose the next one.
#[derive(Debug, Default)]
pub(crate) struct ExternalEndpoints(BTreeMap<PublicKey, Attempt>);

/// The last endpoint that was set.
#[derive(Debug)]
struct Attempt {
    address: SocketAddr,
    since: Instant,
    /// Bytes that the device had sent to the peer when the endpoint was set.
    sent: u64,
}

impl ExternalEndpoints {
    /// Adds to a change of a device, in which nodes are its only peers, what external peers need.
    pub(crate) fn complete(
        &mut self,
        change: &mut DeviceChange,
        wanted: &BTreeMap<PublicKey, DesiredExternal>,
        before: &DeviceState,
        (now, time): (Instant, SystemTime),
    ) {
        change.remove_peers.retain(|key| !wanted.contains_key(key));
        self.0.retain(|key, _| wanted.contains_key(key));
        for (key, peer) in wanted {
            let present = before.peers.get(key);
            let endpoint = next(self.0.get(key), &peer.addresses, present, (now, time));
            if let Some(address) = endpoint {
                let sent = present.map(|present| present.tx_bytes).unwrap_or_default();
                self.0.insert(*key, Attempt { address, since: now, sent });
            }
            let has_prefixes = present.is_some_and(|present| !present.config.allowed_ips.is_empty());
            if peer.is_standby() && has_prefixes {
                // Without its session here the peer notices at once if it does come back, and the next handshake is a new one.
                change.remove_peers.push(*key);
                self.0.remove(key);
            }
            if !present.is_some_and(|present| present.config.is_as(&peer.config, endpoint)) {
                change.set_peers.insert(*key, PeerConfig { endpoint, ..peer.config.clone() });
            }
        }
    }
}

/// The endpoint to set; `None` leaves it alone. The endpoint of a session is left alone, unless the name of the peer that it came from has
/// other addresses now.
fn next(
    last: Option<&Attempt>,
    addresses: &[SocketAddr],
    present: Option<&PeerState>,
    (now, time): (Instant, SystemTime),
) -> Option<SocketAddr> {
    let first = addresses.first().copied()?;
    let Some((present, current)) = present.and_then(|present| Some((present, present.config.endpoint?)))
    else {
        return Some(first);
    };
    let position = addresses.iter().position(|address| *address == current);
    match position {
        None if last.is_some_and(|last| last.address == current) => Some(first),
        // It roamed.
        None => (!is_alive(present, time)).then_some(first),
        Some(_) if is_alive(present, time) => None,
        // It was not answered there.
        Some(at) => {
            let is_over = last.is_none_or(|last| {
                now.saturating_duration_since(last.since) >= ATTEMPT && present.tx_bytes > last.sent
            });
            let following = addresses.get(at.saturating_add(1)).copied().unwrap_or(first);
            Some(following).filter(|following| is_over && *following != current)
        }
    }
}

fn is_alive(peer: &PeerState, now: SystemTime) -> bool {
    let age = peer.last_handshake.map(|at| now.duration_since(at).unwrap_or_default());
    age.is_some_and(|age| age < SESSION)
}

#[cfg(test)]
mod tests;

//! The paths to the peers: tells [`PathAgent`] of peers and observations, and sets endpoints through the device.
//!
//! Datagrams and timers are served by [`PathPort`]. Here, a wake reads no object of the cluster and dumps no links, routes or
//! nftables. Only an observation reads the device, and then serves all peers with one request.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_dataplane::wireguard::{self, Backend, WireGuardDevice};
use fairlead_keys::{DeviceChange, DeviceState, PeerConfig, PeerState, PrivateKey, PublicKey};
use fairlead_members::settings::RelaySettings;
use fairlead_path::history::Observed;
use fairlead_path::{
    Config, Filtering, Identity, Observation, PathAgent, PeerPaths, Source, Status, StunAnswer,
};
use fairlead_relay::client::{INITIATION_HELD, is_relayed};
use prometheus_client::metrics::histogram::Histogram;

use super::path_port::{Due, PathPort};
use super::relay::{RelayTransport, RelayView};
use crate::plan::desired::DesiredPeer;

/// Time for which one endpoint is tried where setting it forces handshakes: they are sent within the first two seconds.
const FORCED_ATTEMPT: Duration = Duration::from_millis(2500);
/// Age of a handshake at which its session ends.
const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);

/// The paths of this node.
pub struct PathDriver {
    port: Arc<PathPort>,
    device: Capabilities,
    seed: u64,
    identity: Identity,
    /// Number of agents so far: each must have an epoch of its own.
    agents: u64,
    relay: RelayView,
    /// The relay that the agent knows of.
    relay_settings: Option<RelaySettings>,
    /// The peers of the agent.
    peers: BTreeMap<PublicKey, Arc<DesiredPeer>>,
    /// Peers as last observed, without their prefixes, which the plan has.
    observed: BTreeMap<PublicKey, Arc<PeerState>>,
}

impl PathDriver {
    /// No peers. `seed` must differ between nodes, or two of them might always try each other at different times.
    pub fn new(
        identity: Identity,
        seed: u64,
        relay: RelayView,
        time_to_direct: Histogram,
        now: Instant,
    ) -> Self {
        let device = Capabilities { backend: Backend::Embedded, has_path_socket: true };
        let agent = agent(device, seed, &identity, 0);
        Self {
            port: PathPort::new(agent, time_to_direct, relay.queue(), now),
            device,
            seed,
            identity,
            agents: 1,
            relay,
            relay_settings: None,
            peers: BTreeMap::new(),
            observed: BTreeMap::new(),
        }
    }

    /// The WireGuard port, for the thread that serves it.
    pub fn port(&self) -> &Arc<PathPort> {
        &self.port
    }

    /// This node has another key. Its paths stay.
    pub fn set_identity(&mut self, private_key: &PrivateKey, public_key: PublicKey) {
        if self.identity.public_key == public_key {
            return;
        }
        self.identity = Identity { private_key: private_key.clone(), public_key, ..self.identity.clone() };
        self.port.with_agent(|agent| agent.set_identity(self.identity.clone()));
        // All are told to the agent anew: which of two nodes decides follows from their keys.
        self.peers.clear();
    }

    /// Replaces the peers. Those that stay keep their state, and those whose paths stay are not visited.
    pub fn set_peers(
        &mut self,
        peers: &BTreeMap<PublicKey, Arc<DesiredPeer>>,
        device: Capabilities,
        relay: Option<&RelaySettings>,
        now: Instant,
    ) {
        if self.relay_settings.as_ref() != relay {
            self.relay_settings = relay.cloned();
            // All have other paths now.
            self.peers.clear();
        }
        if self.device != device {
            self.device = device;
            self.peers.clear();
            let mut new = agent(device, self.seed, &self.identity, self.agents);
            new.set_relay_stun(self.port.since(now), self.relay.stun());
            self.agents = self.agents.saturating_add(1);
            self.port.replace_agent(now, new);
        }
        let since = self.port.since(now);
        self.port.set_peers(now, peers);
        let known = &self.peers;
        self.port.with_agent(|agent| {
            let gone: Vec<PublicKey> =
                agent.peers().filter(|key| !peers.contains_key(*key)).copied().collect();
            gone.iter().for_each(|key| agent.remove_peer(key));
            for (key, peer) in peers {
                let is_same =
                    |known: &DesiredPeer| known.paths == peer.paths && known.uses_relay == peer.uses_relay;
                let stays = known.get(key).is_some_and(|known| is_same(known));
                if !stays {
                    let relay =
                        relay.filter(|_| peer.uses_relay).and_then(|relay| self.relay.path(relay, key));
                    agent.upsert_peer(since, *key, PeerPaths { relay, ..peer.paths.clone() });
                }
            }
        });
        self.peers.clone_from(peers);
    }

    /// Removes all peers and STUN servers: there is no mesh.
    pub fn clear(&mut self, now: Instant) {
        self.set_peers(&BTreeMap::new(), self.device, None, now);
        self.set_stun_servers(&[], now);
    }

    /// Looks at the state of the device and returns the endpoints to set; to be followed by [`Self::remember`].
    pub fn observe(&mut self, state: &DeviceState, now: Instant) -> BTreeMap<PublicKey, SocketAddr> {
        let since = self.port.since(now);
        self.port.with_agent(|agent| {
            for key in self.peers.keys() {
                agent.observe(since, key, observation(state.peers.get(key)));
            }
        });
        self.record(state, now);
        let endpoints = self.port.take_endpoints();
        self.hold_relayed(&endpoints, |key| state.peers.get(key)?.config.endpoint, now);
        endpoints
    }

    /// The kernel's WireGuard is about to leave the relay for these endpoints. The embedded one stays at them by itself.
    fn hold_relayed(
        &self,
        endpoints: &BTreeMap<PublicKey, SocketAddr>,
        present: impl Fn(&PublicKey) -> Option<SocketAddr>,
        now: Instant,
    ) {
        let leaves = |(key, endpoint): &(&PublicKey, &SocketAddr)| {
            present(key).is_some_and(is_relayed) && !is_relayed(**endpoint)
        };
        let leaving = endpoints.iter().filter(|_| self.device.backend == Backend::Kernel).filter(leaves);
        leaving.for_each(|(key, _)| self.relay.hold(key, now));
        self.forget_held(endpoints);
    }

    /// A peer that was never heard is made anew in the device at another endpoint, and is sent a new initiation there at once. What is held for
    /// the relay is of the handshake before: its answer would be dropped, and the peer takes one initiation in 20 ms.
    fn forget_held(&self, endpoints: &BTreeMap<PublicKey, SocketAddr>) {
        for (key, _) in endpoints.iter().filter(|(_, endpoint)| !is_relayed(**endpoint)) {
            self.relay.queue().forget_initiation(key);
        }
    }

    /// Tells the history of the paths what the device has.
    fn record(&self, state: &DeviceState, now: Instant) {
        let observed = |key: &PublicKey| {
            let Observation { endpoint, handshake_age, .. } = observation(state.peers.get(key));
            (*key, Observed { endpoint, is_up: handshake_age.is_some_and(|age| age < REJECT_AFTER_TIME) })
        };
        self.port.observed(now, self.peers.keys().map(observed), |agent, key, endpoint| {
            let asked = agent.candidates(self.port.since(now), key);
            let planned =
                self.peers.get(key).map(|peer| peer.paths.candidates.as_slice()).unwrap_or_default();
            let known = asked.iter().map(|status| &status.candidate).chain(planned);
            match known.into_iter().find(|candidate| candidate.address == endpoint) {
                _ if RelayTransport::of(agent, endpoint).is_some() => Source::Relay,
                Some(candidate) => candidate.source,
                None => Source::Roamed,
            }
        });
    }

    /// Keeps the state of the device, for [`Self::status`].
    pub fn remember(&mut self, state: DeviceState) {
        let kept = |mut peer: PeerState| {
            peer.config.allowed_ips = Vec::new();
            Arc::new(peer)
        };
        self.observed = state.peers.into_iter().map(|(key, peer)| (key, kept(peer))).collect();
    }

    /// The way by the relay, for its users.
    pub fn relay(&self) -> &RelayView {
        &self.relay
    }

    /// Transport by which an endpoint leads to the relay; `None` if it does not.
    pub fn relay_transport(&self, endpoint: SocketAddr) -> Option<RelayTransport> {
        self.port.read_agent(|agent| RelayTransport::of(agent, endpoint))
    }

    /// Replaces the STUN servers. A device without a path socket can ask none.
    pub fn set_stun_servers(&mut self, servers: &[SocketAddr], now: Instant) {
        let since = self.port.since(now);
        self.port.with_agent(|agent| agent.set_stun_servers(since, servers));
    }

    /// Links or addresses of this host changed.
    pub fn network_changed(&mut self, now: Instant) {
        let since = self.port.since(now);
        self.port.with_agent(|agent| agent.network_changed(since));
    }

    /// Last answer of each STUN server.
    pub fn stun_answers(&self) -> BTreeMap<SocketAddr, StunAnswer> {
        self.port.read_agent(PathAgent::stun_answers)
    }

    /// Filtering of the NAT in front of this node, as the relay has tested it; `None` until then.
    pub fn filtering(&self) -> Option<Filtering> {
        self.port.read_agent(PathAgent::filtering)
    }

    /// Ports that the NAT in front of this node gave to new mappings, in that order; empty where that was not measured.
    pub fn measured_ports(&self) -> Vec<u16> {
        self.port.read_agent(|agent| agent.measured_ports().to_vec())
    }

    /// Addresses at which peers see this node, as their answers to probes say.
    pub fn reflexive_addresses(&self) -> BTreeSet<SocketAddr> {
        self.port.read_agent(PathAgent::reflexive_addresses)
    }

    /// The MTU that routes to a peer are to have; `None` for the tunnel's.
    pub fn route_mtu(&self, key: &PublicKey) -> Option<u32> {
        self.port.read_agent(|agent| agent.route_mtu(key))
    }

    /// Lets `change`, to the device that `present` shows, say how often keepalives to each peer have to come.
    pub fn complete(
        &self,
        change: &mut DeviceChange,
        present: &DeviceState,
        endpoints: &BTreeMap<PublicKey, SocketAddr>,
    ) {
        let often: Vec<(PublicKey, PeerConfig)> = self.port.read_agent(|agent| {
            let often = self.peers.iter().filter(|(key, _)| agent.keepalive(key).is_some());
            often.map(|(key, peer)| (*key, kept_alive(agent, key, &peer.config))).collect()
        });
        for (key, config) in often {
            let endpoint = endpoints.get(&key).copied();
            if present.peers.get(&key).is_some_and(|present| present.config.is_as(&config, endpoint)) {
                change.set_peers.remove(&key);
            } else {
                change.set_peers.insert(key, PeerConfig { endpoint, ..config });
            }
        }
    }

    /// Does what the paths need done: reads the device, if it is time for that, and sets endpoints.
    ///
    /// # Errors
    /// The device cannot be read or changed.
    pub fn wake(
        &mut self,
        device: &dyn WireGuardDevice,
        may_observe: bool,
        now: Instant,
    ) -> Result<Woken, wireguard::Error> {
        let mut due = self.port.take_due(may_observe);
        if due.observation {
            let state = device.state()?;
            due.endpoints.extend(self.observe(&state, now));
            self.remember(state);
        }
        self.hold_relayed(&due.endpoints, |key| self.observed.get(key)?.config.endpoint, now);
        let set_peers: BTreeMap<PublicKey, PeerConfig> = due
            .endpoints
            .iter()
            .filter_map(|(key, endpoint)| {
                let config = &self.peers.get(key)?.config;
                let config = self.port.read_agent(|agent| kept_alive(agent, key, config));
                Some((*key, PeerConfig { endpoint: Some(*endpoint), ..config }))
            })
            .collect();
        let handshakes = due.handshakes.iter().copied().filter(|key| self.peers.contains_key(key)).collect();
        let change = DeviceChange { set_peers, handshakes, ..DeviceChange::default() };
        if !change.is_empty() {
            device.change(&change)?;
        }
        let Due { observation: observed, own_addresses_changed, .. } = due;
        let Due { route_mtu_changed, keepalive_changed, .. } = due;
        Ok(Woken { observed, own_addresses_changed, route_mtu_changed, keepalive_changed })
    }

    /// State of a peer in the device as last observed, without prefixes.
    pub fn device_state(&self, key: &PublicKey) -> Option<Arc<PeerState>> {
        self.observed.get(key).cloned()
    }

    /// The path to a peer, and what the device said of the peer.
    pub fn status(&self, key: &PublicKey, now: Instant) -> Option<(Status, Option<Arc<PeerState>>)> {
        let since = self.port.since(now);
        let status = self.port.read_agent(|agent| agent.status(since, key))?;
        Some((status, self.observed.get(key).cloned()))
    }
}

/// Result of [`PathDriver::wake`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Woken {
    /// The device was read, so what is known of the peers is new.
    pub observed: bool,
    /// STUN servers or peers see this node elsewhere than before: the plan may change.
    pub own_addresses_changed: bool,
    /// The path to a peer passes other packets than before: its routes change.
    pub route_mtu_changed: bool,
    /// Keepalives to a peer have to come more often, or no more: the device changes.
    pub keepalive_changed: bool,
}

/// Capabilities of the device that an agent depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The implementation.
    pub backend: Backend,
    /// Probes can be sent from its port.
    pub has_path_socket: bool,
}

/// Configuration of a peer, with keepalives as often as its path needs. A peer that gets none keeps getting none.
fn kept_alive(agent: &PathAgent, key: &PublicKey, config: &PeerConfig) -> PeerConfig {
    let longest = agent.keepalive(key).and_then(|longest| u16::try_from(longest.as_secs()).ok());
    let persistent_keepalive =
        config.persistent_keepalive.map(|seconds| longest.map_or(seconds, |longest| seconds.min(longest)));
    PeerConfig { persistent_keepalive, ..config.clone() }
}

/// The `number`-th agent of this program.
fn agent(device: Capabilities, seed: u64, identity: &Identity, number: u64) -> PathAgent {
    let mut agent = PathAgent::new(config(device.backend), seed);
    if device.has_path_socket {
        let epoch = (u128::from_be_bytes(identity.epoch) ^ u128::from(number)).to_be_bytes();
        agent.enable_probes(Identity { epoch, ..identity.clone() });
        agent.enable_sockets();
    }
    agent
}

fn config(backend: Backend) -> Config {
    match backend {
        // A new endpoint makes it send handshakes at once, so that each attempt can be short.
        Backend::Embedded => Config { attempt: FORCED_ATTEMPT, ..Config::default() },
        // It begins at the relay, for as long as an initiation is held there.
        Backend::Kernel => Config { relay_attempt: INITIATION_HELD, ..Config::default() },
    }
}

fn observation(peer: Option<&PeerState>) -> Observation {
    let Some(peer) = peer else { return Observation::default() };
    let age = |at| SystemTime::now().duration_since(at).unwrap_or_default();
    Observation {
        endpoint: peer.config.endpoint,
        handshake_age: peer.last_handshake.map(age),
        rx_bytes: peer.rx_bytes,
        tx_bytes: peer.tx_bytes,
    }
}

#[cfg(test)]
mod tests;

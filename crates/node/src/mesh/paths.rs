//! The paths to the peers: drives [`PathAgent`] on timers and observations, and sets endpoints through the device.
//!
//! A wake costs what the peers that are due cost. It reads no object of the cluster and dumps no links, routes or
//! nftables. Only an observation reads the device, and then serves all peers with one request.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_api::wireguard::{DeviceChange, DeviceState, PeerConfig, PeerState, PublicKey};
use fairlead_dataplane::wireguard::{self, Backend, PathSocket, WireGuardDevice};
use fairlead_path::{Config, Event, Observation, PathAgent, Status, StunAnswer};

use super::desired::DesiredPeer;

/// How long one endpoint is tried where setting it forces handshakes: they are sent within the first two seconds.
const FORCED_ATTEMPT: Duration = Duration::from_millis(2500);
/// Datagrams handled in one step; the socket queues no more.
const MAX_DATAGRAMS: usize = 256;

/// The paths of this node.
pub struct PathDriver {
    agent: PathAgent,
    backend: Backend,
    seed: u64,
    started: Instant,
    /// The peers of the agent.
    peers: BTreeMap<PublicKey, Arc<DesiredPeer>>,
    /// Peers as last observed, without their prefixes, which the plan has.
    observed: BTreeMap<PublicKey, Arc<PeerState>>,
}

impl PathDriver {
    /// No peers. `seed` must differ between nodes, or two of them might always try each other at different times.
    pub fn new(seed: u64, now: Instant) -> Self {
        let backend = Backend::Embedded;
        Self {
            agent: PathAgent::new(config(backend), seed),
            backend,
            seed,
            started: now,
            peers: BTreeMap::new(),
            observed: BTreeMap::new(),
        }
    }

    /// Replaces the peers. Those that stay keep their state, and those whose paths stay are not visited.
    pub fn set_peers(
        &mut self,
        peers: &BTreeMap<PublicKey, Arc<DesiredPeer>>,
        backend: Backend,
        now: Instant,
    ) {
        if self.backend != backend {
            self.backend = backend;
            self.peers.clear();
            self.agent = PathAgent::new(config(backend), self.seed);
        }
        let gone: Vec<PublicKey> =
            self.agent.peers().filter(|key| !peers.contains_key(*key)).copied().collect();
        gone.iter().for_each(|key| self.agent.remove_peer(key));
        let since = self.since(now);
        for (key, peer) in peers {
            let stays = self.peers.get(key).is_some_and(|known| known.paths == peer.paths);
            if !stays {
                self.agent.upsert_peer(since, *key, peer.paths.clone());
            }
        }
        self.peers.clone_from(peers);
    }

    /// Looks at the state of the device and returns the endpoints to set; to be followed by [`Self::remember`].
    pub fn observe(&mut self, state: &DeviceState, now: Instant) -> BTreeMap<PublicKey, SocketAddr> {
        let since = self.since(now);
        for key in self.peers.keys() {
            self.agent.observe(since, key, observation(state.peers.get(key)));
        }
        self.drain().endpoints
    }

    /// Keeps the state of the device, for [`Self::status`].
    pub fn remember(&mut self, state: DeviceState) {
        let kept = |mut peer: PeerState| {
            peer.config.allowed_ips = Vec::new();
            Arc::new(peer)
        };
        self.observed = state.peers.into_iter().map(|(key, peer)| (key, kept(peer))).collect();
    }

    /// Replaces the STUN servers. A device without a [`PathSocket`] can ask none.
    pub fn set_stun_servers(&mut self, servers: &[SocketAddr], now: Instant) {
        self.agent.set_stun_servers(self.since(now), servers);
    }

    /// Links or addresses of this host changed.
    pub fn network_changed(&mut self, now: Instant) {
        self.agent.network_changed(self.since(now));
    }

    /// What each STUN server said last.
    pub fn stun_answers(&self) -> BTreeMap<SocketAddr, StunAnswer> {
        self.agent.stun_answers()
    }

    /// Handles the datagrams that wait and the timers that are due.
    ///
    /// # Errors
    /// The device cannot be read or changed.
    pub fn wake(
        &mut self,
        device: &dyn WireGuardDevice,
        socket: Option<&dyn PathSocket>,
        now: Instant,
    ) -> Result<Woken, wireguard::Error> {
        let since = self.since(now);
        let datagrams = socket.into_iter().flat_map(|socket| std::iter::from_fn(|| socket.try_receive()));
        for datagram in datagrams.take(MAX_DATAGRAMS) {
            self.agent.handle_datagram(since, datagram.local, datagram.remote, &datagram.payload);
        }
        self.agent.handle_timeout(since);
        self.transmit(socket);
        let mut due = self.drain();
        if due.observation {
            let state = device.state()?;
            due.endpoints.extend(self.observe(&state, now));
            self.remember(state);
        }
        let set_peers: BTreeMap<PublicKey, PeerConfig> = due
            .endpoints
            .into_iter()
            .filter_map(|(key, endpoint)| {
                Some((key, PeerConfig { endpoint: Some(endpoint), ..self.peers.get(&key)?.config.clone() }))
            })
            .collect();
        if !set_peers.is_empty() {
            device.change(&DeviceChange { set_peers, ..DeviceChange::default() })?;
        }
        Ok(Woken { observed: due.observation, stun_changed: due.stun_changed })
    }

    /// What cannot be sent now is sent again by the timers of the agent, as if the network had lost it.
    fn transmit(&mut self, socket: Option<&dyn PathSocket>) {
        while let Some(transmit) = self.agent.poll_transmit() {
            let Some(socket) = socket else { continue };
            if let Err(error) = socket.send(transmit.local, transmit.remote, &transmit.payload) {
                tracing::debug!(remote = %transmit.remote, %error, "cannot send from the WireGuard port");
            }
        }
    }

    /// When to call [`Self::wake`] at the latest; `None` without peers and STUN servers.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.started.checked_add(self.agent.poll_timeout()?)
    }

    /// The path to a peer, and what the device said of the peer.
    pub fn status(&self, key: &PublicKey, now: Instant) -> Option<(Status, Option<Arc<PeerState>>)> {
        Some((self.agent.status(self.since(now), key)?, self.observed.get(key).cloned()))
    }

    /// The agent counts time from the start of the driver.
    fn since(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    fn drain(&mut self) -> Due {
        let mut due = Due::default();
        while let Some(event) = self.agent.poll_event() {
            match event {
                Event::ObservationDue { .. } => due.observation = true,
                Event::SetEndpoint { peer, endpoint, source, reason } => {
                    tracing::debug!(%peer, %endpoint, %source, ?reason, "trying endpoint");
                    due.endpoints.insert(peer, endpoint);
                }
                Event::StunAnswersChanged => due.stun_changed = true,
                Event::StateChanged { peer, from, to, reason } => {
                    tracing::debug!(%peer, %from, %to, reason = reason.name(), "the path changed its state");
                }
            }
        }
        due
    }
}

/// What became of [`PathDriver::wake`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Woken {
    /// The device was read, so what is known of the peers is new.
    pub observed: bool,
    /// A STUN server answers something else than before: the plan may change.
    pub stun_changed: bool,
}

/// What events ask for.
#[derive(Default)]
struct Due {
    observation: bool,
    stun_changed: bool,
    endpoints: BTreeMap<PublicKey, SocketAddr>,
}

fn config(backend: Backend) -> Config {
    match backend {
        // A new endpoint makes it send handshakes at once, so that each attempt can be short.
        Backend::Embedded => Config { attempt: FORCED_ATTEMPT, ..Config::default() },
        Backend::Kernel => Config::default(),
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

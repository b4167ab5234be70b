//! One state machine per peer behind one sans-I/O interface, as in the cores of Firezone (`snownet`) and iroh.
//!
//! The shell owns the clock, the WireGuard device and the sockets. It calls [`PathAgent::handle_timeout`] at
//! [`PathAgent::poll_timeout`] and [`PathAgent::handle_datagram`] for each datagram on the WireGuard port that is no
//! WireGuard message; after each call it drains [`PathAgent::poll_event`] and [`PathAgent::poll_transmit`].
//!
//! Every decision of a rotation needs a current observation, or it could change the endpoint of a session that came up
//! a moment ago. So a timer only asks for one ([`Event::ObservationDue`]), and [`PathAgent::observe`] decides. A
//! shell that reads all peers from the device in one request should observe all of them: their timers then move on
//! together.
//!
//! The datagrams are those of STUN ([`PathAgent::set_stun_servers`]) and path probes ([`PathAgent::enable_probes`]); all others
//! are counted and dropped.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::{Nat64Prefix, canonical};
use fairlead_keys::PublicKey;
use fairlead_wire::probe::is_probe;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::birthday::{BirthdaySide, Birthdays};
use crate::candidates::{Candidate, MAX_CANDIDATES, Source};
use crate::datagram::{Arrival, Transmit};
use crate::prober::{Prober, Session};
use crate::probing::{Identity, PerSecond, Probing};
use crate::relay_path::RelayPath;
use crate::rotation::{Config, Observation, Rotation, State, Status};
use crate::stun::StunClient;

mod birthday;
mod event;
mod keepalive;
mod observation;
mod own_candidates;
mod path_mtu;
mod peer;
mod probes;
mod refusals;
mod relay;
mod wakeups;

pub use event::{Event, SocketChange};
use observation::{MIN_OBSERVATION_INTERVAL, observation_interval, on_grid};
use own_candidates::OwnCandidates;
pub use own_candidates::OwnSide;
use path_mtu::MtuSearches;
use peer::Peer;
use relay::RelayMachines;
use wakeups::Wakeups;

/// Paths by which a peer may be reached, and what to expect of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerPaths {
    /// Endpoints to try, best first ([`crate::order`]).
    pub candidates: Vec<Candidate>,
    /// The time without a packet from the peer that ends a session. `None` for a peer that need not send keepalives: then
    /// only an answer that is missing does.
    pub silence: Option<Duration>,
    /// The way by a relay, if there is one.
    pub relay: Option<RelayPath>,
    /// Role of this node in birthday attempts with the peer ([`crate::birthday_side`]); `None` without any.
    pub birthday: Option<BirthdaySide>,
}

impl PeerPaths {
    /// All candidates, the relay last.
    fn all(&self) -> Vec<Candidate> {
        let relay = self.relay.map(|relay| Candidate { address: relay.endpoint, source: Source::Relay });
        let is_used = self.relay.is_none_or(|relay| !relay.is_only);
        let most = MAX_CANDIDATES.saturating_sub(usize::from(relay.is_some()));
        self.candidates.iter().filter(|_| is_used).take(most).copied().chain(relay).collect()
    }
}

/// The paths of one node: a machine for each peer, a queue of their timers, and what they want done.
#[derive(Debug)]
pub struct PathAgent {
    config: Config,
    random: StdRng,
    /// Boxed: up to half of a tree is empty.
    peers: BTreeMap<PublicKey, Box<Peer>>,
    wakeups: Wakeups,
    events: VecDeque<Event>,
    stun: StunClient,
    relay: RelayMachines,
    /// `None` where no probes can be sent.
    probing: Option<Probing>,
    transmits: VecDeque<Transmit>,
    own: OwnCandidates,
    birthdays: Birthdays,
    nat64: Arc<[Nat64Prefix]>,
    mtu_searches: MtuSearches,
    refusals: PerSecond,
    unknown_datagrams: u64,
}

impl PathAgent {
    /// An agent without peers. `seed` must differ between nodes: all random numbers are drawn from it, and
    /// [`Config::seed`] is replaced for each peer.
    pub fn new(config: Config, seed: u64) -> Self {
        Self {
            config,
            random: StdRng::seed_from_u64(seed),
            peers: BTreeMap::new(),
            wakeups: Wakeups::default(),
            events: VecDeque::new(),
            stun: StunClient::new(),
            relay: RelayMachines::default(),
            probing: None,
            transmits: VecDeque::new(),
            own: OwnCandidates::default(),
            birthdays: Birthdays::new(seed),
            nat64: Arc::default(),
            mtu_searches: MtuSearches::default(),
            refusals: PerSecond::default(),
            unknown_datagrams: 0,
        }
    }

    /// Lets peers that are added from now on be probed.
    pub fn enable_probes(&mut self, identity: Identity) {
        self.probing = Some(Probing::new(identity));
    }

    /// This node has another key: probes are encrypted with it from now on. The paths keep their state.
    pub fn set_identity(&mut self, identity: Identity) {
        let Some(probing) = &mut self.probing else { return };
        probing.set_identity(identity);
        for (key, peer) in &mut self.peers {
            peer.prober.set_controlling(probing.is_controlling(key));
        }
    }

    /// Adds a peer, or replaces its paths. The path of a known peer keeps its state.
    pub fn upsert_peer(&mut self, now: Duration, key: PublicKey, paths: PeerPaths) {
        let is_new = !self.peers.contains_key(&key);
        let peer = self.peers.entry(key).or_insert_with(|| {
            let config = Config { seed: self.random.random(), ..self.config };
            let is_controlling = self.probing.as_ref().is_some_and(|probing| probing.is_controlling(&key));
            Box::new(Peer::new(now, Rotation::new(config), Prober::new(is_controlling)))
        });
        if let Some(probing) = &mut self.probing {
            probing.add_peer(key);
            peer.prober.set_relay(paths.relay);
            peer.prober.set_relay_ports(self.relay.ports);
            peer.prober.set_mtu(self.mtu_searches.tunnel_mtu);
            peer.prober.set_nat64(&self.nat64);
            peer.prober.set_candidates(now, &paths.all());
            self.wakeups.follow_prober(&key, peer);
            self.birthdays.set_side(key, paths.birthday, probing.is_controlling(&key));
        }
        peer.rotation.set_silence(paths.silence);
        peer.rotation.set_relay(paths.relay.map(|relay| (relay.endpoint, relay.handshake_timeout)));
        peer.rotation.set_relay_ports(self.relay.ports);
        peer.rotation.set_candidates(now, paths.all());
        let wakeup = if is_new { Some(now) } else { peer.rotation.next_wakeup(now) };
        let due = peer.due.into_iter().chain(wakeup).min();
        self.wakeups.observe_at(&key, peer, due);
        if !is_new {
            peer.report_state(now, &key, &mut self.events);
        }
        // A relay may have come or gone.
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.report_keepalive(&key, &mut self.events);
        }
    }

    /// Removes a peer, its timer and its undelivered events.
    pub fn remove_peer(&mut self, key: &PublicKey) {
        if let Some(mut peer) = self.peers.remove(key) {
            self.wakeups.remove_peer(key, &mut peer);
            if let Some(probing) = &mut self.probing {
                probing.remove_peer(key);
            }
            self.own.reflexive.forget(key);
            self.relay.remove_peer(key);
            self.mtu_searches.remove_peer(key);
            self.events.retain(|event| event.peer() != Some(key));
            if peer.also.is_some() {
                self.events.push_back(Event::SendBothWays { peer: *key, also: None });
            }
            self.birthdays.remove_peer(key);
            self.run_birthday_actions(Duration::ZERO);
        }
    }

    /// Takes the device's state of a peer and decides on it; peers that were not added are ignored. A peer that the
    /// device does not have yet is observed as [`Observation::default`].
    pub fn observe(&mut self, now: Duration, key: &PublicKey, observation: Observation) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.rotation.observe(now, observation);
        // What answers probes now is better than what is next in the rotation.
        if let Some(endpoint) = peer.rotation.poll(now)
            && let Some(attempt) = peer.rotation.attempt()
            && !peer.prober.works(now)
        {
            peer.changed = now;
            let source = attempt.candidate.source;
            let reason = attempt.reason;
            self.events.push_back(Event::SetEndpoint { peer: *key, endpoint, source, reason });
        }
        peer.report_state(now, key, &mut self.events);
        let wakeup = peer.rotation.next_wakeup(now).filter(|wakeup| *wakeup > now);
        let next = now.saturating_add(observation_interval(peer.state, now.saturating_sub(peer.changed)));
        let due = wakeup.map_or(next, |wakeup| wakeup.min(next));
        self.wakeups.observe_at(key, peer, Some(on_grid(due)));
        if self.probing.is_some() {
            let is_up = peer.state == State::Up;
            let Observation { endpoint, rx_bytes, tx_bytes, .. } = observation;
            peer.prober.observe(now, Session { is_up, endpoint, rx_bytes, tx_bytes });
            peer.prober.observe_handshake(now, !peer.rotation.is_expired(now), tx_bytes);
            endpoint.iter().for_each(|endpoint| self.birthdays.claim(key, *endpoint));
            self.conclude_probing(now, key);
        }
    }

    /// Replaces the STUN servers that are asked where they see the WireGuard port; at most [`crate::MAX_STUN_SERVERS`] are.
    pub fn set_stun_servers(&mut self, now: Duration, servers: &[SocketAddr]) {
        self.stun.set_servers(now, servers);
        self.report_stun();
    }

    /// Links, addresses or routes of this host changed: STUN servers and peers are asked again at once.
    pub fn network_changed(&mut self, now: Duration) {
        self.stun.network_changed(now);
        self.relay.network_changed(now);
        self.birthdays.network_changed();
        self.own.reflexive.clear();
        if self.probing.is_some() {
            for (key, peer) in &mut self.peers {
                peer.prober.network_changed(now);
                self.wakeups.follow_prober(key, peer);
                peer.report_keepalive(key, &mut self.events);
            }
        }
    }

    /// The device has sent packets to a peer and received none for half a second: whether its path works is asked at once.
    pub fn packets_unanswered(&mut self, now: Duration, key: &PublicKey) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.prober.packets_unanswered(now);
            self.conclude_probing(now, key);
        }
    }

    /// Addresses at which peers see this node, as answers to probes say.
    pub fn reflexive_addresses(&self) -> BTreeSet<SocketAddr> {
        self.own.reflexive.agreed()
    }

    fn report_stun(&mut self) {
        let is_changed = self.stun.take_changed() | self.relay.take_changed();
        self.own.is_outdated |= is_changed;
        if is_changed {
            self.birthdays.set_stun_server(self.stun.answering_server());
        }
        if is_changed && !self.events.contains(&Event::StunAnswersChanged) {
            self.events.push_back(Event::StunAnswersChanged);
        }
    }

    /// Takes a datagram that arrived on the WireGuard port and is no WireGuard message. `local` is the address it was
    /// sent to, if the socket told. What is no answer to a request of this agent is counted and dropped.
    pub fn handle_datagram(
        &mut self,
        now: Duration,
        local: Option<IpAddr>,
        remote: SocketAddr,
        bytes: &[u8],
    ) {
        if is_probe(bytes) {
            self.handle_probe(now, Arrival { local, socket: None }, canonical(remote), bytes);
        } else if self.stun.handle_datagram(remote, bytes) || self.relay.handle_datagram(now, remote, bytes) {
            self.report_stun();
            self.conclude_bindings(now);
        } else {
            self.unknown_datagrams = self.unknown_datagrams.saturating_add(1);
        }
        self.tell_own_candidates(now);
    }

    /// Runs the machines that are due, and no others.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.stun.handle_timeout(now, &mut self.random);
        self.relay.handle_timeout(now, &mut self.random);
        self.report_stun();
        self.conclude_bindings(now);
        self.tell_own_candidates(now);
        self.run_probers(now);
        self.run_birthdays(now);
        while let Some(key) = self.wakeups.observations.pop_due(now) {
            let Some(peer) = self.peers.get_mut(&key) else { continue };
            peer.due = None;
            let again = on_grid(now.saturating_add(MIN_OBSERVATION_INTERVAL));
            self.wakeups.observe_at(&key, peer, Some(again));
            if !std::mem::replace(&mut peer.observation_queued, true) {
                self.events.push_back(Event::ObservationDue { peer: key });
            }
        }
    }

    /// The next datagram to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        let transmit = self.transmits.pop_front().or_else(|| self.stun.poll_transmit());
        transmit.or_else(|| self.relay.poll_transmit())
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        if let Event::ObservationDue { peer } = event
            && let Some(peer) = self.peers.get_mut(&peer)
        {
            peer.observation_queued = false;
        }
        Some(event)
    }

    /// Time at which to call [`Self::handle_timeout`]. `None` without peers and STUN servers.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let timers = self.wakeups.next().into_iter().chain(self.own.due);
        let machines = self.relay.poll_timeout().into_iter().chain(self.birthdays.poll_timeout());
        timers.chain(self.stun.poll_timeout()).chain(machines).min()
    }

    /// The state of a peer at `now`, for users.
    pub fn status(&self, now: Duration, key: &PublicKey) -> Option<Status> {
        let peer = self.peers.get(key)?;
        let round_trip = peer.prober.round_trip();
        let loses_long = peer.prober.loses_long(now);
        let route_mtu = peer.route_mtu;
        let mut status = Status { round_trip, loses_long, route_mtu, ..peer.rotation.status(now) };
        peer.explain_keepalive(&mut status);
        Some(status)
    }

    /// The peers, sorted.
    pub fn peers(&self) -> impl Iterator<Item = &PublicKey> {
        self.peers.keys()
    }

    /// Number of datagrams that were dropped: of an unknown format, or not asked for.
    pub fn unknown_datagrams(&self) -> u64 {
        self.unknown_datagrams
    }
}

#[cfg(test)]
mod tests;

//! Requests of the agent to a relay: where it sees this node, how the NAT filters, and UDP ports to peers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_keys::PublicKey;
use rand::rngs::StdRng;

use super::{Event, PathAgent};
use crate::binding::{Bindings, Outcome, RelayPort};
use crate::datagram::Transmit;
use crate::filtering::{Filtering, FilteringTest, RelayStun};
use crate::relay_path::RelayPortRange;
use crate::stun::StunAnswer;

/// The machines that speak STUN with the relay.
#[derive(Debug, Default)]
pub(super) struct RelayMachines {
    filtering: FilteringTest,
    bindings: Bindings,
    /// UDP ports of the last relay that had any: endpoints may be among them for a while after the link to it is lost.
    pub(super) ports: Option<RelayPortRange>,
}

impl RelayMachines {
    pub(super) fn network_changed(&mut self, now: Duration) {
        self.filtering.network_changed(now);
        self.bindings.renew_all(now);
    }

    pub(super) fn remove_peer(&mut self, peer: &PublicKey) {
        self.bindings.remove(peer);
    }

    pub(super) fn handle_datagram(&mut self, now: Duration, remote: SocketAddr, bytes: &[u8]) -> bool {
        self.filtering.handle_datagram(remote, bytes) || self.bindings.handle_datagram(now, remote, bytes)
    }

    pub(super) fn handle_timeout(&mut self, now: Duration, random: &mut StdRng) {
        self.filtering.handle_timeout(now, random);
        self.bindings.handle_timeout(now, random);
    }

    pub(super) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.filtering.poll_transmit().or_else(|| self.bindings.poll_transmit())
    }

    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        self.filtering.poll_timeout().into_iter().chain(self.bindings.poll_timeout()).min()
    }

    pub(super) fn take_changed(&mut self) -> bool {
        self.filtering.take_changed()
    }

    /// Whether an endpoint is a UDP port of the relay.
    pub(super) fn is_port(&self, endpoint: SocketAddr) -> bool {
        self.ports.is_some_and(|ports| ports.contains(endpoint))
    }
}

impl PathAgent {
    /// Sets where the relay answers STUN requests, and its UDP ports for pairs of peers; `None` where it has none.
    pub fn set_relay_stun(&mut self, now: Duration, relay: Option<RelayStun>) {
        if !self.relay.filtering.set_relay(now, relay) {
            return;
        }
        // The relay may be another run of its program, which knows no port of the last one.
        self.relay.bindings.renew_all(now);
        self.relay.ports = relay.and_then(|relay| relay.ports()).or(self.relay.ports);
        for peer in self.peers.values_mut() {
            peer.prober.set_relay_ports(self.relay.ports);
            peer.rotation.set_relay_ports(self.relay.ports);
        }
        self.report_stun();
    }

    /// The relay has allocated a UDP port to a peer.
    pub fn relay_port_allocated(&mut self, now: Duration, peer: PublicKey, port: RelayPort) {
        if self.relay.is_port(port.address) {
            self.relay.bindings.insert(now, peer, port);
            self.conclude_bindings(now);
        }
    }

    /// Whether an endpoint is a UDP port of the relay, or of the last one that had any.
    pub fn is_relay_port(&self, endpoint: SocketAddr) -> bool {
        self.relay.is_port(endpoint)
    }

    /// This node has a link to the relay now, or has lost it.
    pub fn relay_changed(&mut self, now: Duration, is_up: bool) {
        let keys: Vec<PublicKey> = self.peers.keys().copied().collect();
        for key in keys {
            if let Some(peer) = self.peers.get_mut(&key) {
                peer.prober.relay_changed(now, is_up);
            }
            self.conclude_probing(now, &key);
        }
    }

    /// Last answer of each STUN server, and of the relay if it says something of use.
    pub fn stun_answers(&self) -> BTreeMap<SocketAddr, StunAnswer> {
        let mut answers = self.stun.answers();
        if let Some((relay, mapped)) = self.relay.filtering.mapped() {
            answers.entry(relay).or_insert(StunAnswer::Mapped(mapped));
        }
        answers
    }

    /// Filtering of the NAT in front of this node; `None` until that is known.
    pub fn filtering(&self) -> Option<Filtering> {
        self.relay.filtering.filtering()
    }

    /// A peer whose packets go by way of the relay is to have a UDP port, if UDP to the relay works.
    pub(super) fn use_relay_port(&mut self, now: Duration, key: &PublicKey) {
        let Some(peer) = self.peers.get(key).filter(|peer| peer.prober.uses_relay()) else { return };
        let works = self.relay.ports.is_some() && self.relay.filtering.mapped().is_some();
        if self.relay.bindings.need(now, *key, works) {
            self.events.push_back(Event::RelayPortDue { peer: *key });
        }
        if peer.prober.misses_answers() {
            // The NAT may have given this node another address.
            self.relay.bindings.renew(now, key);
        }
    }

    /// Uses ports that were bound, and no more those that were lost.
    pub(super) fn conclude_bindings(&mut self, now: Duration) {
        while let Some((key, outcome)) = self.relay.bindings.poll_outcome() {
            let Some(peer) = self.peers.get_mut(&key) else { continue };
            let port = match outcome {
                Outcome::Bound(address) => Some(address),
                Outcome::Lost => None,
            };
            peer.prober.set_relay_port(now, port);
            self.conclude_probing(now, &key);
        }
    }
}

//! Probes on their way between the socket and the probers of the peers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::{Nat64Prefix, without_nat64};
use fairlead_keys::PublicKey;
use fairlead_wire::probe::{Header, Message, TransactionId};

use super::{Event, PathAgent};
use crate::candidates::Candidate;
use crate::datagram::{Arrival, Transmit};
use crate::prober::{CandidateStatus, Probe};
use crate::probing::{ProbeCounts, Probing};

/// A probe of a peer that was decrypted, and how it came.
struct ReceivedProbe {
    key: PublicKey,
    header: Header,
    arrival: Arrival,
    remote: SocketAddr,
    /// The address of the sender elsewhere, if a NAT64 lies between.
    original: SocketAddr,
    /// Length of the payload in bytes.
    length: usize,
}

impl PathAgent {
    /// Sets the MTU of the tunnel: paths must pass what its longest packets become, or another one is better.
    pub fn set_mtu(&mut self, mtu: u32) {
        if self.mtu_searches.tunnel_mtu.replace(mtu) != Some(mtu) {
            self.peers.values_mut().for_each(|peer| peer.prober.set_mtu(Some(mtu)));
        }
    }

    /// Sets the prefixes of the NAT64 of this node's network: what comes from there has an address elsewhere.
    pub fn set_nat64(&mut self, prefixes: &[Nat64Prefix]) {
        if *self.nat64 != *prefixes {
            self.nat64 = Arc::from(prefixes);
            self.peers.values_mut().for_each(|peer| peer.prober.set_nat64(&self.nat64));
        }
    }

    /// Asks every candidate of a peer now, within the limits on probes; [`Self::candidates`] has what they answer. Whether that is
    /// possible: the peer must be known, and probes [enabled](Self::enable_probes).
    pub fn ping(&mut self, now: Duration, key: &PublicKey) -> bool {
        let Some(peer) = self.peers.get_mut(key).filter(|_| self.probing.is_some()) else { return false };
        peer.prober.ping(now);
        self.conclude_probing(now, key);
        true
    }

    /// The candidates of a peer, and addresses that its requests came from; empty where no probes can be sent.
    pub fn candidates(&self, now: Duration, key: &PublicKey) -> Vec<CandidateStatus> {
        self.peers.get(key).map(|peer| peer.prober.candidates(now)).unwrap_or_default()
    }

    /// Counters of sent, received and dropped probes.
    pub fn probe_counts(&self) -> ProbeCounts {
        self.probing.as_ref().map(Probing::counts).unwrap_or_default()
    }

    pub(super) fn handle_probe(&mut self, now: Duration, arrival: Arrival, remote: SocketAddr, bytes: &[u8]) {
        let opened = self.probing.as_mut().and_then(|probing| probing.open(now, bytes));
        let Some((key, header, message)) = opened.filter(|(key, ..)| self.peers.contains_key(key)) else {
            return;
        };
        let original = without_nat64(&self.nat64, remote);
        let probe = ReceivedProbe { key, header, arrival, remote, original, length: bytes.len() };
        match message {
            Message::Answer { transaction, observed } => {
                self.handle_answer(now, &probe, transaction, observed);
            }
            // The answer would go through a tunnel, and seem to prove a path that the tunnel needs.
            Message::Request { .. } if self.own.is_cluster_address(remote) => return,
            Message::Request { .. } => self.handle_request(now, &probe, &message),
        }
        self.run_birthday_actions(now);
        self.conclude_probing(now, &key);
    }

    fn handle_answer(
        &mut self,
        now: Duration,
        probe: &ReceivedProbe,
        transaction: TransactionId,
        observed: SocketAddr,
    ) {
        let ReceivedProbe { key, header, arrival: Arrival { socket, .. }, remote, original, .. } = *probe;
        let (Some(probing), Some(peer)) = (&mut self.probing, self.peers.get_mut(&key)) else { return };
        let is_of_birthday = self.birthdays.handle_answer(now, &key, remote, socket, transaction);
        let is_expected = is_of_birthday || peer.prober.handle_answer(now, remote, transaction);
        probing.conclude(&key, &header, original, is_expected);
        if is_expected
            // A socket of an attempt has a mapping of its own.
            && socket.is_none()
            && !self.relay.is_port(remote)
            && self.own.observed(now, key, original, observed)
        {
            self.events.push_back(Event::ReflexiveAddressesChanged);
        }
    }

    /// Answers a request, and does what it asks for.
    fn handle_request(&mut self, now: Duration, probe: &ReceivedProbe, request: &Message) {
        let Message::Request {
            transaction,
            starts_round,
            wants_handshake,
            is_birthday,
            wants_keepalives,
            ports,
            candidates,
        } = request
        else {
            return;
        };
        self.answer(probe, *transaction);
        let ReceivedProbe { key, header, arrival: Arrival { socket, .. }, remote, .. } = *probe;
        let (Some(probing), Some(peer)) = (&mut self.probing, self.peers.get_mut(&key)) else { return };
        if !is_birthday && probing.is_current(&key, &header) {
            peer.prober.peer_wants_keepalives(*wants_keepalives);
        }
        if *is_birthday && peer.prober.is_relay_at(remote) && !peer.prober.works_directly(now) {
            self.birthdays.handle_ask(now, key, peer.prober.birthday_target(), *ports);
        }
        if !self.birthdays.handle_request(now, &key, remote, socket)
            && (peer.prober.is_relay(remote) || self.own.is_tried(remote))
        {
            peer.prober.handle_request(now, remote, *starts_round);
        }
        if peer.prober.is_relay(remote) && probing.is_current(&key, &header) {
            peer.take_candidates(now, &self.own, &header, candidates);
        }
        let is_new = probing.is_confirmed(&key, &header);
        if *wants_handshake && peer.prober.handle_handshake_request(now, remote, is_new) {
            self.events.push_back(Event::HandshakeDue { peer: key });
        }
    }

    fn answer(&mut self, probe: &ReceivedProbe, transaction: TransactionId) {
        let ReceivedProbe { key, arrival: Arrival { local, socket }, remote, original, length, .. } = *probe;
        let answer = Message::Answer { transaction, observed: original };
        let payload = self.probing.as_mut().and_then(|probing| probing.seal(&key, &answer, length));
        if let Some(payload) = payload {
            self.transmits.push_back(Transmit { local, socket, remote, payload });
        }
    }

    /// Uses what the prober of a peer has found, and sets its timer.
    pub(super) fn conclude_probing(&mut self, now: Duration, key: &PublicKey) {
        let Some(peer) = self.peers.get_mut(key).filter(|_| self.probing.is_some()) else { return };
        if let Some((candidate, reason)) = peer.prober.select(now) {
            peer.changed = now;
            let Candidate { address: endpoint, source } = candidate;
            let reason = self.birthdays.reason(key, endpoint).unwrap_or(reason);
            self.events.push_back(Event::SetEndpoint { peer: *key, endpoint, source, reason });
        }
        let also = peer.prober.also(now);
        if std::mem::replace(&mut peer.also, also) != also {
            self.events.push_back(Event::SendBothWays { peer: *key, also });
        }
        self.review_path_mtu(now, key);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.report_keepalive(key, &mut self.events);
            self.wakeups.follow_prober(key, peer);
        }
        self.use_relay_port(now, key);
        self.review_birthday(now, key);
    }

    pub(super) fn run_probers(&mut self, now: Duration) {
        let Some(probing) = &mut self.probing else { return };
        let mut ran = Vec::new();
        while let Some(key) = self.wakeups.probes.pop_due(now) {
            let Some(peer) = self.peers.get_mut(&key) else { continue };
            peer.probe_due = None;
            for probe in peer.prober.handle_timeout(now, &mut self.random) {
                let Probe { to: remote, transaction, starts_round, wants_handshake, .. } = probe;
                let Probe { is_proven, signals, length, .. } = probe;
                let candidates = if signals { self.own.list().to_vec() } else { Vec::new() };
                let is_birthday = false;
                let wants_keepalives = peer.prober.wants_keepalives();
                let ports = None;
                let request = Message::Request {
                    transaction,
                    starts_round,
                    wants_handshake,
                    is_birthday,
                    wants_keepalives,
                    ports,
                    candidates,
                };
                let payload = if is_proven {
                    probing.check(&key, &request, length)
                } else {
                    // One host, whatever the prefix.
                    let original = without_nat64(&self.nat64, remote);
                    probing.request(now, &key, original, &request, length)
                };
                match payload {
                    Some(payload) => {
                        self.transmits.push_back(Transmit { local: None, socket: None, remote, payload })
                    }
                    None => peer.prober.held_back(remote),
                }
            }
            ran.push(key);
        }
        ran.iter().for_each(|key| self.conclude_probing(now, key));
    }

    /// Begins and ends the search of a peer for the packets that its path passes, and reports what follows for its routes.
    pub(super) fn review_path_mtu(&mut self, now: Duration, key: &PublicKey) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        self.mtu_searches.review(now, key, &mut peer.prober);
        let mtu = peer.prober.route_mtu();
        if std::mem::replace(&mut peer.route_mtu, mtu) != mtu {
            self.events.push_back(Event::RouteMtuChanged { peer: *key, mtu });
        }
    }

    /// The MTU that routes to a peer are to have; `None` for the tunnel's.
    pub fn route_mtu(&self, key: &PublicKey) -> Option<u32> {
        self.peers.get(key)?.route_mtu
    }
}

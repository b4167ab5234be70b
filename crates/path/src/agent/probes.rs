//! Probes on their way between the socket and the probers of the peers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::{Nat64Prefix, without_nat64};
use fairlead_api::wireguard::PublicKey;
use fairlead_wire::probe::Message;

use super::{Event, PathAgent, Transmit};
use crate::candidates::Candidate;
use crate::prober::{CandidateStatus, Probe};
use crate::probing::{ProbeCounts, Probing};

impl PathAgent {
    /// Sets the MTU of the tunnel: paths must pass what its longest packets become, or another one is better.
    pub fn set_mtu(&mut self, mtu: u32) {
        if self.mtu != Some(mtu) {
            self.mtu = Some(mtu);
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

    /// How many probes were sent, received and dropped.
    pub fn probe_counts(&self) -> ProbeCounts {
        self.probing.as_ref().map(Probing::counts).unwrap_or_default()
    }

    pub(super) fn handle_probe(
        &mut self,
        now: Duration,
        local: Option<IpAddr>,
        remote: SocketAddr,
        bytes: &[u8],
    ) {
        let Some(probing) = &mut self.probing else { return };
        let Some((key, header, message)) = probing.open(now, bytes) else { return };
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let original = without_nat64(&self.nat64, remote);
        match message {
            Message::Answer { transaction, observed } => {
                let is_expected = peer.prober.handle_answer(now, remote, transaction);
                probing.conclude(&key, &header, original, is_expected);
                if is_expected
                    && !self.relay.is_port(remote)
                    && self.reflexive.insert(now, key, original, observed)
                {
                    self.events.push_back(Event::ReflexiveAddressesChanged);
                }
            }
            Message::Request { transaction, starts_round, wants_handshake } => {
                let answer = Message::Answer { transaction, observed: original };
                if let Some(payload) = probing.seal(&key, &answer, bytes.len()) {
                    self.transmits.push_back(Transmit { local, remote, payload });
                }
                peer.prober.handle_request(now, remote, starts_round);
                let is_new = probing.is_confirmed(&key, &header);
                if wants_handshake && peer.prober.handle_handshake_request(now, remote, is_new) {
                    self.events.push_back(Event::HandshakeDue { peer: key });
                }
            }
        }
        self.conclude_probing(now, &key);
    }

    /// Uses what the prober of a peer has found, and sets its timer.
    pub(super) fn conclude_probing(&mut self, now: Duration, key: &PublicKey) {
        let Some(peer) = self.peers.get_mut(key).filter(|_| self.probing.is_some()) else { return };
        if let Some((candidate, reason)) = peer.prober.select(now) {
            peer.changed = now;
            let Candidate { address: endpoint, source } = candidate;
            self.events.push_back(Event::SetEndpoint { peer: *key, endpoint, source, reason });
        }
        let due = peer.prober.poll_timeout();
        self.probe_timers.reschedule(*key, &mut peer.probe_due, due);
        self.use_relay_port(now, key);
    }

    pub(super) fn run_probers(&mut self, now: Duration) {
        let Some(probing) = &mut self.probing else { return };
        let mut ran = Vec::new();
        while let Some(key) = self.probe_timers.pop_due(now) {
            let Some(peer) = self.peers.get_mut(&key) else { continue };
            peer.probe_due = None;
            for Probe { to: remote, transaction, starts_round, wants_handshake, is_proven, length } in
                peer.prober.handle_timeout(now, &mut self.random)
            {
                let request = Message::Request { transaction, starts_round, wants_handshake };
                let payload = if is_proven {
                    probing.check(&key, &request, length)
                } else {
                    // One host, whatever the prefix.
                    let original = without_nat64(&self.nat64, remote);
                    probing.request(now, &key, original, &request, length)
                };
                match payload {
                    Some(payload) => self.transmits.push_back(Transmit { local: None, remote, payload }),
                    None => peer.prober.held_back(remote),
                }
            }
            ran.push(key);
        }
        ran.iter().for_each(|key| self.conclude_probing(now, key));
    }
}

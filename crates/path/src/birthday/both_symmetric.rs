//! Attempts between two symmetric NATs: both nodes measure which ports their NATs give out, tell each other, and try the ports that
//! follow, from the WireGuard ports. One of them chooses the port that both then use.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::canonical;
use fairlead_keys::PublicKey;
use fairlead_wire::probe::PortSequence;
use fairlead_wire::stun::parse_response;

use super::following::Following;
use super::measuring::{self, Measuring, PeerPorts};
use super::record::BirthdaySide;
use super::searching::Searching;
use super::{Action, Attempt, Birthdays, Stage, ports};

/// Ports that say something of how a NAT chooses them.
const MIN_SAMPLES: usize = 4;

impl Birthdays {
    /// Sets a STUN server that answers, if there is one.
    pub(crate) fn set_stun_server(&mut self, server: Option<SocketAddr>) {
        self.stun_server = server;
    }

    /// See [`crate::PathAgent::measured_ports`].
    pub(crate) fn measured(&self) -> &[u16] {
        self.measured.as_deref().unwrap_or_default()
    }

    /// Begins an attempt. Whether the budget allows it.
    pub(super) fn measure(
        &mut self,
        now: Duration,
        peer: PublicKey,
        target: SocketAddr,
        their: PeerPorts,
    ) -> bool {
        let is_allowed = self.has_budget(now, measuring::SOCKETS.into());
        if is_allowed {
            let stage = Stage::Measuring(Measuring::new(now, self.stun_server, their));
            let attempt = Attempt::new(now, peer, BirthdaySide::BothSymmetric, target, stage);
            // The peer is told once there is something to tell.
            self.attempt = Some(Attempt { next_ask: None, ..attempt });
            self.actions.push_back(Action::Open(measuring::SOCKETS));
        }
        is_allowed
    }

    /// Takes what came in by a socket. Whether it is an answer of the STUN server.
    pub(crate) fn handle_stun(
        &mut self,
        now: Duration,
        socket: u16,
        remote: SocketAddr,
        bytes: &[u8],
    ) -> bool {
        let Some(Attempt { stage: Stage::Measuring(measuring), .. }) = &mut self.attempt else {
            return false;
        };
        let Ok(response) = parse_response(bytes) else { return false };
        let mapped = response.mapped.ok().map(canonical);
        let is_answer = measuring.handle_answer(socket, canonical(remote), response.transaction, mapped);
        if is_answer && measuring.is_over(now) {
            self.conclude_measuring(now);
        }
        is_answer
    }

    /// Tells the peer what was measured, and tries ports if the peer has said the same of its own.
    pub(super) fn conclude_measuring(&mut self, now: Duration) {
        let Some(attempt) = &mut self.attempt else { return };
        let Stage::Measuring(measuring) = &attempt.stage else { return };
        let their = measuring.their;
        attempt.ports = measuring.prediction();
        let ports = measuring.ports();
        // One is enough: it is for people, and each other one would be written to the API server.
        if ports.len() >= MIN_SAMPLES {
            self.measured.get_or_insert(ports);
        }
        attempt.began = now;
        attempt.next_ask = Some(now);
        attempt.stage = Stage::Asking;
        self.actions.push_back(Action::Close);
        if let PeerPorts::Told(their) = their {
            self.try_ports(now, their);
        }
    }

    /// Both nodes know what the other one's NAT does. Without a budget nothing is sent, and the attempt ends as one without the peer.
    pub(super) fn try_ports(&mut self, now: Duration, their: Option<PortSequence>) {
        if !self.has_budget(now, ports::MAX_REQUESTS) {
            return;
        }
        let Some(attempt) = &mut self.attempt else { return };
        let leads = self.peers.get(&attempt.peer).is_some_and(|record| record.leads);
        let ports = ports::plan(attempt.ports, their, leads, &mut self.random);
        let ip = attempt.target.ip();
        attempt.stage = if leads {
            Stage::Searching(Searching::new(now, ip, ports))
        } else {
            Stage::Following(Following::new(now, ip, ports))
        };
    }
}

//! Candidates as an operator sees them, who may have all of them asked now.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;
use super::path::Path;
use super::ping::{Ping, PingOutcome};
use crate::candidates::Candidate;

/// A candidate of a peer, and what is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CandidateStatus {
    /// Endpoint and its source.
    pub candidate: Candidate,
    /// WireGuard sends to it.
    pub is_in_use: bool,
    /// An answer has lately proved that it works.
    pub works: bool,
    /// Whether the path passes short datagrams and loses those that are as long as WireGuard's.
    pub loses_long: bool,
    /// Outcome of the last [`crate::PathAgent::ping`]; `None` without one.
    pub ping: Option<PingOutcome>,
}

impl Prober {
    /// Asks every path from now on, as if it were new.
    pub(crate) fn ping(&mut self, now: Duration) {
        self.ping = Some(Box::new(Ping::new(now)));
        // The peer is asked to try its paths as well: its NAT may let in only what it has sent to.
        self.rounds.is_joined = false;
        self.paths.iter_mut().for_each(|path| path.attempt = Some((now, 0)));
    }

    /// The limits held back a request.
    pub(crate) fn held_back(&mut self, to: SocketAddr) {
        if let Some(ping) = &mut self.ping {
            ping.remove_request(to);
        }
    }

    /// All paths, as they are at `now`.
    pub(crate) fn candidates(&self, now: Duration) -> Vec<CandidateStatus> {
        let status = |path: &Path| {
            let Path { candidate, .. } = *path;
            CandidateStatus {
                candidate,
                is_in_use: self.paths.current == Some(candidate.address),
                works: path.is_fresh(now),
                loses_long: path.full_size.is_lost,
                ping: self.ping.as_ref().map(|ping| ping.outcome(candidate.address)),
            }
        };
        self.paths.iter().map(status).collect()
    }
}

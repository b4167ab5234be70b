//! The state of a peer's path, why it is in that state, and both as text for users.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::Rotation;
use super::liveness::Loss;
use crate::candidates::{Candidate, Source};

/// Whether packets reach the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// A session is alive.
    Up,
    /// Candidates are being tried.
    Connecting,
    /// There is no candidate, or each was tried in [`super::Config::fast_rounds`] rounds; the rotation continues slowly.
    Down,
}

impl State {
    /// The word for status and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Connecting => "connecting",
            Self::Down => "down",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reason for the state of a path. [`Self::name`] is the word for conditions, Events and metrics; `Display` is the sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Each candidate was tried and none completed a handshake.
    CandidatesExhausted,
    /// The peer has no candidate.
    NoCandidates,
    /// The state of the WireGuard device has not been read since the peer was added.
    NotObserved,
    /// The peer sent nothing for too long, or did not answer.
    PeerSilent,
    /// A handshake completed and packets arrive.
    SessionAlive,
    /// The last handshake is too old, or the device has lost the session.
    SessionExpired,
    /// A candidate is being tried.
    TryingCandidates,
}

impl Reason {
    /// All of them, for metrics that name each.
    pub const ALL: [Self; 7] = [
        Self::CandidatesExhausted,
        Self::NoCandidates,
        Self::NotObserved,
        Self::PeerSilent,
        Self::SessionAlive,
        Self::SessionExpired,
        Self::TryingCandidates,
    ];

    /// The reason as one CamelCase word.
    pub fn name(self) -> &'static str {
        match self {
            Self::CandidatesExhausted => "CandidatesExhausted",
            Self::NoCandidates => "NoCandidates",
            Self::NotObserved => "NotObserved",
            Self::PeerSilent => "PeerSilent",
            Self::SessionAlive => "SessionAlive",
            Self::SessionExpired => "SessionExpired",
            Self::TryingCandidates => "TryingCandidates",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CandidatesExhausted => "all candidate endpoints were tried and none completed a handshake",
            Self::NoCandidates => {
                "no candidate endpoint known: the node has published none and no peer has seen it"
            }
            Self::NotObserved => "the WireGuard device has not been read yet",
            Self::PeerSilent => "the peer stopped sending packets",
            Self::SessionAlive => "a WireGuard session is alive",
            Self::SessionExpired => "the WireGuard session expired without a new handshake",
            Self::TryingCandidates => "candidate endpoints are being tried",
        })
    }
}

/// The state of a peer for `fairlead status`, Events and the peer resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Whether packets reach the peer.
    pub state: State,
    /// Reason for this state.
    pub reason: Reason,
    /// Endpoint that packets go to now.
    pub endpoint: Option<SocketAddr>,
    /// The source of that endpoint.
    pub source: Option<Source>,
    /// The reason with its figures: durations, number of candidates, the candidate being tried.
    pub message: String,
    /// Round-trip time over the path in use, at its last answer to a probe; `None` for a peer that answers none.
    pub round_trip: Option<Duration>,
    /// The path in use passes short datagrams and loses those that are as long as WireGuard's.
    pub loses_long: bool,
    /// The MTU that routes to the peer are to have, because the path passes no longer packets; `None` for the tunnel's.
    pub route_mtu: Option<u32>,
}

impl Rotation {
    /// The state of the peer at `now`, for users.
    pub(crate) fn status(&self, now: Duration) -> Status {
        let device = self
            .liveness
            .device
            .and_then(|device| device.endpoint)
            .map(|endpoint| self.candidate_at(endpoint));
        let trying = self.attempts.current.map(|attempt| attempt.candidate).filter(|_| !self.is_alive(now));
        let shown = trying.or(device);
        let (state, reason) = self.state(now);
        let message = match state {
            State::Up => self.session_message(now, device),
            State::Connecting | State::Down => self.trouble_message(now, trying),
        };
        Status {
            state,
            reason,
            endpoint: shown.map(|candidate| candidate.address),
            source: shown.map(|candidate| candidate.source),
            message,
            round_trip: None,
            loses_long: false,
            route_mtu: None,
        }
    }

    /// The state of the peer at `now`, and why.
    pub(crate) fn state(&self, now: Duration) -> (State, Reason) {
        if self.is_alive(now) {
            return (State::Up, Reason::SessionAlive);
        }
        let has_candidates = !self.ordered_candidates().is_empty();
        let exhausted = self.attempts.round >= self.config.fast_rounds;
        let state = if exhausted || !has_candidates { State::Down } else { State::Connecting };
        let reason = match self.current_loss(now) {
            _ if self.liveness.device.is_none() => Reason::NotObserved,
            _ if !has_candidates => Reason::NoCandidates,
            _ if exhausted => Reason::CandidatesExhausted,
            Some(Loss::Expired) => Reason::SessionExpired,
            Some(Loss::Silent) => Reason::PeerSilent,
            None => Reason::TryingCandidates,
        };
        (state, reason)
    }

    fn session_message(&self, now: Duration, device: Option<Candidate>) -> String {
        let age = self.liveness.handshake.map_or(Duration::ZERO, |at| now.saturating_sub(at)).as_secs();
        let via = device.map_or_else(String::new, |candidate| format!(" over {candidate}"));
        format!("handshake {age} s ago{via}")
    }

    /// The session may have been lost since the last update.
    fn current_loss(&self, now: Duration) -> Option<Loss> {
        self.lost.or(self.up.then(|| self.loss(now)))
    }

    fn trouble_message(&self, now: Duration, trying: Option<Candidate>) -> String {
        let mut parts = Vec::new();
        match (self.current_loss(now), self.liveness.received, self.liveness.handshake) {
            (Some(Loss::Silent), Some(received), _) => {
                parts.push(format!("no packet for {} s", now.saturating_sub(received).as_secs()));
            }
            (Some(_), _, Some(at)) => {
                parts.push(format!("no handshake for {} s", now.saturating_sub(at).as_secs()));
            }
            (Some(_), ..) => parts.push("the device lost its session".to_owned()),
            (None, ..) => {}
        }
        let failed =
            self.attempts.count().saturating_sub(usize::from(self.attempts.round == 0 && trying.is_some()));
        let endpoints = if failed == 1 { "endpoint" } else { "endpoints" };
        if failed > 0 {
            parts.push(format!("tried {failed} {endpoints}, no handshake yet"));
        }
        match trying {
            Some(candidate) => parts.push(format!("trying {candidate}")),
            None if self.liveness.device.is_none() => parts.push(Reason::NotObserved.to_string()),
            None if self.ordered_candidates().is_empty() => parts.push(Reason::NoCandidates.to_string()),
            None => parts.push("about to try its endpoints".to_owned()),
        }
        parts.join("; ")
    }
}

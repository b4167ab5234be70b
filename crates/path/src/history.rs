//! Changes of the path to each peer: the last ones with their reasons, for operators, and the time that the first direct path took.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use fairlead_keys::PublicKey;

use crate::{Candidate, EndpointReason, Source};

/// Changes of each peer that are kept.
pub const MAX_CHANGES: usize = 16;

/// Another endpoint of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathChange {
    /// Time of the change.
    pub at: SystemTime,
    /// The endpoint before; `None` if there was none.
    pub from: Option<Candidate>,
    /// The endpoint from then on.
    pub to: Candidate,
    /// Reason for the change.
    pub reason: ChangeReason,
    /// Number of endpoints in a row that were tried for this reason; this is the last of them.
    pub attempts: u32,
}

/// Reason why a peer has another endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeReason {
    /// WireGuard took it from an authenticated packet of the peer, or had it before this program started.
    Roamed,
    /// This node set it.
    Set(EndpointReason),
}

impl ChangeReason {
    /// The reason as one CamelCase word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Roamed => "Roamed",
            Self::Set(reason) => reason.name(),
        }
    }
}

/// Observation of a peer in a WireGuard device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observed {
    /// The endpoint; `None` before there is one.
    pub endpoint: Option<SocketAddr>,
    /// Whether the peer has a session.
    pub is_up: bool,
}

/// The changes of all peers.
#[derive(Debug, Default)]
pub struct PathHistory(BTreeMap<PublicKey, PeerHistory>);

#[derive(Debug)]
struct PeerHistory {
    /// The endpoint before the first of `changes`.
    before: Option<Candidate>,
    changes: VecDeque<Change>,
    /// Whether the endpoint that was set last may not be in the device yet.
    is_set_pending: bool,
    direct: Direct,
}

/// [`PathChange`] without what the one before it says.
#[derive(Debug, Clone, Copy)]
struct Change {
    at: SystemTime,
    to: Candidate,
    reason: ChangeReason,
    attempts: u32,
}

/// Whether there was a direct path yet.
#[derive(Debug, Clone, Copy)]
enum Direct {
    Found,
    /// Since the peer was added, and whether the device was observed since.
    Sought(Instant, bool),
}

impl PathHistory {
    /// Forgets peers that are gone, and begins with new ones.
    pub fn set_peers<T>(&mut self, now: Instant, peers: &BTreeMap<PublicKey, T>) {
        self.0.retain(|key, _| peers.contains_key(key));
        for key in peers.keys() {
            self.0.entry(*key).or_insert_with(|| PeerHistory {
                before: None,
                changes: VecDeque::new(),
                is_set_pending: false,
                direct: Direct::Sought(now, false),
            });
        }
    }

    /// This node sets an endpoint. Returns the time to the first direct path if it is one.
    pub fn endpoint_set(
        &mut self,
        key: &PublicKey,
        (at, now): (SystemTime, Instant),
        to: Candidate,
        reason: EndpointReason,
    ) -> Option<Duration> {
        let peer = self.0.get_mut(key)?;
        peer.is_set_pending = true;
        peer.push(Change { at, to, reason: ChangeReason::Set(reason), attempts: 1 });
        // The others are attempts, which may lead nowhere.
        let works = matches!(
            reason,
            EndpointReason::BetterPath
                | EndpointReason::BirthdayAttack
                | EndpointReason::PathFailed
                | EndpointReason::ProbeAnswered
        );
        peer.found_direct(now, works && to.source != Source::Relay)
    }

    /// The device was read. Returns the time to the first direct path if it is on one now; a session that was there before this
    /// program has none.
    pub fn observed(
        &mut self,
        key: &PublicKey,
        (at, now): (SystemTime, Instant),
        observed: Observed,
        source: impl FnOnce(SocketAddr) -> Source,
    ) -> Option<Duration> {
        let peer = self.0.get_mut(key)?;
        let is_set_pending = std::mem::take(&mut peer.is_set_pending);
        let is_first = match &mut peer.direct {
            Direct::Found => false,
            Direct::Sought(_, was_observed) => !std::mem::replace(was_observed, true),
        };
        let known = peer.current();
        let to = match (observed.endpoint?, known) {
            (endpoint, Some(known)) if known.address == endpoint => known,
            // The device was read before it got what was set; the next reading shows what became of that.
            (_, Some(_)) if is_set_pending => return None,
            (address, _) => {
                let to = Candidate { address, source: source(address) };
                peer.push(Change { at, to, reason: ChangeReason::Roamed, attempts: 1 });
                to
            }
        };
        let is_direct = observed.is_up && to.source != Source::Relay;
        peer.found_direct(now, is_direct).filter(|_| !is_first)
    }

    /// The changes of a peer, the oldest first.
    pub fn of(&self, key: &PublicKey) -> Vec<PathChange> {
        let Some(PeerHistory { before, changes, .. }) = self.0.get(key) else { return Vec::new() };
        let mut from = *before;
        let complete = |Change { at, to, reason, attempts }: &Change| PathChange {
            at: *at,
            from: from.replace(*to),
            to: *to,
            reason: *reason,
            attempts: *attempts,
        };
        changes.iter().map(complete).collect()
    }
}

impl PeerHistory {
    fn current(&self) -> Option<Candidate> {
        self.changes.back().map(|change| change.to)
    }

    /// A peer that stays away is tried again and again: that is one entry, or nothing else would be left.
    fn push(&mut self, change: Change) {
        let is_attempt = change.reason == ChangeReason::Set(EndpointReason::NextCandidate);
        if let Some(last) = self.changes.back_mut().filter(|last| is_attempt && last.reason == change.reason)
        {
            *last = Change { attempts: last.attempts.saturating_add(1), ..change };
            return;
        }
        if self.changes.len() >= MAX_CHANGES {
            self.before = self.changes.pop_front().map(|oldest| oldest.to);
        }
        self.changes.push_back(change);
    }

    fn found_direct(&mut self, now: Instant, is_direct: bool) -> Option<Duration> {
        let Direct::Sought(since, _) = self.direct else { return None };
        is_direct.then(|| {
            self.direct = Direct::Found;
            now.saturating_duration_since(since)
        })
    }
}

#[cfg(test)]
mod tests;

//! Paths to a peer, and which of them is in use.

use std::net::SocketAddr;
use std::time::Duration;

use super::attempt::LAST_REQUEST;
use super::path::{Origin, Path};
use crate::candidates::Candidate;

/// Addresses that only requests of the peer came from; the oldest makes room.
pub(super) const MAX_REFLEXIVE: usize = 4;

/// All paths to a peer.
#[derive(Debug, Default)]
pub(super) struct Paths {
    pub(super) all: Vec<Path>,
    /// Endpoint that WireGuard uses, as observed or selected last.
    pub(super) current: Option<SocketAddr>,
}

impl Paths {
    pub(super) fn iter(&self) -> std::slice::Iter<'_, Path> {
        self.all.iter()
    }

    pub(super) fn iter_mut(&mut self) -> std::slice::IterMut<'_, Path> {
        self.all.iter_mut()
    }

    /// The path to this address.
    pub(super) fn to(&self, address: SocketAddr) -> Option<&Path> {
        self.iter().find(|path| path.candidate.address == address)
    }

    /// The path to this address.
    pub(super) fn to_mut(&mut self, address: SocketAddr) -> Option<&mut Path> {
        self.iter_mut().find(|path| path.candidate.address == address)
    }

    /// The path in use.
    pub(super) fn in_use(&self) -> Option<&Path> {
        self.to(self.current?)
    }

    /// The path in use.
    pub(super) fn in_use_mut(&mut self) -> impl Iterator<Item = &mut Path> {
        let current = self.current;
        self.iter_mut().filter(move |path| Some(path.candidate.address) == current)
    }

    /// Whether the path in use has answered since a time.
    pub(super) fn in_use_has_answered_since(&self, time: Duration) -> bool {
        let mut in_use = self.iter().filter(|path| Some(path.candidate.address) == self.current);
        in_use.any(|path| path.has_answered_since(time))
    }

    pub(super) fn works_directly(&self, now: Duration) -> bool {
        self.iter().any(|path| !path.is_relay() && path.is_fresh(now))
    }

    /// Whether an address stands for the peer by way of the relay.
    pub(super) fn is_relay(&self, address: SocketAddr) -> bool {
        self.to(address).is_some_and(Path::is_relay)
    }

    /// The relay's loopback port, which shares the fate of no path over UDP.
    pub(super) fn loopback_port(&self) -> Option<SocketAddr> {
        let relay = self.iter().find(|path| path.is_relay() && !path.is_relay_port())?;
        Some(relay.candidate.address)
    }

    /// Adds an address that no source names.
    pub(super) fn add_reflexive(&mut self, now: Duration, candidate: Candidate) {
        let is_reflexive = |path: &Path| path.origin == Origin::Request;
        let reflexive = self.iter().filter(|path| is_reflexive(path)).count();
        if reflexive >= MAX_REFLEXIVE {
            let current = self.current;
            let oldest =
                self.iter().position(|path| is_reflexive(path) && Some(path.candidate.address) != current);
            if let Some(oldest) = oldest {
                self.all.remove(oldest);
            }
        }
        self.all.push(Path { origin: Origin::Request, ..Path::new(candidate, now) });
    }

    /// Asks the path in use, as if it were new.
    pub(super) fn ask_in_use(&mut self, now: Duration) {
        self.in_use_mut().for_each(|path| path.attempt = Some((now, 0)));
    }

    /// Sends one request each to these addresses.
    pub(super) fn ask_once(&mut self, now: Duration, addresses: [Option<SocketAddr>; 2]) {
        let (after, before) = LAST_REQUEST;
        let is_asked = |address| addresses.contains(&Some(address));
        for path in self.iter_mut().filter(|path| path.attempt.is_none()) {
            if is_asked(path.candidate.address) {
                path.attempt = Some((now.saturating_sub(after), before));
            }
        }
    }

    /// Asks over the relay: so that its answer is there when the path in use has failed, and that the peer tries its paths as well.
    pub(super) fn ask_relay(&mut self, now: Duration) {
        let relays = self.iter_mut().filter(|path| path.is_relay() && path.attempt.is_none());
        relays.for_each(|path| path.attempt = Some((now, 0)));
    }
}

//! Paths to a peer as a birthday attempt sees them, and the paths that it adds.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::is_private;

use super::Prober;
use super::attempt::LAST_REQUEST;
use super::path::Origin;
use crate::candidates::Source;

impl Prober {
    /// Whether packets are relayed although all paths were tried, and there is traffic that an attempt is worth.
    pub(crate) fn wants_birthday(&self, now: Duration) -> bool {
        let (last_request, _) = LAST_REQUEST;
        let tried = self.rounds.began.is_none_or(|began| now.saturating_sub(began) > last_request);
        self.uses_relay()
            && self.traffic.is_active(now)
            && tried
            && !self.works_directly(now)
            && !self.network.is_relay_only()
    }

    /// Address for requests by way of the relay.
    pub(crate) fn relay_address(&self) -> Option<SocketAddr> {
        let current = self.paths.in_use().filter(|path| path.is_relay());
        let any = || self.paths.iter().filter(|path| path.is_relay()).min_by_key(|path| path.rank());
        current.or_else(any).map(|path| path.candidate.address)
    }

    /// Whether what comes from this address came by way of the relay.
    pub(crate) fn is_relay_at(&self, address: SocketAddr) -> bool {
        self.network.is_port_of_relay(address) || self.paths.is_relay(address)
    }

    /// Public IPv4 endpoint at which others see the peer: the only one that an attempt may be aimed at.
    pub(crate) fn birthday_target(&self) -> Option<SocketAddr> {
        let published = self.paths.iter().filter(|path| path.origin == Origin::Published);
        let seen = published.filter(|path| path.candidate.source == Source::Observed);
        let mut addresses = seen.map(|path| path.candidate.address);
        addresses
            .find(|address| address.is_ipv4() && !is_private(address.ip()) && self.network.may_use(*address))
    }

    /// An attempt has found this address: it is asked like any other path.
    pub(crate) fn add_found(&mut self, now: Duration, address: SocketAddr) {
        self.moves.add_found(address);
        let may_use = self.network.may_use(address);
        match self.paths.to_mut(address) {
            Some(path) => {
                path.attempt = Some((now, 0));
                path.has_failed = false;
            }
            None if may_use => self.add_reflexive(now, address),
            None => {}
        }
    }

    /// Whether packets go to this address.
    pub(crate) fn is_in_use(&self, address: SocketAddr) -> bool {
        self.paths.current == Some(address)
    }

    /// Whether this path was in use and stopped answering.
    pub(crate) fn has_failed(&self, address: SocketAddr, now: Duration) -> bool {
        self.paths.to(address).is_some_and(|path| path.has_failed && !path.is_fresh(now))
    }
}

//! Search for the MTU of the path in use, where no path to the peer passes the longest packets of the tunnel.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_wire::probe::TransactionId;
use rand::rngs::StdRng;

use super::Prober;
use super::probe::Probe;

impl Prober {
    /// Whether it is to be searched for what the path in use passes: a test has found since the last search that it loses the longest
    /// packets, and no other path passes them.
    pub(crate) fn wants_mtu_search(&self, now: Duration) -> bool {
        let Some(path) = self.paths.in_use().filter(|_| self.traffic.is_active(now)) else { return false };
        let others = self.paths.iter().filter(|other| other.is_fresh(now) && !other.full_size.is_lost);
        self.path_mtu.may_search(now, path.full_size.lost_at)
            && path.full_size.is_lost
            && path.is_fresh(now)
            && others.count() == 0
    }

    /// Whether a search runs.
    pub(crate) fn searches_mtu(&self) -> bool {
        self.path_mtu.is_searching()
    }

    /// Begins a search.
    pub(crate) fn start_mtu_search(&mut self, now: Duration) {
        if let (Some(address), Some(full)) = (self.paths.current, self.full_mtu()) {
            self.path_mtu.start(now, address, full);
        }
    }

    /// The MTU for routes to the peer, if it is to be another one than the tunnel's.
    pub(crate) fn route_mtu(&self) -> Option<u32> {
        self.paths.in_use().filter(|path| path.full_size.is_lost)?;
        self.path_mtu.found
    }

    /// Goes on with the search.
    pub(super) fn search_mtu(&mut self, now: Duration, random: &mut StdRng, probes: &mut Vec<Probe>) {
        let is_narrow = |address: SocketAddr| {
            self.traffic.session.is_up
                && self.paths.current == Some(address)
                && self.paths.in_use().is_some_and(|path| path.full_size.is_lost && path.is_fresh(now))
                && self.checks.missed == 0
        };
        self.path_mtu.go_on(now, is_narrow, random, probes);
    }

    /// Takes the answer to a request of the search. Whether it was one.
    pub(super) fn handle_search_answer(
        &mut self,
        now: Duration,
        from: SocketAddr,
        transaction: TransactionId,
    ) -> bool {
        let Some(passes) = self.path_mtu.handle_answer(now, from, transaction) else { return false };
        if passes {
            self.full_size_passes(from);
        }
        true
    }
}

//! Datagrams as long as those of WireGuard: which paths pass them.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;
use super::full_size::{FullSize, OVERHEAD};
use super::path_mtu::PathMtu;

/// The longest packets that are tested for: what Ethernet's 1500 bytes leave in a tunnel over IPv4. A node with jumbo frames has peers
/// without them, to which TCP sends shorter segments than to others.
const MAX_MTU: u32 = 1440;

impl Prober {
    /// Sets the MTU of the tunnel; `None` until it is known. Tests of another length are void.
    pub(crate) fn set_mtu(&mut self, mtu: Option<u32>) {
        let length = mtu.and_then(|mtu| usize::try_from(mtu.min(MAX_MTU).saturating_add(OVERHEAD)).ok());
        if std::mem::replace(&mut self.full_length, length) != length {
            self.forget_full_size();
        }
    }

    /// The longest packets that are tested for.
    pub(super) fn full_mtu(&self) -> Option<u32> {
        u32::try_from(self.full_length?).ok()?.checked_sub(OVERHEAD)
    }

    /// A path passes the longest packets after all.
    pub(super) fn full_size_passes(&mut self, address: SocketAddr) {
        for path in self.paths.iter_mut().filter(|path| path.candidate.address == address) {
            path.full_size.pass();
        }
    }

    pub(super) fn forget_full_size(&mut self) {
        self.path_mtu = PathMtu::default();
        self.paths.iter_mut().for_each(|path| path.full_size = FullSize::default());
    }

    /// Packets of the session stay unanswered: they may be the long ones.
    pub(super) fn doubt_full_size(&mut self, now: Duration) {
        let is_known = self.full_length.is_some();
        if let Some(path) = self.paths.in_use_mut().next().filter(|_| is_known) {
            path.doubt_full_size(now);
        }
    }

    /// Whether the path in use passes short datagrams only. That of an idle session is not tested, so it may have changed.
    pub(crate) fn loses_long(&self, now: Duration) -> bool {
        self.traffic.is_active(now) && self.paths.in_use().is_some_and(|path| path.full_size.is_lost)
    }

    /// The requests of tests that are due, as addresses and lengths.
    pub(super) fn full_size_requests(&mut self, now: Duration) -> Vec<(SocketAddr, usize)> {
        let Some(length) = self.full_length else { return Vec::new() };
        let mut requests = Vec::new();
        let mut has_failed = false;
        let current = self.paths.current;
        for path in self.paths.iter_mut() {
            let was_lost = path.full_size.is_lost;
            let due = path.full_size_due(now);
            has_failed |= path.full_size.is_lost && !was_lost && Some(path.candidate.address) == current;
            let lengths = [due.long.then_some(length), due.short.then_some(0)];
            requests.extend(lengths.into_iter().flatten().map(|length| (path.candidate.address, length)));
        }
        if has_failed {
            // What else works must be known before the session moves there.
            self.rounds.in_vain = 0;
            self.start_round(now);
        }
        requests
    }
}

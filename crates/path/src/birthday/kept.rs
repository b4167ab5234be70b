//! The sockets that are kept: a peer is reached by the mapping of one that an attempt opened.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_keys::PublicKey;

use super::{Action, Birthdays};

/// A socket that is kept for a peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) remote: SocketAddr,
    /// Since when another path has been in use.
    pub(super) unused_since: Option<Duration>,
}

/// Time for which a socket is kept whose path is not in use.
const MAX_UNUSED: Duration = Duration::from_secs(60);
/// Time for which a socket of an earlier program is kept for a peer that is to use it.
const MAX_UNCLAIMED: Duration = Duration::from_secs(120);

impl Birthdays {
    /// Endpoint of the peer for which a socket is kept.
    pub(crate) fn kept(&self, peer: &PublicKey) -> Option<SocketAddr> {
        self.kept.get(peer).map(|kept| kept.remote)
    }

    /// An earlier program keeps sockets for these endpoints; which peers use them is not known yet.
    pub(crate) fn adopt(&mut self, now: Duration, remotes: &[SocketAddr]) {
        for remote in remotes {
            let is_known = self.kept.values().any(|kept| kept.remote == *remote);
            if !is_known {
                self.adopted.entry(*remote).or_insert(now.saturating_add(MAX_UNCLAIMED));
            }
        }
    }

    /// The device uses this endpoint for a peer: if a socket was adopted for it, it is kept for this peer.
    pub(crate) fn claim(&mut self, peer: &PublicKey, endpoint: SocketAddr) {
        if self.adopted.remove(&endpoint).is_some() {
            self.leave(peer);
            self.kept.insert(*peer, Kept { remote: endpoint, unused_since: None });
        }
    }

    /// Time at which the next adopted socket is closed unless a peer uses it.
    pub(super) fn next_unclaimed(&self) -> Option<Duration> {
        self.adopted.values().min().copied()
    }

    /// Closes the adopted sockets that no peer uses.
    pub(super) fn leave_unclaimed(&mut self, now: Duration) {
        for (remote, _) in self.adopted.extract_if(.., |_, until| *until <= now) {
            self.actions.push_back(Action::Leave { remote });
        }
    }

    /// Closes the socket that is kept for a peer when its path has failed, or was not in use for long.
    pub(crate) fn review(&mut self, now: Duration, peer: &PublicKey, is_in_use: bool, has_failed: bool) {
        let Some(kept) = self.kept.get_mut(peer) else { return };
        let since = *kept.unused_since.get_or_insert(now);
        if is_in_use {
            kept.unused_since = None;
        }
        if has_failed || (!is_in_use && now.saturating_sub(since) >= MAX_UNUSED) {
            self.leave(peer);
        }
    }

    pub(super) fn leave(&mut self, peer: &PublicKey) {
        if let Some(Kept { remote, .. }) = self.kept.remove(peer) {
            self.actions.push_back(Action::Leave { remote });
        }
    }
}

//! One search at a time, over all peers, for the packets that a path passes: what all of them may send is limited so.

use std::time::Duration;

use fairlead_keys::PublicKey;

use crate::prober::Prober;

/// Time between two searches.
const PAUSE: Duration = Duration::from_secs(2);

/// The packets that paths are searched for, and whose turn it is.
#[derive(Debug, Default)]
pub(super) struct MtuSearches {
    /// The MTU of the tunnel; `None` until it is known.
    pub(super) tunnel_mtu: Option<u32>,
    running: Option<PublicKey>,
    not_before: Duration,
}

impl MtuSearches {
    pub(super) fn remove_peer(&mut self, key: &PublicKey) {
        self.running.take_if(|running| running == key);
    }

    /// Ends the search of a peer, and begins it when it is its turn.
    pub(super) fn review(&mut self, now: Duration, key: &PublicKey, prober: &mut Prober) {
        let is_over = |running: &mut PublicKey| running == key && !prober.searches_mtu();
        if self.running.take_if(is_over).is_some() {
            self.not_before = now.saturating_add(PAUSE);
        }
        let is_free = self.running.is_none() && now >= self.not_before;
        if is_free && prober.wants_mtu_search(now) {
            prober.start_mtu_search(now);
            self.running = Some(*key);
        }
    }
}

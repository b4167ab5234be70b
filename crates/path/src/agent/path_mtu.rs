//! One search at a time, over all peers, for the packets that a path passes: what all of them may send is limited so.

use std::time::Duration;

use fairlead_keys::PublicKey;

use super::{Event, PathAgent};

/// Time between two searches.
const PAUSE: Duration = Duration::from_secs(2);

/// Whose turn it is.
#[derive(Debug, Default)]
pub(super) struct MtuSearches {
    running: Option<PublicKey>,
    not_before: Duration,
}

impl MtuSearches {
    pub(super) fn remove_peer(&mut self, key: &PublicKey) {
        self.running.take_if(|running| running == key);
    }
}

impl PathAgent {
    /// Begins and ends the search of a peer, and reports what follows for its routes.
    pub(super) fn review_path_mtu(&mut self, now: Duration, key: &PublicKey) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        let searches = &mut self.mtu_searches;
        let is_over = |running: &mut PublicKey| running == key && !peer.prober.searches_mtu();
        if searches.running.take_if(is_over).is_some() {
            searches.not_before = now.saturating_add(PAUSE);
        }
        let is_free = searches.running.is_none() && now >= searches.not_before;
        if is_free && peer.prober.wants_mtu_search(now) {
            peer.prober.start_mtu_search(now);
            searches.running = Some(*key);
        }
        let mtu = peer.prober.route_mtu();
        if std::mem::replace(&mut peer.route_mtu, mtu) != mtu {
            self.events.push_back(Event::RouteMtuChanged { peer: *key, mtu });
        }
    }

    /// The MTU that routes to a peer are to have; `None` for the tunnel's.
    pub fn route_mtu(&self, key: &PublicKey) -> Option<u32> {
        self.peers.get(key)?.route_mtu
    }
}

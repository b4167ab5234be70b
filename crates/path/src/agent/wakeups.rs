//! Moments at which the machines of peers are to run next.

use std::time::Duration;

use fairlead_keys::PublicKey;

use super::peer::Peer;
use crate::timers::TimerQueue;

/// The timers of all peers, each of which keeps the moments of its own.
#[derive(Debug, Default)]
pub(super) struct Wakeups {
    /// Times at which the device's state of a peer is needed.
    pub(super) observations: TimerQueue<PublicKey>,
    /// Times at which the probers of peers run.
    pub(super) probes: TimerQueue<PublicKey>,
}

impl Wakeups {
    /// Has a peer observed at another time.
    pub(super) fn observe_at(&mut self, key: &PublicKey, peer: &mut Peer, at: Option<Duration>) {
        self.observations.reschedule(*key, &mut peer.due, at);
    }

    /// Has the prober of a peer run when it asks for that now.
    pub(super) fn follow_prober(&mut self, key: &PublicKey, peer: &mut Peer) {
        let due = peer.prober.poll_timeout();
        self.probes.reschedule(*key, &mut peer.probe_due, due);
    }

    pub(super) fn remove_peer(&mut self, key: &PublicKey, peer: &mut Peer) {
        self.observations.reschedule(*key, &mut peer.due, None);
        self.probes.reschedule(*key, &mut peer.probe_due, None);
    }

    /// The earliest of all moments.
    pub(super) fn next(&self) -> Option<Duration> {
        self.observations.next().into_iter().chain(self.probes.next()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prober::Prober;
    use crate::rotation::{Config, Rotation};

    #[test]
    fn the_earliest_moment_counts_and_a_peer_that_is_removed_has_none() {
        let (mut wakeups, key) = (Wakeups::default(), PublicKey([1; 32]));
        let mut peer = Peer::new(Duration::ZERO, Rotation::new(Config::default()), Prober::new(true));
        let [soon, late] = [2, 3].map(Duration::from_secs);
        wakeups.observe_at(&key, &mut peer, Some(late));
        wakeups.observe_at(&key, &mut peer, Some(soon));
        wakeups.probes.reschedule(key, &mut peer.probe_due, Some(late));
        assert_eq!((wakeups.next(), wakeups.observations.len()), (Some(soon), 1));
        wakeups.follow_prober(&key, &mut peer);
        assert_eq!((peer.probe_due, wakeups.probes.next()), (None, None), "nothing is to be probed");
        wakeups.remove_peer(&key, &mut peer);
        assert_eq!((wakeups.next(), peer.due), (None, None));
    }
}

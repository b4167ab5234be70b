//! Interval of keepalives to each peer.

use std::collections::VecDeque;
use std::time::Duration;

use fairlead_keys::KEEPALIVE;
use fairlead_keys::PublicKey;

use super::peer::Peer;
use super::{Event, PathAgent};
use crate::rotation::{State, Status};

/// Time between keepalives where mappings of NATs expire sooner than those of the usual interval come.
const SHORT_KEEPALIVE: Duration = Duration::from_secs(10);

impl PathAgent {
    /// The longest time between keepalives to a peer that keeps its path open; `None` for the usual one.
    pub fn keepalive(&self, key: &PublicKey) -> Option<Duration> {
        self.peers.get(key)?.needs_keepalives.then_some(SHORT_KEEPALIVE)
    }
}

impl Peer {
    /// Reports whether keepalives to the peer have to come more often.
    pub(super) fn report_keepalive(&mut self, key: &PublicKey, events: &mut VecDeque<Event>) {
        let needs = self.prober.needs_keepalives();
        if std::mem::replace(&mut self.needs_keepalives, needs) != needs {
            let interval = needs.then_some(SHORT_KEEPALIVE);
            events.push_back(Event::KeepaliveChanged { peer: *key, interval });
        }
    }

    /// Says why keepalives come more often.
    pub(super) fn explain_keepalive(&self, status: &mut Status) {
        if self.needs_keepalives && status.state == State::Up {
            let short = SHORT_KEEPALIVE.as_secs();
            let usual = KEEPALIVE.as_secs();
            let why =
                format!("keepalives every {short} s: a NAT on the path forgets it in less than {usual} s");
            status.message = format!("{}; {why}", status.message);
        }
    }
}

//! ICMP messages of hosts and routers that say that datagrams of this node do not reach an address. Anyone can send them, in another's
//! name. So they are no more than a reason to ask the path there.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::canonical;

use super::PathAgent;
use super::observation::on_grid;
use crate::prober::Hint;

/// Messages that are looked at in a second: each is compared with the endpoints of all peers.
const MAX_MESSAGES: u32 = 50;

impl PathAgent {
    /// Takes a message that a datagram from the WireGuard port did not reach `remote`. A path there that is in use is asked soon; of one
    /// that seems idle, the device is read to see whether it is.
    pub fn unreachable(&mut self, now: Duration, remote: SocketAddr) {
        let remote = canonical(remote);
        if self.probing.is_none() || !self.refusals.take(now, MAX_MESSAGES) {
            return;
        }
        for (key, peer) in &mut self.peers {
            match peer.prober.unreachable(now, remote) {
                Hint::Check => self.wakeups.follow_prober(key, peer),
                Hint::Ignore => {}
                Hint::Observe => {
                    let soonest = peer.due.map_or(now, |due| due.min(now));
                    self.wakeups.observe_at(key, peer, Some(on_grid(soonest)));
                }
            }
        }
    }
}

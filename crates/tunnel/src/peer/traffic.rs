//! Packets that went to a peer and came from it.

use std::time::{Duration, Instant};

/// Time from an inner packet that is sent until an answer to it, or at least a keepalive, is missed.
const MISSED_AFTER: Duration = Duration::from_millis(500);

/// Counters and moments of what was exchanged.
#[derive(Default)]
pub(super) struct Traffic {
    /// Time at which an authenticated packet was last sent; `None` asks for a keepalive now. What is received does not count, as it does
    /// in the kernel: an inbound packet need not refresh the mapping of a NAT (RFC 4787, 4.3), and of two nodes that send
    /// keepalives one would never be heard.
    pub(super) last_sent: Option<Instant>,
    /// Time at which the first inner packet was sent since anything came from the peer, or since [`Self::stop_waiting`].
    waiting_since: Option<Instant>,
    pub(super) rx_bytes: u64,
    pub(super) tx_bytes: u64,
}

impl Traffic {
    /// An inner packet is sent, which the peer should answer.
    pub(super) fn wait(&mut self, now: Instant) {
        self.waiting_since.get_or_insert(now);
    }

    /// No packet that was sent until now is missed an answer.
    pub(super) fn stop_waiting(&mut self) {
        self.waiting_since = None;
    }

    /// Time at which packets that were sent have been unanswered for [`MISSED_AFTER`].
    pub(super) fn missed_at(&self) -> Option<Instant> {
        self.waiting_since?.checked_add(MISSED_AFTER)
    }

    /// Counts a datagram of the peer.
    pub(super) fn received(&mut self, length: usize) {
        self.stop_waiting();
        self.rx_bytes = self.rx_bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    }

    /// Counts a datagram to the peer.
    pub(super) fn sent(&mut self, length: usize) {
        self.tx_bytes = self.tx_bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_packet_since_the_peer_was_heard_is_missed() {
        let (mut traffic, now) = (Traffic::default(), Instant::now());
        assert_eq!(traffic.missed_at(), None);
        traffic.wait(now);
        traffic.wait(now + MISSED_AFTER);
        assert_eq!(traffic.missed_at(), Some(now + MISSED_AFTER));
        traffic.received(32);
        assert_eq!((traffic.missed_at(), traffic.rx_bytes), (None, 32));
    }
}

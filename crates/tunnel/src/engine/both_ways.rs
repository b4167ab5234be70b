//! Packets that go to a peer two ways, while the path in use is in doubt. The peer drops what arrives second: to WireGuard it is a
//! replay.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;

use crate::udp::Path;

/// Bytes that go both ways at once, and how many more each second: what a relay behind a slow link can pass. Both hold for all peers
/// together.
const BURST: u64 = 128 << 10;
const BYTES_PER_SECOND: u64 = 256 << 10;

/// The peers in doubt, and what was sent to them.
pub(crate) struct BothWays {
    also: BTreeMap<PublicKey, Path>,
    /// Bytes that may go both ways now, as of this time.
    left: u64,
    filled: Option<Instant>,
    copies: Copies,
}

/// Counters of packets that went both ways, and of those that went only one because there were too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Copies {
    pub(crate) sent: u64,
    pub(crate) held_back: u64,
}

impl BothWays {
    pub(super) fn new() -> Self {
        Self { also: BTreeMap::new(), left: BURST, filled: None, copies: Copies::default() }
    }

    /// Replaces the second ways, by peer.
    pub(super) fn set(&mut self, also: &BTreeMap<PublicKey, SocketAddr>) {
        self.also = also.iter().map(|(peer, remote)| (*peer, Path::to(*remote))).collect();
    }

    /// Second path of a data message of at most `length` bytes that is sent over `path`; `None` if there is none, or the limit is reached.
    pub(crate) fn second_path(
        &mut self,
        peer: &PublicKey,
        path: &Path,
        length: usize,
        now: Instant,
    ) -> Option<Path> {
        let also = *self.also.get(peer).filter(|also| also.remote != path.remote)?;
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        self.fill(now);
        let Some(left) = self.left.checked_sub(length) else {
            self.copies.held_back = self.copies.held_back.saturating_add(1);
            return None;
        };
        self.left = left;
        self.copies.sent = self.copies.sent.saturating_add(1);
        Some(also)
    }

    /// Takes the counters since the last call.
    pub(super) fn take_copies(&mut self) -> Copies {
        std::mem::take(&mut self.copies)
    }

    fn fill(&mut self, now: Instant) {
        let since = self.filled.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
        let gained = since.as_micros().saturating_mul(u128::from(BYTES_PER_SECOND)) / 1_000_000;
        let gained = u64::try_from(gained).unwrap_or(u64::MAX);
        // Time that brings no whole byte counts later.
        if gained > 0 {
            self.left = self.left.saturating_add(gained).min(BURST);
            self.filled = Some(now);
        }
    }
}

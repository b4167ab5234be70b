//! Datagrams that wait to be sent, in batches of which each takes one system call.

use std::collections::VecDeque;

use fairlead_api::wireguard::PublicKey;

use crate::ecn::Ecn;
use crate::udp::Path;

/// Datagrams of one batch: `UDP_MAX_SEGMENTS` of `include/linux/udp.h` before Linux 6.9.
const MAX_DATAGRAMS: usize = 64;
/// Their bytes: the kernel makes one UDP packet of a batch before it cuts it, and none over IPv4 has a longer payload.
const MAX_BATCH: usize = 65_507;
/// Bytes that wait in all; what comes then is lost, as in any full queue of a network.
const MAX_WAITING: usize = 4 << 20;
/// Buffers that are kept for the next batches.
const MAX_POOL: usize = 32;

/// Where datagrams go, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Destination {
    /// The peer whose counters include them; `None` for cookies and copies.
    pub(crate) peer: Option<PublicKey>,
    pub(crate) path: Path,
    pub(crate) ecn: Ecn,
}

/// Datagrams for one destination, all of one length but the last, which may be shorter.
pub(crate) struct Batch {
    pub(crate) to: Destination,
    bytes: Vec<u8>,
    datagram_length: usize,
    /// Of the last one.
    last_length: usize,
    datagrams: usize,
}

impl Batch {
    /// All datagrams, one behind the other.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The length of each but the last one.
    pub(crate) fn datagram_length(&self) -> usize {
        self.datagram_length
    }

    /// One by one.
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks(self.datagram_length.max(1))
    }

    fn last(&self) -> &[u8] {
        let start = self.bytes.len().saturating_sub(self.last_length);
        self.bytes.get(start..).unwrap_or_default()
    }

    /// Whether another one of at most `length` bytes may follow.
    fn has_room(&self, length: usize) -> bool {
        self.last_length == self.datagram_length
            && length <= self.datagram_length
            && self.datagrams < MAX_DATAGRAMS
            && self.bytes.len().saturating_add(length) <= MAX_BATCH
    }
}

/// The batches in the order in which they are sent.
#[derive(Default)]
pub(crate) struct Outbox {
    batches: VecDeque<Batch>,
    /// Of all batches.
    bytes: usize,
    pool: Vec<Vec<u8>>,
}

impl Outbox {
    /// Appends a datagram of at most `max_length` bytes, which `write` appends to what is there; if it appends nothing, there is none.
    /// Without room it is lost, and not written.
    pub(crate) fn append(&mut self, to: &Destination, max_length: usize, write: impl FnOnce(&mut Vec<u8>)) {
        if self.bytes.saturating_add(max_length) > MAX_WAITING {
            return;
        }
        let joins = self.batches.back().is_some_and(|last| last.to == *to && last.has_room(max_length));
        if !joins {
            self.begin(*to);
        }
        let Some(batch) = self.batches.back_mut() else { return };
        let before = batch.bytes.len();
        write(&mut batch.bytes);
        let length = batch.bytes.len().saturating_sub(before);
        if length > 0 {
            batch.last_length = length;
            batch.datagrams = batch.datagrams.saturating_add(1);
            self.bytes = self.bytes.saturating_add(length);
            if before == 0 {
                batch.datagram_length = length;
            }
        } else if before == 0
            && let Some(batch) = self.batches.pop_back()
        {
            self.recycle(batch);
        }
    }

    /// Appends a datagram as it is.
    pub(crate) fn push(&mut self, to: &Destination, datagram: &[u8]) {
        self.append(to, datagram.len(), |bytes| bytes.extend_from_slice(datagram));
    }

    /// Appends a message of a handshake.
    pub(crate) fn push_message(&mut self, peer: Option<PublicKey>, path: &Path, message: &[u8]) {
        self.push(&Destination { peer, path: *path, ecn: Ecn::NOT_CAPABLE }, message);
    }

    /// The datagram that was appended last.
    pub(crate) fn last(&self) -> &[u8] {
        self.batches.back().map(Batch::last).unwrap_or_default()
    }

    fn begin(&mut self, to: Destination) {
        let bytes = self.pool.pop().unwrap_or_default();
        self.batches.push_back(Batch { to, bytes, datagram_length: 0, last_length: 0, datagrams: 0 });
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Bytes that wait.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first batch that waits.
    pub(crate) fn front(&self) -> Option<&Batch> {
        self.batches.front()
    }

    /// Takes the first batch; give it back with [`Self::recycle`] or [`Self::return_front`].
    pub(crate) fn pop_front(&mut self) -> Option<Batch> {
        let batch = self.batches.pop_front()?;
        self.bytes = self.bytes.saturating_sub(batch.bytes.len());
        Some(batch)
    }

    /// Puts a batch back that could not be sent yet.
    pub(crate) fn return_front(&mut self, batch: Batch) {
        self.bytes = self.bytes.saturating_add(batch.bytes.len());
        self.batches.push_front(batch);
    }

    /// Keeps the buffer of a batch for another one.
    pub(crate) fn recycle(&mut self, mut batch: Batch) {
        if self.pool.len() < MAX_POOL {
            batch.bytes.clear();
            self.pool.push(batch.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(number: u8) -> Path {
        Path::to(std::net::SocketAddr::from(([192, 0, 2, number], 7)))
    }

    /// The lengths of the datagrams of each batch.
    fn lengths(outbox: &mut Outbox) -> Vec<Vec<usize>> {
        std::iter::from_fn(|| outbox.pop_front())
            .map(|batch| batch.datagrams().map(<[u8]>::len).collect())
            .collect()
    }

    #[test]
    fn datagrams_of_one_length_share_a_batch_that_a_shorter_one_ends() {
        let mut outbox = Outbox::default();
        for length in [10, 10, 7, 7, 8, 8] {
            outbox.push_message(None, &path(1), &vec![0; length]);
        }
        assert_eq!((outbox.bytes(), outbox.last().len()), (50, 8));
        assert_eq!(lengths(&mut outbox), [vec![10, 10, 7], vec![7], vec![8, 8]]);
        assert!(outbox.is_empty() && outbox.bytes() == 0);
    }

    #[test]
    fn another_path_peer_or_ecn_field_has_its_own_batch_and_order_stays() {
        let mut outbox = Outbox::default();
        for (peer, remote) in [(None, 1), (None, 2), (None, 1), (Some(PublicKey([1; 32])), 1)] {
            outbox.push_message(peer, &path(remote), &[0; 5]);
        }
        outbox.push(&Destination { peer: None, path: path(1), ecn: Ecn::of(2) }, &[0; 5]);
        let remotes: Vec<_> = std::iter::from_fn(|| outbox.pop_front()).map(|batch| batch.to.path).collect();
        assert_eq!(remotes, [path(1), path(2), path(1), path(1), path(1)]);
    }

    #[test]
    fn batches_are_no_longer_than_the_kernel_takes() {
        let mut outbox = Outbox::default();
        (0..65).for_each(|_| outbox.push_message(None, &path(1), &[0; 100]));
        (0..46).for_each(|_| outbox.push_message(None, &path(2), &[0; 1452]));
        let batches: Vec<usize> = lengths(&mut outbox).iter().map(Vec::len).collect();
        assert_eq!(batches, [64, 1, 45, 1]);
    }

    #[test]
    fn what_is_not_written_leaves_nothing_and_what_has_no_room_is_lost() {
        let mut outbox = Outbox::default();
        outbox.append(&Destination { peer: None, path: path(1), ecn: Ecn::NOT_CAPABLE }, 100, |_| {});
        assert!(outbox.is_empty());
        (0..100).for_each(|_| outbox.push_message(None, &path(1), &vec![0; 65_507]));
        assert_eq!(outbox.bytes(), MAX_WAITING / 65_507 * 65_507);
        let first = outbox.pop_front().unwrap();
        outbox.return_front(first);
        assert_eq!(lengths(&mut outbox).len(), 64);
    }
}

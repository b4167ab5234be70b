//! Datagrams that wait to be sent, in batches of which each takes one system call.

use std::collections::VecDeque;
use std::sync::Arc;

use fairlead_keys::PublicKey;
use fairlead_transport::udp_runs::{Kind, MAX_BYTES, MAX_DATAGRAMS};
use fairlead_wireguard::SendKey;

use crate::ecn::Ecn;
use crate::udp::Path;
use crate::workers::{Work, Workers};

/// Bytes that wait in all; what comes then is lost, as in any full queue of a network.
const MAX_WAITING: usize = 4 << 20;
/// Buffers that are kept for the next batches.
const MAX_POOL: usize = 32;

/// Destination of datagrams, and the ECN field that they get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Destination {
    /// The peer whose counters include them; `None` for cookies, and when only copies are left to be sent.
    pub(crate) peer: Option<PublicKey>,
    pub(crate) path: Path,
    /// Path of copies that are sent as well.
    pub(crate) also: Option<Path>,
    pub(crate) ecn: Ecn,
}

/// Datagrams for one destination and of one kind, all of one length but the last, which may be shorter.
pub(crate) struct Batch {
    pub(crate) to: Destination,
    bytes: Vec<u8>,
    datagram_length: usize,
    /// Length of the last datagram, in bytes.
    last_length: usize,
    datagrams: usize,
    /// The bytes that count as waiting.
    waiting: usize,
    /// The key that they still have to be encrypted with: they have their counters.
    key: Option<Arc<SendKey>>,
    /// No more datagrams are added: the next one is of another kind.
    is_complete: bool,
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

    /// Each datagram by itself.
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks(self.datagram_length.max(1))
    }

    /// Encrypts what is not encrypted yet.
    pub(crate) fn encrypt(&mut self) {
        let Some(key) = self.key.take() else { return };
        let mut encrypted = 0_usize;
        for datagram in self.bytes.chunks_mut(self.datagram_length.max(1)) {
            if let Err(error) = key.encrypt(datagram) {
                tracing::error!(%error, "packets lost: they cannot be encrypted");
                break;
            }
            encrypted = encrypted.saturating_add(datagram.len());
        }
        // What is not encrypted must not leave.
        self.bytes.truncate(encrypted);
    }

    /// Whether another one of at most `length` bytes may follow.
    fn has_room(&self, key: Option<&Arc<SendKey>>, length: usize) -> bool {
        !self.is_complete
            && self.key.as_ref().map(Arc::as_ptr) == key.map(Arc::as_ptr)
            && self.last_length == self.datagram_length
            && length <= self.datagram_length
            && self.datagrams < MAX_DATAGRAMS
            && self.bytes.len().saturating_add(length) <= MAX_BYTES
    }
}

/// The batches in the order in which they are sent.
#[derive(Default)]
pub(crate) struct Outbox {
    batches: VecDeque<Batch>,
    /// Bytes of all batches.
    bytes: usize,
    pool: Vec<Vec<u8>>,
    /// A batch is encrypted as soon as it is complete, while the processor has it in its cache: no other thread will.
    encrypts_at_once: bool,
}

impl Outbox {
    /// An outbox whose batches these threads encrypt, if there are any.
    pub(crate) fn new(workers: &Workers) -> Self {
        Self { encrypts_at_once: !workers.has_threads(), ..Self::default() }
    }

    /// Whether a datagram of at most `max_length` bytes would not be lost.
    pub(crate) fn has_room(&self, max_length: usize) -> bool {
        self.bytes.saturating_add(max_length) <= MAX_WAITING
    }

    /// Appends a datagram of at most `max_length` bytes, which `write` appends to what is there; if it appends nothing, there is none.
    /// Without room it is lost, and not written. With a key, it is a data message that has its counter and is to be encrypted.
    pub(crate) fn append(
        &mut self,
        to: &Destination,
        max_length: usize,
        key: Option<&Arc<SendKey>>,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        if !self.has_room(max_length) {
            return;
        }
        let joins = self.batches.back().is_some_and(|last| last.to == *to && last.has_room(key, max_length));
        if !joins {
            self.begin(*to, key);
        }
        let Some(batch) = self.batches.back_mut() else { return };
        let before = batch.bytes.len();
        write(&mut batch.bytes);
        let length = batch.bytes.len().saturating_sub(before);
        if length > 0 {
            batch.last_length = length;
            batch.datagrams = batch.datagrams.saturating_add(1);
            batch.waiting = batch.waiting.saturating_add(length);
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
        if let Some(last) = self.batches.back_mut() {
            last.is_complete |= Kind::of(&last.bytes) != Kind::of(datagram);
        }
        self.append(to, datagram.len(), None, |bytes| bytes.extend_from_slice(datagram));
    }

    /// Appends a message of a handshake.
    pub(crate) fn push_message(&mut self, peer: Option<PublicKey>, path: &Path, message: &[u8]) {
        self.push(&Destination { peer, path: *path, also: None, ecn: Ecn::NOT_CAPABLE }, message);
    }

    fn begin(&mut self, to: Destination, key: Option<&Arc<SendKey>>) {
        if self.encrypts_at_once {
            self.batches.back_mut().into_iter().for_each(Batch::encrypt);
        }
        let bytes = self.pool.pop().unwrap_or_default();
        let key = key.cloned();
        self.batches.push_back(Batch {
            to,
            bytes,
            datagram_length: 0,
            last_length: 0,
            datagrams: 0,
            waiting: 0,
            key,
            is_complete: false,
        });
    }

    /// Encrypts what waits if other threads help; otherwise [`Self::pop_front`] and the beginning of the next batch do.
    pub(crate) fn encrypt(&mut self, workers: &mut Workers) {
        if self.encrypts_at_once {
            return;
        }
        let first = self.batches.iter().position(|batch| batch.key.is_some()).unwrap_or(self.batches.len());
        workers.run(self.batches.drain(first..).map(Work::Encrypt));
        self.batches.extend(workers.done().filter_map(Work::into_batch));
        self.bytes = self.batches.iter().map(|batch| batch.waiting).sum();
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

    /// Takes the first batch, encrypted; give it back with [`Self::recycle`] or [`Self::return_front`].
    pub(crate) fn pop_front(&mut self) -> Option<Batch> {
        let mut batch = self.batches.pop_front()?;
        self.bytes = self.bytes.saturating_sub(batch.waiting);
        batch.encrypt();
        Some(batch)
    }

    /// Puts a batch back that could not be sent yet.
    pub(crate) fn return_front(&mut self, batch: Batch) {
        self.bytes = self.bytes.saturating_add(batch.waiting);
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
        assert_eq!(outbox.bytes(), 50);
        assert_eq!(lengths(&mut outbox), [vec![10, 10, 7], vec![7], vec![8, 8]]);
        assert!(outbox.is_empty() && outbox.bytes() == 0);
    }

    #[test]
    fn another_kind_of_message_has_its_own_batch() {
        let mut outbox = Outbox::default();
        for kind in [1, 1, 2, 4, 4, 1] {
            outbox.push_message(None, &path(1), &[kind, 0, 0, 0, 9, 9]);
        }
        assert_eq!(lengths(&mut outbox), [vec![6, 6], vec![6], vec![6, 6], vec![6]]);
    }

    #[test]
    fn another_path_peer_or_ecn_field_has_its_own_batch_and_order_stays() {
        let mut outbox = Outbox::default();
        for (peer, remote) in [(None, 1), (None, 2), (None, 1), (Some(PublicKey([1; 32])), 1)] {
            outbox.push_message(peer, &path(remote), &[0; 5]);
        }
        outbox.push(&Destination { peer: None, path: path(1), also: None, ecn: Ecn::of(2) }, &[0; 5]);
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
        let to = Destination { peer: None, path: path(1), also: None, ecn: Ecn::NOT_CAPABLE };
        outbox.append(&to, 100, None, |_| {});
        assert!(outbox.is_empty());
        (0..100).for_each(|_| outbox.push_message(None, &path(1), &vec![0; 65_507]));
        assert_eq!(outbox.bytes(), MAX_WAITING / 65_507 * 65_507);
        let first = outbox.pop_front().unwrap();
        outbox.return_front(first);
        assert_eq!(lengths(&mut outbox).len(), 64);
    }
}

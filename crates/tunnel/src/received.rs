//! Data messages that were received and are to be decrypted, in batches of which each came with one system call.

use std::ops::Range;
use std::sync::Arc;

use fairlead_keys::PublicKey;
use fairlead_wireguard::{Decrypted, ReceiveKey};

use crate::ecn::Ecn;
use crate::udp::{Path, Received, Receiver};
use crate::workers::{Work, Workers};

/// Batches that are decrypted together, at most: half a mebibyte, which the caches of a processor hold. Where the kernel joins nothing, a
/// batch is one datagram, and so few are decrypted without other threads.
const MAX_WAITING: usize = 8;

/// Key that decrypts the data messages of a session, and the peer at its other end.
pub(crate) struct SessionKey {
    pub(crate) peer: PublicKey,
    pub(crate) key: Arc<ReceiveKey>,
}

/// A data message that was decrypted.
pub(crate) struct Message {
    /// Position in the received bytes.
    pub(crate) range: Range<usize>,
    pub(crate) decrypted: Decrypted,
}

impl SessionKey {
    /// Decrypts the messages in the part `run` of `bytes`, of which each but the last is `length` bytes long, and appends them to
    /// `messages`, without those that the peer has not made.
    pub(crate) fn decrypt(
        &self,
        bytes: &mut [u8],
        run: Range<usize>,
        length: usize,
        messages: &mut Vec<Message>,
    ) {
        let mut start = run.start;
        for message in bytes.get_mut(run).unwrap_or_default().chunks_mut(length.max(1)) {
            let end = start.saturating_add(message.len());
            match self.key.decrypt(message) {
                Ok(decrypted) => messages.push(Message { range: start..end, decrypted }),
                Err(error) => tracing::trace!(%error, peer = %self.peer, "message dropped"),
            }
            start = end;
        }
    }
}

/// Data messages of one session that one system call received.
pub(crate) struct ReceivedBatch {
    pub(crate) session: SessionKey,
    path: Path,
    ecn: Ecn,
    buffer: Buffer,
    received: usize,
    /// The length of each message but the last one.
    datagram_length: usize,
}

/// Kept for the next batches.
#[derive(Default)]
struct Buffer {
    bytes: Vec<u8>,
    messages: Vec<Message>,
}

impl ReceivedBatch {
    /// Bytes that were received.
    pub(crate) fn length(&self) -> usize {
        self.received
    }

    /// Decrypts all messages.
    pub(crate) fn decrypt(&mut self) {
        let Buffer { bytes, messages } = &mut self.buffer;
        self.session.decrypt(bytes, 0..self.received, self.datagram_length, messages);
    }

    /// The received bytes, and the messages in them that were decrypted.
    pub(crate) fn decrypted(&mut self) -> (Received<'_>, &[Message]) {
        let bytes = self.buffer.bytes.get_mut(..self.received).unwrap_or_default();
        let received = Received { path: self.path, ecn: self.ecn, bytes, length: self.datagram_length };
        (received, &self.buffer.messages)
    }
}

/// The batches that wait, in the order in which they came.
#[derive(Default)]
pub(crate) struct ReceivedBatches {
    waiting: Vec<ReceivedBatch>,
    pool: Vec<Buffer>,
}

impl ReceivedBatches {
    /// Keeps what the receiver has received last: so many bytes, in datagrams of this length, with this path and ECN field. The receiver
    /// goes on with another buffer.
    pub(crate) fn keep(
        &mut self,
        receiver: &mut Receiver,
        (path, ecn, received, datagram_length): (Path, Ecn, usize, usize),
        session: SessionKey,
    ) {
        let mut buffer = self.pool.pop().unwrap_or_default();
        receiver.exchange(&mut buffer.bytes);
        self.waiting.push(ReceivedBatch { session, path, ecn, buffer, received, datagram_length });
    }

    /// Whether those that wait are to be decrypted before more is received: at once, if no other thread helps.
    pub(crate) fn is_full(&self, workers: &Workers) -> bool {
        self.waiting.len() >= if workers.has_threads() { MAX_WAITING } else { 1 }
    }

    /// Whether none waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Decrypts those that wait; several threads share the work where that is worth it.
    pub(crate) fn decrypt(&mut self, workers: &mut Workers) {
        workers.run(self.waiting.drain(..).map(Work::Decrypt));
        self.waiting.extend(workers.done().filter_map(Work::into_received));
    }

    /// Calls `take` with each of those that were decrypted, and forgets them.
    pub(crate) fn take(&mut self, mut take: impl FnMut(&mut ReceivedBatch)) {
        for mut batch in self.waiting.drain(..) {
            take(&mut batch);
            batch.buffer.messages.clear();
            self.pool.push(batch.buffer);
        }
    }
}

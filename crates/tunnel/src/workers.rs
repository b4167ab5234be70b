//! Threads that encrypt and decrypt beside the packet loop, on machines with several processors.
//!
//! The loop reads, decides and writes alone, so everything stays in the order in which it came. Only the cipher, which takes half of the
//! time, is shared out: a batch each, of which the loop itself takes as many as it comes to. When [`Workers::run`] returns, no batch is
//! with another thread. A thread that is woken too late finds nothing to do; nothing waits for it.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::outbox::Batch;
use crate::received::ReceivedBatch;

/// Threads of a device by default, at most: with these the loop itself is what limits throughput.
const MAX_DEFAULT_THREADS: usize = 7;
/// Threads of a device, at most: there is never so much to do at once that more could help.
const MAX_THREADS: usize = 32;
/// Bytes that are worth the waking of one more thread: it takes about as long as half of their encryption.
const MIN_BYTES: usize = 32 << 10;
/// Bytes of a batch that are worth handing it to another thread.
const MIN_BATCH: usize = 4 << 10;
/// Slots that are kept for the next time.
const MAX_SLOTS: usize = 1 << 10;

/// Unit of work: one thread does all of it.
pub(crate) enum Work {
    /// Encrypts what is to be sent.
    Encrypt(Batch),
    /// Decrypts what was received.
    Decrypt(ReceivedBatch),
}

impl Work {
    fn perform(&mut self) {
        match self {
            Self::Encrypt(batch) => batch.encrypt(),
            Self::Decrypt(batch) => batch.decrypt(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Encrypt(batch) => batch.bytes().len(),
            Self::Decrypt(batch) => batch.length(),
        }
    }

    /// The batch that was encrypted; `None` for other work.
    pub(crate) fn into_batch(self) -> Option<Batch> {
        match self {
            Self::Encrypt(batch) => Some(batch),
            Self::Decrypt(_) => None,
        }
    }

    /// The batch that was decrypted; `None` for other work.
    pub(crate) fn into_received(self) -> Option<ReceivedBatch> {
        match self {
            Self::Decrypt(batch) => Some(batch),
            Self::Encrypt(_) => None,
        }
    }
}

/// The threads of a device, which begin when there is work for them, and end with this value.
pub(crate) struct Workers {
    /// Name of the device.
    name: Arc<str>,
    /// Limit on the number of threads; zero for none beside the loop.
    max_threads: usize,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
    /// Work that [`Self::run`] was given, and has done.
    slots: Vec<Option<Work>>,
}

/// State that the loop and the threads share.
#[derive(Default)]
struct Shared {
    round: Mutex<Round>,
    /// There is work, or the threads shall end.
    begun: Condvar,
    /// The last of the work is done.
    finished: Condvar,
}

/// The work of one [`Workers::run`].
#[derive(Default)]
struct Round {
    /// Empty while a thread has it.
    slots: Vec<Option<Work>>,
    /// Index of the first slot that no thread has taken.
    next: usize,
    /// Number of slots that are neither done nor lost.
    unfinished: usize,
    /// The threads shall end.
    ends: bool,
}

impl Round {
    fn take(&mut self) -> Option<(usize, Work)> {
        let index = self.next;
        let work = self.slots.get_mut(index)?.take()?;
        self.next = index.saturating_add(1);
        Some((index, work))
    }

    /// Puts back what was done; nothing if a thread has panicked over it.
    fn put_back(&mut self, index: usize, work: Option<Work>) {
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = work;
        }
        self.unfinished = self.unfinished.saturating_sub(1);
    }
}

impl Workers {
    /// For the device `name`. Without a number of threads, one processor is left to the loop, and one to those who send and receive
    /// through it: with only these, other threads cost a twentieth more and bring nothing.
    pub(crate) fn new(name: Arc<str>, threads: Option<usize>) -> Self {
        let default = || {
            let processors = thread::available_parallelism().map_or(1, usize::from);
            processors.saturating_sub(2).min(MAX_DEFAULT_THREADS)
        };
        let max_threads = threads.unwrap_or_else(default).min(MAX_THREADS);
        Self { name, max_threads, threads: Vec::new(), shared: Arc::default(), slots: Vec::new() }
    }

    /// The name of the device.
    pub(crate) fn device(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Whether there are threads that help.
    pub(crate) fn has_threads(&self) -> bool {
        self.max_threads > 0
    }

    /// Does all of it; [`Self::done`] has it then, in the same order. Only what a thread has panicked over is missing.
    pub(crate) fn run(&mut self, work: impl Iterator<Item = Work>) {
        self.slots.extend(work.map(Some));
        let helpers = self.helpers();
        if helpers > 0 {
            self.run_with(helpers);
        } else {
            self.slots.iter_mut().flatten().for_each(Work::perform);
        }
    }

    /// Takes what [`Self::run`] was given.
    pub(crate) fn done(&mut self) -> impl Iterator<Item = Work> {
        if self.slots.is_empty() {
            self.slots.shrink_to(MAX_SLOTS);
        }
        self.slots.drain(..).flatten()
    }

    /// Number of threads that have enough to do beside the largest batch, which the loop itself does meanwhile.
    fn helpers(&mut self) -> usize {
        let lengths = || self.slots.iter().flatten().map(Work::bytes);
        let bytes = lengths().fold(0, usize::saturating_add);
        let others = bytes.saturating_sub(lengths().max().unwrap_or_default());
        if others < MIN_BYTES || bytes / self.slots.len().max(1) < MIN_BATCH {
            return 0;
        }
        self.start();
        self.threads.len().min(others / MIN_BYTES)
    }

    /// Starts the threads, once.
    fn start(&mut self) {
        if !self.threads.is_empty() {
            return;
        }
        for number in 0..self.max_threads {
            match self.spawn(number) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    let wanted = self.max_threads;
                    let started = self.threads.len();
                    tracing::warn!(interface = %self.name, %error, wanted, started, "cannot start all threads that encrypt");
                    break;
                }
            }
        }
        self.max_threads = self.threads.len();
    }

    fn spawn(&self, number: usize) -> io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        // Linux keeps 15 bytes of a name.
        let name = format!("wg{number}-{}", self.name);
        thread::Builder::new().name(name).stack_size(256 << 10).spawn(move || shared.serve())
    }

    fn run_with(&mut self, helpers: usize) {
        let mut round = self.shared.lock();
        std::mem::swap(&mut round.slots, &mut self.slots);
        round.next = 0;
        round.unfinished = round.slots.len();
        drop(round);
        (0..helpers).for_each(|_| self.shared.begun.notify_one());
        round = self.shared.lock();
        while let Some((index, mut work)) = round.take() {
            drop(round);
            work.perform();
            round = self.shared.lock();
            round.put_back(index, Some(work));
        }
        while round.unfinished > 0 {
            round = self.shared.finished.wait(round).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::swap(&mut round.slots, &mut self.slots);
    }
}

impl Shared {
    /// The work of one thread.
    fn serve(&self) {
        let mut round = self.lock();
        loop {
            if round.ends {
                return;
            }
            let Some((index, work)) = round.take() else {
                round = self.begun.wait(round).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(round);
            let mut taken = Taken { shared: self, index, work: Some(work), is_done: false };
            taken.work.iter_mut().for_each(Work::perform);
            taken.is_done = true;
            drop(taken);
            round = self.lock();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A batch that a thread is working on. If the thread panics, the batch is dropped, and the packet loop goes on without it.
struct Taken<'a> {
    shared: &'a Shared,
    index: usize,
    work: Option<Work>,
    is_done: bool,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // What is done in part must not leave.
        let work = self.work.take().filter(|_| self.is_done);
        let mut round = self.shared.lock();
        round.put_back(self.index, work);
        if round.unfinished == 0 {
            self.shared.finished.notify_one();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.begun.notify_all();
        for thread in self.threads.drain(..) {
            // It has no result, and what it panicked with was printed.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use fairlead_keys::PublicKey;
    use fairlead_wireguard::{ReceiveKey, SendKey};

    use super::*;
    use crate::ecn::Ecn;
    use crate::outbox::{Destination, Outbox};
    use crate::received::{ReceivedBatches, SessionKey};
    use crate::udp::{MAX_DATAGRAM, Path, Receiver};

    const KEY: [u8; 32] = [7; 32];
    const LENGTH: usize = 1_452;

    fn path() -> Path {
        Path::to(SocketAddr::from(([192, 0, 2, 1], 7)))
    }

    fn workers(threads: usize) -> Workers {
        Workers::new("test".into(), Some(threads))
    }

    /// Batches to send for `count` packets, each with its number.
    fn encrypted(count: u32, workers: &mut Workers) -> Vec<Batch> {
        let (key, mut outbox) = (Arc::new(SendKey::new(&KEY, 1)), Outbox::default());
        let to = Destination { peer: None, path: path(), also: None, ecn: Ecn::NOT_CAPABLE };
        outbox.push(&to, b"a message of a handshake");
        for number in 0..count {
            outbox.append(&to, LENGTH, Some(&key), |bytes| {
                let start = bytes.len();
                bytes.resize(start + LENGTH, 0);
                bytes[start + 16..start + 20].copy_from_slice(&number.to_be_bytes());
                key.assign_counter(&mut bytes[start..]).unwrap();
            });
        }
        outbox.encrypt(workers);
        std::iter::from_fn(|| outbox.pop_front()).collect()
    }

    #[test]
    fn threads_encrypt_what_one_would_in_the_same_order() {
        let mut shared = workers(3);
        for count in [0, 1, 46, 500, 2_000] {
            let bytes = |batches: Vec<Batch>| -> Vec<Vec<u8>> {
                batches.iter().map(|batch| batch.bytes().to_vec()).collect()
            };
            let alone = bytes(encrypted(count, &mut workers(0)));
            assert!(alone == bytes(encrypted(count, &mut shared)), "{count} packets differ");
        }
        assert_eq!(shared.threads.len(), 3);
    }

    #[test]
    fn threads_decrypt_in_the_order_of_arrival_and_leave_out_what_is_forged() {
        let (key, peer) = (Arc::new(ReceiveKey::new(&KEY, 1)), PublicKey([1; 32]));
        let mut shared = workers(2);
        let (mut receiver, mut received) = (Receiver::new(MAX_DATAGRAM), ReceivedBatches::default());
        let batches = encrypted(10 * 45, &mut workers(0));
        for _ in 0..20 {
            for (number, batch) in batches.iter().skip(1).enumerate() {
                let mut bytes = batch.bytes().to_vec();
                if number == 3 {
                    bytes[LENGTH + 100] ^= 1;
                }
                let (length, path) = (bytes.len(), path());
                bytes.resize(MAX_DATAGRAM, 0);
                receiver.exchange(&mut bytes);
                let session = SessionKey { peer, key: Arc::clone(&key) };
                received.keep(&mut receiver, (path, Ecn::NOT_CAPABLE, length, LENGTH), session);
            }
            received.decrypt(&mut shared);
            let mut numbers = Vec::new();
            received.take(|batch| {
                let (received, messages) = batch.decrypted();
                numbers.extend(messages.iter().map(|message| {
                    let inner = &received.bytes[message.range.clone()][message.decrypted.inner()];
                    u32::from_be_bytes(*inner.first_chunk().unwrap())
                }));
            });
            let forged = 3 * 45 + 1;
            assert!(numbers.iter().copied().eq((0..450).filter(|number| *number != forged)), "{numbers:?}");
            assert!(received.is_empty());
        }
    }

    #[test]
    fn what_a_thread_panics_over_is_lost_and_nothing_waits_for_it() {
        let shared = Shared::default();
        shared.lock().slots = vec![None, None];
        shared.lock().unfinished = 2;
        let batch = || encrypted(1, &mut workers(0)).remove(0);
        let thread = std::thread::scope(|scope| {
            let panics = || {
                let _taken =
                    Taken { shared: &shared, index: 0, work: Some(Work::Encrypt(batch())), is_done: false };
                panic!("while it encrypts");
            };
            scope.spawn(panics).join()
        });
        assert!(thread.is_err());
        drop(Taken { shared: &shared, index: 1, work: Some(Work::Encrypt(batch())), is_done: true });
        let round = shared.lock();
        assert_eq!(round.unfinished, 0);
        assert_eq!(round.slots.iter().map(Option::is_some).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn little_work_starts_no_thread() {
        let mut shared = workers(3);
        // 64 KiB of one connection, with a rest that no thread need be woken for.
        encrypted(47, &mut shared);
        assert!(shared.threads.is_empty() && shared.has_threads() && !workers(0).has_threads());
    }
}

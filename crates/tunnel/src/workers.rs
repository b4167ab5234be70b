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
const MAX_THREADS: usize = 7;
/// Bytes that are worth the waking of a thread: it takes about as long as their encryption.
const MIN_BYTES: usize = 64 << 10;

/// What a thread does at once.
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

    /// What was encrypted.
    pub(crate) fn into_batch(self) -> Option<Batch> {
        match self {
            Self::Encrypt(batch) => Some(batch),
            Self::Decrypt(_) => None,
        }
    }

    /// What was decrypted.
    pub(crate) fn into_received(self) -> Option<ReceivedBatch> {
        match self {
            Self::Decrypt(batch) => Some(batch),
            Self::Encrypt(_) => None,
        }
    }
}

/// The threads of a device, which begin when there is work for them, and end with this value.
pub(crate) struct Workers {
    /// Of the device.
    name: Arc<str>,
    /// How many there may be.
    max_threads: usize,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
    /// What [`Self::run`] was given, and has done.
    slots: Vec<Option<Work>>,
}

/// What the loop and the threads share.
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
    /// The first one that is left.
    next: usize,
    /// Those that are not done.
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

    fn put_back(&mut self, index: usize, work: Work) {
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some(work);
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
            processors.saturating_sub(2).min(MAX_THREADS)
        };
        let max_threads = threads.unwrap_or_else(default);
        Self { name, max_threads, threads: Vec::new(), shared: Arc::default(), slots: Vec::new() }
    }

    /// The name of the device.
    pub(crate) fn device(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Whether several at once are done sooner.
    pub(crate) fn share(&self) -> bool {
        self.max_threads > 0
    }

    /// Does all of it; [`Self::done`] has it then, in the same order.
    pub(crate) fn run(&mut self, work: impl Iterator<Item = Work>) {
        self.slots.extend(work.map(Some));
        let bytes = self.slots.iter().flatten().map(Work::bytes).fold(0, usize::saturating_add);
        if self.slots.len() > 1 && bytes >= MIN_BYTES && self.start() {
            self.run_shared();
        } else {
            self.slots.iter_mut().flatten().for_each(Work::perform);
        }
    }

    /// Takes what [`Self::run`] was given.
    pub(crate) fn done(&mut self) -> impl Iterator<Item = Work> {
        self.slots.drain(..).flatten()
    }

    /// Starts the threads, once. Whether there are any.
    fn start(&mut self) -> bool {
        if self.threads.is_empty() && self.max_threads > 0 {
            let threads: io::Result<Vec<_>> =
                (0..self.max_threads).map(|number| self.spawn(number)).collect();
            match threads {
                Ok(threads) => self.threads = threads,
                Err(error) => {
                    tracing::warn!(interface = %self.name, %error, "cannot start threads: one alone encrypts and decrypts");
                    self.max_threads = 0;
                }
            }
        }
        !self.threads.is_empty()
    }

    fn spawn(&self, number: usize) -> io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        // Linux keeps 15 bytes of a name.
        let name = format!("wg{number}-{}", self.name);
        thread::Builder::new().name(name).stack_size(256 << 10).spawn(move || shared.serve())
    }

    fn run_shared(&mut self) {
        let others = self.threads.len().min(self.slots.len().saturating_sub(1));
        let mut round = self.shared.lock();
        std::mem::swap(&mut round.slots, &mut self.slots);
        round.next = 0;
        round.unfinished = round.slots.len();
        (0..others).for_each(|_| self.shared.begun.notify_one());
        while let Some((index, mut work)) = round.take() {
            drop(round);
            work.perform();
            round = self.shared.lock();
            round.put_back(index, work);
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
            let Some((index, mut work)) = round.take() else {
                round = self.begun.wait(round).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(round);
            work.perform();
            round = self.lock();
            round.put_back(index, work);
            if round.unfinished == 0 {
                self.finished.notify_one();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
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

    use fairlead_api::wireguard::PublicKey;
    use fairlead_wireguard::{ReceiveKey, SendKey};

    use super::*;
    use crate::ecn::Ecn;
    use crate::outbox::{Destination, Outbox};
    use crate::received::{ReceivedBatches, Session};
    use crate::udp::{MAX_DATAGRAM, Path, Receiver};

    const KEY: [u8; 32] = [7; 32];
    const LENGTH: usize = 1_452;

    fn path() -> Path {
        Path::to(SocketAddr::from(([192, 0, 2, 1], 7)))
    }

    fn workers(threads: usize) -> Workers {
        Workers::new("test".into(), Some(threads))
    }

    /// What is sent of `count` packets, each with its number.
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
                let session = Session { peer, key: Arc::clone(&key) };
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
    fn little_work_starts_no_thread() {
        let mut shared = workers(3);
        encrypted(40, &mut shared);
        assert!(shared.threads.is_empty() && shared.share() && !workers(0).share());
    }
}

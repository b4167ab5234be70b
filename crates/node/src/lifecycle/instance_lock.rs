//! One node program at a time.
//!
//! In an upgrade the new program starts while the old one still serves. It fills its watch caches, which takes most of a
//! start, and takes over when the old one ends. Tunnels inside the old process live on until the new one has its own
//! ([`super::handover`]). Two programs that allocate addresses, or move packets of one device, would contradict each other.

use std::fs::{File, TryLockError};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use fairlead_wire::spool;
use tokio::net::UnixStream;

/// Interval at which a program that waits tries the lock: no pod starts meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Interval at which it connects to the socket of a program that takes no lock (Coil's).
const CONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// The lock of the node program of this machine. It is held until the process is gone, and with it every socket and device
/// that a successor needs, unless it is [released](Self::release).
#[derive(Debug)]
pub(crate) struct InstanceLock {
    lock: ManuallyDrop<File>,
    /// Locked by the program that waits for this one.
    successor: PathBuf,
}

impl InstanceLock {
    /// Waits until no other program serves `socket`.
    ///
    /// # Errors
    /// The directory beside the socket cannot be written.
    pub(crate) async fn acquire(socket: &Path) -> anyhow::Result<Self> {
        let path = spool::instance_lock(socket);
        let lock = open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let successor = spool::successor_lock(socket);
        let queue = open(&successor).with_context(|| format!("cannot open {}", successor.display()))?;
        let mut waits = false;
        let mut wait = async |pause| {
            if !std::mem::replace(&mut waits, true) {
                // Of several programs that wait, one lock is enough to show that there is a successor.
                let _ = queue.try_lock();
                tracing::info!(socket = %socket.display(), "another node program runs here: taking over when it ends");
            }
            tokio::time::sleep(pause).await;
        };
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => wait(POLL_INTERVAL).await,
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", path.display()));
                }
            }
        }
        while UnixStream::connect(socket).await.is_ok() {
            wait(CONNECT_INTERVAL).await;
        }
        Ok(Self { lock: ManuallyDrop::new(lock), successor })
    }

    /// Whether another program waits for the end of this one.
    pub(crate) fn has_successor(&self) -> bool {
        open(&self.successor).is_ok_and(|queue| matches!(queue.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Lets the successor begin although this process still exists.
    pub(crate) fn release(self) {
        drop(ManuallyDrop::into_inner(self.lock));
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    File::options().create(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Long enough to catch a program that does not wait.
    const SOON: Duration = Duration::from_millis(300);

    #[tokio::test]
    async fn a_second_program_waits_for_the_end_of_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("coild.sock");
        let first = InstanceLock::acquire(&socket).await.unwrap();
        let mut second = Box::pin(InstanceLock::acquire(&socket));
        assert!(!first.has_successor());
        assert!(tokio::time::timeout(SOON, &mut second).await.is_err(), "there are two");
        assert!(first.has_successor());
        first.release();
        assert!(!second.await.unwrap().has_successor());
    }

    #[tokio::test]
    async fn a_program_that_takes_no_lock_is_waited_for_too() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("coild.sock");
        let other = tokio::net::UnixListener::bind(&socket).unwrap();
        let mut lock = Box::pin(InstanceLock::acquire(&socket));
        assert!(tokio::time::timeout(SOON, &mut lock).await.is_err(), "there are two");
        drop(other);
        lock.await.unwrap();
        assert!(socket.exists(), "a stale socket file delays no start");
    }
}

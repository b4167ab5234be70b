//! One node program at a time.
//!
//! In an upgrade the new program is started while the old one still serves. It gets to know the cluster, which takes most
//! of a start, and takes over in the moment the old one ends: tunnels inside the process stand still no longer than that.
//! Two programs that give addresses, or move packets of one device, would be two truths.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_wire::spool;
use tokio::net::UnixStream;

/// How often a program that waits looks whether it is its turn: packets are lost meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// The same for a program that takes no lock (Coil's), which has to be asked.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The right to be the node program of this machine.
#[derive(Debug)]
pub(crate) struct Turn(File);

impl Turn {
    /// Waits until no other program serves `socket`.
    ///
    /// # Errors
    /// The directory beside the socket cannot be written.
    pub(crate) async fn wait(socket: &Path) -> anyhow::Result<Self> {
        let path = spool::turn(socket);
        let lock = open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut waits = false;
        let mut wait = async |pause| {
            if !std::mem::replace(&mut waits, true) {
                tracing::info!(socket = %socket.display(), "another node program runs here: taking over when it ends");
            }
            tokio::time::sleep(pause).await;
        };
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => wait(LOOK_AGAIN).await,
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", path.display()));
                }
            }
        }
        while UnixStream::connect(socket).await.is_ok() {
            wait(ASK_AGAIN).await;
        }
        Ok(Self(lock))
    }

    /// Keeps it until the process is gone, and with it every socket and device that a successor needs.
    pub(crate) fn keep(self) {
        std::mem::forget(self.0);
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

    /// Long enough for a program that does not wait to be found out.
    const SOON: Duration = Duration::from_millis(300);

    #[tokio::test]
    async fn a_second_program_waits_for_the_end_of_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("coild.sock");
        let first = Turn::wait(&socket).await.unwrap();
        let mut second = Box::pin(Turn::wait(&socket));
        assert!(tokio::time::timeout(SOON, &mut second).await.is_err(), "there are two");
        drop(first);
        second.await.unwrap();
    }

    #[tokio::test]
    async fn a_program_that_takes_no_lock_is_waited_for_too() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("coild.sock");
        let other = tokio::net::UnixListener::bind(&socket).unwrap();
        let mut turn = Box::pin(Turn::wait(&socket));
        assert!(tokio::time::timeout(SOON, &mut turn).await.is_err(), "there are two");
        drop(other);
        turn.await.unwrap();
        assert!(socket.exists(), "what is left of a socket that nobody serves holds up nobody");
    }
}

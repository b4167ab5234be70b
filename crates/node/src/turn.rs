//! One node program at a time.
//!
//! In an upgrade the new program is started while the old one still serves. It gets to know the cluster, which takes most
//! of a start, and takes over in the moment the old one ends. Tunnels inside the old process live on until the new one has
//! its own ([`hand_over`]). Two programs that give addresses, or move packets of one device, would be two truths.

use std::fs::{File, TryLockError};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use fairlead_wire::spool;
use tokio::net::UnixStream;

use crate::mesh::agent::Agent;

/// How often a program that waits looks whether it is its turn: no pod starts meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// The same for a program that takes no lock (Coil's), which has to be asked.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// How long the next program may take to have tunnels of its own: less than the grace kubelet gives a pod.
const HANDOVER_PATIENCE: Duration = Duration::from_secs(20);

/// The right to be the node program of this machine. It is kept until the process is gone, and with it every socket and
/// device that a successor needs, unless it is [passed on](Self::pass_on).
#[derive(Debug)]
pub(crate) struct Turn {
    lock: ManuallyDrop<File>,
    /// Locked by the program that waits for this one.
    next: PathBuf,
}

impl Turn {
    /// Waits until no other program serves `socket`.
    ///
    /// # Errors
    /// The directory beside the socket cannot be written.
    pub(crate) async fn wait(socket: &Path) -> anyhow::Result<Self> {
        let path = spool::turn(socket);
        let lock = open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let next = spool::next_turn(socket);
        let queue = open(&next).with_context(|| format!("cannot open {}", next.display()))?;
        let mut waits = false;
        let mut wait = async |pause| {
            if !std::mem::replace(&mut waits, true) {
                // Of several that wait, one is enough to tell that somebody does.
                let _ = queue.try_lock();
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
        Ok(Self { lock: ManuallyDrop::new(lock), next })
    }

    /// Whether another program waits for the end of this one.
    pub(crate) fn has_successor(&self) -> bool {
        open(&self.next).is_ok_and(|queue| matches!(queue.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Lets the successor begin although this process is still there.
    pub(crate) fn pass_on(self) {
        drop(ManuallyDrop::into_inner(self.lock));
    }
}

/// Where tunnels inside the process are handed over.
pub(crate) fn handover(state_dir: &Path) -> PathBuf {
    state_dir.join("handover.sock")
}

/// Lets the next program begin, and tunnels of this process live on until that one has its own.
pub(crate) async fn hand_over(agent: Agent, turn: Turn) {
    let retiring = match tokio::task::spawn_blocking(|| agent.retire()).await {
        Ok(Ok(Some(retiring))) => retiring,
        Ok(Ok(None)) | Err(_) => return,
        Ok(Err(error)) => {
            return tracing::warn!(%error, "tunnels stand still until the next program has its own");
        }
    };
    turn.pass_on();
    match tokio::task::spawn_blocking(|| retiring.wait(HANDOVER_PATIENCE)).await {
        Ok(true) => tracing::info!("the next program has taken over"),
        _ => tracing::warn!("no program took over within {} s", HANDOVER_PATIENCE.as_secs()),
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
        assert!(!first.has_successor());
        assert!(tokio::time::timeout(SOON, &mut second).await.is_err(), "there are two");
        assert!(first.has_successor());
        first.pass_on();
        assert!(!second.await.unwrap().has_successor());
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

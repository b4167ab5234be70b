//! Removes everything of Fairlead from this node, when the node leaves the cluster or Fairlead is uninstalled.

use std::fs::{self, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use fairlead_dataplane::cleanup;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_members::discovery_client;
use fairlead_wire::spool;

/// Choice of the parts that are removed.
#[derive(Debug, Clone)]
pub struct Cleanup {
    /// Socket of the node program.
    pub socket: PathBuf,
    /// Directory of the key file; it stays, emptied, since it may be a mount.
    pub state_dir: PathBuf,
    /// Tables, rule and protocol of pods' routes.
    pub numbers: RoutingIds,
    /// Names of mesh devices.
    pub mesh_devices: Vec<String>,
}

impl Cleanup {
    /// Removes it, and deletes this node at its discovery services. It may be repeated.
    ///
    /// # Errors
    /// A node program runs here, the kernel refuses, or a file cannot be removed. A service that is away is no error: it forgets the node by
    /// itself.
    pub async fn run(&self) -> anyhow::Result<()> {
        self.refuse_while_a_program_runs()?;
        cleanup::remove_all(self.numbers, &self.mesh_devices)
            .context("cannot clean up the kernel's state")?;
        // Without the mesh, whose tunnels end; with the files, which say where.
        if let Err(error) = discovery_client::leaving::leave(&self.state_dir).await {
            tracing::warn!(error = %format!("{error:#}"), "cannot delete this node at discovery services, which forget it after half an hour");
        }
        let beside = spool::instance_lock(&self.socket);
        let beside = beside.parent().context("the socket has no directory")?;
        ignore_missing(fs::remove_dir_all(beside), beside)?;
        ignore_missing(fs::remove_file(&self.socket), &self.socket)?;
        let entries = match fs::read_dir(&self.state_dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.with_context(|| format!("cannot list {}", self.state_dir.display()))?,
        };
        for entry in entries {
            let path = entry?.path();
            ignore_missing(fs::remove_file(&path), &path)?;
        }
        Ok(())
    }

    fn refuse_while_a_program_runs(&self) -> anyhow::Result<()> {
        let path = spool::instance_lock(&self.socket);
        match fs::File::open(&path).map(|lock| lock.try_lock()) {
            Ok(Err(TryLockError::WouldBlock)) => {
                bail!("a node program runs here (it holds {}): stop it first", path.display())
            }
            _ => Ok(()),
        }
    }
}

fn ignore_missing(removed: io::Result<()>, path: &Path) -> anyhow::Result<()> {
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

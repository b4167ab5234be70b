//! Pods that asked for no egress gateways when they were attached, for a program that starts while the API server is away: a new
//! sandbox of such a pod needs nothing that only the API server knows. One empty file for each, named by the UID.
//!
//! A file is no promise for later: what the pod asks for by then is set up as for every running pod, once the API server shows it.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fairlead_wire::spool;

/// Age from which the file of a pod that the watch does not show is removed: a watch may be behind.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// The files.
pub(crate) struct WithoutEgress {
    directory: PathBuf,
}

impl WithoutEgress {
    /// Files of a socket.
    pub(crate) fn beside(socket: &Path) -> Self {
        Self { directory: spool::without_egress(socket) }
    }

    /// Records of a pod that is attached whether it asks for gateways.
    pub(crate) fn record(&self, uid: &str, asks: bool) {
        let Some(file) = self.file(uid) else { return };
        let outcome = if asks { remove(&file) } else { self.create(&file) };
        if let Err(error) = outcome {
            tracing::warn!(file = %file.display(), %error, "cannot record whether a pod asks for egress gateways");
        }
    }

    /// Whether the pod asked for none when it was attached last.
    pub(crate) fn has(&self, uid: &str) -> bool {
        self.file(uid).is_some_and(|file| file.exists())
    }

    /// Removes the files of pods that do not exist any more.
    pub(crate) fn forget(&self, now: SystemTime, exists: impl Fn(&str) -> bool) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let made = entry.metadata().and_then(|metadata| metadata.modified()).ok();
            let age = made.and_then(|made| now.duration_since(made).ok());
            let is_old = age.is_some_and(|age| age >= FORGOTTEN_AFTER);
            if is_old && !name.to_str().is_some_and(&exists) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn create(&self, file: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        File::create(file).map(drop)
    }

    /// A UID comes from the runtime.
    fn file(&self, uid: &str) -> Option<PathBuf> {
        (spool::is_identifier(uid) && uid.len() <= 255).then(|| self.directory.join(uid))
    }
}

fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_program_knows_which_pods_asked_for_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let first = WithoutEgress::beside(&socket);
        first.record("plain", false);
        first.record("changed", false);
        first.record("changed", true);
        first.record("asks", true);
        first.record("../evil", false);
        let later = WithoutEgress::beside(&socket);
        assert_eq!(
            ["plain", "changed", "asks", "../evil", ""].map(|uid| later.has(uid)),
            [true, false, false, false, false]
        );
    }

    #[test]
    fn pods_that_are_gone_for_a_while_are_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let known = WithoutEgress::beside(&directory.path().join("s"));
        known.record("runs", false);
        known.record("gone", false);
        let now = SystemTime::now();
        known.forget(now, |_| false);
        assert!(known.has("runs") && known.has("gone"), "the watch may be behind");
        known.forget(now + 2 * FORGOTTEN_AFTER, |uid| uid == "runs");
        assert!(known.has("runs") && !known.has("gone"));
    }
}

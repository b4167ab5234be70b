//! Network namespaces by file: opening one and running a closure inside it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::thread;

use nix::sched::{CloneFlags, setns};

use crate::{Error, Result};

/// A network namespace, held open: it lives at least as long as this value.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
}

impl Netns {
    /// Opens the namespace a path names, as `CNI_NETNS` or `/run/netns/NAME` does.
    ///
    /// # Errors
    /// The file is missing or may not be opened.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| Error::Socket {
            operation: "open network namespace",
            source: std::io::Error::new(source.kind(), format!("{}: {source}", path.display())),
        })?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn current() -> Result<Self> {
        Self::open("/proc/thread-self/ns/net")
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` on a thread of its own inside the namespace and returns what it returns.
    ///
    /// # Errors
    /// The namespace cannot be entered (the file is none, or rights are missing), or `work` panicked.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(self.file.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|errno| Error::Socket {
                        operation: "enter network namespace",
                        source: std::io::Error::other(format!("{}: {errno}", self.path.display())),
                    })?;
                    Ok(work())
                })
                .join()
                .unwrap_or_else(|_| {
                    Err(Error::Invalid {
                        what: format!("work in network namespace {}", self.path.display()),
                        reason: "the work panicked".to_owned(),
                    })
                })
        })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

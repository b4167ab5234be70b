//! Network namespaces by file: opening one and running a closure inside it.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::{io, thread};

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::fstat;

use crate::{Error, Result};

thread_local! {
    /// Device and inode of the namespace for which [`Netns::run`] started this thread.
    static INSIDE: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

/// A network namespace, held open: it exists at least as long as this value.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
}

impl Netns {
    /// Opens the namespace a path names, as `CNI_NETNS` or `/run/netns/NAME` does.
    ///
    /// # Errors
    /// The file is missing or may not be opened. That it is no network namespace shows when it is entered.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| failed("open", path, source))?;
        Ok(Self { file, path: path.to_owned() })
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn current() -> Result<Self> {
        Self::open("/proc/thread-self/ns/net")
    }

    /// A new, empty namespace without a name: it is deleted with the last descriptor, process and socket in it.
    ///
    /// # Errors
    /// The rights to make one are missing, or the kernel's limit is reached.
    pub fn create() -> Result<Self> {
        on_own_thread(Path::new("(new)"), || {
            unshare(CloneFlags::CLONE_NEWNET)
                .map_err(|errno| failed("create", Path::new("(new)"), errno.into()))?;
            Self::current()
        })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are the same namespace, by whatever paths they were opened.
    ///
    /// # Errors
    /// A descriptor cannot be examined.
    pub fn is_same(&self, other: &Self) -> Result<bool> {
        Ok(self.identity()? == other.identity()?)
    }

    fn identity(&self) -> Result<(u64, u64)> {
        let status = fstat(&self.file).map_err(|errno| failed("examine", &self.path, errno.into()))?;
        Ok((status.st_dev, status.st_ino))
    }

    /// Runs `work` on a thread of its own inside the namespace and returns what it returns. Within such work in the same namespace it
    /// stays on that thread, so that many small steps may be put into one `run`. `work` must not change the thread's namespace.
    ///
    /// # Errors
    /// The namespace cannot be entered (the file is none, or rights are missing), or `work` panicked.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let identity = self.identity()?;
        if INSIDE.get() == Some(identity) {
            return Ok(work());
        }
        on_own_thread(&self.path, || {
            setns(self.file.as_fd(), CloneFlags::CLONE_NEWNET)
                .map_err(|errno| failed("enter", &self.path, errno.into()))?;
            INSIDE.set(Some(identity));
            Ok(work())
        })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn failed(operation: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Namespace { operation, path: path.to_owned(), source }
}

/// A thread that changed its namespace must not run other work afterwards, so it ends with this one.
fn on_own_thread<T: Send>(path: &Path, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        thread::Builder::new()
            .name("netns".to_owned())
            .spawn_scoped(scope, work)
            .map_err(|source| failed("start a thread for", path, source))?
            .join()
            .unwrap_or_else(|_| {
                Err(Error::Invalid {
                    what: format!("work in network namespace {}", path.display()),
                    reason: "the work panicked".to_owned(),
                })
            })
    })
}

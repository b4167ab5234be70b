//! Places from which traffic can come: network namespaces that another program made.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};

use crate::namespace::Namespace;

/// Somewhere that sockets can be opened.
pub trait Place {
    /// Name of the place, for people.
    fn name(&self) -> &str;

    /// Runs `work` in its network namespace; sockets opened there stay there.
    ///
    /// # Errors
    /// The namespace no longer exists or cannot be entered.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T>;
}

impl Place for Namespace {
    fn name(&self) -> &str {
        Self::name(self)
    }

    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.run(work)
    }
}

/// A network namespace of which only a file is known, such as that of a pod.
#[derive(Debug)]
pub struct ForeignNetwork {
    name: String,
    file: File,
}

impl ForeignNetwork {
    /// Opens it; it exists at least as long as the value.
    ///
    /// # Errors
    /// There is no such file.
    pub fn open(name: &str, path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { name: name.to_owned(), file })
    }
}

impl Place for ForeignNetwork {
    fn name(&self) -> &str {
        &self.name
    }

    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let enter = || -> io::Result<()> { Ok(setns(&self.file, CloneFlags::CLONE_NEWNET)?) };
        thread::scope(|scope| match scope.spawn(|| enter().map(|()| work())).join() {
            Ok(result) => result.with_context(|| format!("cannot enter the network of {}", self.name)),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

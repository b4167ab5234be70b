//! Files that test beds build or download once, kept outside the checkout for all checkouts of a user.
//!
//! For: programs compiled from Go modules, kernels and programs of Debian packages that must not be installed, images. Everything
//! is in directories of `$XDG_CACHE_HOME` (or `~/.cache`) `/fairlead`, whose names say what they were made from; each may be
//! deleted at any time. Also [`free_port`], for what is started then. Not for: results of the build of this workspace, which cargo keeps.

pub mod debian;
mod ports;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

pub use ports::free_port;

/// A directory of the cache. Its name says what it was made from, so that its files are made once.
#[derive(Debug)]
pub struct Shelf {
    directory: PathBuf,
}

impl Shelf {
    /// The directory `name` in the cache.
    ///
    /// # Errors
    /// Neither `XDG_CACHE_HOME` nor `HOME` is set.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        let base = base.context("neither XDG_CACHE_HOME nor HOME is set: no place to keep what was built")?;
        Ok(Self { directory: base.join("fairlead").join(name) })
    }

    /// Path of the directory; it may not exist yet.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The path of a file, made first if it is not there. Of several processes that ask at once, one makes it and the others
    /// wait. `make` gets the path to write to; the file appears under its own name when it is complete.
    ///
    /// # Errors
    /// `make` failed, or the cache is not writable.
    pub fn file(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<PathBuf> {
        let path = self.directory.join(name);
        if path.exists() {
            return Ok(path);
        }
        let context = || format!("cannot create {}", path.display());
        fs::create_dir_all(&self.directory).with_context(context)?;
        let lock = File::create(self.directory.join(format!("{name}.lock"))).with_context(context)?;
        if lock.try_lock().is_err() {
            progress(&format!("waiting for another process that makes {}", path.display()));
            lock.lock().with_context(|| format!("cannot lock {}.lock", path.display()))?;
        }
        if !path.exists() {
            let unfinished = self.directory.join(format!("{name}.unfinished"));
            make(&unfinished).with_context(context)?;
            fs::rename(&unfinished, &path).with_context(context)?;
        }
        Ok(path)
    }
}

/// Reports progress on standard error.
pub fn progress(message: &str) {
    // Nothing useful can be done when stderr is closed.
    let _ = writeln!(io::stderr(), "testbed: {message}");
}

/// FNV-1a, 64 bits (<https://www.rfc-editor.org/rfc/rfc9923>): names a cache entry, protects nothing.
#[derive(Debug)]
pub struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    /// Adds a field and its length, so that moving bytes between neighbours changes the hash.
    pub fn add(&mut self, field: &[u8]) {
        for byte in field.iter().chain(&field.len().to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The hash of all fields so far.
    pub fn value(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_sees_content_and_boundaries() {
        let of = |fields: &[&str]| {
            let mut hash = Fnv1a::default();
            fields.iter().for_each(|field| hash.add(field.as_bytes()));
            hash.value()
        };
        assert_eq!(of(&["a", "bc"]), of(&["a", "bc"]));
        assert_ne!(of(&["a", "bc"]), of(&["ab", "c"]));
        assert_ne!(of(&["a"]), of(&["b"]));
    }

    #[test]
    fn a_file_is_made_once_and_only_when_complete() {
        let directory = tempfile::tempdir().unwrap();
        let shelf = Shelf { directory: directory.path().join("new") };
        let error = shelf.file("thing", |path| {
            fs::write(path, "half")?;
            anyhow::bail!("no more ink")
        });
        assert!(format!("{:#}", error.unwrap_err()).contains("no more ink"));
        let path = shelf.file("thing", |path| Ok(fs::write(path, "whole")?)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "whole");
        shelf.file("thing", |_| panic!("it is there already")).unwrap();
    }
}

//! The files of an image.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::host;

/// The files of an image, by their path below its root. `/bin`, `/sbin`, `/lib` and `/lib64` are links into `/usr`, as in
/// Debian, and paths are given as they are on such a system.
#[derive(Debug)]
pub struct Tree {
    // Sorted by component: a directory precedes its entries, as unpacking needs it.
    entries: BTreeMap<PathBuf, Entry>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// With its mode bits.
    Directory(u32),
    File {
        mode: u32,
        content: Content,
    },
    Symlink(OsString),
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Bytes(Vec<u8>),
    /// A file of this machine, read when the image is written.
    Host(PathBuf),
}

impl Default for Tree {
    fn default() -> Self {
        Self::new()
    }
}

impl Tree {
    /// A tree with what every program expects: the links into `/usr`, `/tmp`, `/run`, `/root`, and the user `root`.
    pub fn new() -> Self {
        let mut tree = Self { entries: BTreeMap::new() };
        for directory in ["bin", "sbin", "lib", "lib64"] {
            tree.directory(&Path::new("/usr").join(directory), 0o755);
            tree.entries.insert(directory.into(), Entry::Symlink(format!("usr/{directory}").into()));
        }
        tree.directory(Path::new("/tmp"), 0o1777);
        tree.directory(Path::new("/run"), 0o755);
        tree.directory(Path::new("/root"), 0o700);
        tree.symlink(Path::new("/var/run"), "/run");
        tree.bytes(Path::new("/etc/passwd"), 0o644, "root:x:0:0:root:/root:/bin/sh\n");
        tree.bytes(Path::new("/etc/group"), 0o644, "root:x:0:\n");
        tree.bytes(Path::new("/etc/nsswitch.conf"), 0o644, "hosts: files dns\n");
        tree
    }

    /// Adds a directory, or changes the mode of one.
    pub fn directory(&mut self, path: &Path, mode: u32) {
        self.add(path, Entry::Directory(mode));
    }

    /// Adds a file with this content; `mode` is the lower twelve mode bits.
    pub fn bytes(&mut self, path: &Path, mode: u32, content: impl Into<Vec<u8>>) {
        self.add(path, Entry::File { mode, content: Content::Bytes(content.into()) });
    }

    /// Adds a symbolic link to `target`.
    pub fn symlink(&mut self, path: &Path, target: impl Into<OsString>) {
        self.add(path, Entry::Symlink(target.into()));
    }

    /// Adds a file of this machine under another path, with its mode. Libraries are not added.
    ///
    /// # Errors
    /// There is no such file.
    pub fn file(&mut self, source: &Path, path: &Path) -> anyhow::Result<()> {
        let metadata = std::fs::metadata(source)
            .with_context(|| format!("cannot put {} into the image", source.display()))?;
        anyhow::ensure!(
            metadata.is_file(),
            "cannot put {} into the image: it is not a regular file",
            source.display()
        );
        let mode = metadata.permissions().mode() & 0o7777;
        self.add(path, Entry::File { mode, content: Content::Host(source.to_owned()) });
        Ok(())
    }

    /// Adds an executable or a library of this machine, and at their own paths the shared libraries it needs.
    ///
    /// # Errors
    /// There is no such file, or one of its libraries is missing.
    pub fn program(&mut self, source: &Path, path: &Path) -> anyhow::Result<()> {
        self.file(source, path)?;
        for library in host::libraries(source)? {
            if !self.contains(&library) {
                self.file(&library, &library)?;
            }
        }
        Ok(())
    }

    /// Whether the path exists.
    pub fn contains(&self, path: &Path) -> bool {
        self.entries.contains_key(&host::inside(path))
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&Path, &Entry)> {
        self.entries.iter().map(|(path, entry)| (path.as_path(), entry))
    }

    fn add(&mut self, path: &Path, entry: Entry) {
        let path = host::inside(path);
        for parent in path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
            self.entries.entry(parent.to_owned()).or_insert(Entry::Directory(0o755));
        }
        self.entries.insert(path, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_come_before_their_entries() {
        let mut tree = Tree::new();
        tree.bytes(Path::new("/opt/a/b"), 0o644, "");
        let paths: Vec<&Path> = tree.entries().map(|(path, _)| path).collect();
        let place = |path: &str| paths.iter().position(|one| *one == Path::new(path)).unwrap();
        assert!(place("opt") < place("opt/a") && place("opt/a") < place("opt/a/b"));
    }

    #[test]
    fn a_path_in_bin_is_one_in_usr() {
        let mut tree = Tree::new();
        tree.symlink(Path::new("/bin/sh"), "dash");
        assert!(tree.contains(Path::new("/usr/bin/sh")));
        assert!(
            tree.entries()
                .any(|(path, entry)| path == Path::new("bin") && *entry == Entry::Symlink("usr/bin".into()))
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Tree::new().file(Path::new("/nonexistent/x"), Path::new("/x")).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent/x"), "{error:#}");
    }
}

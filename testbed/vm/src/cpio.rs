//! Archives as the kernel unpacks them into its first file system: cpio, "newc" format
//! (Linux Documentation/driver-api/early-userspace/buffer-format.rst).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

enum Entry {
    Directory,
    Symlink(OsString),
    File { permissions: u32, content: Vec<u8> },
}

/// A tree of files to be written as one archive. Paths are relative to the root.
#[derive(Default)]
pub(crate) struct Archive {
    // Sorted by component, so a directory always precedes what is in it, as unpacking needs it.
    entries: BTreeMap<PathBuf, Entry>,
}

impl Archive {
    pub(crate) fn directory(&mut self, path: &Path) {
        for directory in path.ancestors().filter(|directory| !directory.as_os_str().is_empty()) {
            self.entries.entry(directory.to_owned()).or_insert(Entry::Directory);
        }
    }

    /// Adds a file; `permissions` are the lower twelve mode bits.
    pub(crate) fn file(&mut self, path: &Path, permissions: u32, content: Vec<u8>) {
        self.add(path, Entry::File { permissions, content });
    }

    pub(crate) fn symlink(&mut self, path: &Path, target: impl Into<OsString>) {
        self.add(path, Entry::Symlink(target.into()));
    }

    pub(crate) fn contains(&self, path: &Path) -> bool {
        self.entries.contains_key(path)
    }

    fn add(&mut self, path: &Path, entry: Entry) {
        self.directory(path.parent().unwrap_or(Path::new("")));
        self.entries.insert(path.to_owned(), entry);
    }

    /// The archive's bytes; several of them may follow each other in one initramfs.
    ///
    /// # Errors
    /// A file does not fit the format's 32-bit sizes.
    pub(crate) fn encode(&self) -> anyhow::Result<Vec<u8>> {
        const DIRECTORY: u32 = 0o040_755;
        const SYMLINK: u32 = 0o120_777;
        const REGULAR: u32 = 0o100_000;
        let mut output = Vec::new();
        for (inode, (path, entry)) in (1_u32..).zip(&self.entries) {
            let (mode, content) = match entry {
                Entry::Directory => (DIRECTORY, &[][..]),
                Entry::Symlink(target) => (SYMLINK, target.as_bytes()),
                Entry::File { permissions, content } => {
                    (REGULAR | (permissions & 0o7777), content.as_slice())
                }
            };
            append(&mut output, inode, mode, path.as_os_str().as_bytes(), content)
                .with_context(|| format!("{} is too big for an initramfs", path.display()))?;
        }
        append(&mut output, 0, 0, b"TRAILER!!!", &[])?;
        Ok(output)
    }
}

fn append(output: &mut Vec<u8>, inode: u32, mode: u32, name: &[u8], content: &[u8]) -> anyhow::Result<()> {
    let size = u32::try_from(content.len())?;
    let name_size = u32::try_from(name.len().saturating_add(1))?;
    // inode, mode, uid, gid, links, time, size, device (major, minor), special device (same), name size, checksum
    let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
    output.extend(b"070701");
    output.extend(fields.iter().flat_map(|field| format!("{field:08X}").into_bytes()));
    output.extend(name);
    output.push(0);
    pad(output);
    output.extend(content);
    pad(output);
    Ok(())
}

/// Name and content each start at a multiple of four bytes.
fn pad(output: &mut Vec<u8>) {
    output.resize(output.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_itself_lists_what_was_put_in() {
        let mut archive = Archive::default();
        archive.file(Path::new("usr/bin/tool"), 0o755, b"12345".to_vec());
        archive.symlink(Path::new("bin"), "usr/bin");
        let mut cpio = Command::new("cpio")
            .args(["--list", "--verbose", "--numeric-uid-gid", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        cpio.stdin.take().unwrap().write_all(&archive.encode().unwrap()).unwrap();
        let listing = String::from_utf8(cpio.wait_with_output().unwrap().stdout).unwrap();
        // The archive's files have no date but the epoch's.
        let lines: Vec<(&str, &str)> =
            listing.lines().map(|line| (&line[..10], line.split_once(" 1970 ").unwrap().1)).collect();
        let expected = [
            ("lrwxrwxrwx", "bin -> usr/bin"),
            ("drwxr-xr-x", "usr"),
            ("drwxr-xr-x", "usr/bin"),
            ("-rwxr-xr-x", "usr/bin/tool"),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn everything_is_aligned_to_four_bytes() {
        for length in 0..5 {
            let mut archive = Archive::default();
            archive.file(Path::new("f"), 0o644, vec![b'x'; length]);
            assert_eq!(archive.encode().unwrap().len() % 4, 0);
        }
    }
}

//! The one layer of an image: a tar of its tree, hashed while it is written.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use anyhow::Context;
use flate2::GzBuilder;
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};

use crate::Tree;
use crate::tree::{Content, Entry};

/// Compression of a stored layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Compression {
    /// Small, for registries.
    Gzip,
    /// Fast, for images that are imported on the machine that builds them.
    #[default]
    None,
}

/// A layer that has been written.
pub(crate) struct Layer {
    /// Digest of the stored bytes, `sha256:…`.
    pub(crate) digest: String,
    pub(crate) size: u64,
    /// Digest of the uncompressed tar, `diff_id` in the configuration.
    pub(crate) diff_id: String,
    pub(crate) media_type: &'static str,
}

/// `sha256:…` of some bytes.
pub(crate) fn digest(bytes: &[u8]) -> String {
    name(Sha256::digest(bytes).as_slice())
}

/// Writes the tree as a layer.
pub(crate) fn write(tree: &Tree, compression: Compression, file: &File) -> anyhow::Result<Layer> {
    let stored = Hashing::new(BufWriter::new(file));
    let (stored, diff_id, media_type) = match compression {
        Compression::Gzip => {
            // No time and no file name in its header.
            let gzip = GzBuilder::new().write(stored, flate2::Compression::default());
            let (gzip, diff_id) = archive(tree, gzip)?;
            let stored = gzip.finish().context("cannot finish the layer")?;
            (stored, diff_id, "application/vnd.oci.image.layer.v1.tar+gzip")
        }
        Compression::None => {
            let (stored, diff_id) = archive(tree, stored)?;
            (stored, diff_id, "application/vnd.oci.image.layer.v1.tar")
        }
    };
    let (mut file, digest, size) = stored.finish();
    file.flush().context("cannot write the layer")?;
    Ok(Layer { digest, size, diff_id, media_type })
}

/// Writes the tar; returns the writer and the digest.
fn archive<W: Write>(tree: &Tree, output: W) -> anyhow::Result<(W, String)> {
    let mut builder = Builder::new(Hashing::new(output));
    for (path, entry) in tree.entries() {
        append(&mut builder, path, entry).with_context(|| format!("cannot write /{}", path.display()))?;
    }
    let (output, digest, _) = builder.into_inner().context("cannot finish the layer")?.finish();
    Ok((output, digest))
}

fn append(builder: &mut Builder<impl Write>, path: &Path, entry: &Entry) -> io::Result<()> {
    match entry {
        Entry::Directory(mode) => {
            builder.append_data(&mut header(EntryType::Directory, *mode, 0), path, io::empty())
        }
        Entry::File { mode, content: Content::Bytes(bytes) } => {
            let size = u64::try_from(bytes.len()).map_err(io::Error::other)?;
            builder.append_data(&mut header(EntryType::Regular, *mode, size), path, bytes.as_slice())
        }
        Entry::File { mode, content: Content::Host(source) } => {
            let file = File::open(source)?;
            let size = file.metadata()?.len();
            // One that grows meanwhile would corrupt the tar.
            builder.append_data(&mut header(EntryType::Regular, *mode, size), path, file.take(size))
        }
        Entry::Symlink(target) => {
            builder.append_link(&mut header(EntryType::Symlink, 0o777, 0), path, Path::new(target))
        }
    }
}

/// Owned by root, modification time 0.
fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// Counts and hashes what is written through it.
struct Hashing<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self { inner, hash: Sha256::new(), bytes: 0 }
    }

    fn finish(self) -> (W, String, u64) {
        (self.inner, name(self.hash.finalize().as_slice()), self.bytes)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        let written = bytes
            .get(..count)
            .ok_or_else(|| io::Error::other("the writer reports more bytes than it was given"))?;
        self.hash.update(written);
        self.bytes = self.bytes.saturating_add(u64::try_from(count).map_err(io::Error::other)?);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn name(hash: &[u8]) -> String {
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

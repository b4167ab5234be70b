//! The state directory of one node, and what its files have in common.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;

/// The format; a file of another one is not read.
pub(crate) const VERSION: u32 = 1;
/// Longer files are not read: ten times what 5,000 members take.
const MAX_LENGTH: u64 = 64 << 20;

/// The file of one node.
#[derive(Debug, Clone)]
pub struct StateFile {
    /// The state directory.
    pub directory: PathBuf,
    /// Name of the node whose facts these are: a state directory may have been copied.
    pub node: String,
}

/// Age of a file. One from the future is new: a host without a clock that runs while it is off starts with a time of the past.
pub(crate) fn age(saved: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(saved)).unwrap_or_default()
}

/// Content of a file, up to [`MAX_LENGTH`]; `None` if there is no file.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_LENGTH).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Replaces a file with one that only its owner may read. After a crash there is the old one or the new one.
///
/// # Errors
/// The file system refuses.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut temporary = OsString::from(path);
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    // Left by a crash between writing and renaming; it was never in use.
    let _ = fs::remove_file(&temporary);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

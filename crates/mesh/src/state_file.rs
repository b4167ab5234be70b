//! Files of the state directory.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Replaces a file with one that only its owner may read. After a crash there is the old one or the new one.
///
/// # Errors
/// The file system refuses.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
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

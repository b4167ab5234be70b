//! Small files beside the socket that are written whole: a reader sees the old text or the new one.

use std::path::Path;
use std::{fs, io};

/// Replaces a file, and makes its directory where there is none.
///
/// # Errors
/// The file system refuses; the old file stays.
pub(crate) fn replace(file: &Path, text: &str) -> io::Result<()> {
    let temporary = file.with_extension("new");
    if let Some(directory) = file.parent() {
        fs::create_dir_all(directory)?;
    }
    fs::write(&temporary, text)?;
    fs::rename(&temporary, file)
}

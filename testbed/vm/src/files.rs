//! Host files, with the shared libraries they need, as they will lie inside the VM.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context;
use fairlead_image::{inside, libraries};

use crate::cpio::Archive;

/// Adds a host file at its own path, and every library that `ldd` names for it.
pub(crate) fn add_with_libraries(archive: &mut Archive, path: &Path) -> anyhow::Result<()> {
    add(archive, path)?;
    for library in libraries(path)? {
        if !archive.contains(&inside(&library)) {
            add(archive, &library)?;
        }
    }
    Ok(())
}

/// Adds a host file at its own path.
pub(crate) fn add(archive: &mut Archive, path: &Path) -> anyhow::Result<()> {
    let read = || anyhow::Ok((fs::metadata(path)?.permissions().mode(), fs::read(path)?));
    let (permissions, content) =
        read().with_context(|| format!("cannot copy {} into the VM", path.display()))?;
    archive.file(&inside(path), permissions, content);
    Ok(())
}

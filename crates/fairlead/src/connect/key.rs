//! The private key of this machine's Peer.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use anyhow::Context as _;
use fairlead_cli::peer::private_key_of;
use fairlead_keys::PrivateKey;

/// Reads the key of a Peer, or makes it from `new` where there is none. What is no key is an error, and stays.
pub(super) fn load_or_create(
    directory: &Path,
    peer: &str,
    new: impl FnOnce() -> PrivateKey,
) -> anyhow::Result<PrivateKey> {
    let path = directory.join(format!("{peer}.key"));
    match fs::metadata(&path) {
        Ok(found) => {
            if found.permissions().mode() & 0o077 != 0 {
                tracing::warn!(path = %path.display(), "the private key file was readable by others; narrowing it to 0600");
                fs::set_permissions(&path, Permissions::from_mode(0o600))
                    .with_context(|| format!("cannot narrow private key file {}", path.display()))?;
            }
            private_key_of(&path)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = new();
            write(directory, &path, &key)
                .with_context(|| format!("cannot write private key file {}", path.display()))?;
            Ok(key)
        }
        Err(error) => Err(error).with_context(|| format!("cannot read private key file {}", path.display())),
    }
}

/// After a crash there is no key or a whole one.
fn write(directory: &Path, path: &Path, key: &PrivateKey) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let temporary = path.with_extension("key.new");
    // Left by a crash; it was never in use.
    let _ = fs::remove_file(&temporary);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(format!("{}\n", key.to_base64()).as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_only_its_owner_may_read_it() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("fairlead/peers");
        let load = |byte| load_or_create(&directory, "laptop.example", || PrivateKey([byte; 32])).unwrap();
        let path = directory.join("laptop.example.key");
        assert_eq!((load(1), load(2)), (PrivateKey([1; 32]), PrivateKey([1; 32])));
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o600);
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert_eq!((load(3), mode()), (PrivateKey([1; 32]), 0o600));
    }

    #[test]
    fn what_is_no_key_is_named_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("laptop.key");
        fs::write(&path, "nonsense").unwrap();
        let error = load_or_create(directory.path(), "laptop", || PrivateKey([1; 32])).unwrap_err();
        assert!(format!("{error:#}").contains("laptop.key"), "{error:#}");
        assert_eq!(fs::read_to_string(path).unwrap(), "nonsense");
    }
}

//! The node's WireGuard identity: one key in one file, generated once.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use fairlead_keys::{InvalidKey, PrivateKey};
use fairlead_members::state_file;

/// Name of the key file in the state directory.
const FILE: &str = "wireguard.key";
/// Name of the file with the key that will replace it.
const NEXT_FILE: &str = "wireguard.next.key";
/// A key file holds 44 characters; no key file is longer than this.
const MAX_LENGTH: u64 = 4096;

/// Reason why there is no identity. The key file is never overwritten after such an error.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file holds no key.
    #[error(
        "WireGuard key file {path} is corrupt ({reason}). It was left unchanged: restore it from a backup, or delete it \
         to give this node a new identity"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Defect in the content of the file.
        reason: KeyDefect,
    },
    /// The file system refused.
    #[error("cannot {operation} WireGuard key file {path}: {source}")]
    File {
        /// Verb for the operation that failed, as in "read".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
}

/// Defect in the content of a key file.
#[derive(Debug, thiserror::Error)]
pub enum KeyDefect {
    /// A key of zeros is what some tools write for "no key".
    #[error("the key is all zeros")]
    AllZeros,
    /// The text is no key.
    #[error(transparent)]
    Invalid(#[from] InvalidKey),
    /// The content is not UTF-8.
    #[error("it is not text")]
    NotText,
}

/// Reads the key of `state_dir`, or generates one from `random` bytes when there is none yet.
///
/// A new key is written to a temporary file (mode 0600), synced and renamed, so that a crash leaves either no key or
/// a whole one. A key file that others may read is narrowed to 0600.
///
/// # Errors
/// The directory cannot be used, or the file holds something that is not a key.
pub fn load_or_create(state_dir: &Path, random: [u8; 32]) -> Result<PrivateKey, IdentityError> {
    let path = state_dir.join(FILE);
    let failed = |operation, path: &Path| {
        let path = path.to_owned();
        move |source| IdentityError::File { operation, path, source }
    };
    fs::create_dir_all(state_dir).map_err(failed("make the directory of", &path))?;
    match File::open(&path) {
        Ok(file) => read(&path, file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = PrivateKey(clamp(random));
            let text = format!("{}\n", key.to_base64());
            state_file::replace(&path, text.as_bytes()).map_err(failed("write", &path))?;
            Ok(key)
        }
        Err(error) => Err(failed("open", &path)(error)),
    }
}

/// Reads the key that is to replace the one of `state_dir`, if there is one.
///
/// # Errors
/// The file cannot be read, or holds something that is not a key.
pub fn load_next(state_dir: &Path) -> Result<Option<PrivateKey>, IdentityError> {
    let path = state_dir.join(NEXT_FILE);
    match File::open(&path) {
        Ok(file) => read(&path, file).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(IdentityError::File { operation: "open", path, source }),
    }
}

/// Makes the key that is to replace the one of `state_dir`, from `random` bytes. What was in its file was never in use.
///
/// # Errors
/// The file system refuses.
pub fn create_next(state_dir: &Path, random: [u8; 32]) -> Result<PrivateKey, IdentityError> {
    let path = state_dir.join(NEXT_FILE);
    let key = PrivateKey(clamp(random));
    let text = format!("{}\n", key.to_base64());
    let written = state_file::replace(&path, text.as_bytes());
    written.map_err(|source| IdentityError::File { operation: "write", path, source }).map(|()| key)
}

/// Replaces the key of `state_dir` by the next one, in one step.
///
/// # Errors
/// The file system refuses.
pub fn use_next(state_dir: &Path) -> Result<(), IdentityError> {
    let path = state_dir.join(NEXT_FILE);
    let renamed = fs::rename(&path, state_dir.join(FILE)).and_then(|()| File::open(state_dir)?.sync_all());
    renamed.map_err(|source| IdentityError::File { operation: "rename", path, source })
}

fn read(path: &Path, file: File) -> Result<PrivateKey, IdentityError> {
    let corrupt = |reason| IdentityError::Corrupt { path: path.to_owned(), reason };
    let unreadable = |source| IdentityError::File { operation: "read", path: path.to_owned(), source };
    let mode = file.metadata().map_err(unreadable)?.permissions().mode();
    if mode & 0o077 != 0 {
        tracing::warn!(path = %path.display(), "the WireGuard key file was readable by others; narrowing it to 0600");
        file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(unreadable)?;
    }
    let mut text = Vec::new();
    file.take(MAX_LENGTH).read_to_end(&mut text).map_err(unreadable)?;
    let text = String::from_utf8(text).map_err(|_| corrupt(KeyDefect::NotText))?;
    let key: PrivateKey = text.parse().map_err(|error: InvalidKey| corrupt(error.into()))?;
    if key.0 == [0; 32] {
        return Err(corrupt(KeyDefect::AllZeros));
    }
    // The kernel clamps what it is given; an unclamped key would differ from the device's forever.
    Ok(PrivateKey(clamp(key.0)))
}

/// Turns random bytes into the form of a Curve25519 scalar, as `wg genkey` does (RFC 7748, section 5).
fn clamp(mut bytes: [u8; 32]) -> [u8; 32] {
    bytes[0] &= 248;
    bytes[31] = (bytes[31] & 127) | 64;
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let first = load_or_create(dir.path(), [7; 32]).unwrap();
        let again = load_or_create(dir.path(), [9; 32]).unwrap();
        assert_eq!(first, again);
        let mode = fs::metadata(dir.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_corrupt_key_is_named_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        for garbage in [
            &b"not a key"[..],
            b"",
            b"\xff\xfe",
            &[b'A'; 9000],
            b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
        ] {
            fs::write(dir.path().join(FILE), garbage).unwrap();
            let error = load_or_create(dir.path(), [7; 32]).unwrap_err().to_string();
            assert!(error.contains("wireguard.key is corrupt"), "{error}");
            assert_eq!(fs::read(dir.path().join(FILE)).unwrap(), garbage);
        }
    }

    #[test]
    fn a_widely_readable_key_is_narrowed() {
        let dir = tempfile::tempdir().unwrap();
        let key = load_or_create(dir.path(), [7; 32]).unwrap();
        let path = dir.path().join(FILE);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(load_or_create(dir.path(), [1; 32]).unwrap(), key);
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_key_of_another_tool_is_clamped_as_the_kernel_does() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), PrivateKey([0xff; 32]).to_base64()).unwrap();
        let key = load_or_create(dir.path(), [1; 32]).unwrap();
        assert_eq!((key.0[0], key.0[31]), (248, 127));
    }

    #[test]
    fn a_half_written_key_is_never_used() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("wireguard.key.new"), b"half").unwrap();
        let key = load_or_create(dir.path(), [7; 32]).unwrap();
        assert_eq!(load_or_create(dir.path(), [8; 32]).unwrap(), key);
    }
}

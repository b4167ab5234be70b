//! Access to a relay: the clients that may use it.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use aws_lc_rs::digest::{SHA256, digest};
use fairlead_keys::PublicKey;

use crate::core::Admission;

/// Decides who may use a relay. The server asks when a client registers, and again for each client after
/// [`Authorizer::refresh`] has said that something changed.
pub trait Authorizer: Send + Sync + 'static {
    /// Lets a client in that has proved this key and shows this token.
    fn admit(&self, key: PublicKey, instance: [u8; 8], token: &[u8]) -> Option<Admission>;

    /// Whether a client that was let in still may.
    fn is_allowed(&self, admission: &Admission) -> bool;

    /// Reads its sources again; whether that changed who is allowed. Called every two seconds.
    fn refresh(&self) -> bool;
}

/// Reason why an authorizer cannot decide.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// A file cannot be read.
    #[error("cannot read {path}: {error}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        error: io::Error,
    },
    /// A line is not what the file should have.
    #[error("{path}:{line}: {reason}", path = path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line.
        line: usize,
        /// Reason why the line is invalid.
        reason: String,
    },
    /// Every client would be allowed.
    #[error("neither allowed keys nor tokens: every client could use this relay")]
    Open,
}

/// Keys and tokens from files with one in each line. If there are files for both, a client needs both.
#[derive(Debug)]
pub struct FileAuthorizer {
    keys: Option<PathBuf>,
    tokens: Option<PathBuf>,
    current: RwLock<Allowed>,
    /// The last failure to read a file: it is logged once.
    failure: RwLock<Option<String>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Allowed {
    keys: Option<BTreeSet<PublicKey>>,
    /// SHA-256 of each.
    tokens: Option<BTreeSet<[u8; 32]>>,
}

impl FileAuthorizer {
    /// Reads the files.
    ///
    /// # Errors
    /// There is none, or one of them cannot be read or parsed.
    pub fn read(keys: Option<PathBuf>, tokens: Option<PathBuf>) -> Result<Self, AccessError> {
        if keys.is_none() && tokens.is_none() {
            return Err(AccessError::Open);
        }
        let current = RwLock::new(Allowed::read(keys.as_deref(), tokens.as_deref())?);
        Ok(Self { keys, tokens, current, failure: RwLock::default() })
    }

    fn permits(&self, key: &PublicKey, token: Option<&[u8; 32]>) -> bool {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.keys.as_ref().is_none_or(|keys| keys.contains(key))
            && current.tokens.as_ref().is_none_or(|tokens| token.is_some_and(|token| tokens.contains(token)))
    }
}

impl Authorizer for FileAuthorizer {
    /// Tokens are compared by their hashes: how long that takes says nothing of a token.
    fn admit(&self, key: PublicKey, instance: [u8; 8], token: &[u8]) -> Option<Admission> {
        let token = self.tokens.as_ref().map(|_| sha256(token));
        self.permits(&key, token.as_ref()).then_some(Admission { key, instance, token })
    }

    fn is_allowed(&self, admission: &Admission) -> bool {
        self.permits(&admission.key, admission.token.as_ref())
    }

    /// A file that cannot be read or parsed leaves everything as it is.
    fn refresh(&self) -> bool {
        let read = Allowed::read(self.keys.as_deref(), self.tokens.as_deref());
        let failure = read.as_ref().err().map(ToString::to_string);
        let mut last = self.failure.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = failure.as_ref().filter(|_| *last != failure) {
            tracing::error!(%error, "cannot read who may use the relay; those who could still can");
        }
        *last = failure;
        let Ok(read) = read else { return false };
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let changed = *current != read;
        *current = read;
        changed
    }
}

impl Allowed {
    fn read(keys: Option<&Path>, tokens: Option<&Path>) -> Result<Self, AccessError> {
        let parse_key = |line: &str| line.split_whitespace().next().unwrap_or_default().parse::<PublicKey>();
        let keys = keys.map(|path| lines(path, parse_key)).transpose()?;
        let hash = |line: &str| Ok::<_, std::convert::Infallible>(sha256(line.as_bytes()));
        let tokens = tokens.map(|path| lines(path, hash)).transpose()?;
        Ok(Self { keys, tokens })
    }
}

/// Parsed lines of a file, without those that are empty or begin with `#`.
fn lines<T: Ord, E: Display>(
    path: &Path,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<BTreeSet<T>, AccessError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| AccessError::File { path: path.to_owned(), error })?;
    let lines = text.lines().map(str::trim).zip(1..);
    lines
        .filter(|(line, _)| !line.is_empty() && !line.starts_with('#'))
        .map(|(text, line)| {
            let invalid =
                |error: E| AccessError::Line { path: path.to_owned(), line, reason: error.to_string() };
            parse(text).map_err(invalid)
        })
        .collect()
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let hash = digest(&SHA256, bytes);
    // SHA-256 has 32 bytes.
    hash.as_ref().try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PublicKey = PublicKey([1; 32]);
    const B: PublicKey = PublicKey([2; 32]);

    fn file(text: &str) -> tempfile::TempPath {
        let file = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        std::fs::write(&file, text).unwrap();
        file
    }

    fn admitted(access: &FileAuthorizer, key: PublicKey, token: &str) -> Option<Admission> {
        access.admit(key, [0; 8], token.as_bytes())
    }

    #[test]
    fn listed_keys_are_let_in_and_others_are_not() {
        let keys = file(&format!("# nodes\n\n{A} node-a\n"));
        let access = FileAuthorizer::read(Some(keys.to_path_buf()), None).unwrap();
        let a = admitted(&access, A, "any").unwrap();
        assert_eq!(admitted(&access, B, ""), None);
        std::fs::write(&keys, format!("{B}\n")).unwrap();
        assert!(access.refresh() && !access.refresh());
        assert!(!access.is_allowed(&a) && admitted(&access, B, "").is_some());
    }

    #[test]
    fn a_token_is_valid_while_it_is_in_the_file() {
        let tokens = file("old\n");
        let access = FileAuthorizer::read(None, Some(tokens.to_path_buf())).unwrap();
        let old = admitted(&access, A, "old").unwrap();
        assert_eq!((admitted(&access, A, ""), admitted(&access, A, "new")), (None, None));
        std::fs::write(&tokens, "old\nnew\n").unwrap();
        assert!(access.refresh() && access.is_allowed(&old));
        let new = admitted(&access, A, "new").unwrap();
        std::fs::write(&tokens, "new\n").unwrap();
        assert!(access.refresh() && !access.is_allowed(&old) && access.is_allowed(&new));
    }

    #[test]
    fn with_both_files_a_client_needs_both() {
        let (keys, tokens) = (file(&A.to_string()), file("token"));
        let access = FileAuthorizer::read(Some(keys.to_path_buf()), Some(tokens.to_path_buf())).unwrap();
        assert!(admitted(&access, A, "token").is_some());
        assert_eq!((admitted(&access, A, "x"), admitted(&access, B, "token")), (None, None));
    }

    #[test]
    fn a_file_that_becomes_unreadable_changes_nothing() {
        let keys = file(&A.to_string());
        let access = FileAuthorizer::read(Some(keys.to_path_buf()), None).unwrap();
        for broken in ["not a key", "AAAA"] {
            std::fs::write(&keys, broken).unwrap();
            assert!(!access.refresh());
        }
        std::fs::remove_file(&keys).unwrap();
        assert!(!access.refresh());
        assert!(admitted(&access, A, "").is_some());
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let keys = file(&format!("{A}\nrubbish\n"));
        let error = FileAuthorizer::read(Some(keys.to_path_buf()), None).unwrap_err().to_string();
        assert!(error.contains(":2: not a WireGuard key"), "{error}");
        let missing = FileAuthorizer::read(None, Some("/nonexistent/tokens".into())).unwrap_err().to_string();
        assert!(missing.contains("/nonexistent/tokens"), "{missing}");
        assert!(matches!(FileAuthorizer::read(None, None), Err(AccessError::Open)));
    }
}

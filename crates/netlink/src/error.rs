//! Errors that name the operation, the object and the kernel's own words.

use std::io;
use std::path::PathBuf;

/// Failure of an exchange with the kernel.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused one message.
    #[error("cannot {what}: {}{}", io::Error::from_raw_os_error(*.errno), .detail.as_ref().map(|d| format!(" ({d})")).unwrap_or_default())]
    Refused {
        /// The operation and its object, as in "add route 10.0.0.0/24 table 116".
        what: String,
        /// Position of the message in its batch.
        index: usize,
        /// Positive errno.
        errno: i32,
        /// The kernel's extended acknowledgement, if it sent one.
        detail: Option<String>,
    },
    /// A system call on the socket itself failed.
    #[error("netlink {operation}: {source}")]
    Socket {
        /// The system call.
        operation: &'static str,
        /// Error of the call.
        source: io::Error,
    },
    /// A network namespace could not be opened or entered.
    #[error("cannot {operation} network namespace {}: {source}", .path.display())]
    Namespace {
        /// Operation that failed: "open", "enter", "create".
        operation: &'static str,
        /// The file that names the namespace.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The kernel answered something we cannot read.
    #[error("cannot read the kernel's answer to {what}: {reason}")]
    Malformed {
        /// The operation.
        what: String,
        /// Reason why the answer cannot be read.
        reason: String,
    },
    /// A request cannot be expressed.
    #[error("cannot {what}: {reason}")]
    Invalid {
        /// The operation and its object.
        what: String,
        /// Reason why it cannot be expressed.
        reason: String,
    },
}

/// A result of talking to the kernel.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn socket(operation: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Socket { operation, source: source.into() }
    }

    /// The errno of a refusal.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            Self::Socket { source, .. } | Self::Namespace { source, .. } => source.raw_os_error(),
            Self::Malformed { .. } | Self::Invalid { .. } => None,
        }
    }

    /// Whether the object was already gone.
    pub fn is_missing(&self) -> bool {
        matches!(
            self.errno(),
            Some(nix::libc::ENOENT | nix::libc::ESRCH | nix::libc::ENODEV | nix::libc::EADDRNOTAVAIL)
        )
    }

    /// Whether the object was already there.
    pub fn is_existing(&self) -> bool {
        self.errno() == Some(nix::libc::EEXIST)
    }

    /// Whether this kernel does not have the feature (module missing).
    pub fn is_unsupported(&self) -> bool {
        matches!(
            self.errno(),
            Some(
                nix::libc::EOPNOTSUPP
                    | nix::libc::EPROTONOSUPPORT
                    | nix::libc::EAFNOSUPPORT
                    | nix::libc::ENOENT
            )
        )
    }
}

//! The state directory of one node, and what its files have in common.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;

/// The format; a file of another one is not read.
pub(super) const VERSION: u32 = 1;
/// Longer files are not read: ten times what 5,000 members take.
pub(super) const MAX_LENGTH: u64 = 64 << 20;

/// The file of one node.
#[derive(Debug, Clone)]
pub(crate) struct StateFile {
    pub(crate) directory: PathBuf,
    /// Whose facts these are: a state directory may have been copied.
    pub(crate) node: String,
}

/// How old a file is. One from the future is new: a host without a clock that runs while it is off starts with a time of the past.
pub(crate) fn age(saved: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(saved)).unwrap_or_default()
}

//! Error of this node's clock, as tokens show it.

use std::sync::atomic::{AtomicI64, Ordering};

/// Seconds by which the clock here differs from the API server's, as the last token has shown that shows it; 0 for none.
#[derive(Debug, Default)]
pub(crate) struct ClockError(AtomicI64);

impl ClockError {
    /// Seconds by which the clock here is ahead of the API server's (positive) or behind it; `None` if no token has shown that.
    pub(crate) fn seconds(&self) -> Option<i64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|seconds| *seconds != 0)
    }

    /// Keeps the error that a token has shown, in seconds; `None` leaves it as it is.
    pub(super) fn set(&self, error: Option<i64>) {
        let Some(seconds) = error else { return };
        let before = self.0.swap(seconds, Ordering::Relaxed);
        if seconds != 0 && before == 0 {
            tracing::warn!(
                reason = "ClockWrong",
                seconds,
                "this node's clock differs from the API server's: by it, a token that the API server accepts is not valid; set the time \
                 of the node"
            );
        }
    }
}

//! Attempts to reach a candidate: a few requests, one after the other.

use std::time::Duration;

/// Times at which requests are sent to a candidate in one attempt, until it answers.
pub(super) const ATTEMPT: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
];
/// The last request of an attempt: the time after its start, and how many are before it.
pub(super) const LAST_REQUEST: (Duration, usize) = (Duration::from_millis(800), ATTEMPT.len() - 1);

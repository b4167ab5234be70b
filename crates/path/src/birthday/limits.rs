//! Limits of an attempt: sockets, requests, rates and times.

use std::time::Duration;

/// Sockets that the node behind the symmetric NAT opens.
pub const SOCKETS: u16 = 256;
/// Requests per second of the attempt: a few less than a node may send in all.
pub(super) const RATE: u32 = 450;
/// Requests at once after a late wake-up.
pub(super) const MAX_AT_ONCE: usize = 20;
/// Time between sendings while there are more requests to send.
pub(super) const PACE: Duration = Duration::from_millis(20);
/// Answers after which a port is used.
pub(super) const CONFIRMATIONS: u8 = 3;
/// Longest time in which the peer may say nothing of the attempt.
pub(super) const MAX_SILENCE: Duration = Duration::from_millis(1500);
/// Time to wait for the first answer after the last request.
pub(super) const LAST_ANSWER: Duration = Duration::from_millis(1500);
/// Longest time to wait for an answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest attempt.
pub(super) const MAX_ATTEMPT: Duration = Duration::from_secs(8);

/// Number of requests that should have been sent `elapsed` after the first.
pub(super) fn paced(elapsed: Duration) -> usize {
    let due = elapsed.as_millis().saturating_mul(RATE.into()) / 1000;
    usize::try_from(due).unwrap_or(usize::MAX).saturating_add(1)
}

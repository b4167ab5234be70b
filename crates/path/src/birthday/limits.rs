//! How many sockets and requests an attempt has, how fast, and how long it takes.

use std::time::Duration;

/// Sockets that the node behind the symmetric NAT opens.
pub const SOCKETS: u16 = 256;
/// Requests per second of the attempt: a few less than a node may send in all.
pub(super) const RATE: u32 = 450;
/// Requests at once after a late wake-up.
pub(super) const MAX_AT_ONCE: usize = 20;
/// How often requests are sent while there are more to send.
pub(super) const PACE: Duration = Duration::from_millis(20);
/// Answers after which a port is used.
pub(super) const CONFIRMATIONS: u8 = 3;
/// How long the peer may say nothing of the attempt.
pub(super) const MAX_SILENCE: Duration = Duration::from_millis(1500);
/// How long after the last request the first answer is waited for.
pub(super) const LAST_ANSWER: Duration = Duration::from_millis(1500);
/// How long an answer is waited for.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest attempt.
pub(super) const MAX_ATTEMPT: Duration = Duration::from_secs(8);

/// How many requests should have been sent `elapsed` after the first.
pub(super) fn paced(elapsed: Duration) -> usize {
    let due = elapsed.as_millis().saturating_mul(RATE.into()) / 1000;
    usize::try_from(due).unwrap_or(usize::MAX).saturating_add(1)
}

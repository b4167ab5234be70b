//! A token bucket, without a clock: something may happen a few times at once, and after that once in each interval.

use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct TokenBucket {
    most: u32,
    interval: Duration,
    left: u32,
    /// When the last token was gained.
    filled: Instant,
}

impl TokenBucket {
    /// A bucket with all of its tokens.
    pub(crate) fn full(most: u32, interval: Duration, now: Instant) -> Self {
        Self { most, interval, left: most, filled: now }
    }

    /// Takes a token.
    ///
    /// # Errors
    /// There is none; when there is one.
    pub(crate) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        self.fill(now);
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(self.filled.checked_add(self.interval).unwrap_or(now)),
        }
    }

    /// Whether no token is missing, as if none had ever been taken.
    pub(crate) fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.left >= self.most
    }

    fn fill(&mut self, now: Instant) {
        while self.left < self.most {
            let Some(next) = self.filled.checked_add(self.interval).filter(|next| *next <= now) else {
                return;
            };
            (self.left, self.filled) = (self.left.saturating_add(1), next);
        }
        self.filled = now;
    }
}

//! A value that is expensive to read and may be a little old.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The last value a reader returned, for as long as it is valid.
pub(crate) struct TtlCell<T, R> {
    ttl: Duration,
    read: R,
    last: Mutex<Option<(Instant, T)>>,
}

impl<T: Copy, R: Fn() -> Option<T>> TtlCell<T, R> {
    /// Nothing is read before the first call of [`Self::value`]. A failed read is not remembered.
    pub(crate) fn new(ttl: Duration, read: R) -> Self {
        Self { ttl, read, last: Mutex::new(None) }
    }

    /// The value as of `now` or at most the time to live before. Concurrent callers wait for one read: for threads that
    /// may block.
    pub(crate) fn value(&self, now: Instant) -> Option<T> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, value)) = *last
            && now.saturating_duration_since(at) < self.ttl
        {
            return Some(value);
        }
        let value = (self.read)()?;
        *last = Some((now, value));
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_value_is_read_again_when_it_has_expired() {
        let reads = Cell::new(0);
        let cell = TtlCell::new(Duration::from_secs(1), || {
            reads.set(reads.get() + 1);
            (reads.get() > 1).then_some(reads.get())
        });
        let start = Instant::now();
        let after = |milliseconds| cell.value(start + Duration::from_millis(milliseconds));
        assert_eq!(after(0), None, "a failed read is not remembered");
        assert_eq!((after(1), after(1000), after(1001), after(2000)), (Some(2), Some(2), Some(3), Some(3)));
    }
}

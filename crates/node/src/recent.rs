//! A value that is expensive to read and may be a little old.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a reader said last, for as long as it counts.
pub(crate) struct Recent<T, R> {
    lifetime: Duration,
    read: R,
    last: Mutex<Option<(Instant, T)>>,
}

impl<T: Copy, R: Fn() -> Option<T>> Recent<T, R> {
    /// Nothing is read before the first question. What cannot be read is not remembered.
    pub(crate) fn new(lifetime: Duration, read: R) -> Self {
        Self { lifetime, read, last: Mutex::new(None) }
    }

    /// The value of `now`, or of a moment within the lifetime before it. Who asks while it is read waits for that: for
    /// threads that may block.
    pub(crate) fn value(&self, now: Instant) -> Option<T> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, value)) = *last
            && now.saturating_duration_since(at) < self.lifetime
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
    fn a_value_is_read_again_when_its_time_is_over() {
        let reads = Cell::new(0);
        let recent = Recent::new(Duration::from_secs(1), || {
            reads.set(reads.get() + 1);
            (reads.get() > 1).then_some(reads.get())
        });
        let start = Instant::now();
        let after = |milliseconds| recent.value(start + Duration::from_millis(milliseconds));
        assert_eq!(after(0), None, "what cannot be read is not remembered");
        assert_eq!((after(1), after(1000), after(1001), after(2000)), (Some(2), Some(2), Some(3), Some(3)));
    }
}

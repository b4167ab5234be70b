//! Metrics as text, which is kept for a multiple of the time that its encoding took: however many clients ask, and how often, they take a tenth of
//! one processor. What costs a millisecond is ten milliseconds old at most, and none is older than 5 s and its encoding.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;

use crate::metrics::Exposition;

/// Time for which a text is kept, in times that its encoding took.
const REST: u32 = 9;
/// Longest time for which one is kept: a process that was paused while it encoded has not used a processor for so long.
const LONGEST: Duration = Duration::from_secs(5);

/// The latest texts.
pub(super) struct Encoded<F> {
    encode: F,
    latest: Mutex<[Option<Text>; 2]>,
}

#[derive(Clone)]
struct Text {
    bytes: Bytes,
    until: Instant,
}

impl<F: Fn(Exposition) -> String> Encoded<F> {
    pub(super) fn new(encode: F) -> Arc<Self> {
        Arc::new(Self { encode, latest: Mutex::default() })
    }

    /// The text in a format. Clients that ask at the same time wait for one encoding.
    pub(super) fn text(&self, format: Exposition) -> Bytes {
        let mut texts = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let [open, plain] = &mut *texts;
        let latest = match format {
            Exposition::OpenMetrics => open,
            Exposition::Text => plain,
        };
        let begin = Instant::now();
        if let Some(text) = latest.as_ref().filter(|text| begin < text.until) {
            return text.bytes.clone();
        }
        let bytes = Bytes::from((self.encode)(format));
        let end = Instant::now();
        *latest = until(begin, end).map(|until| Text { bytes: bytes.clone(), until });
        bytes
    }
}

/// End of the time for which a text is kept whose encoding took so long.
fn until(begin: Instant, end: Instant) -> Option<Instant> {
    let rest: Duration = end.saturating_duration_since(begin).saturating_mul(REST);
    end.checked_add(rest.min(LONGEST))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn many_requests_cost_few_encodings_and_each_format_has_its_own() {
        let encodings = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&encodings);
        let encoded = Encoded::new(move |format| {
            std::thread::sleep(Duration::from_millis(200));
            format!("{format:?} {}", counted.fetch_add(1, Ordering::Relaxed))
        });
        let text = |format| String::from_utf8(encoded.text(format).to_vec()).unwrap();
        assert_eq!(text(Exposition::Text), "Text 0");
        assert_eq!(text(Exposition::OpenMetrics), "OpenMetrics 1");
        for _ in 0..1_000 {
            assert_eq!(text(Exposition::Text), "Text 0");
        }
        assert_eq!(encodings.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_text_is_kept_for_nine_times_as_long_as_its_encoding_took() {
        let begin = Instant::now();
        let end = begin + Duration::from_millis(10);
        assert_eq!(until(begin, end), Some(begin + Duration::from_millis(100)));
        assert_eq!(until(begin, begin), Some(begin));
        let resumed = begin + Duration::from_secs(3600);
        assert_eq!(until(begin, resumed), Some(resumed + LONGEST));
    }
}

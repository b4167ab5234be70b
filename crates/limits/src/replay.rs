//! Replay window: the counters of authenticated messages that have been received.
//!
//! The sliding window of RFC 6479: a ring of 64-bit words, of which the oldest is cleared when a newer one is needed, so no bits are
//! shifted. Its rules are those of the kernel's WireGuard (`counter_validate` in `drivers/net/wireguard/receive.c`).

const WORD_BITS: u64 = u64::BITS as u64;
/// The first allocation: 512 counters, which a session that only carries keepalives never exceeds.
const MIN_WORDS: usize = 8;

/// Counters that were received: each passes once, and none that is older than the greatest by more than the window remembers.
///
/// Memory grows with the counters, up to the words of the window: the first 512 counters need 64 bytes.
#[derive(Debug)]
pub struct ReplayWindow {
    /// A ring whose length is a power of two and at most `limit`. While it is shorter, it has a bit for every counter there was.
    words: Box<[u64]>,
    limit: usize,
    end: u64,
    greatest: Option<u64>,
}

impl ReplayWindow {
    /// A window of `words` words of 64 counters, rounded up to a power of two, that has seen no counter. It remembers 64 counters less
    /// than it has bits, and refuses counters from `end` on.
    pub fn new(words: usize, end: u64) -> Self {
        Self { words: Box::default(), limit: words.max(1).next_power_of_two(), end, greatest: None }
    }

    /// Whether no counter has been recorded.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.greatest.is_none()
    }

    /// Whether [`Self::check_and_record`] would accept `counter`.
    #[inline]
    fn is_new(&self, counter: u64) -> bool {
        if counter >= self.end {
            return false;
        }
        match self.greatest.map(|greatest| greatest.checked_sub(counter)) {
            // It is greater than all before.
            None | Some(None) => true,
            Some(Some(age)) => {
                let (index, bit) = self.position(counter);
                age <= self.size() && self.words.get(index).is_some_and(|word| word & bit == 0)
            }
        }
    }

    /// Records the counter of a message that was authenticated. False if it must be dropped: the counter was recorded before, is
    /// too old to tell, or is not below the end.
    #[inline]
    pub fn check_and_record(&mut self, counter: u64) -> bool {
        if !self.is_new(counter) {
            return false;
        }
        if self.greatest.is_none_or(|greatest| greatest < counter) {
            self.advance(counter);
        }
        let (index, bit) = self.position(counter);
        if let Some(word) = self.words.get_mut(index) {
            *word |= bit;
        }
        true
    }

    /// Reduces the window to `words` words, rounded up to a power of two: older counters are no longer accepted, and their memory is free.
    pub fn reduce(&mut self, words: usize) {
        self.limit = self.limit.min(words.max(1).next_power_of_two());
        if self.words.len() <= self.limit {
            return;
        }
        let mut kept = vec![0; self.limit].into_boxed_slice();
        let newest = word_of(self.greatest.unwrap_or_default());
        for number in newest.saturating_sub(self.limit as u64 - 1)..=newest {
            let from = self.words.get(slot(number, self.words.len()));
            if let (Some(to), Some(from)) = (kept.get_mut(slot(number, self.limit)), from) {
                *to = *from;
            }
        }
        self.words = kept;
    }

    /// Largest distance of a counter from the greatest one. It is a word less than the ring has: the newest word is not complete.
    #[inline]
    fn size(&self) -> u64 {
        (self.limit as u64 - 1) * WORD_BITS
    }

    /// Position of a counter's bit: index of the word in the ring, and mask of the bit.
    #[inline]
    fn position(&self, counter: u64) -> (usize, u64) {
        (slot(word_of(counter), self.words.len()), 1 << (counter % WORD_BITS))
    }

    /// Makes `counter` the greatest: clears the words between, which stood for counters a whole ring older.
    #[inline]
    fn advance(&mut self, counter: u64) {
        let newest = word_of(counter);
        let previous = word_of(self.greatest.unwrap_or_default());
        self.greatest = Some(counter);
        if newest >= self.words.len() as u64 && self.words.len() < self.limit {
            self.grow(newest);
        }
        let length = self.words.len();
        for step in 1..=newest.saturating_sub(previous).min(length as u64) {
            if let Some(word) = self.words.get_mut(slot(previous.saturating_add(step), length)) {
                *word = 0;
            }
        }
    }

    /// No counter has exceeded the ring yet, so every word keeps its place.
    #[cold]
    fn grow(&mut self, newest: u64) {
        let needed = usize::try_from(newest).unwrap_or(self.limit).saturating_add(1);
        let length = needed.clamp(MIN_WORDS.min(self.limit), self.limit).next_power_of_two();
        let mut words = vec![0; length].into_boxed_slice();
        for (to, from) in words.iter_mut().zip(&self.words) {
            *to = *from;
        }
        self.words = words;
    }
}

#[inline]
const fn word_of(counter: u64) -> u64 {
    counter / WORD_BITS
}

/// Index of a word in a ring of `length`, a power of two or zero.
#[inline]
const fn slot(word: u64, length: usize) -> usize {
    word as usize & length.wrapping_sub(1)
}

#[cfg(test)]
mod tests;

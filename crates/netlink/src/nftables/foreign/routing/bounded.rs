//! Lists of the kernel of which a part is kept, however long they are.

use crate::nftables::attributes::Parsed;

/// First items of a list, at most so many. Those behind them are counted, and not parsed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Bounded<T> {
    /// Items that are kept.
    pub(super) kept: Vec<T>,
    /// Number of items behind them.
    pub(super) left_out: usize,
    most: usize,
}

impl<T> Bounded<T> {
    pub(super) const fn new(most: usize) -> Self {
        Self { kept: Vec::new(), left_out: 0, most }
    }

    /// Adds an item, if there is room for it and it is one.
    pub(super) fn add(&mut self, parse: impl FnOnce() -> Parsed<Option<T>>) -> Parsed<()> {
        if self.kept.len() < self.most {
            self.kept.extend(parse()?);
        } else {
            self.left_out = self.left_out.saturating_add(1);
        }
        Ok(())
    }

    /// Number of all items.
    pub(super) fn read(&self) -> usize {
        self.kept.len().saturating_add(self.left_out)
    }
}

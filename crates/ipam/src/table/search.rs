//! Search for the next free address of a block.

use std::collections::BTreeSet;

/// First unused offset behind `last`, with one wrap-around.
pub(super) fn next_free(used: &BTreeSet<u32>, size: u32, last: Option<u32>) -> Option<u32> {
    let start = last.and_then(|last| last.checked_add(1)).filter(|start| *start < size).unwrap_or(0);
    first_gap(used, start, size).or_else(|| first_gap(used, 0, start))
}

fn first_gap(used: &BTreeSet<u32>, from: u32, to: u32) -> Option<u32> {
    let mut gap = from;
    for offset in used.range(from..) {
        if *offset != gap {
            break;
        }
        gap = gap.checked_add(1)?;
    }
    (gap < to).then_some(gap)
}

//! What tables for people have in common.

use comfy_table::Table;
use comfy_table::presets::NOTHING;

/// A table without lines, as kubectl prints them.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header);
    table
}

/// Nothing is written as a dash, so that every column has a word.
pub(crate) fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

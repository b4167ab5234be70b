//! Laws of the house that a test keeps, over the sources, `cargo metadata` and the tracked files: `cargo test -p xtask laws`.
//!
//! Each law finds violations, with a figure each. Those of today are listed in `xtask/laws.toml`, which may only shrink: what is not
//! listed fails, what is larger than its entry fails, and so does an entry whose violation has gone or become smaller. Only tests parse
//! sources, so that `cargo xtask` compiles quickly. Here are production lines, which `cargo xtask lint` prints: what stands in
//! `crates/*/src` outside of test files, each file up to its first test module.

use std::collections::BTreeMap;
use std::process::Command;

use crate::steps::root;

/// Tracked files, with their paths from the workspace's root.
pub(crate) fn tracked() -> Result<Vec<String>, String> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let listed = listed.map_err(|error| format!("cannot run git ls-files: {error}"))?;
    if !listed.status.success() {
        return Err(format!("git ls-files failed: {}", String::from_utf8_lossy(&listed.stderr).trim()));
    }
    let names = String::from_utf8_lossy(&listed.stdout);
    // A file may be deleted and not yet committed.
    Ok(names.split_terminator('\0').filter(|name| root().join(name).is_file()).map(str::to_owned).collect())
}

/// Text of a tracked file.
pub(crate) fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(root().join(path)).map_err(|error| format!("cannot read {path}: {error}"))
}

/// Directory of the crate of a production source, as `crates/node`; `None` for every other file.
pub(crate) fn production_crate(path: &str) -> Option<&str> {
    let (directory, source) = path.split_once("/src/")?;
    let is_test = source.split('/').any(|part| part == "tests" || part == "tests.rs");
    let is_crate = directory.strip_prefix("crates/").is_some_and(|name| !name.contains('/'));
    (is_crate && path.ends_with(".rs") && !is_test).then_some(directory)
}

/// Lines of a source up to its first test module.
fn production_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_module = |line: &&&str| !line.starts_with("#[");
    let begins_tests = |(number, line): &(usize, &&str)| {
        let next = lines.iter().skip(number + 1).find(is_module).copied().unwrap_or_default();
        **line == "#[cfg(test)]"
            && (next.starts_with("mod ") || next.contains(") mod ") || next.starts_with("pub mod "))
    };
    let first = lines.iter().enumerate().find(begins_tests);
    first.map_or(lines.len(), |(number, _)| number)
}

/// Production lines by crate.
pub(crate) fn lines_by_crate<'a>(
    sources: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> BTreeMap<String, usize> {
    let mut lines = BTreeMap::new();
    for (path, text) in sources {
        if let Some(directory) = production_crate(path) {
            *lines.entry(directory.to_owned()).or_default() += production_lines(text);
        }
    }
    lines
}

/// A sentence with the total and the five largest crates.
pub(crate) fn summary() -> Result<String, String> {
    let paths = tracked()?.into_iter().filter(|path| production_crate(path).is_some());
    let sources: Vec<(String, String)> =
        paths.map(|path| read(&path).map(|text| (path, text))).collect::<Result<_, _>>()?;
    let lines = lines_by_crate(sources.iter().map(|(path, text)| (path.as_str(), text.as_str())));
    let mut largest: Vec<(&String, &usize)> = lines.iter().collect();
    largest.sort_by_key(|(_, lines)| std::cmp::Reverse(**lines));
    let largest: Vec<String> =
        largest.iter().take(5).map(|(name, lines)| format!("{name} {lines}")).collect();
    Ok(format!(
        "{} production lines; the largest crates: {}",
        lines.values().sum::<usize>(),
        largest.join(", ")
    ))
}

#[cfg(test)]
mod tests;

//! Tracked files: their sizes and kinds, and where modules and tests are.

use syn::{File, Item};

use super::list::Violation;
use super::sources::is_test;

const FILE_BYTES: u64 = 256 * 1024;
const SOURCE_LINES: usize = 500;
/// Ends of names of files that people write as programs. What is generated is of other kinds.
const SOURCES: [&str; 6] = [".c", ".go", ".h", ".proto", ".rs", ".sh"];
/// Ends of names of files that the repository may have, or whole names.
const KINDS: [&str; 21] = [
    ".gitattributes",
    ".gitignore",
    ".c",
    ".go",
    ".h",
    ".json",
    ".lock",
    ".md",
    ".mod",
    ".proto",
    ".rs",
    ".service",
    ".sh",
    ".sum",
    ".svg",
    ".toml",
    ".tsv",
    ".txt",
    ".yaml",
    ".ci/run",
    "LICENSE",
];
/// Inputs of parsers: of any kind, and named for what they are.
const CORPORA: &str = "fuzz/corpus/";

/// Files that are too large, and of kinds that are not listed.
pub(super) fn files<'a>(files: impl IntoIterator<Item = (&'a str, u64)>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (path, bytes) in files {
        let violation = |law, figure, advice| Violation { law, subject: path.to_owned(), figure, advice };
        if bytes > FILE_BYTES {
            let figure = usize::try_from(bytes).unwrap_or(usize::MAX);
            violations.push(violation(
                "files",
                figure,
                format!("bytes, at most {FILE_BYTES}: build it, or split it"),
            ));
        }
        if !path.starts_with(CORPORA) && !KINDS.iter().any(|kind| path.ends_with(kind)) {
            let advice =
                "take it out, or add its kind to xtask/src/laws/tests/tree.rs with a reason".to_owned();
            violations.push(violation("kinds", 1, advice));
        }
    }
    violations
}

/// Whether a file is a source, which [`lines`] bounds.
pub(super) fn is_source(path: &str) -> bool {
    SOURCES.iter().any(|end| path.ends_with(end))
}

/// Sources with too many lines, tests among them.
pub(super) fn lines<'a>(sources: impl IntoIterator<Item = (&'a str, usize)>) -> Vec<Violation> {
    let long = sources.into_iter().filter(|(_, lines)| *lines > SOURCE_LINES);
    let violation = |(path, lines): (&str, usize)| Violation {
        law: "lines",
        subject: path.to_owned(),
        figure: lines,
        advice: format!("lines, at most {SOURCE_LINES}: split it by subject"),
    };
    long.map(violation).collect()
}

/// Files under `src/` that are not where STYLE.md wants them: `name.rs` beside `name/`, and unit tests inline at the end or in
/// `name/tests.rs`.
pub(super) fn layout(path: &str, file: &File) -> Vec<Violation> {
    let violation = |subject: String, advice: &str| Violation {
        law: "layout",
        subject,
        figure: 1,
        advice: format!("{advice} (STYLE.md)"),
    };
    let mut violations = Vec::new();
    if path.ends_with("/mod.rs") {
        violations.push(violation(path.to_owned(), "rename it to name.rs beside name/"));
    }
    for (number, item) in file.items.iter().enumerate() {
        let Item::Mod(module) = item else { continue };
        let subject = format!("{path}: mod {}", module.ident);
        if module.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
            violations.push(violation(subject, "a module is in the file of its name"));
        } else if is_test(&module.attrs) && module.ident != "tests" {
            violations.push(violation(subject, "name it tests, or move it below tests.rs"));
        } else if is_test(&module.attrs) && module.content.is_some() && number + 1 != file.items.len() {
            violations.push(violation(subject, "move it to the end of the file"));
        }
    }
    violations
}

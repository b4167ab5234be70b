//! Doc comments that begin with a question word or a pronoun: they describe a thing without naming it.

use std::collections::BTreeMap;

use super::list::Violation;
use crate::laws::production_crate;

/// First words that name nothing.
const OPENINGS: [&str; 12] =
    ["How", "Its", "Of", "Their", "They", "Those", "What", "Where", "Which", "Who", "Whose", "Why"];

/// Number of such doc comments of each crate, if there are any.
pub(super) fn violations<'a>(sources: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<Violation> {
    let mut figures: BTreeMap<&str, usize> = BTreeMap::new();
    for (path, text) in sources {
        if let Some(directory) = production_crate(path) {
            *figures.entry(directory).or_default() += nameless(text);
        }
    }
    let violation = |(directory, figure): (&str, usize)| Violation {
        law: "prose",
        subject: directory.to_owned(),
        figure,
        advice: format!("doc comments begin with one of: {}: name the thing first", OPENINGS.join(" ")),
    };
    figures.into_iter().filter(|(_, figure)| *figure > 0).map(violation).collect()
}

/// Doc comments of a source, before its test module, whose first word names nothing.
fn nameless(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let begins_tests =
        |pair: &[&str]| matches!(pair, ["#[cfg(test)]", next] if next.ends_with("mod tests {"));
    let end = lines.windows(2).position(begins_tests).unwrap_or(lines.len());
    let is_doc = |line: &str| line.starts_with("///") || line.starts_with("//!");
    let first_of_comment = |(before, line): (&str, &str)| !is_doc(before) && is_nameless(line);
    let before = std::iter::once("").chain(lines.iter().copied());
    before.zip(lines.iter().copied()).take(end).filter(|pair| first_of_comment(*pair)).count()
}

fn is_nameless(line: &str) -> bool {
    let comment = line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! "));
    let first = comment.and_then(|comment| comment.split(|letter: char| !letter.is_alphabetic()).next());
    first.is_some_and(|first| OPENINGS.contains(&first))
}

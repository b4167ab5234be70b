//! Doc comments that begin with a question word or a pronoun: they describe a thing without naming it.

/// First words that name nothing.
const OPENINGS: [&str; 12] =
    ["How", "Its", "Of", "Their", "They", "Those", "What", "Where", "Which", "Who", "Whose", "Why"];

/// Places of such doc comments in a source, before its test module. No list excepts any.
pub(super) fn nameless(path: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let begins_tests =
        |pair: &[&str]| matches!(pair, ["#[cfg(test)]", next] if next.ends_with("mod tests {"));
    let end = lines.windows(2).position(begins_tests).unwrap_or(lines.len());
    let is_doc = |line: &str| line.starts_with("///") || line.starts_with("//!");
    let before = std::iter::once("").chain(lines.iter().copied());
    let numbered = before.zip(lines.iter().copied()).zip(1_usize..).take(end);
    let wrong = |((before, line), number): ((&str, &str), usize)| {
        (!is_doc(before) && is_nameless(line))
            .then(|| format!("prose: {path}:{number}: name the thing first: {line}"))
    };
    numbered.filter_map(wrong).collect()
}

fn is_nameless(line: &str) -> bool {
    let comment = line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! "));
    let first = comment.and_then(|comment| comment.split(|letter: char| !letter.is_alphabetic()).next());
    first.is_some_and(|first| OPENINGS.contains(&first))
}

//! Names in messages for operators.

/// The first `most` of the names, and how many more there are.
pub fn some_of(names: &[impl AsRef<str>], most: usize) -> String {
    let (first, others) = names.split_at(names.len().min(most));
    let first: Vec<&str> = first.iter().map(AsRef::as_ref).collect();
    let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    format!("{}{more}", first.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beyond_the_most_are_counted() {
        assert_eq!(some_of(&["a"], 2), "a");
        assert_eq!(some_of(&["a", "b"], 2), "a, b");
        assert_eq!(some_of(&["a".to_owned(), "b".to_owned(), "c".to_owned()], 2), "a, b and 1 more");
        assert_eq!(some_of(&[""; 0], 2), "");
    }
}

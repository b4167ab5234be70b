//! Replays what the fuzz target keeps.
#![cfg(test)]

use fairlead_egress_gateway::options::Target;
use fairlead_egress_gateway::query;

#[test]
fn kept_lines_never_panic_and_some_are_good() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/egress_gateway");
    let mut results = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let targets = text.lines().filter(|line| line.parse::<Target>().is_ok()).count();
        let queries = text.lines().filter(|line| query::parse(line).is_ok()).count();
        results.push((path.file_name().unwrap().to_string_lossy().into_owned(), targets, queries));
    }
    results.sort();
    let expected = [("query", 0, 1), ("refused", 0, 0), ("targets", 3, 0)];
    assert_eq!(results, expected.map(|(name, targets, queries)| (name.to_owned(), targets, queries)));
}

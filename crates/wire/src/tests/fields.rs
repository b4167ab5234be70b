//! The numbers of the gRPC contracts: names, types and numbers of fields, and the methods.

use std::collections::BTreeSet;
use std::path::Path;

use super::file_lines;

/// The statements of all `.proto` files, each behind the blocks that it is in: `package message Name: string field = 1`.
fn statements() -> BTreeSet<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let files = std::fs::read_dir(directory).unwrap();
    files.flat_map(|file| of_file(&std::fs::read_to_string(file.unwrap().path()).unwrap())).collect()
}

fn of_file(text: &str) -> Vec<String> {
    let code: Vec<_> = text.lines().filter_map(|line| line.split("//").next()).collect();
    let code = code.join(" ");
    let (mut package, mut blocks, mut found) = (String::new(), Vec::new(), Vec::new());
    for part in code.split_inclusive(['{', '}', ';']) {
        let words: Vec<_> = part[..part.len() - 1].split_whitespace().collect();
        let words = words.join(" ");
        match part.as_bytes().last().unwrap() {
            b'{' => blocks.push(words),
            b'}' => drop(blocks.pop()),
            b';' if blocks.is_empty() => {
                if let Some(name) = words.strip_prefix("package ") {
                    name.clone_into(&mut package);
                }
            }
            b';' => found.push(format!("{package} {}: {words}", blocks.join(" "))),
            _ => assert!(words.is_empty(), "{words}"),
        }
    }
    found
}

#[test]
fn no_field_number_is_changed_or_used_again() {
    let (kept, today) = (file_lines("fields.txt"), statements());
    let lost: Vec<_> = kept.iter().filter(|line| !today.contains(*line)).collect();
    assert!(lost.is_empty(), "an earlier or later program has another meaning for {lost:#?}");
    assert!(kept.len() > 300, "{}", kept.len());
}

//! Every input that the fuzz target `egress_answers` keeps is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_controller::egress::{cause_of_answer, cost_of_answer};

#[test]
fn kept_answers_of_gateways_never_panic_and_some_are_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/egress_answers");
    let files = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let mut results: Vec<_> = files
        .map(|file| {
            let answer = std::fs::read(file.path()).unwrap();
            let cause = cause_of_answer(&answer);
            assert!(cause.iter().all(|cause| cause.chars().count() < 450), "{cause:?}");
            (file.file_name().into_string().unwrap(), cost_of_answer(&answer), cause.is_some())
        })
        .collect();
    results.sort();
    let expected = [
        ("draining", Some(-1), false),
        ("load", Some(3), false),
        ("long_cause", None, true),
        ("negative", None, false),
        ("no_http", None, false),
        ("not_counted_yet", None, false),
        ("not_found", None, false),
        ("not_ready", None, true),
    ];
    assert_eq!(results, expected.map(|(name, cost, has_cause)| (name.to_owned(), cost, has_cause)));
}

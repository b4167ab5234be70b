//! Every input that the fuzz target `sandboxes` keeps is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_egress_client::parse_sandbox;

#[test]
fn kept_files_of_sandboxes_never_panic_and_some_are_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/sandboxes");
    let files = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let mut results: Vec<_> = files
        .map(|file| {
            let written = parse_sandbox(&std::fs::read(file.path()).unwrap());
            assert!(written.iter().all(|written| parse_sandbox(written).as_ref() == Some(written)));
            (file.file_name().into_string().unwrap(), written.is_some())
        })
        .collect();
    results.sort();
    let expected = [
        ("client", true),
        ("cut_off", false),
        ("empty", false),
        ("gateway", true),
        ("mtu_too_large", false),
        ("no_address", false),
        ("of_an_earlier_version", true),
    ];
    assert_eq!(results, expected.map(|(name, is_good)| (name.to_owned(), is_good)));
}

//! Every input that the fuzz target `wireguard_messages` keeps is run again, without a fuzzer.

use std::path::Path;

use crate::tunnel::operations::run;

#[test]
fn kept_sequences_of_operations_never_panic_and_messages_are_taken() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/wireguard_messages");
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let mut taken: Vec<_> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), run(&std::fs::read(entry.path()).unwrap())))
        .collect();
    taken.sort_unstable();
    // Initiations, responses, cookie replies and data messages.
    let expected = [
        ("changed_and_signed", [0, 0, 0, 0]),
        ("cookie", [1, 1, 1, 1]),
        ("crossing", [2, 2, 0, 2]),
        ("injected", [1, 1, 0, 0]),
        ("lost_and_repeated", [1, 1, 0, 3]),
        ("other_preshared_key", [1, 0, 0, 0]),
        ("renewed_and_expired", [2, 2, 0, 4]),
        ("replayed", [1, 1, 0, 1]),
    ];
    assert_eq!(taken, expected.map(|(name, taken)| (name.to_owned(), taken)));
}

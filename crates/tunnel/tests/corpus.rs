//! Every input the fuzz target `uapi` keeps is read again, without a fuzzer.
#![allow(clippy::unwrap_used, reason = "a test may")]

use std::path::Path;

use fairlead_tunnel::understand_control_request;

#[test]
fn kept_inputs_never_panic_and_some_are_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/uapi");
    let good = std::fs::read_dir(directory).unwrap().filter(|entry| {
        let bytes = std::fs::read(entry.as_ref().unwrap().path()).unwrap();
        understand_control_request(&String::from_utf8_lossy(&bytes)).is_ok()
    });
    assert!(good.count() > 2);
}

//! Every input that the fuzz targets `uapi` and `handover` keep is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_tunnel::{parse_control_request, parse_handover_message};

fn inputs(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    std::fs::read_dir(directory).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn kept_requests_never_panic_and_some_are_good() {
    let understood = |bytes: &Vec<u8>| parse_control_request(&String::from_utf8_lossy(bytes)).is_ok();
    assert!(inputs("uapi").iter().filter(|bytes| understood(bytes)).count() > 2);
}

#[test]
fn kept_handover_messages_never_panic_and_some_are_good() {
    let understood = |bytes: &Vec<u8>| parse_handover_message(bytes).is_some();
    let (good, bad): (Vec<_>, Vec<_>) = inputs("handover").into_iter().partition(understood);
    assert!(good.len() > 3 && bad.len() > 1);
}

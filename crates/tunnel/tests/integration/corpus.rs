//! Every input that the fuzz targets `handover`, `offload` and `uapi` keep is read again, without a fuzzer.

use std::collections::BTreeMap;
use std::path::Path;

use fairlead_tunnel::{join_packets, parse_control_request, parse_handover_message, split_read};

use check::Offload;

#[path = "../../src/offload/tests/check.rs"]
mod check;
#[path = "../../src/offload/tests/reference.rs"]
mod reference;

/// By the names of the files.
fn inputs(target: &str) -> BTreeMap<String, Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let input = |entry: std::fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    entries.map(input).collect()
}

#[test]
fn kept_requests_never_panic_and_some_are_good() {
    let understood = |bytes: &Vec<u8>| parse_control_request(&String::from_utf8_lossy(bytes)).is_ok();
    assert!(inputs("uapi").values().filter(|bytes| understood(bytes)).count() > 2);
}

#[test]
fn kept_handover_messages_never_panic_and_some_are_good() {
    let understood = |bytes: &Vec<u8>| parse_handover_message(bytes).is_some();
    let (good, bad): (Vec<_>, Vec<_>) = inputs("handover").into_values().partition(understood);
    assert!(good.len() > 3 && bad.len() > 1);
}

#[test]
fn kept_reads_and_packets_are_split_and_joined() {
    let offload = Offload { split: split_read, join: join_packets };
    let inputs = inputs("offload");
    let counts = inputs.iter().map(|(name, input)| (name.as_str(), offload.check(input)));
    // How many packets there are, and how many writes they become.
    let expected = [
        ("batch_damaged", Some((5, 3))),
        ("batch_flows", Some((4, 2))),
        ("batch_fragment", Some((5, 3))),
        ("batch_many", Some((130, 3))),
        ("batch_udp_not_taken", Some((4, 4))),
        ("batch_unnumbered", Some((6, 2))),
        ("read_checksum", Some((1, 1))),
        ("read_extension_header", Some((3, 3))),
        ("read_tcp_ecn", Some((4, 2))),
        ("read_udp", Some((4, 1))),
        ("read_wrong_offset", None),
    ];
    assert_eq!(counts.collect::<Vec<_>>(), expected);
}

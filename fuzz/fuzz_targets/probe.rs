//! What hosts that are no peers, or nodes that were taken over, send to the WireGuard port as path probes.
#![no_main]

use std::sync::LazyLock;

use fairlead_wire::probe::{Header, MAX_CANDIDATES, ProbeKeys, parse_candidates};
use libfuzzer_sys::fuzz_target;

/// Any will do.
static KEYS: LazyLock<ProbeKeys> =
    LazyLock::new(|| ProbeKeys::derive(&[1; 32], &[9; 32], None).expect("the key has no low order"));

fuzz_target!(|bytes: &[u8]| {
    let _ = Header::parse(bytes);
    let _ = KEYS.open(bytes);
    // What a node that was taken over encrypts.
    assert!(parse_candidates(bytes).len() <= MAX_CANDIDATES);
});

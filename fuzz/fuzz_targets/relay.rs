//! Frames of relays and their clients, as both read them from a stream.
#![no_main]

use fairlead_wire::relay::{MAX_BODY, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Ok(Some(parsed)) = parse(rest, MAX_BODY) {
        let mut again = Vec::new();
        parsed.frame.encode(&mut again).expect("what was read can be written");
        rest = &rest[parsed.length..];
    }
});

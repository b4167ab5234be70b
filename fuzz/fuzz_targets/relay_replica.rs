//! Frames between the replicas of a relay, as they are read from a stream.
#![no_main]

use fairlead_wire::relay::replica::parse_replica_frame;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Ok(Some((frame, length))) = parse_replica_frame(rest) {
        let mut again = Vec::new();
        frame.encode(&mut again).expect("what was read can be written");
        rest = &rest[length..];
    }
});

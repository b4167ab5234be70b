//! What STUN servers answer.
#![no_main]

use fairlead_wire::stun::parse_response;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse_response(bytes);
});

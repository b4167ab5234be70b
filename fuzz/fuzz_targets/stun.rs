//! What STUN servers answer, and what relays are asked.
#![no_main]

use fairlead_wire::stun::parse_response;
use fairlead_wire::stun::server::parse_request;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse_response(bytes);
    if let Some(parsed) = parse_request(bytes) {
        let _ = parsed.is_authentic(&[7; 32]);
    }
});

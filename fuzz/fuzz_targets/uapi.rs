//! What a client such as `wg` writes to the control socket of the embedded WireGuard.
#![no_main]

use fairlead_tunnel::parse_control_request;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = parse_control_request(text);
});

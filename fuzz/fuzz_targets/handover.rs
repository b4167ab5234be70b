//! What one node program says to the next when it hands over its tunnels.
#![no_main]

use fairlead_tunnel::parse_handover_message;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse_handover_message(bytes);
});

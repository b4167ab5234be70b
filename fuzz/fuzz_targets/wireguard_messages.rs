//! Operations on two peers of the embedded WireGuard, whose messages are lost, repeated, changed, signed again and made of any bytes. See
//! `operations.rs` for the input, and `world.rs` for what has to hold.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/wireguard/tests/integration/tunnel/operations.rs"]
mod operations;
#[expect(dead_code, reason = "tests of the crate use more of it")]
#[path = "../../crates/wireguard/tests/integration/tunnel/support.rs"]
mod support;
#[path = "../../crates/wireguard/tests/integration/tunnel/world.rs"]
mod world;

fuzz_target!(|bytes: &[u8]| {
    let _ = operations::run(bytes);
});

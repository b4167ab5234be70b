//! Tokens that node programs show to an egress gateway, as its claims are read once the API server has accepted one.
#![no_main]

use fairlead_egress::registration::{MAX_LIFETIME, MIN_LIFETIME, lifetime};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((now, token)) = bytes.split_first_chunk() else { return };
    let Ok(token) = std::str::from_utf8(token) else { return };
    if let Some(lifetime) = lifetime(token, u64::from_be_bytes(*now)) {
        assert!(lifetime >= MIN_LIFETIME && lifetime <= MAX_LIFETIME);
    }
});

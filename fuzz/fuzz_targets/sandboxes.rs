//! Files of `<socket>.d/sandboxes`, by which a node program finds the pods of an earlier one.
#![no_main]

use fairlead_egress_client::parse_sandbox;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(written) = parse_sandbox(bytes) {
        assert_eq!(parse_sandbox(&written).as_ref(), Some(&written), "a later program reads the same");
    }
});

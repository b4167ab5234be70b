//! What the metadata service of EC2 answers, or what another host answers in its place.
#![no_main]

use fairlead_port_mapping::codec::imds::{parse_public_ipv4, parse_token, public_ipv4_request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse_public_ipv4(bytes);
    if let Ok(token) = parse_token(bytes) {
        // A token is sent back in a header: it must not end the line.
        let request = public_ipv4_request(&token);
        assert!(request.ends_with("\r\n\r\n"));
        assert_eq!(request.matches("\r\n").count(), request.lines().count());
        assert_eq!(request.matches("\r\n\r\n").count(), 1);
    }
});

//! `spec.destinations` of an Egress, an entry a line, and which table of a client pod each is in.
#![no_main]

use fairlead_api::names::{TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE};
use fairlead_egress::{client, destinations};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let entries: Vec<String> = text.split('\n').map(str::to_owned).collect();
    match destinations::prefixes(&entries) {
        Ok(prefixes) => {
            let written: Vec<String> = prefixes.iter().map(ToString::to_string).collect();
            for prefix in &prefixes {
                assert_eq!(*prefix, prefix.trunc());
                assert!([TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE].contains(&client::table_of(*prefix)));
            }
            assert_eq!(destinations::prefixes(&written), Ok(prefixes));
        }
        Err(error) => assert_eq!(entries.get(error.index), Some(&error.entry)),
    }
});

//! What a gateway of an Egress reads: targets of `spec.healthCheck`, and queries of `/connections`, one a line.
#![no_main]

use fairlead_egress::lookup;
use fairlead_egress::options::Target;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for line in text.lines() {
        if let Ok(target) = line.parse::<Target>() {
            assert_eq!(target.to_string().parse(), Ok(target));
        }
        if let Ok(query) = lookup::parse(line) {
            assert_eq!(query.outside.0, query.outside.0.to_canonical());
        }
    }
});

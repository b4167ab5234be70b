//! Annotations by which pods ask for egress gateways, each a line `NAME: VALUE`.
#![no_main]

use std::collections::BTreeMap;

use fairlead_api::names::{ANNOTATION_EGRESS_PREFIX, is_dns_label, is_object_name};
use fairlead_egress::annotation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let pairs = text.lines().filter_map(|line| line.split_once(": "));
    let annotations = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let Ok(chosen) = annotation::chosen(&annotations) else { return };
    // What is chosen is chosen again when it is written in the shortest form.
    let mut written: BTreeMap<String, String> = BTreeMap::new();
    for egress in &chosen {
        assert!(is_dns_label(&egress.namespace) && is_object_name(&egress.name));
        let value = written.entry(format!("{ANNOTATION_EGRESS_PREFIX}{}", egress.namespace)).or_default();
        let comma = if value.is_empty() { "" } else { "," };
        value.push_str(comma);
        value.push_str(&egress.name);
    }
    assert_eq!(annotation::chosen(&written), Ok(chosen));
});

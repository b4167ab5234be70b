//! Names by which attachments are found again, and keys: aliases of links, files beside the socket, published keys.
//! A process that can write them may write anything.
#![no_main]

use fairlead_dataplane::pods::PodAlias;
use fairlead_keys::PublicKey;
use fairlead_wire::spool;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Some(alias) = PodAlias::parse(text) {
        assert_eq!(alias.to_string(), text);
    }
    if let Some((container_id, ifname)) = spool::parse_file_name(text) {
        assert_eq!(spool::file_name(container_id, ifname).as_deref(), Some(text));
    }
    if let Ok(key) = text.parse::<PublicKey>() {
        assert_eq!(key.to_string().parse(), Ok(key));
    }
});

//! Every input the fuzz target `netlink` keeps is read again, without a fuzzer. They were recorded from a kernel, all but
//! WireGuard's and the connection, which are written by hand after the kernel's headers.

use std::path::Path;

use fairlead_netlink::replies::{ReplyKind, read};

#[test]
fn kept_inputs_never_panic_and_every_kind_has_a_good_one() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/netlink");
    let mut objects = [0; ReplyKind::ALL.len()];
    for entry in std::fs::read_dir(directory).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let Some((kind, reply)) = bytes.split_first() else { continue };
        let kind = usize::from(*kind);
        if let Some(known) = ReplyKind::ALL.get(kind) {
            objects[kind] += read(*known, reply).unwrap_or(0);
        }
    }
    assert!(objects.iter().all(|count| *count > 0), "{objects:?}");
}

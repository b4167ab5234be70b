//! The kernel's replies: links, addresses, routes, rules, nftables, WireGuard, BPF filters, connections. The first byte chooses which.
#![no_main]

use fairlead_netlink::replies::{ReplyKind, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some((kind, reply)) = bytes.split_first()
        && let Some(kind) = ReplyKind::ALL.get(usize::from(*kind))
    {
        let _ = read(*kind, reply);
    }
});

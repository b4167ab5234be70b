//! What is read from a TUN with a `struct virtio_net_hdr` and cut into packets, and packets that are joined and written to it. See
//! `check.rs` for the input and for what has to hold.
#![no_main]

use check::Offload;
use fairlead_tunnel::{join_packets, split_read};
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/tunnel/src/offload/tests/check.rs"]
mod check;
#[path = "../../crates/tunnel/src/offload/tests/reference.rs"]
mod reference;

fuzz_target!(|bytes: &[u8]| {
    let _ = Offload { split: split_read, join: join_packets }.check(bytes);
});

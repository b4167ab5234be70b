//! The opening handshake and the frames of WebSockets, as relays and their clients read them.
#![no_main]

use fairlead_relay::websocket::{Decoder, Role, read_request, read_response};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = (read_request(bytes), read_response(bytes, *b"the sample nonce"));
    for role in [Role::Client, Role::Server] {
        let (mut whole, mut parts) = (Vec::new(), Vec::new());
        let read = Decoder::new(role).decode(bytes, &mut whole);
        let mut decoder = Decoder::new(role);
        let ended = |part| decoder.decode(part, &mut parts).map_or(true, |signals| signals.closed);
        let _ = bytes.chunks(3).any(ended);
        assert!(read.is_err() || whole == parts, "the division of the bytes matters");
    }
});

//! Every input that the fuzz target `websocket` keeps is read again, without a fuzzer.

use std::path::Path;

use fairlead_relay::websocket::{Decoder, Role, read_request, read_response};

#[test]
fn kept_websocket_inputs_never_panic_and_some_are_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/websocket");
    let (mut requests, mut responses, mut data) = (0, 0, Vec::new());
    for entry in std::fs::read_dir(directory).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        requests += usize::from(matches!(read_request(&bytes), Ok(Some(_))));
        responses += usize::from(matches!(read_response(&bytes, *b"the sample nonce"), Ok(Some(_))));
        for role in [Role::Client, Role::Server] {
            let mut out = Vec::new();
            if Decoder::new(role).decode(&bytes, &mut out).is_ok() && !out.is_empty() {
                data.push(String::from_utf8(out).unwrap());
            }
        }
    }
    data.sort();
    assert_eq!((requests, responses), (1, 1));
    assert!(data.iter().filter(|data| *data == "Hello").count() == 2, "{data:?}");
}

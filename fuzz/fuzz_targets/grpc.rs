//! What arrives on the node program's socket, and what the plugin gets back as an error.
#![no_main]

use fairlead_wire::cni::{CniArgs, error_of};
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(args) = CniArgs::decode(bytes) {
        let again = CniArgs::decode(args.encode_to_vec().as_slice());
        assert_eq!(again.as_ref(), Ok(&args));
    }
    error_of(&tonic::Status::with_details(tonic::Code::Unknown, "", bytes.to_vec().into()));
});

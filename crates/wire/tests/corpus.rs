//! Every input the fuzz target `grpc` keeps is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_wire::cni::{CniArgs, error_of};
use prost::Message;

#[test]
fn kept_inputs_never_panic_and_some_are_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/grpc");
    let (mut decoded, mut errors) = (0, 0);
    for entry in std::fs::read_dir(directory).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        decoded += usize::from(CniArgs::decode(bytes.as_slice()).is_ok());
        let status = tonic::Status::with_details(tonic::Code::Unknown, "", bytes.into());
        errors += usize::from(error_of(&status).is_some());
    }
    assert!(decoded > 1 && errors > 0, "{decoded} arguments, {errors} errors");
}

//! The formats of commit 5a83802c: what its programs sent is read as they meant it, and what they would send is sent today.
//!
//! `fixtures/5a83802c` has what that commit encoded: lines of a name and bytes in hexadecimal.

mod cni;
mod discovery;
mod egress;
mod etcd;
mod fields;
mod frames;
mod node;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;

use prost::Message;

/// The kept bytes of one file that no check has asked for yet.
struct Kept(BTreeMap<String, Vec<u8>>);

impl Kept {
    fn of(file: &str) -> Self {
        let entries = file_lines(file).into_iter().map(|line| {
            let (name, hex) = line.rsplit_once(' ').unwrap();
            let digits = (0..hex.len()).step_by(2).map(|at| &hex[at..at + 2]);
            (name.to_owned(), digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect())
        });
        Self(entries.collect())
    }

    /// Asserts that `written` has everything that was kept, and returns the latter.
    fn same(&mut self, name: &str, written: Vec<u8>) -> Vec<u8> {
        let kept = self.0.remove(name).unwrap_or_else(|| panic!("no bytes of {name} are kept"));
        assert_eq!(written, kept, "{name}");
        kept
    }

    /// The kept bytes are those of `message`.
    fn has<M: Message + Default + PartialEq + Debug>(&mut self, name: &str, message: M) {
        let bytes = self.same(name, message.encode_to_vec());
        assert_eq!(M::decode(bytes.as_slice()), Ok(message), "{name}");
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        assert!(std::thread::panicking() || self.0.is_empty(), "unread: {:?}", self.0.keys());
    }
}

fn file_lines(file: &str) -> Vec<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/5a83802c");
    std::fs::read_to_string(directory.join(file)).unwrap().lines().map(str::to_owned).collect()
}

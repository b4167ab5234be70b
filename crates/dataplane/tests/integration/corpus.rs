//! Every input the fuzz target `names` keeps is read again, without a fuzzer.

use std::path::Path;

use fairlead_dataplane::pods::PodAlias;
use fairlead_keys::PublicKey;

#[test]
fn kept_inputs_never_panic_and_some_are_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/names");
    let (mut aliases, mut keys) = (0, 0);
    for entry in std::fs::read_dir(directory).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        if let Some(alias) = PodAlias::parse(&text) {
            assert_eq!(alias.to_string(), text);
            aliases += 1;
        }
        keys += usize::from(text.parse::<PublicKey>().is_ok());
    }
    assert!(aliases == 1 && keys == 1, "{aliases} aliases, {keys} keys");
}

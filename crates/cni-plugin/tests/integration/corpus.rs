//! Every input the fuzz targets keep is read again, without a fuzzer.

use std::path::Path;

use fairlead_cni_plugin::args::PodArgs;
use fairlead_cni_plugin::netconf;
use fairlead_cni_plugin::result::CniResult;

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let inputs =
        std::fs::read_dir(directory).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
    inputs.collect()
}

#[test]
fn kept_inputs_never_panic_and_some_are_good() {
    assert!(corpus("netconf").iter().filter(|input| netconf::parse(input).is_ok()).count() > 1);
    assert!(corpus("prev_result").iter().filter(|input| CniResult::of_answer(input).is_ok()).count() > 1);
    let args = corpus("cni_args");
    assert!(args.iter().any(|input| PodArgs::parse(&String::from_utf8_lossy(input)).is_ok()));
}

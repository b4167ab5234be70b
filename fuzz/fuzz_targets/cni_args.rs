//! `CNI_ARGS` of the CNI plugin's environment.
#![no_main]

use fairlead_cni_plugin::args::PodArgs;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(args) = PodArgs::parse(text) {
        for (name, value) in args.iter() {
            assert_eq!(args.get(name), Some(value));
        }
    }
});

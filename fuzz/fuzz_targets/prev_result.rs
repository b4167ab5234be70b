//! A CNI result: what plugins before this one made, and what the node program answers. It is written in every version.
#![no_main]

use fairlead_cni_plugin::netconf::{self, Previous};
use fairlead_cni_plugin::result::{self, CniResult};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let answer = CniResult::of_answer(bytes).unwrap_or_default();
    for version in ["0.3.1", "0.4.0", "1.0.0"] {
        let mut conf =
            format!(r#"{{"cniVersion":"{version}","name":"n","type":"coil","prevResult":"#).into_bytes();
        conf.extend_from_slice(bytes);
        conf.push(b'}');
        let Ok(conf) = netconf::parse(&conf) else { continue };
        if let Previous::Result(previous) = &conf.previous {
            let written = previous.to_json(conf.version);
            // Of an answer more is asked than of prevResult, so this may refuse it; it must not panic.
            let _ = CniResult::of_answer(written.as_bytes());
            result::of_add(Some(previous), answer.clone()).to_json(conf.version);
        }
    }
});

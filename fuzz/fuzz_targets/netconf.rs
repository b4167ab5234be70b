//! The configuration a container runtime writes to the CNI plugin.
#![no_main]

use fairlead_cni_plugin::netconf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(conf) = netconf::parse(bytes) {
        assert!(conf.socket.len() < 108, "longer than a socket's path can be: {}", conf.socket.len());
        assert!(!conf.name.is_empty());
    }
});

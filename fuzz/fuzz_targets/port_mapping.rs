//! What gateways answer in PCP, NAT-PMP and UPnP. The first byte selects one.
#![no_main]

use fairlead_port_mapping::codec::{nat_pmp, pcp, upnp};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((which, bytes)) = bytes.split_first() else { return };
    match which % 5 {
        0 => {
            let _ = pcp::parse_response(bytes);
        }
        1 => {
            let _ = nat_pmp::parse_response(bytes);
        }
        2 => drop(upnp::parse_search_response(bytes)),
        3 => {
            let Ok(location) = "http://192.0.2.1:5000/root/desc.xml".parse() else { return };
            drop(upnp::best_service(bytes, &location));
        }
        _ => {
            let _ = upnp::parse_answer(bytes);
        }
    }
});

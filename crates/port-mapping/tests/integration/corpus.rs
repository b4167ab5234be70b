//! Every input that the fuzz targets `imds` and `port_mapping` keep is read again, without a fuzzer.

use std::path::Path;

use fairlead_port_mapping::codec::{imds, nat_pmp, pcp, upnp};

fn kept(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn kept_answers_of_gateways_never_panic_and_some_are_good() {
    let location = "http://192.0.2.1:5000/root/desc.xml".parse().unwrap();
    let mut good = [0; 5];
    for bytes in kept("port_mapping") {
        let (which, bytes) = bytes.split_first().unwrap();
        let is_good = match which % 5 {
            0 => pcp::parse_response(bytes).is_ok(),
            1 => nat_pmp::parse_response(bytes).is_ok(),
            2 => upnp::parse_search_response(bytes).is_some(),
            3 => upnp::best_service(bytes, &location).is_some(),
            _ => upnp::parse_answer(bytes) != upnp::Answer::default(),
        };
        good[usize::from(which % 5)] += usize::from(is_good);
    }
    assert_eq!(good, [3, 3, 1, 1, 2]);
}

#[test]
fn kept_answers_of_the_metadata_service_never_panic_and_some_are_good() {
    let kept = kept("imds");
    let tokens = kept.iter().filter(|bytes| imds::parse_token(bytes).is_ok()).count();
    let addresses = kept.iter().filter(|bytes| imds::parse_public_ipv4(bytes).is_ok()).count();
    // An address could be a token.
    assert_eq!((kept.len(), tokens, addresses), (5, 2, 1));
}

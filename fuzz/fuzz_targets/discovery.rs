//! What discovery servers and members of a cluster send: encrypted blobs, their plaintext, and the messages around them. The
//! first byte selects one.
#![no_main]

use fairlead_wire::discovery::server::{AffiliateUpdateRequest, HelloResponse, WatchResponse};
use fairlead_wire::discovery::{Affiliate, ClusterSecret};
use libfuzzer_sys::fuzz_target;
use prost::Message as _;

fuzz_target!(|bytes: &[u8]| {
    let Some((which, bytes)) = bytes.split_first() else { return };
    let secret = ClusterSecret::new(std::array::from_fn(|n| n as u8));
    match which % 6 {
        0 => {
            if let Ok((affiliate, _)) = Affiliate::parse(bytes) {
                assert_eq!(Affiliate::parse(&affiliate.encode()).map(|(read, _)| read), Ok(affiliate));
            }
        }
        1 => drop(secret.open_data(bytes)),
        2 => {
            if let Ok(endpoint) = secret.open_endpoint(bytes) {
                assert_eq!(secret.open_endpoint(&secret.seal_endpoint(endpoint)), Ok(endpoint));
            }
        }
        3 => drop(AffiliateUpdateRequest::decode(bytes)),
        4 => drop(WatchResponse::decode(bytes)),
        _ => drop(HelloResponse::decode(bytes)),
    }
});

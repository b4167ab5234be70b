//! A hypothetical build that has version 2 of the protocol, against this one: what `docs/path-protocol.md` promises of versions.

use fairlead_keys::PrivateKey;
use fairlead_wire::probe::{Message, ProbeKeys, TransactionId};
use x25519_dalek::StaticSecret;

use super::*;

/// A request of node 2 to node 1 in version 1 that says that its sender reads version 2, with a flag, a field and an extension of
/// a later build. `fairlead-wire` makes it.
const REQUEST: &str = "f11ead5001020000bc1da8248395a06c07070707070707070707070707070707\
    00000000000000077fc5dc167e67659b23c9fe692332a91e2f730dfc5f7db7cd\
    5c1fd98eaea9298ea7d6d87d3fac255ca7a367d3ccfa45070cb372a51d116c62\
    73777f8869d8a97eb957f27eadca1d2a";

fn identity(private: u8) -> Identity {
    let public = x25519_dalek::PublicKey::from(&StaticSecret::from([private; 32]));
    let public_key = PublicKey(public.to_bytes());
    Identity { private_key: PrivateKey([private; 32]), public_key, epoch: [private; 16] }
}

fn request() -> Vec<u8> {
    let digits = REQUEST.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

#[test]
fn a_later_build_is_answered_in_the_version_of_its_request_and_falls_back_where_it_is_not() {
    let mut agent = agent();
    agent.enable_probes(identity(1));
    agent.upsert_peer(SECOND, identity(2).public_key, paths(&[2]));
    // This node had a build with version 2 until a moment ago, so the other one sends that.
    let mut newer = request();
    newer[4] = 2;
    for _ in 0..5 {
        agent.handle_datagram(SECOND, None, address(2), &newer);
    }
    assert_eq!(
        (agent.poll_transmit(), agent.probe_counts().drops.unknown),
        (None, 5),
        "counted, not answered"
    );
    // Without an answer it goes back to version 1.
    agent.handle_datagram(SECOND, None, address(2), &request());
    let answer = agent.poll_transmit().unwrap().payload;
    assert_eq!((answer.len(), &answer[4..8]), (request().len(), &[1, 0, 0, 0][..]));
    let keys = ProbeKeys::derive(&[2; 32], &identity(1).public_key.0, None).unwrap();
    let expected = Message::Answer { transaction: TransactionId([9; 12]), observed: address(2) };
    assert_eq!(keys.open(&answer), Ok(expected));
    // What this node sends by itself says as well that it reads no other version.
    agent.handle_timeout(SECOND);
    let own = agent.poll_transmit().unwrap();
    assert_eq!((own.remote, &own.payload[4..8]), (address(2), &[1, 0, 0, 0][..]));
    assert_eq!(agent.unknown_datagrams(), 0);
}

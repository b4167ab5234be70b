//! An agent in a network whose NAT64 has the prefix 2001:db8:64::/96.

use fairlead_keys::PrivateKey;
use x25519_dalek::StaticSecret;

use super::*;

fn identity(private: u8) -> Identity {
    let public = x25519_dalek::PublicKey::from(&StaticSecret::from([private; 32]));
    let public_key = PublicKey(public.to_bytes());
    Identity { private_key: PrivateKey([private; 32]), public_key, epoch: [private; 16] }
}

/// Two agents that are peers of each other; the first one has the NAT64, and reaches the other one there.
fn pair(candidates: [&[&str]; 2]) -> [PathAgent; 2] {
    [0, 1].map(|index| {
        let mut agent = agent();
        agent.enable_probes(identity(index as u8 + 1));
        let candidate = |text: &&str| {
            let source = if index == 0 { Source::Nat64 } else { Source::Host };
            Candidate { address: text.parse().unwrap(), source }
        };
        let candidates = candidates[index].iter().map(candidate).collect();
        let paths = PeerPaths { candidates, silence: None, ..PeerPaths::default() };
        if index == 0 {
            agent.set_nat64(&[Nat64Prefix::new("2001:db8:64::/96".parse().unwrap()).unwrap()]);
        }
        agent.upsert_peer(SECOND, identity(2 - index as u8).public_key, paths);
        agent
    })
}

#[test]
fn a_peer_behind_the_nat64_is_told_the_ipv4_address_it_is_seen_at() {
    let [mut inside, mut outside] = pair([&["[2001:db8:64::203.0.113.5]:51820"], &["198.51.100.7:40000"]]);
    let (at, seen) =
        ("198.51.100.7:40000".parse().unwrap(), "[2001:db8:64::203.0.113.5]:4000".parse().unwrap());
    outside.handle_timeout(SECOND);
    let request = outside.poll_transmit().unwrap();
    inside.handle_datagram(SECOND, None, seen, &request.payload);
    let answer = inside.poll_transmit().unwrap();
    assert_eq!(answer.remote, seen);
    outside.handle_datagram(SECOND, None, at, &answer.payload);
    assert_eq!(outside.reflexive_addresses(), ["203.0.113.5:4000".parse().unwrap()].into());
    let known = inside.candidates(SECOND, &identity(2).public_key);
    let source = known.iter().find(|status| status.candidate.address == seen).map(|it| it.candidate.source);
    assert_eq!(source, Some(Source::Nat64));
}

#[test]
fn requests_from_addresses_that_lead_to_nothing_behind_the_nat64_are_not_followed() {
    let [mut inside, mut outside] = pair([&[], &["198.51.100.7:40000", "198.51.100.8:40000"]]);
    outside.handle_timeout(SECOND);
    for from in ["[2001:db8:64::127.0.0.1]:53", "[2001:db8:64::169.254.169.254]:80"] {
        let request = outside.poll_transmit().unwrap();
        inside.handle_datagram(SECOND, None, from.parse().unwrap(), &request.payload);
    }
    assert_eq!(inside.probe_counts().requests_received, 2);
    assert!(inside.candidates(SECOND, &identity(2).public_key).is_empty());
}

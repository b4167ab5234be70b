//! Every input that the fuzz targets `discovery`, `grpc`, `probe`, `relay`, `relay_replica` and `stun` keep is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_wire::cni::{CniArgs, error_of};
use fairlead_wire::discovery::server::{
    AffiliateDeleteRequest, AffiliateUpdateRequest, HelloResponse, ListResponse, WatchResponse,
};
use fairlead_wire::discovery::{Affiliate, ClusterSecret};
use fairlead_wire::probe::{Header, ProbeKeys, parse_candidates};
use fairlead_wire::relay::replica::parse_replica_frame;
use fairlead_wire::{etcd, relay, stun};
use prost::Message;

fn kept(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect()
}

#[test]
fn kept_inputs_never_panic_and_some_are_good() {
    let (mut decoded, mut errors) = (0, 0);
    for bytes in kept("grpc") {
        decoded += usize::from(CniArgs::decode(bytes.as_slice()).is_ok());
        let status = tonic::Status::with_details(tonic::Code::Unknown, "", bytes.into());
        errors += usize::from(error_of(&status).is_some());
    }
    assert!(decoded > 1 && errors > 0, "{decoded} arguments, {errors} errors");
}

#[test]
fn kept_stun_messages_never_panic_and_some_are_good() {
    let answers: Vec<_> = kept("stun").iter().filter_map(|bytes| stun::parse_response(bytes).ok()).collect();
    let (mapped, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.mapped.is_ok());
    assert!(mapped.len() > 2 && !refused.is_empty(), "{answers:?}");
    let kept = kept("stun");
    let requests: Vec<_> = kept.iter().filter_map(|bytes| stun::server::parse_request(bytes)).collect();
    let authentic = requests.iter().filter(|request| request.is_authentic(&[7; 32])).count();
    assert!(requests.len() > 2 && authentic == 2, "{requests:?}");
}

#[test]
fn kept_discovery_messages_never_panic_and_some_are_good() {
    let secret = ClusterSecret::new(std::array::from_fn(|n| u8::try_from(n).unwrap()));
    let mut good = [0; 10];
    for bytes in kept("discovery") {
        let (which, bytes) = bytes.split_first().unwrap();
        let is_good = match which % 10 {
            0 => Affiliate::parse(bytes).is_ok(),
            1 => secret.open_data(bytes).is_ok(),
            2 => secret.open_endpoint(bytes).is_ok(),
            3 => AffiliateUpdateRequest::decode(bytes).is_ok_and(|update| update.ttl.is_some()),
            4 => WatchResponse::decode(bytes).is_ok_and(|watch| watch.snapshot_continues || watch.expired),
            5 => HelloResponse::decode(bytes).is_ok_and(|hello| hello.redirect.is_some()),
            6 => {
                let deletes =
                    AffiliateDeleteRequest::decode(bytes).is_ok_and(|it| !it.affiliate_id.is_empty());
                deletes || ListResponse::decode(bytes).is_ok_and(|list| !list.affiliates.is_empty())
            }
            // A client and a server read them in crates/discovery.
            7 | 8 => false,
            _ => etcd::RangeResponse::decode(bytes).is_ok_and(|range| !range.kvs.is_empty()),
        };
        good[usize::from(which % 10)] += usize::from(is_good);
    }
    assert_eq!(good, [2, 1, 2, 1, 2, 1, 2, 0, 0, 1]);
}

#[test]
fn kept_relay_frames_never_panic_and_some_are_good() {
    let (mut frames, mut refused) = (0, 0);
    for bytes in kept("relay") {
        let mut rest = bytes.as_slice();
        loop {
            match relay::parse(rest, relay::MAX_BODY) {
                Ok(Some(parsed)) => {
                    parsed.frame.encode(&mut Vec::new()).unwrap();
                    rest = &rest[parsed.length..];
                    frames += 1;
                }
                Ok(None) => break,
                Err(_) => {
                    refused += 1;
                    break;
                }
            }
        }
    }
    assert!(frames > 10 && refused > 3, "{frames} frames, {refused} refused");
}

#[test]
fn kept_frames_of_replicas_never_panic_and_some_are_good() {
    let (mut frames, mut refused) = (0, 0);
    for bytes in kept("relay_replica") {
        let mut rest = bytes.as_slice();
        let mut parsed = parse_replica_frame(rest);
        while let Ok(Some((frame, length))) = parsed {
            frame.encode(&mut Vec::new()).unwrap();
            rest = &rest[length..];
            frames += 1;
            parsed = parse_replica_frame(rest);
        }
        refused += usize::from(parsed.is_err());
    }
    assert_eq!((frames, refused), (11, 2));
}

#[test]
fn kept_probes_never_panic_and_some_have_a_header() {
    let keys = ProbeKeys::derive(&[1; 32], &[9; 32], None).unwrap();
    let kept = kept("probe");
    assert!(kept.iter().all(|bytes| keys.open(bytes).is_err()), "made with other keys");
    assert!(kept.iter().filter(|bytes| Header::parse(bytes).is_ok()).count() > 1);
    assert!(kept.iter().any(|bytes| parse_candidates(bytes).len() == 2));
}

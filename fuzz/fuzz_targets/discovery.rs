//! What discovery servers, their clients, etcd and members of a cluster send: encrypted blobs, their plaintext, the messages around them,
//! and what a client and a server make of several messages. The first byte selects one.
#![no_main]

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use fairlead_discovery::client::Members;
use fairlead_discovery::core::{Discovery, Limits, Notification, Source, Update};
use fairlead_wire::discovery::server::{
    AffiliateDeleteRequest, AffiliateUpdateRequest, HelloRequest, HelloResponse, ListRequest, ListResponse,
    WatchRequest, WatchResponse,
};
use fairlead_wire::discovery::{Affiliate, ClusterSecret};
use fairlead_wire::etcd;
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let Some((which, bytes)) = bytes.split_first() else { return };
    let secret = ClusterSecret::new(std::array::from_fn(|n| n as u8));
    match which % 10 {
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
        5 => drop(HelloResponse::decode(bytes)),
        6 => {
            drop(AffiliateDeleteRequest::decode(bytes));
            drop(HelloRequest::decode(bytes));
            drop(ListRequest::decode(bytes));
            drop(ListResponse::decode(bytes));
            drop(WatchRequest::decode(bytes));
        }
        7 => watch(bytes, &secret),
        8 => serve(bytes, &secret),
        _ => {
            drop(etcd::LeaseGrantResponse::decode(bytes));
            drop(etcd::LeaseTimeToLiveResponse::decode(bytes));
            drop(etcd::RangeResponse::decode(bytes));
            drop(etcd::TxnResponse::decode(bytes));
            drop(etcd::WatchResponse::decode(bytes));
        }
    }
});

fn messages<M: Message + Default>(mut bytes: &[u8]) -> impl Iterator<Item = M> {
    std::iter::from_fn(move || M::decode_length_delimited(&mut bytes).ok())
}

/// A client hears the messages of a watch, each with its length before it.
fn watch(bytes: &[u8], secret: &ClusterSecret) {
    let (mut members, now) = (Members::default(), Instant::now());
    members.begin(true);
    for message in messages::<WatchResponse>(bytes) {
        members.apply(message, "own", secret, now);
    }
    assert!(members.member("own").is_none());
    assert!(members.iter().all(|(id, member)| member.affiliate.node_id == id));
}

/// A server takes updates, each with its length before it, and tells a client of them. Times to live end one after the other.
fn serve(bytes: &[u8], secret: &ClusterSecret) {
    let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
    let source = Source::of(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let Ok(watch) = discovery.watch(source, "c", now) else { return };
    let mut members = Members::default();
    members.begin(false);
    let mut tell = |discovery: &mut Discovery| {
        while let Notification::Message(message) = discovery.poll_watch(watch) {
            members.apply(message, "own", secret, now);
        }
        members.iter().count()
    };
    for request in messages::<AffiliateUpdateRequest>(bytes) {
        let update = Update {
            cluster: request.cluster_id,
            affiliate: request.affiliate_id,
            data: request.affiliate_data,
            endpoints: request.affiliate_endpoints,
            ttl: request.ttl.map(|ttl| Duration::from_secs(ttl.seconds.unsigned_abs())).unwrap_or_default(),
        };
        let _ = discovery.update(source, &update, now);
        tell(&mut discovery);
    }
    while let Some(next) = discovery.poll_timeout() {
        discovery.handle_timeout(next);
        tell(&mut discovery);
    }
    assert_eq!((discovery.totals().affiliates, tell(&mut discovery)), (0, 0));
}

//! Every input that the fuzz target `discovery` keeps for clients and servers is read again, without a fuzzer. `crates/wire` reads the
//! others.

use std::path::Path;
use std::time::{Duration, Instant};

use fairlead_discovery::client::Members;
use fairlead_discovery::core::{Discovery, Limits, Notification, Source, Update};
use fairlead_wire::discovery::ClusterSecret;
use fairlead_wire::discovery::server::{AffiliateUpdateRequest, WatchResponse};
use prost::Message;

fn kept(selector: u8) -> impl Iterator<Item = Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/discovery");
    let all =
        std::fs::read_dir(directory).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
    all.filter(move |bytes| bytes[0] % 10 == selector).map(|bytes| bytes[1..].to_vec())
}

fn messages<M: Message + Default>(mut bytes: &[u8]) -> Vec<M> {
    std::iter::from_fn(|| M::decode_length_delimited(&mut bytes).ok()).collect()
}

fn secret() -> ClusterSecret {
    ClusterSecret::new(std::array::from_fn(|n| u8::try_from(n).unwrap()))
}

#[test]
fn kept_watches_never_panic_and_some_tell_of_members() {
    let mut told = Vec::new();
    for bytes in kept(7) {
        let mut members = Members::default();
        members.begin(true);
        for message in messages::<WatchResponse>(&bytes) {
            members.apply(message, "own", &secret(), Instant::now());
        }
        told.push((members.iter().count(), members.deleted().count(), members.rejected().count()));
    }
    told.sort_unstable();
    assert_eq!(told, [(0, 0, 0), (1, 1, 1)]);
}

#[test]
fn kept_updates_never_panic_and_some_reach_a_watch() {
    let mut told = Vec::new();
    for bytes in kept(8) {
        let (mut discovery, now) = (Discovery::new(Limits::default()), Instant::now());
        let source = Source::of("192.0.2.1".parse().unwrap());
        let watch = discovery.watch(source, "c", now).unwrap();
        let mut members = Members::default();
        members.begin(true);
        let mut refused = 0;
        for request in messages::<AffiliateUpdateRequest>(&bytes) {
            let update = Update {
                cluster: request.cluster_id,
                affiliate: request.affiliate_id,
                data: request.affiliate_data,
                endpoints: request.affiliate_endpoints,
                ttl: request
                    .ttl
                    .map(|ttl| Duration::from_secs(ttl.seconds.unsigned_abs()))
                    .unwrap_or_default(),
            };
            refused += usize::from(discovery.update(source, &update, now).is_err());
            while let Notification::Message(message) = discovery.poll_watch(watch) {
                members.apply(message, "own", &secret(), now);
            }
        }
        told.push((members.iter().count(), refused));
    }
    assert_eq!(told, [(1, 1)]);
}

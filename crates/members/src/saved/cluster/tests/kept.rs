//! The state directory of commit 5a83802c: its files are read as they were meant, and what is written today has all that they have.

use std::path::Path;

use fairlead_topology::{ByDiscovery, InternalAddress, Keepalive, MemberAddresses, Site};
use serde_json::Value;

use super::*;
use crate::departures::{Deleted, Missing, ReleasedBlocks};
use crate::saved::discovery::{Credentials, Previous, SavedServices, Secrets};

const SAVED: i64 = 1_790_000_000;

/// A member with everything that is saved.
fn full() -> Member {
    let seen = |key| (key, "198.51.100.2:9".parse().unwrap());
    Member {
        public_key: Some(key(2)),
        next_key: Some(key(22)),
        claims: vec!["10.0.0.2/32".parse().unwrap(), "2001:db8::2/128".parse().unwrap()],
        blocks: vec!["10.244.2.0/27".parse().unwrap()],
        pod_networks: vec!["10.245.2.0/24".parse().unwrap()],
        addresses: MemberAddresses {
            mesh: vec!["fd00::2".parse().unwrap()],
            node: Some(vec!["10.0.0.2".parse().unwrap()]),
            is_unconfirmed: false,
            is_control_plane: false,
        },
        endpoints: Endpoints {
            manual: "gate.example:51820".parse().ok(),
            preferred: "203.0.113.2:7".parse().ok(),
            host: vec!["10.0.0.2:51820".parse().unwrap()],
            reflexive: vec!["203.0.113.2:8".parse().unwrap()],
            discovered: vec!["[2001:db8::2]:9".parse().unwrap()],
            sightings: [("node-0003".to_owned(), seen(key(3)))].into(),
            is_nat_symmetric: true,
            is_nat_port_restricted: true,
            filter: None,
            birthday_attack: Some(true),
        },
        keepalive: Keepalive { interval: Some(11), always_sends: true },
        site: Some(Site {
            location: "office".to_owned(),
            internal: [("192.168.1.10", Some(24)), ("fd00:1::10", None)]
                .map(|(address, length)| InternalAddress { address: address.parse().unwrap(), length })
                .into(),
            is_leader: true,
            is_public: true,
            networks: vec!["192.168.7.0/24".parse().unwrap()],
        }),
        since: Some(Since { created: 7, uid: "u".to_owned() }),
        entry_terms: [("laptop".to_owned(), (key(4), 3))].into(),
        discovery: ByDiscovery { is_only_source: false, needs_preshared_key: true },
        ..Member::named("node-0002")
    }
}

fn departures(now: Instant) -> Departures {
    let hour = Duration::from_secs(3600);
    let deleted = |next_key| Deleted { public_key: key(5), next_key, until: now + 2 * hour };
    let deleted = [("node-0005", deleted(Some(key(55)))), ("node-0006", deleted(None))];
    let gone =
        Member { discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false }, ..member(7) };
    let missing = Missing { member: gone, until: now + hour, is_guarded: true };
    Departures::restored(
        deleted.map(|(name, deleted)| (name.to_owned(), deleted)).into(),
        [("node-0007".to_owned(), missing)].into(),
        ReleasedBlocks::default(),
    )
}

/// The files that are written in a directory have what the kept ones have; those are what is read then.
#[track_caller]
fn replace_with_kept(directory: &Path, name: &str, kept: &str) {
    let parsed = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let written = fs::read_to_string(directory.join(name)).unwrap();
    assert!(has_all(&parsed(&written), &parsed(kept)), "{name}: {written}\ninstead of {kept}");
    fs::write(directory.join(name), kept).unwrap();
}

/// Whether a later program says at least the same.
fn has_all(later: &Value, kept: &Value) -> bool {
    match (later, kept) {
        (Value::Object(later), Value::Object(kept)) => {
            kept.iter().all(|(name, kept)| later.get(name).is_some_and(|later| has_all(later, kept)))
        }
        (Value::Array(later), Value::Array(kept)) => {
            later.len() == kept.len() && later.iter().zip(kept).all(|(later, kept)| has_all(later, kept))
        }
        _ => later == kept,
    }
}

#[test]
fn what_the_cluster_said_last_is_kept_as_it_was() {
    let instant = Instant::now();
    let now = (instant, Timestamp::from_second(SAVED).unwrap());
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    let full = Unsaved {
        members: merged(vec![member(1), full(), laptop()]),
        departures: departures(instant),
        ..unsaved()
    };
    let bare = Unsaved {
        members: merged(vec![Member::named("node-0001")]),
        api_server: Vec::new(),
        services: Vec::new(),
        sources: Arc::default(),
        ..unsaved()
    };
    let kept =
        [include_str!("../fixtures/5a83802c/mesh.json"), include_str!("../fixtures/5a83802c/mesh-bare.json")];
    for (unsaved, kept) in [full, bare].into_iter().zip(kept) {
        file.write(&unsaved, now).unwrap();
        replace_with_kept(directory.path(), FILE, kept);
        let Saved { facts, departures, age } = file.read(now).unwrap().unwrap();
        let members = unsaved.members.iter();
        let untold = members.map(|member| Member { sources: Sources::default(), ..Member::clone(member) });
        assert!(facts.members.iter().cloned().eq(untold), "{:#?}", facts.members);
        assert_eq!((&*facts.mesh, &*facts.node), (&*unsaved.mesh, &needed(&unsaved.node)));
        assert_eq!((facts.api_server, facts.services), (unsaved.api_server, unsaved.services));
        assert_eq!((facts.sources, departures), (unsaved.sources, unsaved.departures));
        assert_eq!(age, Duration::ZERO);
    }
}

#[test]
fn the_token_of_a_relay_and_what_discovery_services_said_are_kept_as_they_were() {
    let now = Timestamp::from_second(SAVED).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (file, kept) = (file(directory.path()), |name, kept| replace_with_kept(directory.path(), name, kept));
    file.write_token("relays/cloud", b"t\xff").unwrap();
    kept(TOKEN_FILE, include_str!("../fixtures/5a83802c/relay-token.json"));
    assert_eq!(file.read_token("relays/cloud").as_deref(), Some(&b"t\xff"[..]));
    let members = [full(), Member::named("node-0003")];
    file.write_discovered(&members, now).unwrap();
    kept("discovery.json", include_str!("../fixtures/5a83802c/discovery.json"));
    assert_eq!(file.read_discovered(now).unwrap(), (members.into(), Duration::ZERO));
    let credentials = |id: &str, secret| Credentials { cluster_id: id.to_owned(), secret: [secret; 32] };
    let previous = Some(Previous { credentials: credentials("cluster=", 8), changed: now });
    for (previous, text) in [
        (previous, include_str!("../fixtures/5a83802c/discovery-secret.json")),
        (None, include_str!("../fixtures/5a83802c/discovery-secret-bare.json")),
    ] {
        let secrets = Secrets { current: credentials("cluster=", 9), previous };
        file.write_secrets("ns/name", &secrets).unwrap();
        kept("discovery-secret.json", text);
        assert_eq!(file.saved_secrets(), Some(secrets));
        assert_eq!(file.read_credentials("ns/name"), Some(credentials("cluster=", 9)));
    }
    let server = "https://discovery.example:443".parse().unwrap();
    file.write_services(&[server], Some(b"PEM")).unwrap();
    kept("discovery-services.json", include_str!("../fixtures/5a83802c/discovery-services.json"));
    let services = SavedServices {
        node: "node-0001".to_owned(),
        servers: vec!["https://discovery.example:443".to_owned()],
        ca_bundle: Some("PEM".to_owned()),
    };
    assert_eq!(file.read_services().unwrap(), Some(services));
}

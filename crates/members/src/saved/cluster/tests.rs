use std::os::unix::fs::PermissionsExt as _;

use fairlead_keys::PresharedKey;
use fairlead_topology::{Endpoints, External, MemberRecord, Since, Source, Sources, merge};

use super::*;

mod kept;

fn key(number: u32) -> PublicKey {
    let mut bytes = [1; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    PublicKey(bytes)
}

fn member(number: u8) -> Member {
    let address = IpAddr::from([10, 0, 0, number]);
    let endpoints = Endpoints { host: vec![SocketAddr::new(address, 51820)], ..Endpoints::default() };
    Member {
        public_key: Some(key(number.into())),
        claims: vec![address.into()],
        endpoints,
        ..Member::named(format!("node-{number:04}"))
    }
}

/// Members as the cluster says them.
fn merged(members: Vec<Member>) -> Vec<Arc<Member>> {
    let record = |member| MemberRecord { member, ..MemberRecord::of_node(Source::Kubernetes, "") };
    merge(members.into_iter().map(record).collect()).into_iter().map(Arc::new).collect()
}

fn unsaved() -> Unsaved {
    let mesh = serde_json::json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh",
        "metadata": { "name": "default" }, "spec": { "listenPort": 51821 },
    });
    let node = serde_json::json!({
        "metadata": { "name": "node-0001", "labels": { "not": "needed" }, "annotations": { "wirekube.io/endpoint": "192.0.2.9:1" } },
        "status": { "addresses": [{ "type": "InternalIP", "address": "10.0.0.1" }], "images": [{ "names": ["many"] }] },
    });
    let mut third = member(3);
    third.endpoints.manual = "gate.example:51820".parse().ok();
    third.endpoints.sightings.insert("node-0002".to_owned(), (key(2), "198.51.100.2:9".parse().unwrap()));
    third.since = Some(Since { created: 7, uid: "u".to_owned() });
    third.keepalive.interval = Some(11);
    third.endpoints.is_nat_symmetric = true;
    third.endpoints.is_nat_port_restricted = true;
    third.endpoints.birthday_attack = Some(false);
    third.entry_terms.insert("laptop".to_owned(), (key(4), 3));
    let services = vec!["10.96.0.0/12".parse().unwrap(), "fd96::/112".parse().unwrap()];
    let gateways = ["node-0002", "node-0003"].map(str::to_owned);
    let held = SourceNodes { holder: Some("node-0003".to_owned()), gateways: gateways.clone().into() };
    let free = SourceNodes { holder: None, gateways: gateways.into() };
    let sources = [("192.0.2.40", held), ("2001:db8::40", free)];
    let sources = sources.map(|(address, nodes)| (address.parse().unwrap(), nodes));
    Unsaved {
        mesh: Arc::new(serde_json::from_value(mesh).unwrap()),
        node: Arc::new(serde_json::from_value(node).unwrap()),
        public_key: key(1),
        members: merged(vec![member(1), member(2), third, laptop()]),
        api_server: vec!["192.0.2.100:6443".parse().unwrap()],
        services,
        sources: Arc::new(sources.into()),
        departures: Departures::default(),
    }
}

/// A member that is no node.
fn laptop() -> Member {
    let external =
        External { preshared_key: Some(PresharedKey([9; 32])), entry_nodes: vec!["node-0003".to_owned()] };
    Member { public_key: Some(key(4)), external: Some(external), ..Member::of_peer("laptop") }
}

fn at(seconds: i64) -> (Instant, Timestamp) {
    (Instant::now(), Timestamp::from_second(seconds).unwrap())
}

fn file(directory: &std::path::Path) -> StateFile {
    StateFile { directory: directory.to_owned(), node: "node-0001".to_owned() }
}

#[test]
fn what_is_written_is_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    assert!(file.read(at(0)).unwrap().is_none());
    let unsaved = unsaved();
    for seconds in [1, 2] {
        file.write(&unsaved, at(seconds)).unwrap();
    }
    let Saved { facts, age, .. } = file.read(at(7)).unwrap().unwrap();
    assert_eq!(age, Duration::from_secs(5));
    assert_eq!(file.read(at(1)).unwrap().unwrap().age, Duration::ZERO, "the clock of the host is behind");
    let members = unsaved.members.iter();
    // Who tells of them is not saved.
    let untold = members.map(|member| Member { sources: Sources::default(), ..Member::clone(member) });
    assert!(facts.members.into_iter().eq(untold));
    assert_eq!(facts.api_server, unsaved.api_server);
    assert_eq!(facts.services, unsaved.services);
    assert_eq!(facts.sources, unsaved.sources);
    let text = fs::read_to_string(file.path()).unwrap();
    let mut earlier: serde_json::Value = serde_json::from_str(&text).unwrap();
    earlier.as_object_mut().unwrap().remove("sources");
    let earlier = file.parse(&serde_json::to_vec(&earlier).unwrap(), at(2)).unwrap();
    assert!(earlier.facts.sources.is_empty(), "a file of a version that did not save them");
    assert_eq!(facts.mesh.spec, unsaved.mesh.spec);
    assert_eq!(facts.node.metadata.annotations, unsaved.node.metadata.annotations);
    assert!(facts.node.metadata.labels.is_none(), "as little as the mesh needs");
    let [problem] = &facts.problems[..] else { panic!("{:?}", facts.problems) };
    assert!(problem.to_string().contains("1970-01-01T00:00:02Z"), "{problem}");
    let entries: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries, [file.path()]);
    assert_eq!(fs::metadata(file.path()).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_file_of_another_node_or_format_is_not_used() {
    let directory = tempfile::tempdir().unwrap();
    let ours = file(directory.path());
    ours.write(&unsaved(), at(0)).unwrap();
    let other = StateFile { node: "node-0002".to_owned(), ..ours.clone() };
    let error = format!("{:#}", other.read(at(0)).unwrap_err());
    assert!(error.contains("mesh.json: it is of node node-0001"), "{error}");
    let text = fs::read_to_string(ours.path()).unwrap();
    for (content, expected) in [
        (text.replace("\"version\":1", "\"version\":2"), "format 2"),
        (text.replace(&key(2).to_string(), "no key"), "key"),
        (text[..text.len() / 2].to_owned(), "EOF"),
        (String::new(), "EOF"),
    ] {
        fs::write(ours.path(), content).unwrap();
        let error = format!("{:#}", ours.read(at(0)).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_token_of_a_relay_is_kept_for_its_secret_only() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    assert_eq!(file.read_token("relays/cloud"), None);
    file.write_token("relays/cloud", b"t\xff").unwrap();
    assert_eq!(file.read_token("relays/cloud").as_deref(), Some(&b"t\xff"[..]));
    assert_eq!(file.read_token("relays/other"), None);
    let mode = fs::metadata(directory.path().join(TOKEN_FILE)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    file.remove();
    assert_eq!(file.read_token("relays/cloud"), None);
}

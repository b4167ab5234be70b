use std::time::Instant;

use fairlead_wire::discovery::server::{self, WatchResponse};
use fairlead_wire::discovery::{Affiliate, ClusterSecret, KubeSpan};

use super::*;

fn secret() -> ClusterSecret {
    ClusterSecret::new([7; 32])
}

fn key(byte: u8) -> PublicKey {
    PublicKey([byte; 32])
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// A node of Fairlead with one address.
fn node(id: &str, name: &str, number: u8) -> Affiliate {
    let kubespan =
        KubeSpan { public_key: key(number).to_string(), without_preshared_key: true, ..KubeSpan::default() };
    Affiliate {
        node_id: id.to_owned(),
        nodename: name.to_owned(),
        addresses: vec![[192, 0, 2, number].into()],
        kubespan: Some(kubespan),
        ..Affiliate::default()
    }
}

/// Members of a service that has these affiliates, each with one endpoint.
fn service(affiliates: &[Affiliate], port: u16) -> Members {
    let mut members = Members::default();
    members.begin(true);
    let sealed = affiliates.iter().map(|affiliate| server::Affiliate {
        id: affiliate.node_id.clone(),
        data: secret().seal_data([1; 12], &affiliate.encode()).unwrap().into(),
        endpoints: vec![secret().seal_endpoint(([192, 0, 2, 1], port).into()).into()],
    });
    let message = WatchResponse { affiliates: sealed.collect(), ..WatchResponse::default() };
    members.apply(message, "own", &secret(), Instant::now());
    members
}

fn read(services: &[Members], allowed: &[&str]) -> Told {
    let allowed: Vec<IpNet> = allowed.iter().copied().map(net).collect();
    Reader { node: "self", node_id: "own", of_others: &BTreeSet::new(), allowed: &allowed }.read(services)
}

fn names(told: &Told) -> Vec<&str> {
    told.members.keys().map(String::as_str).collect()
}

fn whys(told: &Told) -> String {
    told.problems.iter().map(|problem| format!("{problem}\n")).collect()
}

#[test]
fn what_several_services_tell_is_united() {
    let services = [service(&[node("a", "n1", 1)], 1), service(&[node("a", "n1", 1), node("b", "", 2)], 2)];
    let told = read(&services, &[]);
    assert_eq!((names(&told), told.problems.len()), (vec!["discovery/b", "n1"], 0));
    let record = &told.members["n1"].record;
    assert_eq!((record.source, record.member.public_key), (Source::Discovery, Some(key(1))));
    assert_eq!(record.member.claims, [net("192.0.2.1/32")]);
    assert_eq!(record.member.endpoints.discovered.len(), 2);
    assert!(record.member.discovery.is_only_source);
}

#[test]
fn only_addresses_and_allowed_prefixes_are_believed() {
    let mut affiliate = node("a", "n1", 1);
    let kubespan = affiliate.kubespan.as_mut().unwrap();
    kubespan.additional_addresses =
        ["10.1.0.0/24", "10.2.0.0/24", "0.0.0.0/0", "10.1.1.0/24"].map(net).to_vec();
    kubespan.exclude_advertised_addresses = vec![net("10.1.1.128/25")];
    let told = read(&[service(&[affiliate], 1)], &["10.1.0.0/16"]);
    let claims = &told.members["n1"].record.member.claims;
    assert_eq!(*claims, ["10.1.0.0/24", "10.1.1.0/25", "192.0.2.1/32"].map(net));
    assert!(whys(&told).contains("prefix 10.2.0.0/24 and 1 more of member n1"), "{}", whys(&told));
}

#[test]
fn a_node_of_kubespan_needs_the_preshared_key_and_keeps_its_address_on_the_mesh() {
    let mut talos = node("t", "talos", 3);
    let kubespan = talos.kubespan.as_mut().unwrap();
    kubespan.without_preshared_key = false;
    kubespan.address = "fd7f:175a:b97c:5602::3".parse().ok();
    kubespan.exclude_advertised_addresses = vec![net("fd00::/8")];
    let told = read(&[service(&[talos, node("a", "n1", 1)], 1)], &[]);
    let member = |name: &str| &told.members[name].record.member;
    assert_eq!(member("talos").addresses.mesh, kubespan_address());
    assert!(member("talos").discovery.needs_preshared_key && !member("n1").discovery.needs_preshared_key);
}

fn kubespan_address() -> Vec<std::net::IpAddr> {
    vec!["fd7f:175a:b97c:5602::3".parse().unwrap()]
}

#[test]
fn who_is_not_connected_is_named() {
    let affiliates = [
        node("a", "n1", 1),
        node("b", "n1", 2),
        node("c", "self", 4),
        node("d", "kubernetes/x", 5),
        node("e", "Upper", 6),
        Affiliate { node_id: "silent".to_owned(), ..Affiliate::default() },
    ];
    let told = read(&[service(&affiliates, 1)], &[]);
    assert_eq!((names(&told), told.members["n1"].record.member.public_key), (vec!["n1"], Some(key(1))));
    let whys = whys(&told);
    for (id, why) in [
        ("b", "smaller identifier"),
        ("c", "name of this node"),
        ("d", "none of a Node"),
        ("e", "none of a Node"),
    ] {
        let line = whys.lines().find(|line| line.contains(&format!("member discovery/{id} "))).unwrap();
        assert!(line.contains(why), "{line}");
    }
    assert_eq!(told.problems.len(), 4, "{whys}");
}

#[test]
fn what_no_service_tells_any_more_stays_while_its_tunnel_works() {
    let mut memory = Memory::default();
    let all = read(&[service(&[node("a", "n1", 1), node("b", "n2", 2), node("c", "n3", 3)], 1)], &[]);
    assert!(!memory.update(&all, true, |_| false, |_| true, Instant::now()));
    let nothing = Told::default();
    let keys = |memory: &Memory| {
        let records = memory.records();
        records.iter().map(|record| record.member.public_key.unwrap()).collect::<Vec<_>>()
    };
    assert!(memory.update(&nothing, true, |id| id == "c", |peer| *peer != key(2), Instant::now()));
    assert_eq!(keys(&memory), [key(1)], "n2 had no handshake, n3 was deleted");
    let deleted: Vec<String> = memory.deleted().into_iter().map(|deletion| deletion.name).collect();
    assert_eq!(deleted, ["n3"]);
    assert!(!memory.update(&all, true, |_| false, |_| false, Instant::now()));
    assert_eq!((memory.records().len(), memory.deleted().len()), (3, 0));
    assert!(!memory.update(&nothing, true, |_| false, |_| false, Instant::now()));
    assert_eq!(memory.records(), []);
}

#[test]
fn what_was_known_before_a_restart_stays_until_a_service_answers() {
    let member = Member { public_key: Some(key(1)), ..Member::named("n1") };
    let saved = Instant::now();
    let mut memory = Memory::with_cached(vec![member], Some(saved));
    assert!(memory.update(&Told::default(), false, |_| false, |_| false, Instant::now()));
    let cached = memory.records().remove(0);
    assert_eq!((cached.source, cached.member.discovery.is_only_source), (Source::Cache, true));
    assert_eq!(memory.untold(), [("n1".to_owned(), saved)].into());
    let told = read(&[service(&[node("a", "n1", 2)], 1)], &[]);
    memory.update(&told, true, |_| false, |_| false, Instant::now());
    assert_eq!(memory.records()[0].member.public_key, Some(key(2)), "it has another key now");
    assert_eq!(memory.untold(), BTreeMap::new());
}

proptest::proptest! {
    #[test]
    fn hostile_names_are_never_those_of_other_sources(name in ".{0,40}", id in ".{1,40}") {
        let told = read(&[service(&[Affiliate { node_id: id.clone(), ..node("", &name, 1) }], 1)], &[]);
        for name in told.members.keys() {
            proptest::prop_assert!(name.starts_with("discovery/") || is_name(name), "{}", name);
        }
    }
}

#[test]
fn while_the_secret_changes_members_are_united_and_who_has_the_new_one_counts_as_changed() {
    let talos = |id: &str, name: &str, number: u8| {
        let mut affiliate = node(id, name, number);
        affiliate.kubespan.as_mut().unwrap().without_preshared_key = false;
        affiliate
    };
    let mut told = read(&[service(&[talos("b1", "t1", 1), node("bn", "n1", 3)], 1)], &[]);
    told.add_previous(read(&[service(&[talos("a1", "t1", 1), talos("a2", "t2", 2)], 2)], &[]));
    assert_eq!(told.members().collect::<Vec<_>>(), [("n1", "bn"), ("t1", "b1"), ("t2", "a2")]);
    let mut memory = Memory::default();
    let now = Instant::now();
    memory.update(&told, true, |_| false, |_| false, now);
    assert_eq!(memory.changed_kubespan(), BTreeSet::from(["t1".to_owned()]));
    memory.update(&Told::default(), true, |_| false, |_| true, now);
    assert_eq!(memory.changed_kubespan().len(), 1, "it keeps the key while its tunnel works");
    memory.change_secret();
    assert!(memory.changed_kubespan().is_empty());
}

#[test]
fn what_the_other_secret_reads_is_no_problem() {
    let mut members = Members::default();
    let foreign = server::Affiliate { id: "a".to_owned(), data: vec![1; 64].into(), endpoints: Vec::new() };
    let message = WatchResponse { affiliates: vec![foreign], ..WatchResponse::default() };
    members.apply(message, "own", &secret(), Instant::now());
    let problems = |of_others: &BTreeSet<String>| {
        Reader { node: "self", node_id: "own", of_others, allowed: &[] }.read([&members]).problems.len()
    };
    assert_eq!((problems(&BTreeSet::new()), problems(&BTreeSet::from(["a".to_owned()]))), (1, 0));
}

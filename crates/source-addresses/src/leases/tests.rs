use serde_json::{Value, json};

use super::*;
use crate::hold::{Write, WriteKind};
use fairlead_api::resources::Egress;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use std::collections::BTreeSet;

fn egress(name: &str, created: &str, addresses: &[&str]) -> Egress {
    let object = json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
        "metadata": { "name": name, "namespace": "n", "uid": "u", "creationTimestamp": created },
        "spec": { "destinations": ["0.0.0.0/0"], "sourceAddresses": addresses },
    });
    serde_json::from_value(object).unwrap()
}

fn texts(slots: &[Vec<IpAddr>]) -> Vec<String> {
    slots.iter().map(|slot| slot.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")).collect()
}

#[test]
fn addresses_of_both_families_are_paired_in_order() {
    let listed = ["2001:db8::1", "192.0.2.1", "192.0.2.2", "2001:db8::2", "192.0.2.3"].map(str::to_owned);
    assert_eq!(texts(&slots(&listed)), ["192.0.2.1,2001:db8::1", "192.0.2.2,2001:db8::2", "192.0.2.3"]);
    assert!(slots(&[]).is_empty());
}

#[test]
fn each_refusal_has_its_reason_and_leaves_other_addresses_and_slots() {
    let ranges = Ranges {
        permitted: vec!["192.0.2.0/24".parse().unwrap(), "2001:db8::/64".parse().unwrap()],
        cluster: vec![("192.0.2.128/25".parse().unwrap(), "AddressPool default".to_owned())],
    };
    let young =
        egress("a", "2026-01-02T00:00:00Z", &["192.0.2.1", "2001:db8::1", "192.0.2.200", "198.51.100.1"]);
    let old = egress("b", "2026-01-01T00:00:00Z", &["192.0.2.1", "192.0.2.2"]);
    let claimed = Claimed::new([&young, &old]);
    let (slots, refusals) = permit(&young, &ranges, &claimed, &[]);
    assert_eq!(texts(&slots), ["2001:db8::1", "", ""]);
    let told: Vec<_> = refusals.iter().map(|it| (it.reason(), it.to_string())).collect();
    let expected = [
        ("SourceAddressInUse", "192.0.2.1 is one of Egress n/b, which is older"),
        (
            "SourceAddressInCluster",
            "192.0.2.200 is in AddressPool default: choose an address that nothing in the cluster uses",
        ),
        (
            "SourceAddressNotPermitted",
            "198.51.100.1 is in none of the prefixes of the controller's --egress-source-addresses",
        ),
    ];
    assert_eq!(told, expected.map(|(reason, text)| (reason, text.to_owned())));
    assert_eq!(permit(&old, &ranges, &claimed, &[]).1, []);
    // Of the same age: by name.
    let (first, second) = (
        egress("a", "2026-01-01T00:00:00Z", &["192.0.2.1"]),
        egress("b", "2026-01-01T00:00:00Z", &["192.0.2.1"]),
    );
    let claimed = Claimed::new([&second, &first]);
    assert_eq!(
        (permit(&first, &ranges, &claimed, &[]).1.len(), permit(&second, &ranges, &claimed, &[]).1.len()),
        (0, 1)
    );
}

#[test]
fn what_is_permitted_is_what_the_status_says() {
    let mut object = egress("a", "2026-01-01T00:00:00Z", &["192.0.2.1"]);
    assert_eq!(permitted(&object.spec, None), Some(Vec::new()));
    let slots = slots(&["192.0.2.1".to_owned(), "192.0.2.2".to_owned()]);
    let said = status(&slots, &[Some("pod".to_owned())]);
    assert_eq!((said[0].gateway.as_deref(), said[1].gateway.as_deref()), (Some("pod"), None));
    let status = EgressStatus { source_addresses: said, ..EgressStatus::default() };
    assert_eq!(permitted(&object.spec, Some(&status)), Some(slots));
    object.spec.source_addresses = None;
    assert_eq!(permitted(&object.spec, Some(&status)), None);
}

#[test]
fn leases_say_what_slots_have_and_who_holds_them() {
    let object = egress("nat", "2026-01-01T00:00:00Z", &[]);
    let made =
        leases(&object, &[vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()], Vec::new()]);
    assert_eq!(made.keys().collect::<Vec<_>>(), ["nat-gateways", "nat-source-0"]);
    let mut lease: Lease = made["nat-source-0"].clone();
    assert!(is_ours("nat", &lease) && !is_ours("na", &lease) && slot_lease(&lease).is_none());
    assert_eq!(slot_of("nat", "nat-source-12"), Some(12));
    for other in ["nat-gateways", "nat-source-012", "nat-source-+1", "nat-source-"] {
        assert_eq!(slot_of("nat", other), None, "{other}");
    }
    lease.metadata.resource_version = Some("7".to_owned());
    let read = slot_lease(&lease).unwrap();
    assert_eq!(texts(&[read.addresses]), ["192.0.2.1,2001:db8::1"]);
    assert_eq!(read.lease, hold_lease(7, None, 0));
    let write = Write {
        slot: 0,
        kind: WriteKind::Release,
        base: 7,
        holder: None,
        term: 3,
        successor: Some("nat-b".to_owned()),
        began: Duration::ZERO,
    };
    let patch = lease_patch(&write, MicroTime(Timestamp::UNIX_EPOCH)).unwrap();
    let expected = json!({
        "metadata": { "resourceVersion": "7", "annotations": { ANNOTATION_SUCCESSOR: "nat-b" } },
        "spec": { "holderIdentity": null, "leaseTransitions": 3, "renewTime": "1970-01-01T00:00:00.000000Z" },
    });
    assert_eq!(patch, expected);
    assert!(lease_patch(&Write { term: u64::MAX, ..write }, MicroTime(Timestamp::UNIX_EPOCH)).is_none());
}

fn hold_lease(version: u64, holder: Option<&str>, term: u64) -> crate::hold::Lease {
    crate::hold::Lease { version, holder: holder.map(str::to_owned), term, successor: None }
}

#[test]
fn members_whose_pods_are_gone_are_found_by_their_uids() {
    let lease: Lease = serde_json::from_value(json!({ "metadata": { "name": "nat-gateways", "annotations": {
        "gateway.egress.coil.cybozu.com/a": "{\"uid\":\"1\"}", "gateway.egress.coil.cybozu.com/b": "{\"uid\":\"2\"}",
        "gateway.egress.coil.cybozu.com/c": "nonsense", "other": "x",
    } } }))
    .unwrap();
    let pods = [("a", "1"), ("b", "3")].map(|(name, uid)| (name.to_owned(), uid.to_owned()));
    let gone: Vec<String> = gone_members(&lease, &pods.into()).into_iter().map(|(name, _)| name).collect();
    assert_eq!(gone, ["b", "c"]);
}

#[test]
fn a_member_is_asked_to_leave_once_and_to_stay_again() {
    let written = r#"{"uid":"1","addresses":["10.0.0.1"],"key":"AA=="}"#;
    let asked = asking_to_leave(written, true).unwrap();
    assert!(asked.contains(r#""leave":true"#) && asked.contains(r#""uid":"1""#), "{asked}");
    assert_eq!(asking_to_leave(&asked, true), None);
    let stays: Value = serde_json::from_str(&asking_to_leave(&asked, false).unwrap()).unwrap();
    assert_eq!(stays, serde_json::from_str::<Value>(written).unwrap());
    assert_eq!((asking_to_leave(written, false), asking_to_leave("nonsense", true)), (None, None));
}

#[test]
fn gateways_may_use_their_leases_and_no_others() {
    let made = role("n", &BTreeSet::from(["nat-gateways".to_owned()]));
    let rules = made.rules.unwrap();
    assert_eq!(rules[0].resource_names, Some(vec!["nat-gateways".to_owned()]));
    assert!(!rules[0].verbs.iter().any(|verb| verb == "create" || verb == "delete"));
    assert_eq!(role("n", &BTreeSet::new()).rules, Some(Vec::new()));
}

#[test]
fn an_address_gets_a_lease_three_seconds_after_another_one_with_it_is_gone() {
    let object = egress("nat", "2026-01-01T00:00:00Z", &[]);
    let wanted = vec![vec!["192.0.2.1".parse().unwrap()]];
    let at = Duration::from_millis;
    let mut resting = Resting::default();
    resting.look([], at(0));
    let first = plan(&object, &wanted, &[], &resting, at(0));
    let names =
        |leases: &[Lease]| leases.iter().filter_map(|it| it.metadata.name.clone()).collect::<Vec<_>>();
    assert_eq!((names(&first.create), first.waits), (vec!["nat-gateways".to_owned()], true), "not known yet");
    let made = plan(&object, &wanted, &[], &resting, at(3000));
    assert_eq!((names(&made.create).len(), made.waits, made.slots), (2, false, vec![Vec::new()]));

    // Another Egress has had it until now.
    let other = leases(&egress("old", "2026-01-01T00:00:00Z", &[]), &wanted);
    resting.look(other.values(), at(4000));
    resting.look([], at(4200));
    let waiting = plan(&object, &wanted, &[], &resting, at(6900));
    assert!(waiting.waits && waiting.blocked.is_none(), "its Lease is gone");
    assert_eq!(plan(&object, &wanted, &[], &resting, at(7000)).create.len(), 2);
}

#[test]
fn a_lease_that_keeps_an_address_from_another_egress_is_named() {
    let object = egress("nat", "2026-01-01T00:00:00Z", &[]);
    let wanted = vec![vec!["192.0.2.1".parse().unwrap()]];
    let mut resting = Resting::default();
    let other = leases(&egress("copy", "2026-01-01T00:00:00Z", &[]), &wanted);
    resting.look(other.values(), Duration::ZERO);
    let now = Duration::from_secs(60);
    resting.look(other.values(), now);
    let blocked = plan(&object, &wanted, &[], &resting, now).blocked.unwrap();
    assert!(blocked.contains("n/copy-source-0") && blocked.contains("192.0.2.1"), "{blocked}");
}

#[test]
fn an_address_that_is_in_use_outlives_a_range_of_the_cluster_around_it() {
    let object = egress("nat", "2026-01-01T00:00:00Z", &["192.0.2.1", "192.0.2.2"]);
    let ranges = Ranges {
        permitted: vec!["192.0.2.0/24".parse().unwrap()],
        cluster: vec![("192.0.2.0/30".parse().unwrap(), "an address of Node n1".to_owned())],
    };
    let claimed = Claimed::new([&object]);
    let made = leases(&object, &[vec!["192.0.2.1".parse().unwrap()]]);
    let live: Vec<&Lease> = made.values().collect();
    let (slots, refusals) = permit(&object, &ranges, &claimed, &live);
    assert_eq!(texts(&slots), ["192.0.2.1", ""]);
    assert_eq!(refusals.iter().map(Refusal::reason).collect::<Vec<_>>(), ["SourceAddressInCluster"; 2]);
}

#[test]
fn what_a_lease_is_for_never_changes_and_the_status_shows_what_has_one() {
    let object = egress("nat", "2026-01-01T00:00:00Z", &[]);
    let addresses =
        |texts: &[&str]| texts.iter().map(|it| vec![it.parse().unwrap()]).collect::<Vec<Vec<IpAddr>>>();
    let mut resting = Resting::default();
    resting.look([], Duration::ZERO);
    let now = Duration::from_secs(9);
    let mut live: Vec<Lease> =
        leases(&object, &addresses(&["192.0.2.1", "192.0.2.2"])).into_values().collect();
    for lease in &mut live {
        lease.metadata.resource_version = Some("1".to_owned());
    }
    let spec = json!({ "holderIdentity": "pod-a", "leaseTransitions": 4 });
    live[1].spec = serde_json::from_value(spec).unwrap();
    let long = json!({ "holderIdentity": "x".repeat(254) });
    live[2].spec = serde_json::from_value(long).unwrap();
    let live: Vec<&Lease> = live.iter().collect();
    let same = plan(&object, &addresses(&["192.0.2.1", "192.0.2.2"]), &live, &resting, now);
    assert_eq!(
        (same.create.len(), same.delete.len(), texts(&same.slots)),
        (0, 0, vec!["192.0.2.1".to_owned(), "192.0.2.2".to_owned()])
    );
    assert_eq!(same.holders, [Some("pod-a".to_owned()), None]);
    let swapped = plan(&object, &addresses(&["192.0.2.1", "192.0.2.3"]), &live, &resting, now);
    assert_eq!(
        (swapped.create.len(), swapped.delete.len(), texts(&swapped.slots)),
        (0, 1, vec!["192.0.2.1".to_owned(), String::new()])
    );
    let fewer = plan(&object, &addresses(&["192.0.2.1"]), &live, &resting, now);
    assert_eq!(fewer.delete.len(), 1);
    let none = plan(&object, &[], &live, &resting, now);
    assert_eq!((none.delete.len(), none.names.len(), none.create.len()), (3, 0, 0));
}

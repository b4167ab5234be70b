//! Leases of an Egress with source addresses, as its gateways and the controller read them: who the gateways are, and which addresses a slot has
//! and who holds it. A line `NAME: VALUE` each: `name`, `version`, `holder` and `term` of the Lease, and annotations.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use fairlead_source_addresses::hold::{Write, WriteKind};
use fairlead_source_addresses::leases::{
    ANNOTATION_ADDRESSES, ANNOTATION_MEMBER_PREFIX, addresses_of, gone_members, lease_patch, slot_lease,
    slot_of, source_lease,
};
use fairlead_source_addresses::members::{MAX_MEMBERS, Member, members};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (mut lease, mut spec) = (Lease::default(), LeaseSpec::default());
    let mut annotations = BTreeMap::new();
    for (name, value) in text.lines().filter_map(|line| line.split_once(": ")) {
        match name {
            "name" => lease.metadata.name = Some(value.to_owned()),
            "version" => lease.metadata.resource_version = Some(value.to_owned()),
            "holder" => spec.holder_identity = Some(value.to_owned()),
            "term" => spec.lease_transitions = value.parse().ok(),
            _ => drop(annotations.insert(name.to_owned(), value.to_owned())),
        }
    }
    lease.spec = Some(spec);
    lease.metadata.annotations = Some(annotations.clone());
    of_members(&lease, &annotations);
    of_slot(&lease);
});

fn of_members(lease: &Lease, annotations: &BTreeMap<String, String>) {
    let (found, wrong) = members(annotations);
    let named = annotations.keys().filter(|name| name.starts_with(ANNOTATION_MEMBER_PREFIX)).count();
    assert!(found.len() <= MAX_MEMBERS && found.len() + wrong.len() <= named);
    let encoded =
        |(pod, member): (&String, &Member)| (format!("{ANNOTATION_MEMBER_PREFIX}{pod}"), member.encode());
    assert_eq!(members(&found.iter().map(encoded).collect()), (found.clone(), Vec::new()));
    // The controller knows all that gateways connect to, and removes those without a pod.
    let gone = gone_members(lease, &BTreeSet::new());
    assert_eq!(gone.len(), named);
    assert!(found.iter().all(|(pod, member)| gone.contains(&(pod.clone(), member.uid.clone()))));
    assert_eq!(gone_members(lease, &gone.into_iter().collect()), []);
}

fn of_slot(lease: &Lease) {
    let name = lease.metadata.name.as_deref().unwrap_or_default();
    if let Some(slot) = slot_of("nat", name) {
        assert_eq!(source_lease("nat", slot), name);
    }
    let Some(read) = slot_lease(lease) else { return };
    let texts: Vec<String> = read.addresses.iter().map(ToString::to_string).collect();
    let mut again = Lease::default();
    again.metadata.annotations = Some([(ANNOTATION_ADDRESSES.to_owned(), texts.join(","))].into());
    assert_eq!(addresses_of(&again), read.addresses);
    let is_said = |text: &Option<String>| text.as_ref().is_none_or(|text| !text.is_empty());
    assert!(is_said(&read.lease.holder) && is_said(&read.lease.successor));
    let write = Write {
        slot: 0,
        kind: WriteKind::Renew,
        base: read.lease.version,
        holder: read.lease.holder,
        term: read.lease.term,
        successor: read.lease.successor,
        began: std::time::Duration::ZERO,
    };
    assert!(lease_patch(&write, MicroTime(Timestamp::UNIX_EPOCH)).is_some(), "what was read can be written");
}

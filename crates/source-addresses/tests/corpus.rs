//! Every input that the fuzz target `egress_leases` keeps is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_source_addresses::leases::slot_lease;
use fairlead_source_addresses::members::members;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};

/// The kept inputs of a target with their names, in order.
fn kept(target: &str) -> Vec<(String, String)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let mut inputs: Vec<_> = files
        .map(|file| (file.file_name().into_string().unwrap(), std::fs::read_to_string(file.path()).unwrap()))
        .collect();
    inputs.sort();
    inputs
}

/// The Lease of an input of the target `egress_leases`.
fn lease(text: &str) -> Lease {
    let (mut lease, mut spec) = (Lease::default(), LeaseSpec::default());
    for (name, value) in text.lines().filter_map(|line| line.split_once(": ")) {
        let value = value.to_owned();
        match name {
            "name" => lease.metadata.name = Some(value),
            "version" => lease.metadata.resource_version = Some(value),
            "holder" => spec.holder_identity = Some(value),
            "term" => spec.lease_transitions = value.parse().ok(),
            _ => drop(lease.metadata.annotations.get_or_insert_default().insert(name.to_owned(), value)),
        }
    }
    Lease { spec: Some(spec), ..lease }
}

#[test]
fn kept_leases_of_slots_never_panic_and_some_are_good() {
    let results = kept("egress_leases").into_iter().map(|(name, text)| {
        let read = slot_lease(&lease(&text)).map(|slot| {
            let hold = slot.lease;
            (slot.addresses.len(), hold.holder.unwrap_or_default(), hold.term, hold.successor.is_some())
        });
        (name, read)
    });
    let expected = [
        ("held_slot", Some((2, "nat-a", 4, false))),
        ("hostile_slot", Some((0, "", 0, false))),
        ("members", Some((0, "", 0, false))),
        ("no_version", None),
        ("released_slot", Some((1, "", 4, true))),
        ("too_many_members", None),
        ("wrong_members", None),
    ];
    let expected = expected.map(|(name, read)| {
        let read =
            read.map(|(addresses, holder, term, is_named)| (addresses, holder.to_owned(), term, is_named));
        (name.to_owned(), read)
    });
    assert_eq!(results.collect::<Vec<_>>(), expected);
}

#[test]
fn kept_lists_of_gateways_never_panic_and_some_are_good() {
    let results = kept("egress_leases").into_iter().map(|(name, text)| {
        let pairs = text.lines().filter_map(|line| line.split_once(": "));
        let annotations = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let (found, wrong) = members(&annotations);
        (name, found.len(), wrong.len())
    });
    let expected = [
        ("held_slot", 0, 0),
        ("hostile_slot", 0, 0),
        ("members", 2, 0),
        ("no_version", 0, 0),
        ("released_slot", 0, 0),
        ("too_many_members", 64, 1),
        ("wrong_members", 0, 7),
    ];
    assert_eq!(
        results.collect::<Vec<_>>(),
        expected.map(|(name, found, wrong)| (name.to_owned(), found, wrong))
    );
}

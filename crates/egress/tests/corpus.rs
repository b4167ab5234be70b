//! Every input that the fuzz targets `egress_annotation`, `egress_destinations`, `egress_options`, `egress_selectors` and `egress_token`
//! keep is read again, without a fuzzer.
#![cfg(test)]

use std::path::Path;

use fairlead_api::names::ANNOTATION_EGRESS_ALLOW_SELECTORS;
use fairlead_api::resources::EgressSelector;
use fairlead_egress::destinations::Destinations;
use fairlead_egress::options::Target;
use fairlead_egress::selectors::{Candidate, Labels, PodSelectors};
use fairlead_egress::{EgressName, annotation, lookup, registration};

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

#[test]
fn kept_annotations_never_panic_and_some_are_good() {
    let results = kept("egress_annotation").into_iter().map(|(name, text)| {
        let pairs = text.lines().filter_map(|line| line.split_once(": "));
        let annotations = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        (name, annotation::chosen(&annotations).map(|chosen| chosen.len()).ok())
    });
    let expected = [
        ("empty_name", None),
        ("namespace_with_dot", None),
        ("no_names", None),
        ("other", Some(0)),
        ("two_gateways", Some(3)),
    ];
    assert_eq!(results.collect::<Vec<_>>(), expected.map(|(name, chosen)| (name.to_owned(), chosen)));
}

#[test]
fn kept_destinations_never_panic_and_some_are_good() {
    let results = kept("egress_destinations").into_iter().map(|(name, text)| {
        let entries: Vec<String> = text.split('\n').map(str::to_owned).collect();
        (name, Destinations::parse(&entries, &[]).map(|it| it.prefixes.len()).ok())
    });
    let expected = [
        ("address_without_length", None),
        ("both_families", Some(3)),
        ("empty", None),
        ("too_long", None),
        ("wide_and_narrow", Some(3)),
    ];
    assert_eq!(results.collect::<Vec<_>>(), expected.map(|(name, count)| (name.to_owned(), count)));
}

#[test]
fn kept_tokens_never_panic_and_some_are_good() {
    let results = kept("egress_token").into_iter().map(|(name, text)| {
        let (now, token) = text.as_bytes().split_first_chunk().unwrap();
        let token = std::str::from_utf8(token).unwrap();
        (name, registration::lifetime(token, u64::from_be_bytes(*now)).map(|lifetime| lifetime.as_secs()))
    });
    let expected = [("no_claims", None), ("valid", Some(3500))];
    assert_eq!(results.collect::<Vec<_>>(), expected.map(|(name, lifetime)| (name.to_owned(), lifetime)));
}

#[test]
fn kept_options_never_panic_and_some_are_good() {
    let results = kept("egress_options").into_iter().map(|(name, text)| {
        let targets = text.lines().filter(|line| line.parse::<Target>().is_ok()).count();
        (name, targets, text.lines().filter(|line| lookup::parse(line).is_ok()).count())
    });
    let expected = [("query", 0, 1), ("refused", 0, 0), ("targets", 3, 0)];
    assert_eq!(
        results.collect::<Vec<_>>(),
        expected.map(|(name, targets, queries)| (name.to_owned(), targets, queries))
    );
}

/// Result of the target `egress_selectors` for an input: how many selectors are invalid, and whether the pod is selected.
fn selected(text: &str) -> Option<(usize, bool)> {
    let mut parts = text.splitn(7, '\n');
    let mut part = || parts.next().unwrap_or_default();
    let egress = EgressName::parse(part())?;
    let labels = |text: &str| -> Labels {
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    };
    let (namespace, consent, of_namespace, of_pod) = (part(), part(), labels(part()), labels(part()));
    let allowed = Some(part()).filter(|text| !text.is_empty());
    let allowed: Option<Vec<String>> = allowed.map(|text| text.split(',').map(str::to_owned).collect());
    let given: Vec<EgressSelector> = serde_json::from_str(part()).ok()?;
    let (selectors, invalid) = PodSelectors::new(&given, allowed.as_deref());
    let annotations = Labels::from([(ANNOTATION_EGRESS_ALLOW_SELECTORS.to_owned(), consent.to_owned())]);
    let candidate = Candidate {
        namespace,
        namespace_labels: Some(&of_namespace),
        namespace_annotations: Some(&annotations),
        labels: Some(&of_pod),
    };
    Some((invalid.len(), selectors.selects(&egress, candidate)))
}

#[test]
fn kept_selectors_never_panic_and_some_are_good() {
    let results = kept("egress_selectors").into_iter().map(|(name, text)| (name, selected(&text)));
    let expected = [
        ("consent_of_other", Some((0, false))),
        ("consented", Some((0, true))),
        ("invalid_selectors", Some((4, false))),
        ("no_list", None),
        ("not_allowed", Some((0, false))),
        ("own_namespace", Some((0, true))),
    ];
    assert_eq!(results.collect::<Vec<_>>(), expected.map(|(name, result)| (name.to_owned(), result)));
}

//! `spec.selectors` of an Egress, and the consent of Namespaces. Lines: the name of the Egress, the pod's namespace, the consent, labels of
//! the Namespace and of the pod as `KEY=VALUE,...`, allowed namespaces; what follows is the list of selectors in JSON.
#![no_main]

use fairlead_api::names::ANNOTATION_EGRESS_ALLOW_SELECTORS;
use fairlead_api::resources::EgressSelector;
use fairlead_egress::EgressName;
use fairlead_egress::selectors::{Candidate, Labels, PodSelectors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut parts = text.splitn(7, '\n');
    let mut part = || parts.next().unwrap_or_default();
    let Some(egress) = EgressName::parse(part()) else { return };
    assert_eq!(EgressName::parse(&egress.to_string()), Some(egress.clone()));
    let (namespace, consent, of_namespace, of_pod) = (part(), part(), labels(part()), labels(part()));
    let allowed = Some(part()).filter(|text| !text.is_empty());
    let allowed: Option<Vec<String>> = allowed.map(|text| text.split(',').map(str::to_owned).collect());
    let Ok(given) = serde_json::from_str::<Vec<EgressSelector>>(part()) else { return };
    let (selectors, invalid) = PodSelectors::new(&given, allowed.as_deref());
    assert_eq!(selectors.is_empty(), invalid.len() == given.len());
    assert!(invalid.iter().all(|it| it.at < given.len() && !it.problem.is_empty()));

    let annotations = [(ANNOTATION_EGRESS_ALLOW_SELECTORS.to_owned(), consent.to_owned())].into();
    let candidate = |consents: bool| Candidate {
        namespace,
        namespace_labels: Some(&of_namespace),
        namespace_annotations: consents.then_some(&annotations),
        labels: Some(&of_pod),
    };
    let is_own = namespace == egress.namespace;
    assert!(is_own || !selectors.selects(&egress, candidate(false)), "no Namespace has consented");
    if selectors.selects(&egress, candidate(true)) {
        let all = format!("{}/*", egress.namespace);
        let consents =
            consent.split(',').any(|it| [&egress.to_string(), &all].contains(&&it.trim().to_owned()));
        assert!(is_own || (consents && selectors.has_namespaces()));
        assert!(allowed.is_none_or(|allowed| allowed.iter().any(|it| it == namespace)));
        assert!(invalid.len() < given.len());
    }
});

fn labels(text: &str) -> Labels {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

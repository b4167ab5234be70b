//! Annotations of pods that concern egress.

use std::collections::BTreeMap;

use fairlead_api::names::ANNOTATION_EGRESS_PREFIX;

/// The annotations by which a pod asks for gateways.
pub(crate) fn egress_annotations(annotations: Option<&BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let all = annotations.into_iter().flatten();
    let ours = all.filter(|(name, _)| name.starts_with(ANNOTATION_EGRESS_PREFIX));
    ours.map(|(name, value)| (name.clone(), value.clone())).collect()
}

//! Selection of pods by Egresses (`spec.selectors`).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::EgressName;
use crate::selectors::{Candidate, Labels, PodSelectors};

/// Egresses that select pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selectors(BTreeMap<EgressName, PodSelectors>);

impl Selectors {
    /// Selectors of these Egresses; those that select no pods are left out.
    pub fn of(egresses: impl IntoIterator<Item = (EgressName, PodSelectors)>) -> Self {
        Self(egresses.into_iter().filter(|(_, selectors)| !selectors.is_empty()).collect())
    }

    /// Whether labels and annotations of Namespaces decide.
    pub fn need_namespaces(&self) -> bool {
        self.0.values().any(PodSelectors::has_namespaces)
    }

    /// The Egresses that select a pod with these labels in this namespace, whose metadata are `metadata`.
    pub fn select(
        &self,
        namespace: &str,
        metadata: Option<&ObjectMeta>,
        labels: Option<&Labels>,
    ) -> BTreeSet<EgressName> {
        let candidate = Candidate {
            namespace,
            namespace_labels: metadata.and_then(|metadata| metadata.labels.as_ref()),
            namespace_annotations: metadata.and_then(|metadata| metadata.annotations.as_ref()),
            labels,
        };
        let selecting = self.0.iter().filter(|(egress, selectors)| selectors.selects(egress, candidate));
        selecting.map(|(egress, _)| egress.clone()).collect()
    }
}

//! Which Egresses select a pod (`spec.selectors`), for the node program and for the command line. Pure.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use fairlead_egress::EgressName;
use fairlead_egress::selectors::{Candidate, Labels, PodSelectors};
use kube::api::ObjectMeta;

use super::objects::CachedEgress;

/// Egresses that select pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selectors(BTreeMap<EgressName, PodSelectors>);

impl Selectors {
    /// Those of these Egresses.
    pub(crate) fn of(egresses: impl IntoIterator<Item = impl Borrow<CachedEgress>>) -> Self {
        let of_egress = |egress: &CachedEgress| {
            (!egress.selectors.is_empty()).then(|| (egress.name.clone(), egress.selectors.clone()))
        };
        Self(egresses.into_iter().filter_map(|egress| of_egress(egress.borrow())).collect())
    }

    /// Whether labels and annotations of Namespaces decide.
    pub(crate) fn need_namespaces(&self) -> bool {
        self.0.values().any(PodSelectors::has_namespaces)
    }

    /// The Egresses that select a pod with these labels in this namespace, whose metadata are `metadata`.
    pub(crate) fn select(
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

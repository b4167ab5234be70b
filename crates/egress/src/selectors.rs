//! The pods that an Egress selects (`spec.selectors`), without an annotation of theirs.
//!
//! A pod of the Egress's namespace is selected by its labels. One of another namespace is selected only where a selector names namespaces by
//! their labels, `spec.allowedNamespaces` has its namespace, and the Namespace consents by its annotation
//! [`ANNOTATION_EGRESS_ALLOW_SELECTORS`]: who may write an Egress must not be able to take over the packets of all pods.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::names::ANNOTATION_EGRESS_ALLOW_SELECTORS;
use fairlead_api::resources::{EgressSelector, EgressSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use crate::EgressName;

/// Labels of a pod or Namespace.
pub type Labels = BTreeMap<String, String>;

/// A selector that selects nothing, as it makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("spec.selectors[{at}].{which}: {problem}; this selector selects no pod")]
pub struct InvalidSelector {
    /// Position in the list, from zero.
    pub at: usize,
    /// `namespaceSelector` or `podSelector`.
    pub which: &'static str,
    /// Error of the selector, in words.
    pub problem: String,
}

/// Pods of one Egress.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodSelectors {
    of: Vec<PodSelector>,
    allowed_namespaces: Option<BTreeSet<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PodSelector {
    /// `None` is the namespace of the Egress.
    namespaces: Option<Requirements>,
    pods: Requirements,
}

type Requirements = Vec<Requirement>;

/// Requirement that a label has to meet.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Requirement {
    In(String, BTreeSet<String>),
    NotIn(String, BTreeSet<String>),
    Exists(String),
    DoesNotExist(String),
}

impl Requirement {
    fn is_met(&self, labels: &Labels) -> bool {
        match self {
            Self::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Self::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
            Self::Exists(key) => labels.contains_key(key),
            Self::DoesNotExist(key) => !labels.contains_key(key),
        }
    }
}

/// A pod that may be selected.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Name of its Namespace.
    pub namespace: &'a str,
    /// Labels of its Namespace.
    pub namespace_labels: Option<&'a Labels>,
    /// Annotations of its Namespace.
    pub namespace_annotations: Option<&'a Labels>,
    /// Labels of the pod.
    pub labels: Option<&'a Labels>,
}

impl PodSelectors {
    /// Selectors of an Egress, and those that are left out.
    pub fn of(spec: &EgressSpec) -> (Self, Vec<InvalidSelector>) {
        Self::new(spec.selectors.as_deref().unwrap_or_default(), spec.allowed_namespaces.as_deref())
    }

    /// As [`Self::of`], from `spec.selectors` and `spec.allowedNamespaces`.
    pub fn new(
        selectors: &[EgressSelector],
        allowed_namespaces: Option<&[String]>,
    ) -> (Self, Vec<InvalidSelector>) {
        let (mut of, mut invalid) = (Vec::new(), Vec::new());
        for (at, selector) in selectors.iter().enumerate() {
            match compiled(at, selector) {
                Ok(selector) => of.push(selector),
                Err(error) => invalid.push(error),
            }
        }
        let allowed_namespaces = allowed_namespaces.map(|all| all.iter().cloned().collect());
        (Self { of, allowed_namespaces }, invalid)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Whether Namespaces have to be known.
    pub fn has_namespaces(&self) -> bool {
        self.of.iter().any(|selector| selector.namespaces.is_some())
    }

    /// Whether the Egress of this name selects a pod.
    pub fn selects(&self, egress: &EgressName, pod: Candidate<'_>) -> bool {
        let is_allowed = self.allowed_namespaces.as_ref().is_none_or(|all| all.contains(pod.namespace));
        let may_select = pod.namespace == egress.namespace || consents(pod.namespace_annotations, egress);
        is_allowed && may_select && self.of.iter().any(|selector| selector.matches(egress, pod))
    }
}

impl PodSelector {
    fn matches(&self, egress: &EgressName, pod: Candidate<'_>) -> bool {
        let none = Labels::new();
        let are_met = |requirements: &Requirements, labels: Option<&Labels>| {
            requirements.iter().all(|requirement| requirement.is_met(labels.unwrap_or(&none)))
        };
        let is_namespace = match &self.namespaces {
            Some(requirements) => are_met(requirements, pod.namespace_labels),
            None => pod.namespace == egress.namespace,
        };
        is_namespace && are_met(&self.pods, pod.labels)
    }
}

/// Whether a Namespace with these annotations lets an Egress of another one select its pods.
fn consents(annotations: Option<&Labels>, egress: &EgressName) -> bool {
    let list = annotations.and_then(|all| all.get(ANNOTATION_EGRESS_ALLOW_SELECTORS));
    list.into_iter().flat_map(|list| list.split(',')).any(|entry| {
        entry.trim().split_once('/').is_some_and(|(namespace, name)| {
            namespace == egress.namespace && (name == "*" || name == egress.name)
        })
    })
}

fn compiled(at: usize, selector: &EgressSelector) -> Result<PodSelector, InvalidSelector> {
    let of = |which: &'static str, selector: &LabelSelector| {
        requirements(selector).map_err(|problem| InvalidSelector { at, which, problem })
    };
    let namespaces = selector.namespace_selector.as_ref();
    let namespaces = namespaces.map(|selector| of("namespaceSelector", selector)).transpose()?;
    let pods = selector.pod_selector.as_ref().map(|selector| of("podSelector", selector)).transpose()?;
    if namespaces.is_none() && pods.is_none() {
        let problem = "namespaceSelector or podSelector must be given".to_owned();
        return Err(InvalidSelector { at, which: "podSelector", problem });
    }
    Ok(PodSelector { namespaces, pods: pods.unwrap_or_default() })
}

fn requirements(selector: &LabelSelector) -> Result<Requirements, String> {
    let labels = selector.match_labels.iter().flatten();
    let labels = labels.map(|(key, value)| Ok(Requirement::In(key.clone(), BTreeSet::from([value.clone()]))));
    labels.chain(selector.match_expressions.iter().flatten().map(requirement)).collect()
}

fn requirement(expression: &LabelSelectorRequirement) -> Result<Requirement, String> {
    let LabelSelectorRequirement { key, operator, values } = expression;
    let values: BTreeSet<String> = values.iter().flatten().cloned().collect();
    let key = key.clone();
    match (operator.as_str(), values.is_empty()) {
        ("In", false) => Ok(Requirement::In(key, values)),
        ("NotIn", false) => Ok(Requirement::NotIn(key, values)),
        ("Exists", true) => Ok(Requirement::Exists(key)),
        ("DoesNotExist", true) => Ok(Requirement::DoesNotExist(key)),
        ("In" | "NotIn", true) => Err(format!("operator {operator} for label {key:?} needs values")),
        ("Exists" | "DoesNotExist", false) => {
            Err(format!("operator {operator} for label {key:?} takes no values"))
        }
        _ => Err(format!(
            "{operator:?} for label {key:?} is no operator: In, NotIn, Exists and DoesNotExist are"
        )),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn spec(selectors: Value, more: Value) -> EgressSpec {
        let mut spec = json!({ "destinations": ["0.0.0.0/0"], "selectors": selectors });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(spec).unwrap()
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn nat() -> EgressName {
        EgressName { namespace: "internet".to_owned(), name: "nat".to_owned() }
    }

    /// Whether a pod with the label `app` in a namespace with the label `team`, and with this consent, is selected.
    fn selected(spec: &EgressSpec, namespace: &str, team: &str, consent: &str, app: &str) -> bool {
        let (of_namespace, of_pod) = (labels(&[("team", team)]), labels(&[("app", app)]));
        let annotations = labels(&[(ANNOTATION_EGRESS_ALLOW_SELECTORS, consent)]);
        let candidate = Candidate {
            namespace,
            namespace_labels: Some(&of_namespace),
            namespace_annotations: Some(&annotations),
            labels: Some(&of_pod),
        };
        let (selectors, invalid) = PodSelectors::of(spec);
        assert_eq!(invalid, []);
        selectors.selects(&nat(), candidate)
    }

    #[test]
    fn pods_of_the_own_namespace_need_no_consent_and_others_do() {
        let own = spec(json!([{ "podSelector": { "matchLabels": { "app": "web" } } }]), json!({}));
        assert!(selected(&own, "internet", "a", "", "web"));
        assert!(!selected(&own, "internet", "a", "", "db"));
        assert!(!selected(&own, "shop", "a", "internet/nat", "web"), "it names no namespaces");
        let both = json!([{
            "namespaceSelector": { "matchExpressions": [{ "key": "team", "operator": "In", "values": ["a", "b"] }] },
            "podSelector": { "matchExpressions": [{ "key": "app", "operator": "NotIn", "values": ["db"] }] },
        }]);
        let all = spec(both.clone(), json!({}));
        for (namespace, team, consent, app, expected) in [
            ("shop", "a", "internet/nat", "web", true),
            ("shop", "a", "x/y, internet/*", "web", true),
            ("shop", "a", "internet/other", "web", false),
            ("shop", "a", "*/*", "web", false),
            ("shop", "a", "", "web", false),
            ("shop", "c", "internet/nat", "web", false),
            ("shop", "a", "internet/nat", "db", false),
            ("internet", "b", "", "web", true),
        ] {
            assert_eq!(
                selected(&all, namespace, team, consent, app),
                expected,
                "{namespace} {team} {consent} {app}"
            );
        }
        let allowed = spec(both, json!({ "allowedNamespaces": ["bank"] }));
        assert!(!selected(&allowed, "shop", "a", "internet/nat", "web"));
        assert!(selected(&allowed, "bank", "a", "internet/nat", "web"));
    }

    #[test]
    fn an_invalid_selector_is_named_and_the_others_work() {
        let expression = |operator: &str, values: Value| json!({ "podSelector": { "matchExpressions": [{ "key": "k", "operator": operator, "values": values }] } });
        let all = json!([
            expression("in", json!(["v"])),
            expression("In", json!([])),
            expression("Exists", json!(["v"])),
            {},
            { "podSelector": {} },
        ]);
        let (selectors, invalid) = PodSelectors::of(&spec(all, json!({})));
        let said: Vec<String> = invalid.iter().map(ToString::to_string).collect();
        assert_eq!(
            said[0],
            "spec.selectors[0].podSelector: \"in\" for label \"k\" is no operator: In, NotIn, Exists and DoesNotExist are; \
             this selector selects no pod"
        );
        assert!(said[1].contains("needs values") && said[2].contains("takes no values"), "{said:?}");
        assert!(said.len() == 4 && said[3].contains("must be given"), "{said:?}");
        assert!(!selectors.is_empty() && !selectors.has_namespaces());
        let candidate = Candidate {
            namespace: "internet",
            namespace_labels: None,
            namespace_annotations: None,
            labels: None,
        };
        assert!(selectors.selects(&nat(), candidate));
    }

    proptest! {
        #[test]
        fn no_pod_of_another_namespace_is_selected_without_consent(
            operator in prop::sample::select(vec!["In", "NotIn", "Exists", "DoesNotExist"]),
            names_namespaces: bool, values in prop::collection::vec("[ab]", 0..3), app in "[abc]", team in "[abc]",
            consent in "[a-z/*, ]{0,20}",
        ) {
            let expressions = json!([{ "key": "app", "operator": operator, "values": values }]);
            let mut selector = json!({ "podSelector": { "matchExpressions": expressions } });
            if names_namespaces {
                selector["namespaceSelector"] = json!({});
            }
            let (selectors, _) = PodSelectors::of(&spec(json!([selector]), json!({})));
            let (of_namespace, of_pod) = (labels(&[("team", &team)]), labels(&[("app", &app)]));
            let annotations = labels(&[(ANNOTATION_EGRESS_ALLOW_SELECTORS, &consent)]);
            let candidate = Candidate {
                namespace: "shop",
                namespace_labels: Some(&of_namespace),
                namespace_annotations: Some(&annotations),
                labels: Some(&of_pod),
            };
            let consented = consent.split(',').any(|it| ["internet/nat", "internet/*"].contains(&it.trim()));
            prop_assert!(!selectors.selects(&nat(), candidate) || (consented && names_namespaces));
        }
    }
}

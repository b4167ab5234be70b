//! The annotations `egress.coil.cybozu.com/NAMESPACE: NAME[,NAME…]` by which a pod asks for egress gateways (Coil v2).
//!
//! Unlike Coil, spaces around names are allowed.

use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::names::{ANNOTATION_EGRESS_PREFIX, is_dns_label, is_object_name};

use crate::EgressName;

/// Bytes that the value of one annotation may have: more than 16 names of the greatest length.
pub const MAX_VALUE: usize = 4096;
/// Characters of a value that an error message quotes.
const QUOTED: usize = 64;

/// An annotation that names no gateways.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation}: {problem} in {value:?}")]
pub struct InvalidAnnotation {
    /// Name of the annotation.
    pub annotation: String,
    /// Value of the annotation, or the beginning of a long one.
    pub value: String,
    /// Error of the value or of the name.
    pub problem: AnnotationProblem,
}

/// Error of an annotation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnnotationProblem {
    /// Nothing between two commas, or no value at all.
    #[error("an empty name")]
    EmptyName,
    /// The text after the prefix cannot be a namespace (RFC 1123, DNS label).
    #[error("{0:?} cannot be the name of a namespace")]
    InvalidNamespace(String),
    /// It cannot be the name of an Egress (RFC 1123, DNS subdomain).
    #[error("{0:?} cannot be the name of an Egress")]
    InvalidName(String),
    /// The value has more than [`MAX_VALUE`] bytes.
    #[error("more than {MAX_VALUE} bytes")]
    TooLong,
}

/// The Egresses that a pod with these annotations asks for, in order.
///
/// # Errors
/// The first annotation by name that is invalid. A pod that asks for gateways and does not get all of them must not start:
/// its packets would leave with another source address than its author expects.
pub fn chosen(annotations: &BTreeMap<String, String>) -> Result<BTreeSet<EgressName>, InvalidAnnotation> {
    let mut chosen = BTreeSet::new();
    for (annotation, value) in annotations {
        let Some(namespace) = annotation.strip_prefix(ANNOTATION_EGRESS_PREFIX) else { continue };
        let names = names(namespace, value).map_err(|problem| InvalidAnnotation {
            annotation: annotation.clone(),
            value: beginning(value),
            problem,
        })?;
        let of_namespace = |name| EgressName { namespace: namespace.to_owned(), name };
        chosen.extend(names.into_iter().map(of_namespace));
    }
    Ok(chosen)
}

fn names(namespace: &str, value: &str) -> Result<Vec<String>, AnnotationProblem> {
    if !is_dns_label(namespace) {
        return Err(AnnotationProblem::InvalidNamespace(beginning(namespace)));
    }
    if value.len() > MAX_VALUE {
        return Err(AnnotationProblem::TooLong);
    }
    let name = |name: &str| match name.trim() {
        "" => Err(AnnotationProblem::EmptyName),
        name if is_object_name(name) => Ok(name.to_owned()),
        name => Err(AnnotationProblem::InvalidName(beginning(name))),
    };
    value.split(',').map(name).collect()
}

/// Part of a text that is quoted in messages: at most its first [`QUOTED`] characters.
fn beginning(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(pairs: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let annotations = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let chosen = chosen(&annotations.collect()).map_err(|error| error.to_string())?;
        Ok(chosen.iter().map(EgressName::to_string).collect())
    }

    #[test]
    fn names_are_sorted_and_spaces_are_tolerated() {
        let chosen = parsed(&[
            ("egress.coil.cybozu.com/internet-egress", " b , a,b\t"),
            ("egress.coil.cybozu.com/domestic-egress", "nat"),
            ("coil.cybozu.com/pool", "?"),
        ]);
        let expected = ["domestic-egress/nat", "internet-egress/a", "internet-egress/b"];
        assert_eq!(chosen.unwrap(), expected);
        assert_eq!(parsed(&[]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn what_is_wrong_is_named_with_annotation_and_value() {
        let long = "a,".repeat(MAX_VALUE);
        let quoted = format!("{:?}", format!("{}…", "a,".repeat(QUOTED / 2)));
        let too_long = format!("more than 4096 bytes in {quoted}");
        for (namespace, value, words) in [
            ("n", "", r#"an empty name in """#),
            ("n", "a,,b", r#"an empty name in "a,,b""#),
            ("n", "a, ", r#"an empty name in "a, ""#),
            ("n", "a;b", r#""a;b" cannot be the name of an Egress in "a;b""#),
            ("n", "ok, Nat", r#""Nat" cannot be the name of an Egress in "ok, Nat""#),
            ("n.m", "a", r#""n.m" cannot be the name of a namespace in "a""#),
            ("", "a", r#""" cannot be the name of a namespace in "a""#),
            ("n", &long, &too_long),
        ] {
            let annotation = format!("egress.coil.cybozu.com/{namespace}");
            let error = parsed(&[(&annotation, value)]).unwrap_err();
            assert_eq!(error, format!("annotation {annotation}: {words}"));
        }
    }

    proptest! {
        #[test]
        fn hostile_annotations_never_panic_and_yield_only_valid_names(
            namespace in ".{0,80}", value in "([a-c ,.-]|.){0,300}",
        ) {
            let annotations = BTreeMap::from([(format!("{ANNOTATION_EGRESS_PREFIX}{namespace}"), value.clone())]);
            if let Ok(chosen) = chosen(&annotations) {
                prop_assert!(!chosen.is_empty());
                for EgressName { namespace, name } in chosen {
                    prop_assert!(is_dns_label(&namespace) && is_object_name(&name));
                }
            }
        }

        #[test]
        fn what_is_written_is_read(names in prop::collection::btree_set("[a-z]([a-z0-9-]{0,20}[a-z0-9])?", 1..10), gap in " {0,2}") {
            let value = names.iter().cloned().collect::<Vec<_>>().join(&format!("{gap},{gap}"));
            let annotations = BTreeMap::from([(format!("{ANNOTATION_EGRESS_PREFIX}n"), value)]);
            let read: BTreeSet<String> = chosen(&annotations).unwrap().into_iter().map(|egress| egress.name).collect();
            prop_assert_eq!(read, names);
        }
    }
}

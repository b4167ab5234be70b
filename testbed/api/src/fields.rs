//! Every field of a resource is read, or the API says that it is not.

use std::collections::BTreeSet;
use std::fmt::Debug;

use fairlead_api::resources::not_implemented::{NotImplemented, Values};
use kube::CustomResourceExt;
use serde_json::{Value, json};

/// Asserts that each sample changes what `read` makes of a spec, that every field of the schema has a sample or is listed
/// as not implemented, and that nothing listed changes anything. Other programs read what is below `elsewhere`.
#[track_caller]
pub fn assert_each_is_read_or_listed<K: CustomResourceExt, T: PartialEq + Debug>(
    listed: Option<&NotImplemented>,
    read: impl Fn(Value) -> T,
    samples: &[(&str, Value)],
    without_effect: &Value,
    elsewhere: Option<&str>,
) {
    let nothing = read(json!({}));
    for (path, value) in samples {
        assert_ne!(
            read(nested(path, value)),
            nothing,
            "nothing reads {path}: list it in api::not_implemented"
        );
    }
    let listed = listed.map(|listed| listed.fields).unwrap_or_default();
    let gaps: Vec<(&str, bool)> =
        listed.iter().map(|field| (field.path, matches!(field.values, Values::Only(_)))).collect();
    let schema = serde_json::to_value(&K::crd().spec.versions[0].schema).unwrap();
    let mut fields = BTreeSet::new();
    leaves("spec", &schema["openAPIV3Schema"]["properties"]["spec"], &mut fields);
    for field in fields.iter().filter(|field| elsewhere.is_none_or(|above| !field.starts_with(above))) {
        let gap = gaps.iter().find(|(gap, _)| field == gap || field.starts_with(&format!("{gap}.")));
        let is_read = samples.iter().any(|(path, _)| path == field);
        // Other values of a field may be read.
        let is_in_part = gap.is_some_and(|(_, is_one_value)| *is_one_value);
        assert!(
            gap.is_some() != is_read || is_in_part,
            "{field}: list it in api::not_implemented, or add a sample here"
        );
    }
    assert_eq!(
        read(without_effect.clone()),
        nothing,
        "a listed field has an effect: remove it from the list"
    );
}

/// `spec.a.b` as `{"a": {"b": value}}`.
fn nested(path: &str, value: &Value) -> Value {
    path.split('.')
        .skip(1)
        .collect::<Vec<_>>()
        .iter()
        .rev()
        .fold(value.clone(), |value, name| json!({ *name: value }))
}

fn leaves(path: &str, schema: &Value, found: &mut BTreeSet<String>) {
    match schema["properties"].as_object() {
        Some(fields) => {
            fields.iter().for_each(|(name, field)| leaves(&format!("{path}.{name}"), field, found))
        }
        None => drop(found.insert(path.to_owned())),
    }
}

//! Fields of a template that this build does not know, which a newer API server may know.

use fairlead_api::resources::EgressPodTemplate;
use k8s_openapi::api::apps::v1::Deployment;
use serde_json::{Value, json};

/// The Deployment with the fields of the template's pod spec that were lost when it was parsed.
pub(super) fn with_unknown_fields(deployment: &Deployment, template: Option<&EgressPodTemplate>) -> Value {
    let mut value = json!(deployment);
    let parsed = template.and_then(|template| Some((template.spec.clone()?, template.pod_spec().ok()?)));
    if let (Some((written, read)), Some(spec)) = (parsed, value.pointer_mut("/spec/template/spec")) {
        carry(&Value::Object(written), &json!(read), spec);
    }
    value
}

/// Adds to `into` what `written` has and `read`, which was parsed from it, has not.
fn carry(written: &Value, read: &Value, into: &mut Value) {
    match (written, read, into) {
        (Value::Object(written), Value::Object(read), Value::Object(into)) => {
            for (field, value) in written.iter().filter(|(_, value)| !value.is_null()) {
                match (read.get(field), into.get_mut(field)) {
                    (None, None) => {
                        into.insert(field.clone(), value.clone());
                    }
                    (Some(read), Some(into)) => carry(value, read, into),
                    _ => {}
                }
            }
        }
        (Value::Array(written), Value::Array(read), Value::Array(into)) => {
            for (index, (value, read)) in written.iter().zip(read).enumerate() {
                let name = value.get("name").filter(|name| name.is_string());
                let same = match name {
                    Some(name) => into.iter_mut().find(|into| into.get("name") == Some(name)),
                    // Only elements with names are added, and only at the end.
                    None => into.get_mut(index),
                };
                if let Some(into) = same {
                    carry(value, read, into);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_lost_is_added_to_what_it_was_lost_from() {
        let written = json!({
            "known": 1, "new": { "a": 1 }, "null": null, "removed": { "new": 1 },
            "containers": [{ "name": "b", "new": true }, { "name": "a", "env": [{ "name": "x", "value": "1" }] }],
            "tolerations": [{ "key": "k", "new": 1 }],
        });
        let read = json!({
            "known": 1, "removed": {},
            "containers": [{ "name": "b" }, { "name": "a", "env": [{ "name": "x", "value": "1" }] }],
            "tolerations": [{ "key": "k" }],
        });
        let mut into = json!({
            "known": 2,
            "containers": [{ "name": "egress" }, { "name": "b" }, { "name": "a", "env": [{ "name": "x", "valueFrom": {} }] }],
            "tolerations": [{ "key": "k" }],
        });
        carry(&written, &read, &mut into);
        let expected = json!({
            "known": 2, "new": { "a": 1 },
            "containers": [
                { "name": "egress" }, { "name": "b", "new": true },
                { "name": "a", "env": [{ "name": "x", "valueFrom": {} }] },
            ],
            "tolerations": [{ "key": "k", "new": 1 }],
        });
        assert_eq!(into, expected);
    }
}

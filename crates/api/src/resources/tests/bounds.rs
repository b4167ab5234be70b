//! A law of the schemas: every list, map and string of an object has a bound, so that one token cannot fill etcd with few objects.

use serde_json::Value;

use crate::resources::definitions;

/// Parts of objects without bounds of ours, by kind and path, with the reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[(
    "Egress",
    ".spec.template.spec",
    "a pod spec of Kubernetes, with the fields of newer versions: bounds of ours would refuse what a Deployment takes. The API server limits \
     the object, and who may write Egresses has no other use of it than as a Deployment",
)];

#[test]
fn every_list_map_and_string_is_bounded() {
    let mut unbounded = Vec::new();
    let mut excepted = Vec::new();
    for definition in definitions() {
        let kind = definition.spec.names.kind.as_str();
        for version in &definition.spec.versions {
            let schema = serde_json::to_value(&version.schema).unwrap();
            walk(&schema["openAPIV3Schema"], "", &mut |path, schema| {
                let exception = EXCEPTIONS.iter().find(|(of, at, _)| *of == kind && is_below(path, at));
                match (exception, missing(schema)) {
                    (_, None) => {}
                    (Some(exception), Some(_)) => excepted.push(*exception),
                    (None, Some(bound)) => unbounded.push(format!("{kind} {path}: {bound}")),
                }
            });
        }
    }
    assert!(unbounded.is_empty(), "without a bound:\n{}", unbounded.join("\n"));
    for exception in EXCEPTIONS {
        assert!(excepted.contains(exception), "{exception:?} is bounded now: take it out of the list");
    }
}

fn is_below(path: &str, parent: &str) -> bool {
    path.strip_prefix(parent).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[', '{']))
}

/// Calls `visit` for the schema and all below it, with the path of each.
fn walk(schema: &Value, path: &str, visit: &mut impl FnMut(&str, &Value)) {
    visit(path, schema);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        walk(property, &format!("{path}.{name}"), visit);
    }
    for (keyword, suffix) in [("items", "[]"), ("additionalProperties", "{}")] {
        if schema[keyword].is_object() {
            walk(&schema[keyword], &format!("{path}{suffix}"), visit);
        }
    }
}

/// The bound that the schema lacks.
fn missing(schema: &Value) -> Option<&'static str> {
    let lacks = |bound: &'static str| schema[bound].is_null().then_some(bound);
    let is_time = schema["format"] == "date-time";
    match schema["type"].as_str() {
        Some("array") => lacks("maxItems"),
        Some("object") if schema["x-kubernetes-preserve-unknown-fields"] == true => Some("unknown fields"),
        Some("object") if !schema["additionalProperties"].is_null() => lacks("maxProperties"),
        Some("boolean" | "integer" | "number" | "object") => None,
        Some("string") if is_time || schema["enum"].is_array() => None,
        _ => lacks("maxLength"),
    }
}

#[test]
fn the_law_sees_what_has_no_bound() {
    let schema = serde_json::json!({ "type": "object", "properties": {
        "list": { "type": "array", "maxItems": 3, "items": { "type": "string" } },
        "map": { "type": "object", "additionalProperties": { "type": "string", "maxLength": 1 } },
        "number": { "x-kubernetes-int-or-string": true },
        "word": { "type": "string", "enum": ["a"] },
    } });
    let mut found = Vec::new();
    walk(&schema, "", &mut |path, schema| {
        found.extend(missing(schema).map(|bound| format!("{path} {bound}")))
    });
    assert_eq!(found, [".list[] maxLength", ".map maxProperties", ".number maxLength"]);
}

//! Fields that the API accepts and no program acts on: one list, from which come the warning of `kubectl apply` (an
//! admission policy in `deploy/policy`), the condition that the controller writes, and the words of `kubectl explain`.
//!
//! A field that is implemented is removed from the list; tests of `fairlead-node` and `fairlead-members` compare the list with what is read.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps,
};
use serde_json::{Value, json};

use crate::names::MAX_RELAY_REPLICAS;

/// A kind of object of which fields have no effect.
#[derive(Debug, Clone, Copy)]
pub struct NotImplemented {
    /// API group; empty for Kubernetes's core group.
    pub group: &'static str,
    /// API version.
    pub version: &'static str,
    /// Kind of the objects.
    pub kind: &'static str,
    /// Resource name, as in URLs.
    pub plural: &'static str,
    /// Fields without effect, each with all that is below it.
    pub fields: &'static [Field],
}

/// A field without effect.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Names from the root of the object, separated by dots.
    pub path: &'static str,
    /// Values of the field that have no effect.
    pub values: Values,
    /// Reason why it is left out, in a few words.
    pub why: &'static str,
}

/// Values of a field that have no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Numbers above this one; they count as this one.
    Above(u32),
    /// All.
    Any,
    /// This one; others have an effect.
    Only(&'static str),
    /// All. The one that the API server fills in is not the user's, who is not warned of it.
    OtherThan(u32),
}

/// All fields that have no effect yet, by kind.
pub const NOT_IMPLEMENTED: &[NotImplemented] = &[WIREKUBE_MESH];

/// Settings of the mesh.
pub const WIREKUBE_MESH: NotImplemented = NotImplemented {
    group: "wirekube.io",
    version: "v1alpha1",
    kind: "WireKubeMesh",
    plural: "wirekubemeshes",
    fields: &[
        Field::any("spec.apiServerURL", "nodes know the API server that they read it from"),
        Field::any("spec.natTraversal.directConnectedWindowSeconds", PROBED),
        Field::other_than("spec.natTraversal.handshakeValidWindowSeconds", 180, PROBED),
        Field::other_than("spec.natTraversal.healthProbeTimeoutSeconds", 5, PROBED),
        Field::any("spec.relay.external.controlEndpoint", "one connection to endpoint has everything"),
        Field::above("spec.relay.managed.replicas", MAX_RELAY_REPLICAS, "each is connected to all others"),
        Field::value("spec.relay.managed.transport", "ws", "it always has TLS, as wss"),
    ],
};

/// Paths are judged by probes, which follow the round-trip time, and not by the age of handshakes.
const PROBED: &str = "probes find a dead path within seconds";

impl Field {
    const fn any(path: &'static str, why: &'static str) -> Self {
        Self { path, values: Values::Any, why }
    }

    const fn value(path: &'static str, value: &'static str, why: &'static str) -> Self {
        Self { path, values: Values::Only(value), why }
    }

    const fn other_than(path: &'static str, default: u32, why: &'static str) -> Self {
        Self { path, values: Values::OtherThan(default), why }
    }

    const fn above(path: &'static str, limit: u32, why: &'static str) -> Self {
        Self { path, values: Values::Above(limit), why }
    }

    fn is_in(&self, object: &Value) -> bool {
        let found = self.path.split('.').try_fold(object, |value, name| value.get(name));
        found.is_some_and(|found| match self.values {
            Values::Above(limit) => found.as_u64().is_some_and(|number| number > limit.into()),
            Values::Any => true,
            Values::Only(value) => found == value,
            Values::OtherThan(default) => *found != default,
        })
    }

    /// The field as it is named to users, and why it has no effect.
    fn label(&self) -> String {
        let Self { path, why, .. } = self;
        match self.values {
            Values::Above(limit) => format!("{path} above {limit} ({why})"),
            Values::Only(value) => format!("{path}: {value} ({why})"),
            Values::Any | Values::OtherThan(_) => format!("{path} ({why})"),
        }
    }

    /// Whether the field is in `object`, in CEL.
    fn cel(&self) -> String {
        let path = self.path.split('.').map(|name| format!(".?{name}")).collect::<String>();
        match self.values {
            Values::Above(limit) => format!("object{path}.orValue(0) > {limit}"),
            Values::Any => format!("object{path}.hasValue()"),
            Values::Only(value) => format!("object{path}.orValue('') == '{value}'"),
            Values::OtherThan(default) => format!("object{path}.orValue({default}) != {default}"),
        }
    }
}

impl NotImplemented {
    /// Fields of this object that have no effect, in the words of the warning; `None` if there are none.
    pub fn message(&self, object: &Value) -> Option<String> {
        let found: Vec<String> =
            self.fields.iter().filter(|field| field.is_in(object)).map(Field::label).collect();
        (!found.is_empty()).then(|| self.sentence(&found.join(", ")))
    }

    fn sentence(&self, what: &str) -> String {
        format!("fields of {} that have no effect: {what}", self.kind)
    }

    /// The admission policy and its binding: the API server answers the write of such an object with a warning.
    fn policy(&self) -> [Value; 2] {
        let name = format!("fairlead-not-implemented-{}", self.plural);
        let metadata = json!({ "name": name, "labels": { "app.kubernetes.io/name": "fairlead" } });
        let spec = json!({
            "failurePolicy": "Ignore",
            "matchConstraints": { "resourceRules": [{
                "apiGroups": [self.group], "apiVersions": [self.version], "resources": [self.plural],
                "operations": ["CREATE", "UPDATE"],
            }] },
            // Kubelets and node programs write what others annotated, and read no warnings.
            "matchConditions": [{
                "name": "not-by-a-node",
                "expression": "!request.userInfo.username.startsWith('system:node:') \
                    && request.userInfo.username != 'system:serviceaccount:kube-system:fairlead-node'",
            }],
            "variables": [{ "name": "found", "expression": self.found() }],
            "validations": [{
                "expression": "size(variables.found) == 0",
                "messageExpression": format!("\"{}\" + variables.found.join(', ')", self.sentence("")),
            }],
        });
        let kind = |kind: &str, spec: Value| {
            let version = "admissionregistration.k8s.io/v1";
            json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec })
        };
        [
            kind("ValidatingAdmissionPolicy", spec),
            kind(
                "ValidatingAdmissionPolicyBinding",
                json!({ "policyName": name, "validationActions": ["Warn"] }),
            ),
        ]
    }

    /// Expression in CEL for the list of fields that have no effect.
    fn found(&self) -> String {
        let each = self.fields.iter().map(|field| format!("({} ? ['{}'] : [])", field.cel(), field.label()));
        each.collect::<Vec<_>>().join(" + ")
    }
}

/// The admission policies, as `deploy/policy` has them.
pub fn warning_policies() -> Vec<Value> {
    NOT_IMPLEMENTED.iter().flat_map(NotImplemented::policy).collect()
}

/// Lets `kubectl explain` say what has no effect.
pub(super) fn explain(definition: &mut CustomResourceDefinition) {
    let names = (&definition.spec.group, &definition.spec.names.kind);
    let Some(entry) = NOT_IMPLEMENTED.iter().find(|entry| (entry.group, entry.kind) == (names.0, names.1))
    else {
        return;
    };
    let schemas = definition.spec.versions.iter_mut().filter_map(|version| version.schema.as_mut());
    for schema in schemas.filter_map(|schema| schema.open_api_v3_schema.as_mut()) {
        for field in entry.fields {
            let words = match field.values {
                Values::Above(limit) => format!("Without effect: more than {limit} ({}).", field.why),
                Values::Only(value) => format!("Without effect: {value} ({}).", field.why),
                Values::Any | Values::OtherThan(_) => format!("Without effect: {}.", field.why),
            };
            let property = field
                .path
                .split('.')
                .try_fold(&mut *schema, |schema, name| schema.properties.as_mut()?.get_mut(name));
            property.into_iter().for_each(|property| append(property, &words));
        }
    }
}

fn append(schema: &mut JSONSchemaProps, words: &str) {
    let description = schema.description.get_or_insert_default();
    description.push(' ');
    description.push_str(words);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_what_has_no_effect() {
        let mesh = json!({ "spec": { "mtu": 1400, "apiServerURL": "x", "relay": { "managed": { "transport": "ws" } } } });
        assert_eq!(
            WIREKUBE_MESH.message(&mesh).unwrap(),
            "fields of WireKubeMesh that have no effect: spec.apiServerURL (nodes know the API server that they read it from), \
             spec.relay.managed.transport: ws (it always has TLS, as wss)"
        );
        let works = json!({ "spec": { "mtu": 1400, "routing": { "localSubnetPolicy": "tunnel" } } });
        assert_eq!(WIREKUBE_MESH.message(&works), None);
        // With what the API server fills in.
        let traversal = |birthday: &str, window: u32| {
            json!({ "spec": { "natTraversal": {
            "portMapping": "disabled", "birthdayAttack": birthday, "handshakeValidWindowSeconds": window,
            "healthProbeTimeoutSeconds": 5,
        } } })
        };
        assert_eq!(WIREKUBE_MESH.message(&traversal("disabled", 180)), None);
        let message = WIREKUBE_MESH.message(&traversal("enabled", 60)).unwrap();
        let expected = "have no effect: spec.natTraversal.handshakeValidWindowSeconds (probes find a dead path within seconds)";
        assert!(message.ends_with(expected), "{message}");
    }

    #[test]
    fn every_listed_field_exists_and_says_so() {
        for entry in NOT_IMPLEMENTED {
            let all = super::super::definitions();
            let definition = all.iter().find(|definition| definition.spec.names.kind == entry.kind).unwrap();
            let schema = serde_json::to_value(&definition.spec.versions[0].schema).unwrap();
            for field in entry.fields {
                let path = field.path.split('.').map(|name| format!("/properties/{name}"));
                let path = path.collect::<String>();
                let property = schema.pointer(&format!("/openAPIV3Schema{path}")).expect(field.path);
                let description = property["description"].as_str().unwrap();
                assert!(description.contains("Without effect: "), "{}: {description}", field.path);
            }
        }
    }
}

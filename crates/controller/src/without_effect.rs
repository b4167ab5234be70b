//! Conditions that say what has no effect: fields of a WireKubeMesh, and an Egress that no controller of egress gateways takes, since
//! that controller is installed apart.

use std::fmt::Debug;
use std::time::Duration;

use fairlead_api::conditions::{Finding, condition};
use fairlead_api::resources::not_implemented::WIREKUBE_MESH;
use fairlead_api::resources::{Egress, WireKubeMesh};
use fairlead_cluster::writes::apply_status;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::changes::Changes;

/// Field manager of these conditions alone: other conditions of the same objects have other writers.
const MANAGER: &str = "fairlead-without-effect";
/// Changes are collected this long.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Interval without a change, for writes that failed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(30);
/// Whether fields of a WireKubeMesh have no effect.
const FIELDS_IGNORED: &str = "FieldsIgnored";
/// Whether the gateways of an Egress are there: a condition of its controller, which replaces what is written here.
const READY: &str = "Ready";
/// Age from which an Egress without that condition gets one from here.
const CONTROLLER_PATIENCE: jiff::SignedDuration = jiff::SignedDuration::from_secs(60);

/// Keeps the conditions current forever.
pub(crate) async fn run(
    client: Client,
    meshes: Store<WireKubeMesh>,
    egresses: Store<Egress>,
    watches: [watch::Receiver<u64>; 2],
) {
    let mut changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    loop {
        let now = jiff::Timestamp::now();
        for mesh in meshes.state() {
            let name = mesh.name_any();
            let api = Api::<WireKubeMesh>::all(client.clone());
            if let Some(patch) = of_mesh(&mesh, now) {
                write(&api, &name, &patch).await;
            }
        }
        for egress in egresses.state() {
            let namespace = egress.namespace().unwrap_or_default();
            let name = egress.name_any();
            let api = Api::<Egress>::namespaced(client.clone(), &namespace);
            if let Some(patch) = of_egress(&egress, now) {
                write(&api, &name, &patch).await;
            }
        }
        changes.next().await;
    }
}

async fn write<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str, patch: &Value) {
    if let Err(error) = apply_status(api, name, MANAGER, patch).await {
        tracing::warn!(name, %error, "cannot write the condition; retrying");
    }
}

/// Patch of the status of a mesh; `None` if the condition is there. Pure.
fn of_mesh(mesh: &WireKubeMesh, now: jiff::Timestamp) -> Option<Value> {
    let present = mesh.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let object = json!({ "spec": mesh.spec });
    let (holds, reason, message) = match WIREKUBE_MESH.message(&object) {
        Some(message) => (true, "NotImplemented", message),
        None => (false, "AllFieldsRead", "every field of the spec is read".to_owned()),
    };
    let finding = Finding { type_: FIELDS_IGNORED, holds, reason, message };
    let condition = due(present, finding, mesh.metadata.generation, now)?;
    Some(status("wirekube.io/v1alpha1", "WireKubeMesh", &mesh.name_any(), &condition))
}

/// Patch of the status of an Egress of which nothing is known yet; `None` if another writer knows something. Pure.
fn of_egress(egress: &Egress, now: jiff::Timestamp) -> Option<Value> {
    let present = egress.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let Time(created) = egress.metadata.creation_timestamp.as_ref()?;
    if present.iter().any(|it| it.type_ == READY) || now.duration_since(*created).abs() < CONTROLLER_PATIENCE
    {
        return None;
    }
    let message =
        "no controller of egress gateways is here: kubectl apply -k deploy/overlays/egress".to_owned();
    let finding = Finding { type_: READY, holds: false, reason: "NoController", message };
    let condition = due(present, finding, egress.metadata.generation, now)?;
    Some(status("coil.cybozu.com/v2", "Egress", &egress.name_any(), &condition))
}

fn status(version: &str, kind: &str, name: &str, condition: &Condition) -> Value {
    json!({
        "apiVersion": version, "kind": kind, "metadata": { "name": name },
        "status": { "conditions": [condition] },
    })
}

/// The condition, unless the object has it.
fn due(
    present: &[Condition],
    finding: Finding<'_>,
    generation: Option<i64>,
    now: jiff::Timestamp,
) -> Option<Condition> {
    let condition = condition(present, finding, generation, Time(now));
    (!present.contains(&condition)).then_some(condition)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(spec: &Value, conditions: &Value) -> WireKubeMesh {
        let object = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": "default", "generation": 2 },
            "spec": spec, "status": { "conditions": conditions },
        });
        serde_json::from_value(object).unwrap()
    }

    fn written(patch: &Value) -> (&str, &str, &str) {
        let condition = &patch["status"]["conditions"][0];
        let word = |name: &str| condition[name].as_str().unwrap();
        (word("type"), word("status"), word("message"))
    }

    #[test]
    fn ignored_fields_are_named_and_written_once() {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let spec = json!({ "apiServerURL": "https://192.0.2.1:6443" });
        let patch = of_mesh(&mesh(&spec, &json!([])), now).unwrap();
        let (type_, status, message) = written(&patch);
        assert_eq!((type_, status), ("FieldsIgnored", "True"));
        assert!(message.contains("have no effect: spec.apiServerURL ("), "{message}");
        let conditions = patch["status"]["conditions"].clone();
        let later = jiff::Timestamp::from_second(1000).unwrap();
        assert_eq!(of_mesh(&mesh(&spec, &conditions), later), None);
        // The field is removed.
        let patch = of_mesh(&mesh(&json!({}), &conditions), later).unwrap();
        assert_eq!(written(&patch), ("FieldsIgnored", "False", "every field of the spec is read"));
    }

    #[test]
    fn an_egress_that_no_controller_takes_says_so_after_a_minute() {
        let egress = |conditions: Value| -> Egress {
            let object = json!({
                "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
                "metadata": { "name": "e", "namespace": "n", "creationTimestamp": "1970-01-01T00:00:00Z" },
                "spec": { "destinations": ["0.0.0.0/0"] }, "status": { "conditions": conditions },
            });
            serde_json::from_value(object).unwrap()
        };
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        assert_eq!(of_egress(&egress(json!([])), at(59)), None);
        let patch = of_egress(&egress(json!([])), at(60)).unwrap();
        let (type_, status, message) = written(&patch);
        assert_eq!((type_, status), ("Ready", "False"));
        assert!(message.contains("deploy/overlays/egress"), "{message}");
        assert_eq!(of_egress(&egress(patch["status"]["conditions"].clone()), at(600)), None);
    }
}

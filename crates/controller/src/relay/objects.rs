//! The objects of the managed relay, as they are applied. Pure.
//!
//! The relay is reached at nodes or a load balancer, past the mesh that it carries: its Service delivers only to pods of the node
//! that a connection arrives at (`externalTrafficPolicy: Local`), so no packet of it takes a tunnel on its way. Its pods have the
//! network of pods and no rights on their node.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_api::names::{
    MAX_RELAY_REPLICAS, RELAY_NAMESPACE, RELAY_PORT, RELAY_PROGRAM, RELAY_REPLICA_PORT,
    RELAY_REPLICAS_SERVICE, RELAY_SERVER_NAME, RELAY_TLS_SECRET,
};
use fairlead_api::resources::{ManagedRelay, RelayResources, RelayServiceType, WireKubeMesh};
use kube::ResourceExt as _;
use serde_json::{Map, Value, json};

use super::certificates::{AUTHORITIES, CERTIFICATE, Certificates, KEY, LAST_DAY, Pair};

/// Directory of the certificate in the pods.
const TLS_DIRECTORY: &str = "/etc/fairlead/relay";
/// The user of the program, as in `deploy/controller`.
const USER: i64 = 10_000;

/// Metadata of an object that is deleted with the mesh.
fn metadata(mesh: &WireKubeMesh, name: &str) -> Value {
    json!({
        "name": name, "namespace": RELAY_NAMESPACE, "labels": labels(),
        "ownerReferences": [{
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "name": mesh.name_any(),
            "uid": mesh.metadata.uid, "controller": true,
        }],
    })
}

/// Labels of everything, also of the pods.
fn labels() -> Value {
    json!({ "app.kubernetes.io/name": "fairlead", "app.kubernetes.io/component": "relay" })
}

/// A Secret with this data.
pub(super) fn secret(mesh: &WireKubeMesh, name: &str, data: &Map<String, Value>) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata(mesh, name), "data": data,
    })
}

/// Data of the Secret with the authority, which no pod mounts.
pub(super) fn authority_data(certificates: &Certificates) -> Map<String, Value> {
    data(&certificates.authority, &[])
}

/// Data of the Secret of the relay's pods.
pub(super) fn server_data(certificates: &Certificates) -> Map<String, Value> {
    data(&certificates.server, &certificates.issuers)
}

fn data(pair: &Pair, issuers: &[String]) -> Map<String, Value> {
    let day = pair.last_day.to_string();
    let texts = [
        (CERTIFICATE, pair.certificate.clone()),
        (KEY, pair.key.clone()),
        (LAST_DAY, day),
        (AUTHORITIES, issuers.concat()),
    ];
    let given = texts.into_iter().filter(|(_, text)| !text.is_empty());
    given.map(|(key, text)| (key.to_owned(), STANDARD.encode(text).into())).collect()
}

/// The Service.
pub(super) fn service(mesh: &WireKubeMesh, managed: &ManagedRelay) -> Value {
    let type_ = match managed.service_type {
        RelayServiceType::LoadBalancer => "LoadBalancer",
        RelayServiceType::NodePort => "NodePort",
    };
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata(mesh, RELAY_PROGRAM),
        "spec": {
            "type": type_,
            "externalTrafficPolicy": "Local",
            "ipFamilyPolicy": "PreferDualStack",
            "selector": labels(),
            "ports": [{ "name": "relay", "protocol": "TCP", "port": managed.port, "targetPort": "relay" }],
        },
    })
}

/// The headless Service by which replicas find each other. With those that are not ready: they are on their way up or down, and
/// have nodes meanwhile.
pub(super) fn replicas_service(mesh: &WireKubeMesh) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata(mesh, RELAY_REPLICAS_SERVICE),
        "spec": {
            "clusterIP": "None",
            "ipFamilyPolicy": "PreferDualStack",
            "publishNotReadyAddresses": true,
            "selector": labels(),
            "ports": [{ "name": "replicas", "protocol": "TCP", "port": RELAY_REPLICA_PORT, "targetPort": "replicas" }],
        },
    })
}

/// Draining nodes ends one replica at a time. A single one may always be moved.
pub(super) fn disruption_budget(mesh: &WireKubeMesh) -> Value {
    json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata(mesh, RELAY_PROGRAM),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": { "matchLabels": labels() },
        },
    })
}

/// Number of pods: `spec.relay.managed.replicas` within 1 and the maximum.
pub(super) fn replicas(managed: &ManagedRelay) -> u32 {
    u32::try_from(managed.replicas).unwrap_or(1).clamp(1, MAX_RELAY_REPLICAS)
}

/// The Deployment. A new pod serves before an old one, which tells its clients to connect again, ends. Also a single pod has the
/// options of replicas: during a rollout there are two.
pub(super) fn deployment(mesh: &WireKubeMesh, managed: &ManagedRelay, image: &str) -> Value {
    let probe = |path: &str, period: i32| json!({ "httpGet": { "path": path, "port": "health" }, "periodSeconds": period, "timeoutSeconds": 5 });
    let container = json!({
        "name": "relay",
        "image": image,
        "args": [
            "relay",
            format!("--addr=[::]:{RELAY_PORT}"),
            // A Service would answer from other addresses than nodes ask.
            "--stun-addr=[::]:0",
            format!("--tls-cert-file={TLS_DIRECTORY}/{CERTIFICATE}"),
            format!("--tls-private-key-file={TLS_DIRECTORY}/{KEY}"),
            "--allow-wirekube-peers",
            format!("--replica={RELAY_REPLICAS_SERVICE}.{RELAY_NAMESPACE}.svc:{RELAY_REPLICA_PORT}"),
            format!("--replica-addr=[::]:{RELAY_REPLICA_PORT}"),
            format!("--replica-name={RELAY_SERVER_NAME}"),
            format!("--replica-ca-file={TLS_DIRECTORY}/{AUTHORITIES}"),
        ],
        "env": [{ "name": "MALLOC_ARENA_MAX", "value": "2" }],
        "envFrom": [{ "configMapRef": { "name": "kubernetes-services-endpoint", "optional": true } }],
        "ports": [
            { "name": "relay", "containerPort": RELAY_PORT },
            { "name": "replicas", "containerPort": RELAY_REPLICA_PORT },
            { "name": "metrics", "containerPort": 9388 },
            { "name": "health", "containerPort": 9389 },
        ],
        "livenessProbe": probe("/healthz", 10),
        "readinessProbe": probe("/readyz", 5),
        "resources": resources(managed.resources.as_ref()),
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{ "name": "tls", "mountPath": TLS_DIRECTORY, "readOnly": true }],
    });
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(mesh, RELAY_PROGRAM),
        "spec": {
            "replicas": replicas(managed),
            "selector": { "matchLabels": labels() },
            "strategy": { "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } },
            "template": {
                "metadata": { "labels": labels() },
                "spec": pod(&container),
            },
        },
    })
}

fn pod(container: &Value) -> Value {
    let items = [CERTIFICATE, KEY, AUTHORITIES].map(|key| json!({ "key": key, "path": key }));
    json!({
        "serviceAccountName": RELAY_PROGRAM,
        "nodeSelector": { "kubernetes.io/os": "linux" },
        "terminationGracePeriodSeconds": 30,
        "topologySpreadConstraints": [{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": { "matchLabels": labels() },
        }],
        "affinity": { "podAntiAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{
            "weight": 100,
            "podAffinityTerm": { "topologyKey": "kubernetes.io/hostname", "labelSelector": { "matchLabels": labels() } },
        }] } },
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [container],
        // 0440: for the group above.
        "volumes": [{
            "name": "tls",
            "secret": { "secretName": RELAY_TLS_SECRET, "defaultMode": 0o440, "items": items },
        }],
    })
}

fn resources(wanted: Option<&RelayResources>) -> Value {
    let wanted = wanted.cloned().unwrap_or_default();
    let list = |pairs: [(&str, Option<String>); 2]| {
        let given =
            pairs.into_iter().filter_map(|(name, quantity)| Some((name.to_owned(), quantity?.into())));
        given.collect::<Map<String, Value>>()
    };
    let default = |quantity: &str| Some(quantity.to_owned());
    json!({
        "requests": list([
            ("cpu", wanted.cpu_request.or(default("50m"))),
            ("memory", wanted.memory_request.or(default("64Mi"))),
        ]),
        "limits": list([("cpu", wanted.cpu_limit), ("memory", wanted.memory_limit)]),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fairlead_api::resources::not_implemented::WIREKUBE_MESH;
    use kube::CustomResourceExt as _;

    use super::*;
    use crate::relay::state;

    fn mesh(managed: &Value) -> WireKubeMesh {
        let relay = json!({ "provider": "managed", "managed": managed });
        let metadata = json!({ "name": "default", "uid": "1234" });
        let (version, kind) = ("wirekube.io/v1alpha1", "WireKubeMesh");
        let object =
            json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": { "relay": relay } });
        serde_json::from_value(object).unwrap()
    }

    fn managed(mesh: &WireKubeMesh) -> &ManagedRelay {
        mesh.spec.relay.as_ref().unwrap().managed.as_ref().unwrap()
    }

    fn objects(fields: &Value) -> (Value, Value) {
        let mesh = mesh(fields);
        (deployment(&mesh, managed(&mesh), "image"), service(&mesh, managed(&mesh)))
    }

    #[test]
    fn replicas_find_each_other_and_prove_who_they_are() {
        let (deployment, _) = objects(&json!({ "replicas": 2 }));
        assert_eq!(deployment["spec"]["replicas"], 2);
        let spec = &deployment["spec"]["template"]["spec"];
        let arguments = spec["containers"][0]["args"].as_array().unwrap();
        for argument in [
            "--replica=fairlead-relay-replicas.fairlead-relay.svc:3480",
            "--replica-name=fairlead-relay.fairlead-relay.svc",
            "--replica-ca-file=/etc/fairlead/relay/ca.crt",
        ] {
            assert!(arguments.contains(&json!(argument)), "{arguments:?}");
        }
        let files = spec["volumes"][0]["secret"]["items"].as_array().unwrap();
        assert!(files.contains(&json!({ "key": "ca.crt", "path": "ca.crt" })), "{files:?}");
        let mesh = mesh(&json!({}));
        let (service, budget) = (replicas_service(&mesh), disruption_budget(&mesh));
        let labels = &deployment["spec"]["template"]["metadata"]["labels"];
        assert_eq!((&service["spec"]["selector"], &service["spec"]["clusterIP"]), (labels, &json!("None")));
        assert_eq!(service["spec"]["publishNotReadyAddresses"], true);
        assert_eq!(&budget["spec"]["selector"]["matchLabels"], labels);
    }

    #[test]
    fn pods_run_one_relay_without_privileges() {
        let (deployment, service) = objects(&json!({}));
        let spec = &deployment["spec"]["template"]["spec"];
        assert_eq!(deployment["spec"]["replicas"], 1);
        assert_eq!(spec["hostNetwork"], Value::Null);
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
        let container = &spec["containers"][0];
        assert_eq!(container["securityContext"]["capabilities"], json!({ "drop": ["ALL"] }));
        assert_eq!(
            container["resources"],
            json!({ "requests": { "cpu": "50m", "memory": "64Mi" }, "limits": {} })
        );
        assert_eq!(service["spec"]["externalTrafficPolicy"], "Local");
        assert_eq!(service["spec"]["selector"], deployment["spec"]["template"]["metadata"]["labels"]);
        for object in [&deployment, &service] {
            assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "1234");
        }
    }

    /// The counterpart of the test of `fairlead-node` for all other fields.
    #[test]
    fn every_field_changes_something_or_is_listed_as_not_implemented() {
        let read = |fields: Value| {
            let mesh = mesh(&fields);
            let state = state::tests::with_ready_pod(&mesh);
            let image = managed(&mesh).image.clone().unwrap_or_default();
            (deployment(&mesh, managed(&mesh), &image), service(&mesh, managed(&mesh)), state)
        };
        let nothing = read(json!({}));
        let samples = json!({
            "serviceType": "NodePort", "port": 443, "image": "example.com/fairlead:1",
            "controlEndpoint": "relay.example:443",
            "resources": { "cpuRequest": "1", "memoryRequest": "1Gi", "cpuLimit": "2", "memoryLimit": "2Gi" },
        });
        let mut read_fields = BTreeSet::new();
        for (name, sample) in samples.as_object().unwrap() {
            assert_ne!(read(json!({ name: sample })), nothing, "nothing reads {name}");
            read_fields.insert(name.as_str());
        }
        for (name, sample) in samples["resources"].as_object().unwrap() {
            assert_ne!(read(json!({ "resources": { name: sample } })), nothing, "nothing reads {name}");
        }
        // Nodes read it; the controller refuses the value that is listed.
        read_fields.insert("transport");
        assert_ne!(read(json!({ "transport": "ws" })), nothing);
        // As many as may be; more are listed.
        let replicas = |count: u32| read(json!({ "replicas": count })).0;
        assert!(replicas(2) != nothing.0 && replicas(5) != replicas(2) && replicas(6) == replicas(5));
        let message = |count: u32| {
            WIREKUBE_MESH.message(&serde_json::to_value(mesh(&json!({ "replicas": count }))).unwrap())
        };
        assert_eq!((message(2), message(5)), (None, None));
        assert!(message(6).unwrap().contains("spec.relay.managed.replicas above 5 ("));
        read_fields.insert("replicas");
        let schema = serde_json::to_value(&WireKubeMesh::crd().spec.versions[0].schema).unwrap();
        let path = "/openAPIV3Schema/properties/spec/properties/relay/properties/managed/properties";
        let fields: BTreeSet<&str> =
            schema.pointer(path).unwrap().as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields, read_fields);
    }
}

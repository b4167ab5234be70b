//! Examples of Egresses with their objects.

use serde_json::{Value, json};

use super::*;

fn egress(spec: &Value) -> Egress {
    let mut spec = spec.clone();
    if spec.get("destinations").is_none() {
        spec["destinations"] = json!(["0.0.0.0/0"]);
    }
    let object = json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "spec": spec,
        "metadata": { "name": "nat", "namespace": "internet-egress", "uid": "1234" },
    });
    serde_json::from_value(object).unwrap()
}

fn defaults() -> Defaults {
    Defaults { image: Some("fairlead:1".to_owned()), port: 5555, seccomp: SeccompDefault::RuntimeDefault }
}

fn made(spec: &Value) -> Objects {
    objects(&egress(spec), &defaults()).unwrap()
}

/// The pod template, as it is applied.
fn template(spec: &Value) -> Value {
    made(spec).deployment_to_apply["spec"]["template"].clone()
}

fn gateway(spec: &Value) -> Value {
    template(spec)["spec"]["containers"][0].clone()
}

#[track_caller]
fn error(egress: &Egress, defaults: &Defaults) -> (String, &'static str) {
    let error = objects(egress, defaults).unwrap_err();
    (error.to_string(), error.reason())
}

fn labels_of_nat() -> Value {
    json!({
        "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress",
        "app.kubernetes.io/instance": "nat",
    })
}

#[test]
fn all_objects_have_the_name_the_labels_and_the_owner() {
    let Objects { deployment, service, disruption_budget, .. } =
        made(&json!({ "replicas": 2, "podDisruptionBudget": { "minAvailable": "50%" } }));
    let budget = disruption_budget.unwrap();
    let metadata = json!({
        "name": "nat", "namespace": "internet-egress", "labels": labels_of_nat(),
        "ownerReferences": [{
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "name": "nat", "uid": "1234",
            "controller": true, "blockOwnerDeletion": true,
        }],
    });
    for object in [json!(deployment), json!(service), json!(budget)] {
        assert_eq!(object["metadata"], metadata);
    }
    let selector = json!({ "matchLabels": labels_of_nat() });
    assert_eq!(json!(budget)["spec"], json!({ "minAvailable": "50%", "selector": selector }));
    let deployment = json!(deployment);
    assert_eq!((&deployment["spec"]["selector"], &deployment["spec"]["replicas"]), (&selector, &json!(2)));
    assert_eq!(made(&json!({})).disruption_budget, None);
}

#[test]
fn a_gateway_has_the_defaults_of_coil_without_its_privileges() {
    let pod = template(&json!({}))["spec"].clone();
    assert_eq!(pod["serviceAccountName"], "coil-egress");
    assert_eq!(pod["terminationGracePeriodSeconds"], 310);
    assert_eq!(pod["topologySpreadConstraints"][0]["whenUnsatisfiable"], "ScheduleAnyway");
    assert_eq!(pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"], labels_of_nat());
    assert_eq!(pod["volumes"], json!([{ "name": "run", "emptyDir": {} }]));
    let probe = |path: &str, period: u32| json!({ "httpGet": { "path": path, "port": "health" }, "periodSeconds": period, "timeoutSeconds": 5 });
    let field = |path: &str| json!({ "fieldRef": { "fieldPath": path } });
    let expected = json!({
        "name": "egress", "image": "fairlead:1", "command": ["coil-egress"], "args": [],
        "env": [
            { "name": "COIL_POD_NAMESPACE", "valueFrom": field("metadata.namespace") },
            { "name": "COIL_POD_ADDRESSES", "valueFrom": field("status.podIPs") },
            { "name": "COIL_EGRESS_NAME", "value": "nat" },
        ],
        "ports": [
            { "name": "metrics", "containerPort": 8080, "protocol": "TCP" },
            { "name": "health", "containerPort": 8081, "protocol": "TCP" },
            { "name": "registration", "containerPort": 5556, "protocol": "TCP" },
        ],
        "livenessProbe": probe("/healthz", 10), "readinessProbe": probe("/readyz", 5),
        "resources": { "requests": { "cpu": "100m", "memory": "200Mi" } },
        "securityContext": {
            "privileged": false, "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
            "capabilities": { "add": ["NET_ADMIN", "BPF"], "drop": ["ALL"] },
        },
        "volumeMounts": [{ "name": "run", "mountPath": "/run" }],
    });
    assert_eq!(pod["containers"], json!([expected]));
}

#[test]
fn what_the_template_says_is_kept() {
    let container = json!({
        "name": "egress", "image": "own:2", "command": ["wrapper"], "args": ["--verbose"],
        "env": [{ "name": "COIL_EGRESS_NAME", "value": "forged" }, { "name": "A", "value": "b" }],
        "ports": [{ "name": "metrics", "containerPort": 9000 }],
        "readinessProbe": { "exec": { "command": ["true"] } },
        "resources": { "requests": { "memory": "1Gi" } },
        "securityContext": { "readOnlyRootFilesystem": false, "capabilities": { "add": ["NET_RAW", "BPF"], "drop": ["MKNOD"] } },
        "volumeMounts": [{ "name": "tmp", "mountPath": "/run" }],
    });
    let spec = json!({
        "fouSourcePortAuto": true,
        "strategy": { "type": "Recreate" },
        "template": {
            "metadata": {
                "annotations": { "foo": "bar" },
                "labels": { "tier": "edge", "app.kubernetes.io/name": "forged" },
            },
            "spec": {
                "serviceAccountName": "admin", "serviceAccount": "admin", "terminationGracePeriodSeconds": 5,
                "topologySpreadConstraints": [],
                "containers": [{ "name": "sidecar", "image": "other" }, container],
            },
        },
    });
    let template = template(&spec);
    assert_eq!(template["metadata"]["annotations"], json!({ "foo": "bar" }));
    let mut labels = labels_of_nat();
    labels["tier"] = json!("edge");
    assert_eq!(template["metadata"]["labels"], labels);
    let pod = &template["spec"];
    assert_eq!((&pod["serviceAccountName"], &pod["serviceAccount"]), (&json!("coil-egress"), &Value::Null));
    assert_eq!(
        (&pod["terminationGracePeriodSeconds"], &pod["topologySpreadConstraints"]),
        (&json!(5), &json!([]))
    );
    assert_eq!(pod["containers"][0], json!({ "name": "sidecar", "image": "other" }));
    let gateway = &pod["containers"][1];
    for (field, expected) in [
        ("image", json!("own:2")),
        ("command", json!(["wrapper"])),
        ("args", json!(["--verbose"])),
        ("readinessProbe", json!({ "exec": { "command": ["true"] } })),
        ("resources", json!({ "requests": { "memory": "1Gi" } })),
        ("volumeMounts", json!([{ "name": "tmp", "mountPath": "/run" }])),
    ] {
        assert_eq!(gateway[field], expected, "{field}");
    }
    assert_eq!(gateway["env"][0], json!({ "name": "A", "value": "b" }));
    assert_eq!(gateway["env"].as_array().unwrap().len(), 4);
    assert_eq!(
        (&gateway["ports"][0]["containerPort"], &gateway["ports"][1]["name"]),
        (&json!(9000), &json!("health"))
    );
    let context = &gateway["securityContext"];
    assert_eq!(context["readOnlyRootFilesystem"], false);
    let capabilities = json!({ "add": ["NET_RAW", "BPF", "NET_ADMIN"], "drop": ["MKNOD"] });
    assert_eq!(context["capabilities"], capabilities);
    assert_eq!(json!(made(&spec).deployment)["spec"]["strategy"], json!({ "type": "Recreate" }));
}

#[test]
fn fields_of_a_newer_kubernetes_are_applied() {
    let spec = json!({ "template": { "spec": {
        "podNovelty": { "level": 2 }, "containers": [{ "name": "egress", "novelty": true }],
    } } });
    let pod = template(&spec)["spec"].clone();
    assert_eq!(
        (&pod["podNovelty"], &pod["containers"][0]["novelty"]),
        (&json!({ "level": 2 }), &json!(true))
    );
    assert_eq!(pod["containers"][0]["command"], json!(["coil-egress"]));
}

#[test]
fn gateways_have_the_seccomp_profile_of_the_runtime_unless_told_otherwise() {
    assert_eq!(
        template(&json!({}))["spec"]["securityContext"],
        json!({ "seccompProfile": { "type": "RuntimeDefault" } })
    );
    let with = |context: Value| {
        let spec = json!({ "template": { "spec": { "securityContext": context } } });
        template(&spec)["spec"]["securityContext"].clone()
    };
    let other = with(json!({ "runAsUser": 0 }));
    assert_eq!(other, json!({ "runAsUser": 0, "seccompProfile": { "type": "RuntimeDefault" } }));
    for profile in
        [json!({ "type": "Unconfined" }), json!({ "type": "Localhost", "localhostProfile": "a.json" })]
    {
        assert_eq!(with(json!({ "seccompProfile": profile })), json!({ "seccompProfile": profile }));
    }
    let own = json!({ "seccompProfile": { "type": "Unconfined" } });
    let spec =
        json!({ "template": { "spec": { "containers": [{ "name": "egress", "securityContext": own }] } } });
    assert_eq!(gateway(&spec)["securityContext"]["seccompProfile"]["type"], "Unconfined");
    let none = Defaults { seccomp: SeccompDefault::None, ..defaults() };
    let objects = objects(&egress(&json!({})), &none).unwrap();
    assert!(objects.deployment_to_apply["spec"]["template"]["spec"]["securityContext"].is_null());
}

#[test]
fn a_privileged_gateway_is_asked_for() {
    let context = json!({ "privileged": true });
    let spec = json!({ "template": { "spec": { "containers": [{ "name": "egress", "securityContext": context }] } } });
    let context = gateway(&spec)["securityContext"].clone();
    // The API server refuses a privileged container without privilege escalation.
    assert_eq!((&context["privileged"], &context["allowPrivilegeEscalation"]), (&json!(true), &Value::Null));
}

#[test]
fn the_gateway_is_told_of_another_port_and_of_source_ports() {
    let other = Defaults { port: 6000, ..defaults() };
    let egress = egress(&json!({ "fouSourcePortAuto": true }));
    let objects = objects(&egress, &other).unwrap();
    let arguments = &objects.deployment_to_apply["spec"]["template"]["spec"]["containers"][0]["args"];
    assert_eq!(arguments, &json!(["--fou-port=6000", "--enable-sport-auto=true"]));
    let ports = json!([{ "port": 6000, "targetPort": 6000, "protocol": "UDP" }]);
    assert_eq!(json!(objects.service)["spec"]["ports"], ports);
}

#[test]
fn the_time_for_flows_is_passed_on_with_some_more_until_the_end() {
    let of = |spec: &Value| {
        let pod = template(spec)["spec"].clone();
        (pod["containers"][0]["args"].clone(), pod["terminationGracePeriodSeconds"].clone())
    };
    assert_eq!(of(&json!({ "drainSeconds": 300 })), (json!([]), json!(310)));
    assert_eq!(of(&json!({ "drainSeconds": 0 })), (json!(["--drain-seconds=0"]), json!(10)));
    let mut spec = json!({ "drainSeconds": 3600, "fouSourcePortAuto": true });
    let arguments = json!(["--enable-sport-auto=true", "--drain-seconds=3600"]);
    assert_eq!(of(&spec), (arguments.clone(), json!(3610)));
    spec["template"] = json!({ "spec": { "terminationGracePeriodSeconds": 60 } });
    assert_eq!(of(&spec), (arguments, json!(60)));
}

#[test]
fn a_service_has_both_families_and_the_affinity_of_the_egress() {
    let affinity = |spec: &Value| {
        let service = json!(made(spec).service)["spec"].clone();
        assert_eq!(
            (&service["type"], &service["ipFamilyPolicy"]),
            (&json!("ClusterIP"), &json!("PreferDualStack"))
        );
        assert_eq!(service["selector"], labels_of_nat());
        (service["sessionAffinity"].clone(), service["sessionAffinityConfig"].clone())
    };
    let client = |seconds: u32| (json!("ClientIP"), json!({ "clientIP": { "timeoutSeconds": seconds } }));
    assert_eq!(affinity(&json!({})), client(10800));
    let config = json!({ "clientIP": { "timeoutSeconds": 43200 } });
    assert_eq!(affinity(&json!({ "sessionAffinityConfig": config })), client(43200));
    let none = json!({ "sessionAffinity": "None", "sessionAffinityConfig": config });
    assert_eq!(affinity(&none), (json!("None"), Value::Null));
}

#[test]
fn ports_of_others_are_taken_back() {
    let wanted = made(&json!({})).service;
    let live = |ports: &Value| {
        let mut live = json!(wanted);
        live["metadata"]["resourceVersion"] = json!("7");
        live["spec"]["ports"] = ports.clone();
        serde_json::from_value::<Service>(live).unwrap()
    };
    let ours = json!({ "port": 5555, "targetPort": 5555, "protocol": "UDP" });
    assert_eq!(take_back_ports(&live(&json!([ours])), &wanted), None);
    // What is missing or changed in ours, server-side apply mends.
    assert_eq!(
        take_back_ports(&live(&json!([{ "port": 5555, "protocol": "UDP", "targetPort": 1 }])), &wanted),
        None
    );
    let patch = Some(json!({ "metadata": { "resourceVersion": "7" }, "spec": { "ports": [ours] } }));
    for foreign in
        [json!([{ "port": 5555 }]), json!([ours, { "name": "dns", "port": 53, "protocol": "UDP" }])]
    {
        assert_eq!(take_back_ports(&live(&foreign), &wanted), patch);
    }
}

#[test]
fn an_egress_that_cannot_have_gateways_says_why() {
    let (message, reason) = error(&egress(&json!({ "destinations": ["::/0", "9.9.9.9"] })), &defaults());
    assert_eq!(reason, "InvalidDestination");
    assert!(message.starts_with(r#"spec.destinations[1]: "9.9.9.9""#), "{message}");
    let mut long = egress(&json!({}));
    long.metadata.name = Some("0nat".to_owned());
    let (message, reason) = error(&long, &defaults());
    assert!(reason == "InvalidName" && message.contains(r#""0nat""#), "{message}");
    let template = |spec: &Value| egress(&json!({ "template": { "spec": spec } }));
    let (message, reason) = error(&template(&json!({ "hostNetwork": true })), &defaults());
    assert!(reason == "InvalidTemplate" && message.contains("hostNetwork must not be true"), "{message}");
    let (message, reason) = error(&template(&json!({ "nodeName": 7 })), &defaults());
    assert!(
        reason == "InvalidTemplate" && message.starts_with("spec.template.spec: invalid type"),
        "{message}"
    );
    let without = Defaults { image: None, ..defaults() };
    assert_eq!(error(&egress(&json!({})), &without).1, "ImageUnknown");
    let own = json!({ "containers": [{ "name": "egress", "image": "own:2" }] });
    assert!(objects(&template(&own), &without).is_ok());
}

#[test]
fn the_binding_has_exactly_the_namespaces_with_an_egress() {
    let namespaces = ["b", "a"].map(str::to_owned).into();
    let binding = json!(role_binding(&namespaces));
    let subject =
        |namespace: &str| json!({ "kind": "ServiceAccount", "name": "coil-egress", "namespace": namespace });
    assert_eq!(binding["subjects"], json!([subject("a"), subject("b")]));
    let role =
        json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "coil-egress" });
    assert_eq!((&binding["roleRef"], &binding["metadata"]["name"]), (&role, &json!("coil-egress")));
    assert_eq!(json!(role_binding(&BTreeSet::new()))["subjects"], json!([]));
    let account = json!(service_account("a"));
    assert_eq!(
        (&account["metadata"]["name"], &account["metadata"]["namespace"]),
        (&json!("coil-egress"), &json!("a"))
    );
}

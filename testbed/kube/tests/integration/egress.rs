//! The controller of egress gateways against a real API server with the controllers of Kubernetes: each Egress has its objects, what
//! others change is mended, what belongs to others stays, and nothing is left of an Egress that is deleted.

mod autoscaling;
mod bed;
mod causes;
mod command_line;
mod costs;
mod source_addresses;
mod status;
mod writes;

use anyhow::ensure;
use serde_json::{Value, json};
use testbed_lab::eventually;

use crate::egress::bed::{IMAGE, TIMEOUT, bed, egress};

/// Coil's two examples: the article's Egresses for the Internet and for a domestic network.
#[test]
fn the_egresses_of_coils_article_have_gateways() {
    let bed = bed();
    for (namespace, fixture) in
        [("internet-egress", "egress_dual_stack.yaml"), ("domestic-egress", "egress_domestic.yaml")]
    {
        bed.namespace(namespace);
        let path = format!("{}/../../crates/api/tests/fixtures/{fixture}", env!("CARGO_MANIFEST_DIR"));
        bed.plane.apply(&std::fs::read_to_string(path).unwrap()).unwrap();
        let owner = bed.get(&["egress", "nat", "--namespace", namespace]).unwrap()["metadata"]["uid"].clone();
        let labels = json!({
            "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress",
            "app.kubernetes.io/instance": "nat",
        });
        let (service, deployment) =
            (bed.there(namespace, &["service", "nat"]), bed.there(namespace, &["deployment", "nat"]));
        for object in [&service, &deployment] {
            assert_eq!(object["metadata"]["labels"], labels);
            assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], owner);
        }
        let spec = &service["spec"];
        assert_eq!(spec["ports"], json!([{ "port": 5555, "targetPort": 5555, "protocol": "UDP" }]));
        assert_eq!((&spec["selector"], &spec["sessionAffinity"]), (&labels, &json!("ClientIP")));
        assert_eq!(
            (&spec["ipFamilyPolicy"], &spec["type"]),
            (&json!("PreferDualStack"), &json!("ClusterIP"))
        );
        assert_eq!(spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"], 10800);
        let spec = &deployment["spec"];
        assert_eq!((&spec["replicas"], &spec["selector"]["matchLabels"]), (&json!(2), &labels));
        let pod = &spec["template"]["spec"];
        assert_eq!((&pod["serviceAccountName"], pod["hostNetwork"].as_bool()), (&json!("coil-egress"), None));
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        let [gateway] = &pod["containers"].as_array().unwrap()[..] else { panic!("{pod}") };
        assert_eq!((&gateway["image"], &gateway["command"]), (&json!(IMAGE), &json!(["coil-egress"])));
        assert_eq!(gateway["securityContext"]["privileged"], false);
        bed.there(namespace, &["serviceaccount", "coil-egress"]);
        assert_eq!(bed.ready(namespace, "nat", "False", "NoneAvailable"), "0 of 2 gateways are available");
    }
    eventually(TIMEOUT, || {
        let bound = bed.bound()?;
        let both = ["domestic-egress", "internet-egress"];
        ensure!(both.iter().all(|namespace| bound.iter().any(|it| it == namespace)), "{bound:?}");
        Ok(())
    })
    .unwrap();
    autoscaling::apply_the_example();
    gateways_become_ready_and_are_scaled();
    autoscaling::the_example_has_scaled();
}

fn gateways_become_ready_and_are_scaled() {
    let (bed, namespace) = (bed(), "domestic-egress");
    let pods = |count: usize| {
        bed.until(namespace, &["pods"], |pods| {
            ensure!(pods["items"].as_array().is_some_and(|pods| pods.len() == count));
            Ok(())
        })
    };
    for pod in pods(2)["items"].as_array().unwrap() {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let patch = json!({ "status": { "phase": "Running", "conditions": [
            { "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" },
        ] } });
        patch_status(namespace, name, &patch);
    }
    assert_eq!(bed.ready(namespace, "nat", "True", "AllAvailable"), "2 of 2 gateways are available");
    let status = bed.there(namespace, &["egress", "nat"])["status"].clone();
    let selector =
        "app.kubernetes.io/component=egress,app.kubernetes.io/instance=nat,app.kubernetes.io/name=coil";
    assert_eq!((&status["replicas"], &status["selector"]), (&json!(2), &json!(selector)));
    // As a HorizontalPodAutoscaler does.
    bed.plane.kubectl(&["scale", "egress", "nat", "--namespace", namespace, "--replicas=3"]).unwrap();
    pods(3);
    assert_eq!(bed.ready(namespace, "nat", "True", "SomeAvailable"), "2 of 3 gateways are available");
    nothing_is_written_while_nothing_changes(namespace);
}

/// As kubelet does.
fn patch_status(namespace: &str, pod: &str, patch: &Value) {
    let patch = patch.to_string();
    let of_pod =
        ["patch", "pod", pod, "--namespace", namespace, "--subresource=status", "--type=merge", "-p", &patch];
    bed().plane.kubectl(&of_pod).unwrap();
}

fn nothing_is_written_while_nothing_changes(namespace: &str) {
    let bed = bed();
    let versions = || {
        let of = |kind: &str| bed.there(namespace, &[kind, "nat"])["metadata"]["resourceVersion"].clone();
        ["egress", "deployment", "service"].map(of)
    };
    // Past what the controllers of Kubernetes still write.
    let settled = eventually(TIMEOUT, || {
        let before = versions();
        std::thread::sleep(std::time::Duration::from_secs(1));
        ensure!(before == versions());
        Ok(before)
    });
    // More than one look without a change.
    std::thread::sleep(std::time::Duration::from_secs(12));
    assert_eq!(versions(), settled.unwrap());
}

/// Node programs find gateways by the labels of the Service, which Kubernetes copies to EndpointSlices, and know them by the UIDs of
/// their pods.
#[test]
fn endpoint_slices_have_the_labels_of_the_service_and_name_the_pods() {
    let (bed, namespace) = (bed(), "slices");
    bed.namespace(namespace);
    bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
    bed.there(namespace, &["service", "nat"]);
    bed.plane.apply("{apiVersion: v1, kind: Node, metadata: {name: slices}}").unwrap();
    let labels = json!({
        "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": "nat",
    });
    let spec = json!({ "nodeName": "slices", "containers": [{ "name": "a", "image": IMAGE }] });
    let metadata = json!({ "name": "gateway", "namespace": namespace, "labels": labels });
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
    bed.plane.apply(&pod.to_string()).unwrap();
    let ready = json!({ "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let addresses = json!([{ "ip": "10.20.30.40" }, { "ip": "fd02::40" }]);
    let status =
        json!({ "phase": "Running", "podIP": "10.20.30.40", "podIPs": addresses, "conditions": [ready] });
    patch_status(namespace, "gateway", &json!({ "status": status }));
    let uid = bed.there(namespace, &["pod", "gateway"])["metadata"]["uid"].clone();
    let selector = "--selector=app.kubernetes.io/name=coil,app.kubernetes.io/component=egress";
    bed.until(namespace, &["endpointslices", selector], |slices| {
        let slices = slices["items"].as_array().into_iter().flatten();
        let shown = slices.filter(|slice| slice["metadata"]["labels"]["kubernetes.io/service-name"] == "nat");
        let mut endpoints: Vec<_> = shown.flat_map(|slice| slice["endpoints"].as_array()).flatten().collect();
        endpoints.sort_by_key(|endpoint| endpoint["addresses"].to_string());
        let addresses: Vec<_> = endpoints.iter().map(|endpoint| &endpoint["addresses"][0]).collect();
        ensure!(addresses == ["10.20.30.40", "fd02::40"]);
        for endpoint in endpoints {
            ensure!(endpoint["targetRef"]["uid"] == uid && endpoint["targetRef"]["kind"] == "Pod");
            ensure!(
                endpoint["conditions"] == json!({ "ready": true, "serving": true, "terminating": false })
            );
        }
        Ok(())
    });
}

#[test]
fn fields_that_are_taken_back_are_taken_back_from_the_objects() {
    let (bed, namespace) = (bed(), "fields");
    bed.namespace(namespace);
    let template = json!({
        "metadata": { "labels": { "tier": "edge" }, "annotations": { "a": "b" } },
        "spec": { "containers": [{ "name": "sidecar", "image": "s" }, { "name": "egress", "args": ["--x"] }] },
    });
    let full = json!({
        "podDisruptionBudget": { "maxUnavailable": 1 }, "template": template, "fouSourcePortAuto": true,
        "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 300 } },
    });
    bed.plane.apply(&egress(namespace, "nat", &full)).unwrap();
    let budget = bed.there(namespace, &["pdb", "nat"]);
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    let pod = bed.there(namespace, &["deployment", "nat"])["spec"]["template"].clone();
    assert_eq!(pod["metadata"]["labels"]["tier"], "edge");
    assert_eq!(
        (&pod["spec"]["containers"][0]["name"], &pod["spec"]["containers"][1]["args"]),
        (&json!("sidecar"), &json!(["--x"]))
    );
    let service = bed.there(namespace, &["service", "nat"])["spec"].clone();
    assert_eq!(service["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"], 300);
    // As `kubectl rollout restart` does.
    let restarted =
        json!({ "spec": { "template": { "metadata": { "annotations": { "restarted": "now" } } } } });
    bed.patch(namespace, ["deployment", "nat"], &restarted);

    bed.plane
        .apply(&egress(namespace, "nat", &json!({ "podDisruptionBudget": { "minAvailable": "50%" } })))
        .unwrap();
    bed.until(namespace, &["pdb", "nat"], |budget| {
        ensure!(
            (&budget["spec"]["minAvailable"], &budget["spec"]["maxUnavailable"])
                == (&json!("50%"), &Value::Null)
        );
        Ok(())
    });
    let deployment = bed.until(namespace, &["deployment", "nat"], |deployment| {
        let pod = &deployment["spec"]["template"];
        ensure!(pod["spec"]["containers"].as_array().is_some_and(|containers| containers.len() == 1));
        ensure!(pod["metadata"]["labels"]["tier"] == Value::Null);
        Ok(())
    });
    assert_eq!(deployment["spec"]["template"]["metadata"]["annotations"], json!({ "restarted": "now" }));

    bed.plane.apply(&egress(namespace, "nat", &json!({ "sessionAffinity": "None" }))).unwrap();
    bed.gone(namespace, "pdb", "nat");
    bed.until(namespace, &["service", "nat"], |service| {
        ensure!(service["spec"]["sessionAffinity"] == "None");
        Ok(())
    });
    bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
    bed.until(namespace, &["service", "nat"], |service| {
        ensure!(service["spec"]["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"] == 10800);
        Ok(())
    });
}

#[test]
fn what_others_change_or_delete_is_mended() {
    let (bed, namespace) = (bed(), "mended");
    bed.namespace(namespace);
    bed.plane
        .apply(&egress(namespace, "nat", &json!({ "podDisruptionBudget": { "maxUnavailable": 1 } })))
        .unwrap();
    let service = bed.there(namespace, &["service", "nat"]);
    bed.there(namespace, &["pdb", "nat"]);
    let edit =
        json!({ "spec": { "selector": { "app": "other" }, "ports": [{ "port": 53, "protocol": "UDP" }] } });
    bed.patch(namespace, ["service", "nat"], &edit);
    bed.until(namespace, &["service", "nat"], |mended| {
        ensure!(mended["spec"]["selector"] == service["spec"]["selector"]);
        ensure!(mended["spec"]["ports"] == service["spec"]["ports"]);
        Ok(())
    });
    bed.patch(namespace, ["deployment", "nat"], &json!({ "spec": { "replicas": 5 } }));
    bed.until(namespace, &["deployment", "nat"], |deployment| {
        ensure!(deployment["spec"]["replicas"] == 1);
        Ok(())
    });
    // The watch does not show it any more.
    bed.patch(
        namespace,
        ["deployment", "nat"],
        &json!({ "metadata": { "labels": { "app.kubernetes.io/component": null } } }),
    );
    bed.until(namespace, &["deployment", "nat"], |deployment| {
        ensure!(deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "egress");
        Ok(())
    });
    for object in
        [["service", "nat"], ["deployment", "nat"], ["pdb", "nat"], ["serviceaccount", "coil-egress"]]
    {
        let uid = bed.there(namespace, &object)["metadata"]["uid"].clone();
        bed.delete(namespace, object);
        bed.until(namespace, &object, |new| {
            ensure!(new["metadata"]["uid"] != uid && new["metadata"]["deletionTimestamp"].is_null());
            Ok(())
        });
    }
    bed.plane.kubectl(&["delete", "clusterrolebinding", "coil-egress"]).unwrap();
    eventually(TIMEOUT, || {
        ensure!(bed.bound()?.iter().any(|bound| bound == namespace));
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_object_of_another_owner_stays_and_the_other_egress_is_not_affected() {
    let (bed, namespace) = (bed(), "taken");
    bed.namespace(namespace);
    let foreign = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "nat", "namespace": namespace },
        "spec": { "selector": { "app": "web" }, "ports": [{ "port": 80 }] },
    });
    bed.plane.apply(&foreign.to_string()).unwrap();
    let before = bed.there(namespace, &["service", "nat"]);
    bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
    bed.plane.apply(&egress(namespace, "other", &json!({}))).unwrap();
    let message = bed.ready(namespace, "nat", "False", "NameTaken");
    assert_eq!(
        message,
        "Service nat was not made for this Egress: delete it, or give the Egress another name"
    );
    bed.ready(namespace, "other", "False", "NoneAvailable");
    bed.there(namespace, &["deployment", "other"]);
    assert_eq!(bed.there(namespace, &["service", "nat"]), before);
    assert!(
        bed.get(&["deployment", "nat", "--namespace", namespace]).is_err(),
        "a Deployment without a Service"
    );
    let about = |reason: &str| {
        eventually(TIMEOUT, || {
            let events = bed.get(&["events.events.k8s.io", "--namespace", namespace])?;
            let mut events = events["items"].as_array().cloned().unwrap_or_default().into_iter();
            let found = events.find(|event| event["regarding"]["name"] == "nat" && event["reason"] == reason);
            Ok(found.ok_or_else(|| anyhow::anyhow!("no Event {reason}"))?["note"].clone())
        })
    };
    assert_eq!(about("NameTaken").unwrap(), message);
    bed.delete(namespace, ["service", "nat"]);
    bed.ready(namespace, "nat", "False", "NoneAvailable");
    about("GatewaysDeployed").unwrap();
}

#[test]
fn an_egress_that_cannot_be_deployed_says_why_until_it_is_changed() {
    let (bed, namespace) = (bed(), "invalid");
    bed.namespace(namespace);
    let pod = |spec: Value| json!({ "template": { "spec": spec } });
    bed.plane.apply(&egress(namespace, "nat", &pod(json!({ "hostNetwork": true })))).unwrap();
    let message = bed.ready(namespace, "nat", "False", "InvalidTemplate");
    assert!(message.contains("hostNetwork must not be true"), "{message}");
    // The CRD knows nothing of what the API server demands of pods.
    bed.plane.apply(&egress(namespace, "nat", &pod(json!({ "restartPolicy": "Never" })))).unwrap();
    let message = bed.ready(namespace, "nat", "False", "Rejected");
    assert!(message.contains("refuses Deployment nat") && message.contains("restartPolicy"), "{message}");
    bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
    bed.ready(namespace, "nat", "False", "NoneAvailable");
    let long = "a".repeat(64);
    bed.plane.apply(&egress(namespace, &long, &json!({}))).unwrap();
    bed.ready(namespace, &long, "False", "InvalidName");
}

#[test]
fn nothing_is_left_of_an_egress_that_is_deleted() {
    let (bed, namespace) = (bed(), "deleted");
    bed.namespace(namespace);
    bed.plane
        .apply(&egress(namespace, "nat", &json!({ "podDisruptionBudget": { "minAvailable": 0 } })))
        .unwrap();
    for kind in ["service", "deployment", "pdb"] {
        bed.there(namespace, &[kind, "nat"]);
    }
    let is_bound = |wanted: bool| {
        eventually(TIMEOUT, || {
            let bound = bed.bound()?;
            ensure!(bound.iter().any(|bound| bound == namespace) == wanted, "{bound:?}");
            Ok(())
        })
    };
    is_bound(true).unwrap();
    bed.delete(namespace, ["egress", "nat"]);
    for kind in ["service", "deployment", "pdb"] {
        bed.gone(namespace, kind, "nat");
    }
    is_bound(false).unwrap();
    // Made anew at once, it has objects of its own.
    bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
    let uid = bed.there(namespace, &["egress", "nat"])["metadata"]["uid"].clone();
    bed.until(namespace, &["service", "nat"], |service| {
        ensure!(service["metadata"]["ownerReferences"][0]["uid"] == uid);
        Ok(())
    });
}

/// The other controller writes it where it sees no controller of egress gateways for a while.
#[test]
fn the_condition_that_there_is_no_controller_is_replaced() {
    let (bed, namespace) = (bed(), "other-writer");
    bed.namespace(namespace);
    bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
    bed.ready(namespace, "nat", "False", "NoneAvailable");
    let condition = json!({
        "type": "Ready", "status": "False", "reason": "NoController", "message": "no", "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let status = json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
        "metadata": { "name": "nat", "namespace": namespace }, "status": { "conditions": [condition] },
    });
    let arguments = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--subresource=status",
        "--field-manager=other",
        "-f",
        "-",
    ];
    bed.plane.kubectl_stdin(&arguments, &status.to_string()).unwrap();
    bed.ready(namespace, "nat", "False", "NoneAvailable");
}

#[test]
fn the_controller_has_no_rights_that_it_does_not_need() {
    let bed = bed();
    let account = "--as=system:serviceaccount:kube-system:coil-egress-controller";
    for (verb, resource, namespace, wanted) in [
        ("create", "deployments.apps", "default", true),
        ("patch", "clusterrolebindings/coil-egress", "default", true),
        ("bind", "clusterroles/coil-egress", "default", true),
        ("get", "pods", "kube-system", true),
        ("watch", "nodes", "default", true),
        ("watch", "addresspools.coil.cybozu.com", "default", true),
        ("watch", "servicecidrs.networking.k8s.io", "default", true),
        ("patch", "nodes", "default", false),
        ("patch", "addresspools.coil.cybozu.com", "default", false),
        ("list", "pods", "default", true),
        ("patch", "pods", "default", true),
        ("delete", "pods", "default", false),
        ("watch", "pods", "default", true),
        ("patch", "clusterrolebindings/cluster-admin", "default", false),
        ("bind", "clusterroles/cluster-admin", "default", false),
        ("escalate", "clusterroles/coil-egress", "default", false),
        ("get", "secrets", "kube-system", false),
        // Which gateways are gone.
        ("get", "pods", "default", true),
        ("create", "pods", "default", false),
        ("delete", "services", "default", false),
        ("delete", "deployments.apps", "default", false),
        ("patch", "serviceaccounts/default", "default", false),
        ("patch", "egresses.coil.cybozu.com", "default", false),
        // It can give gateways a right to Leases only if it has that for all.
        ("patch", "leases.coordination.k8s.io", "default", true),
        ("patch", "roles/coil-egress-source-addresses", "default", true),
        ("patch", "roles/other", "default", false),
        ("patch", "rolebindings/other", "default", false),
        ("escalate", "roles/coil-egress-source-addresses", "default", false),
    ] {
        let arguments = ["auth", "can-i", verb, resource, "--namespace", namespace, account];
        // It says no by its exit code.
        let answer = bed.plane.kubectl(&arguments).is_ok_and(|answer| answer.trim() == "yes");
        assert_eq!(answer, wanted, "{verb} {resource} in {namespace}");
    }
}

#[test]
fn a_gateways_token_can_do_nothing_but_its_job() {
    let bed = bed();
    let role = ["create", "clusterrolebinding", "gateway-rights", "--clusterrole=coil-egress"];
    bed.plane.kubectl(&[&role[..], &["--serviceaccount=default:gateway-rights"]].concat()).unwrap();
    let account = "--as=system:serviceaccount:default:gateway-rights";
    for (verb, resource, wanted) in [
        ("watch", "egresses.coil.cybozu.com", true),
        ("watch", "addressblocks.coil.cybozu.com", true),
        ("watch", "addresspools.coil.cybozu.com", true),
        ("watch", "nodes", true),
        ("watch", "servicecidrs.networking.k8s.io", true),
        ("create", "tokenreviews.authentication.k8s.io", true),
        ("list", "pods", false),
        ("get", "secrets", false),
        ("create", "serviceaccounts/token", false),
        ("patch", "egresses.coil.cybozu.com", false),
        ("patch", "nodes", false),
        ("create", "events.events.k8s.io", false),
    ] {
        let arguments = ["auth", "can-i", verb, resource, "--all-namespaces", account];
        // It says no by its exit code.
        let answer = bed.plane.kubectl(&arguments).is_ok_and(|answer| answer.trim() == "yes");
        assert_eq!(answer, wanted, "{verb} {resource}");
    }
}

#[test]
fn the_component_has_the_image_of_this_version_and_the_names_of_coil() {
    let bed = bed();
    let deployment = bed.there("kube-system", &["deployment", "coil-egress-controller"]);
    let labels =
        json!({ "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coil-egress-controller" });
    let spec = &deployment["spec"];
    assert_eq!((&spec["replicas"], &spec["selector"]["matchLabels"]), (&json!(2), &labels));
    let pod = &spec["template"]["spec"];
    assert_eq!(pod["serviceAccountName"], "coil-egress-controller");
    let container = &pod["containers"][0];
    assert_eq!(container["image"], concat!("localhost/fairlead:", env!("CARGO_PKG_VERSION")));
    assert_eq!(
        (&container["ports"][0]["containerPort"], &container["ports"][1]["containerPort"]),
        (&json!(9396), &json!(9397))
    );
    let lease = bed.there("kube-system", &["lease", "coil-egress-leader"]);
    assert_eq!(lease["spec"]["holderIdentity"], "controller-0");
}

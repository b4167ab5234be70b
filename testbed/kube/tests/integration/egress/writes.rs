//! Writes with the token of the controller of egress gateways: RBAC lets it write objects in all namespaces, and policies bind it to what an Egress
//! owns. Each write is one that RBAC allows.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testbed_lab::eventually;

use crate::egress::bed::{Bed, TIMEOUT, bed, egress};

const OWNERLESS: &str = "may only write what an Egress owns, and no Egress owns ";
const COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// An Egress whose objects are there, in a namespace of its own.
struct Owner {
    bed: std::sync::Arc<Bed>,
    namespace: &'static str,
    uid: String,
}

impl Owner {
    fn new(namespace: &'static str) -> Self {
        let bed = bed();
        bed.namespace(namespace);
        bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
        bed.there(namespace, &["deployment", "nat"]);
        let uid = bed.get(&["egress", "nat", "--namespace", namespace]).unwrap()["metadata"]["uid"].clone();
        Self { bed, namespace, uid: uid.as_str().unwrap().to_owned() }
    }

    /// An object as the controller makes it.
    fn object(&self, api: &str, kind: &str, name: &str, fields: &Value) -> Value {
        let mut object = json!({ "apiVersion": api, "kind": kind, "metadata": {
            "name": name, "namespace": self.namespace, "labels": labels("nat"), "ownerReferences": [owner("nat", &self.uid)],
        } });
        for (field, value) in fields.as_object().unwrap() {
            object[field] = value.clone();
        }
        object
    }

    /// Creates it, or what is like it, as the controller.
    fn create(&self, object: &Value) -> Result<String, String> {
        self.bed.as_controller(
            &["create", "--dry-run=server", "--validate=false", "-f", "-"],
            &object.to_string(),
        )
    }

    /// Applies it as the controller does.
    fn apply(&self, object: &Value) -> Result<String, String> {
        let arguments =
            ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=false"];
        self.bed.as_controller(&[&arguments[..], &["-f", "-"]].concat(), &object.to_string())
    }

    fn patch(&self, namespace: &str, kind: &str, name: &str, patch: &Value) -> Result<String, String> {
        let patch = patch.to_string();
        let of = ["patch", kind, name, "--namespace", namespace];
        let how = ["--type=strategic", "--dry-run=server", "-p", &patch];
        self.bed.as_controller(&[&of[..], &how].concat(), "")
    }

    fn delete(&self, namespace: &str, kind: &str, name: &str) -> Result<String, String> {
        let arguments = ["delete", kind, name, "--namespace", namespace, "--dry-run=server", "--wait=false"];
        self.bed.as_controller(&arguments, "")
    }
}

fn labels(instance: &str) -> Value {
    json!({
        "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress", "app.kubernetes.io/instance": instance,
    })
}

fn owner(name: &str, uid: &str) -> Value {
    json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "name": name, "uid": uid,
        "controller": true, "blockOwnerDeletion": true,
    })
}

/// A Deployment of gateways with more in its pods.
fn deployment(of: &Owner, name: &str, more: &Value) -> Value {
    let mut pod =
        json!({ "serviceAccountName": "coil-egress", "containers": [{ "name": "egress", "image": "a" }] });
    for (field, value) in more.as_object().unwrap() {
        pod[field] = value.clone();
    }
    let spec = json!({ "selector": { "matchLabels": labels(name) },
        "template": { "metadata": { "labels": labels(name) }, "spec": pod } });
    let mut made = of.object("apps/v1", "Deployment", name, &json!({ "spec": spec }));
    made["metadata"]["labels"] = labels(name);
    made["metadata"]["ownerReferences"][0]["name"] = json!(name);
    made
}

#[track_caller]
fn refused(answer: Result<String, String>, words: &str) {
    match answer {
        Ok(answer) => panic!("not refused with {words:?}: {answer}"),
        Err(error) => assert!(
            error.contains("denied request: ") && error.contains(words),
            "refused without {words:?}: {error}"
        ),
    }
}

/// The API server puts policies into force some time after it has accepted them.
fn in_force(of: &Owner) {
    let foreign = json!({ "metadata": { "annotations": { "a": "b" } } });
    let end = Instant::now() + Duration::from_secs(60);
    while of.patch("default", "service", "kubernetes", &foreign).is_ok() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_controllers_token_changes_nothing_that_no_egress_owns() {
    let of = Owner::new("owned");
    in_force(&of);
    of.bed
        .plane
        .apply("{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: other, namespace: owned}}")
        .unwrap();
    let annotation = json!({ "metadata": { "annotations": { "a": "b" } } });
    refused(
        of.patch("default", "service", "kubernetes", &annotation),
        &format!("{OWNERLESS}services default/kubernetes"),
    );
    refused(of.patch("owned", "lease", "other", &annotation), &format!("{OWNERLESS}leases owned/other"));
    refused(of.delete("owned", "lease", "other"), &format!("{OWNERLESS}leases owned/other"));
    // Another's Deployment, in a namespace with an Egress and the labels of gateways.
    let foreign = |name: &str| {
        let mut object = deployment(&of, name, &json!({}));
        object["metadata"].as_object_mut().unwrap().remove("ownerReferences");
        object
    };
    of.bed.plane.apply(&foreign("web").to_string()).unwrap();
    let image = json!({ "spec": { "template": { "metadata": { "annotations": { "a": "b" } } } } });
    refused(of.patch("owned", "deployment", "web", &image), &format!("{OWNERLESS}deployments owned/web"));
    let owned = json!({ "metadata": { "ownerReferences": [owner("web", &of.uid)] } });
    refused(of.patch("owned", "deployment", "web", &owned), OWNERLESS);
    refused(of.create(&foreign("web2")), &format!("{OWNERLESS}deployments owned/web2"));
    // The lease by which a replica leads is its own, and those of other programs in its namespace are not.
    of.bed
        .plane
        .apply("{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: another, namespace: kube-system}}")
        .unwrap();
    of.patch("kube-system", "lease", "coil-egress-leader", &annotation).unwrap();
    refused(
        of.patch("kube-system", "lease", "another", &annotation),
        &format!("{OWNERLESS}leases kube-system/another"),
    );
    refused(of.delete("kube-system", "lease", "another"), OWNERLESS);
}

#[test]
fn the_controllers_token_makes_objects_of_egresses_that_there_are() {
    let of = Owner::new("made");
    in_force(&of);
    let good = deployment(&of, "nat", &json!({}));
    of.apply(&good).unwrap();
    let elsewhere = {
        let mut object = good.clone();
        object["metadata"]["namespace"] = json!("default");
        object
    };
    refused(of.create(&elsewhere), "no params found for policy binding with `Deny` parameterNotFoundAction");
    // The API server looks for Egresses for each writer; administrators write every object.
    of.bed
        .plane
        .kubectl(&["create", "serviceaccount", "any", "--namespace", "kube-public", "--dry-run=server"])
        .unwrap();
    let mut account = json!({ "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": { "name": "coil-egress", "namespace": "kube-public", "labels": labels("nat") } });
    refused(of.apply(&account), "no params found for policy binding with `Deny` parameterNotFoundAction");
    account["metadata"].as_object_mut().unwrap().remove("labels");
    refused(of.apply(&account), "has the labels of gateways");
    of.bed.delete("made", ["deployment", "nat"]);
    let other = {
        let mut object = good.clone();
        object["metadata"]["ownerReferences"] = json!([owner("nat", "0000")]);
        object
    };
    // The controller makes it anew at the same time, so that this may be an update.
    let answer = of.apply(&other).unwrap_err();
    let words = [
        "Egress nat has another UID",
        "may give an object one owner",
        "Only one reference can have Controller",
    ];
    assert!(words.iter().any(|words| answer.contains(words)), "{answer}");
    let with = |path: &str, value: Value| {
        let mut object = deployment(&of, "nat2", &json!({}));
        *object
            .pointer_mut("/metadata")
            .unwrap()
            .as_object_mut()
            .unwrap()
            .entry(path)
            .or_insert(json!(null)) = value;
        object
    };
    let two = json!([owner("nat2", &of.uid), { "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1" }]);
    refused(of.create(&with("ownerReferences", two)), "one owner, its Egress");
    refused(of.create(&with("ownerReferences", json!([owner("nat3", &of.uid)]))), "is of Egress nat3");
    refused(
        of.create(&with("finalizers", json!(["a.example.com/b"]))),
        "may not add finalizers to deployments made/nat2",
    );
    refused(of.create(&with("labels", json!({}))), "must be those of its Egress");
    let lease = of.object("coordination.k8s.io/v1", "Lease", "nat-leader", &json!({}));
    refused(of.create(&lease), "leases made/nat-leader is of Egress nat");
    of.create(&of.object("coordination.k8s.io/v1", "Lease", "nat-source-7", &json!({}))).unwrap();
}

#[test]
fn pods_that_the_controllers_token_makes_have_no_privileges_unless_their_namespace_permits_them() {
    let of = Owner::new("unprivileged");
    in_force(&of);
    let container = |field: Value| json!({ "containers": [{ "name": "egress", "image": "a", "securityContext": field }] });
    let probing = |probe: &str| json!({ "containers": [{ "name": "egress", "image": "a", probe: { "tcpSocket": { "host": "127.0.0.1", "port": 1 } } }] });
    let asking = [
        ("hostNetwork", json!({ "hostNetwork": true })),
        ("hostPID", json!({ "hostPID": true })),
        ("hostIPC", json!({ "hostIPC": true })),
        ("hostPath of volume root", json!({ "volumes": [{ "name": "root", "hostPath": { "path": "/" } }] })),
        ("privileged of container egress", container(json!({ "privileged": true }))),
        ("capabilities of container egress", container(json!({ "capabilities": { "add": ["SYS_ADMIN"] } }))),
        ("seLinuxOptions of the pod", json!({ "securityContext": { "seLinuxOptions": { "type": "a" } } })),
        (
            "appArmorProfile of container egress",
            container(json!({ "appArmorProfile": { "type": "Unconfined" } })),
        ),
        ("host of a probe of container egress", probing("livenessProbe")),
        (
            "privileged of container i",
            json!({ "initContainers": [{ "name": "i", "image": "a", "securityContext": { "privileged": true } }] }),
        ),
        (
            "hostPort of container egress",
            json!({ "containers": [{ "name": "egress", "image": "a", "ports": [{ "containerPort": 1, "hostPort": 1 }] }] }),
        ),
    ];
    for (words, more) in &asking {
        refused(
            of.create(&deployment(&of, "nat2", more)),
            &format!("gateway pods may not have {words}; an administrator may"),
        );
        // Of that, the controller says why it makes no gateways.
        if *words == "hostNetwork" {
            continue;
        }
        let wanted = json!({ "template": { "spec": more } });
        let words =
            format!("spec.template of an Egress may not have {words}; an administrator may permit it");
        let applied = of.bed.plane.apply(&egress("unprivileged", "asking", &wanted));
        refused(applied.map_err(|error| format!("{error:#}")), &words);
    }
    the_annotation_of_earlier_kubernetes_names_no_profile_either(&of);
    let account = json!({ "serviceAccountName": "default" });
    refused(
        of.create(&deployment(&of, "nat2", &account)),
        "gateway pods have the ServiceAccount coil-egress",
    );
    let mut other = deployment(&of, "nat2", &json!({}));
    other["spec"]["selector"]["matchLabels"] = json!({ "app": "web" });
    other["spec"]["template"]["metadata"]["labels"]["app"] = json!("web");
    refused(of.create(&other), "selects the pods of that Egress, and no others");
    let gateway = container(json!({ "capabilities": { "add": ["NET_ADMIN", "BPF", "NET_RAW"] } }));
    of.create(&deployment(&of, "nat2", &gateway)).unwrap();
    an_administrator_permits_more_in_a_namespace(&of);
}

fn the_annotation_of_earlier_kubernetes_names_no_profile_either(of: &Owner) {
    let annotations = json!({ "container.apparmor.security.beta.kubernetes.io/egress": "unconfined" });
    let mut annotated = deployment(of, "nat2", &json!({}));
    annotated["spec"]["template"]["metadata"]["annotations"] = annotations.clone();
    let words = "may not have appArmorProfile of container egress; an administrator may permit it";
    refused(of.create(&annotated), words);
    let wanted = json!({ "template": { "metadata": { "annotations": annotations } } });
    let applied = of.bed.plane.apply(&egress("unprivileged", "asking", &wanted));
    refused(applied.map_err(|error| format!("{error:#}")), words);
}

fn an_administrator_permits_more_in_a_namespace(of: &Owner) {
    let permit = "egress.coil.cybozu.com/allow-privileged-gateways=true";
    of.bed.plane.kubectl(&["annotate", "namespace", "unprivileged", permit]).unwrap();
    let privileged = json!({ "template": { "spec": { "containers": [
        { "name": "egress", "securityContext": { "privileged": true } } ] } } });
    // The API server learns of the annotation a moment later.
    eventually(TIMEOUT, || of.bed.plane.apply(&egress("unprivileged", "permitted", &privileged))).unwrap();
    let made = of.bed.there("unprivileged", &["deployment", "permitted"]);
    let context = &made["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    assert_eq!(context["privileged"], true);
    // Taken back, it stays for what has it, also where other fields change.
    let not_any_more = "egress.coil.cybozu.com/allow-privileged-gateways-";
    of.bed.plane.kubectl(&["annotate", "namespace", "unprivileged", not_any_more]).unwrap();
    of.bed.patch(
        "unprivileged",
        ["egress", "permitted"],
        &json!({ "spec": { "replicas": 3, "template": { "spec": { "terminationGracePeriodSeconds": 20 } } } }),
    );
    of.bed.until("unprivileged", &["deployment", "permitted"], |made| {
        anyhow::ensure!(made["spec"]["replicas"] == 3);
        Ok(())
    });
}

#[test]
fn services_of_the_controllers_token_attract_nothing_of_others() {
    let of = Owner::new("attracting");
    in_force(&of);
    let spec = |more: Value| {
        let mut spec = json!({ "selector": labels("nat"), "ports": [{ "port": 5555, "protocol": "UDP" }] });
        for (field, value) in more.as_object().unwrap() {
            spec[field] = value.clone();
        }
        json!({ "spec": spec })
    };
    let service = |more: Value| of.object("v1", "Service", "nat", &spec(more));
    of.apply(&service(json!({}))).unwrap();
    refused(
        of.apply(&service(json!({ "externalIPs": ["192.0.2.1"] }))),
        "may not give a Service external IPs",
    );
    refused(of.apply(&service(json!({ "type": "LoadBalancer" }))), "is of type ClusterIP");
    refused(
        of.apply(&service(json!({ "selector": { "app": "web" } }))),
        "selects the pods of that Egress, and no others",
    );
}

#[test]
fn the_controllers_token_changes_only_the_deletion_cost_of_gateway_pods() {
    let of = Owner::new("costly");
    in_force(&of);
    let pod = |name: &str, labels: Value| {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "costly", "labels": labels },
            "spec": { "containers": [{ "name": "a", "image": "a" }] } })
    };
    of.bed.plane.apply(&pod("gateway", labels("nat")).to_string()).unwrap();
    of.bed.plane.apply(&pod("web", json!({ "app": "web" })).to_string()).unwrap();
    let cost = json!({ "metadata": { "annotations": { COST: "7" } } });
    of.patch("costly", "pod", "gateway", &cost).unwrap();
    refused(of.patch("costly", "pod", "web", &cost), "may not change pods that are no gateways");
    let words = "may only change the annotation controller.kubernetes.io/pod-deletion-cost of a pod";
    for patch in [
        json!({ "spec": { "containers": [{ "name": "a", "image": "evil" }] } }),
        json!({ "metadata": { "annotations": { "a": "b" } } }),
        json!({ "metadata": { "labels": { "app": "web" } } }),
        json!({ "metadata": { "finalizers": ["a.example.com/b"] } }),
    ] {
        refused(of.patch("costly", "pod", "gateway", &patch), words);
    }
}

#[test]
fn the_controllers_token_gives_no_rights_but_those_of_gateways() {
    let of = Owner::new("rights");
    in_force(&of);
    let name = "coil-egress-source-addresses";
    let role = |rule: Value| {
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "rules": [rule],
            "metadata": { "name": name, "namespace": "rights", "labels": labels("nat") } })
    };
    let lease = |names: Value| json!({ "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": names, "verbs": ["get", "patch"] });
    of.apply(&role(lease(json!(["nat-source-0", "nat-gateways"])))).unwrap();
    let words = "may only give rights on the Leases of source addresses";
    refused(of.apply(&role(lease(json!(["kube-scheduler"])))), words);
    refused(
        of.apply(&role(json!({ "apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["create"] }))),
        words,
    );
    let binding = |kind: &str, role_kind: &str, name: &str, subject: Value| {
        let reference = json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": name });
        let mut object = json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "roleRef": reference,
            "subjects": [subject], "metadata": { "name": name, "labels": labels("nat") } });
        if kind == "RoleBinding" {
            object["metadata"]["namespace"] = json!("rights");
        }
        object
    };
    let account = |name: &str, namespace: &str| json!({ "kind": "ServiceAccount", "name": name, "namespace": namespace });
    of.apply(&binding("ClusterRoleBinding", "ClusterRole", "coil-egress", account("coil-egress", "rights")))
        .unwrap();
    let words = "may only give rights to ServiceAccounts named coil-egress";
    refused(
        of.apply(&binding("ClusterRoleBinding", "ClusterRole", "coil-egress", account("default", "rights"))),
        words,
    );
    let everyone =
        json!({ "kind": "Group", "name": "system:unauthenticated", "apiGroup": "rbac.authorization.k8s.io" });
    refused(of.apply(&binding("ClusterRoleBinding", "ClusterRole", "coil-egress", everyone)), words);
    // The controller takes the Role away again, since the Egress has no source addresses.
    let bound = || {
        of.bed.plane.apply(&role(lease(json!(["nat-source-0"]))).to_string())?;
        of.apply(&binding("RoleBinding", "Role", name, account("coil-egress", "rights")))
            .map_err(anyhow::Error::msg)
    };
    eventually(TIMEOUT, bound).unwrap();
    let refused_with_words = || {
        of.bed.plane.apply(&role(lease(json!(["nat-source-0"]))).to_string())?;
        let outcome = of.apply(&binding("RoleBinding", "Role", name, account("coil-egress", "default")));
        anyhow::ensure!(outcome.as_ref().is_err_and(|error| error.contains(words)), "{outcome:?}");
        Ok(())
    };
    eventually(TIMEOUT, refused_with_words).unwrap();
    let with_role = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "coil-egress", "namespace": "rights",
        "annotations": { "eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/admin" } } });
    refused(of.apply(&with_role), "may only write the labels of a ServiceAccount");
    let event = |kind: &str| {
        json!({ "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": { "name": "e", "namespace": "rights" }, "action": "a",
            "reason": "r", "type": "Normal", "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "fairlead-egress-controller",
            "reportingInstance": "i", "regarding": { "kind": kind, "namespace": "rights", "name": "nat" } })
    };
    of.create(&event("Egress")).unwrap();
    refused(of.create(&event("Pod")), "publishes Events of Egresses, in its own name");
}

/// RBAC lets it give rights that it has itself.
#[test]
fn the_controllers_token_gives_gateways_none_of_its_own_rights() {
    let of = Owner::new("own-rights");
    in_force(&of);
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": { "name": "coil-egress-source-addresses", "namespace": "own-rights", "labels": labels("nat") },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "coil-egress-controller" },
        "subjects": [{ "kind": "ServiceAccount", "name": "coil-egress", "namespace": "own-rights" }],
    });
    refused(of.apply(&binding), "may only bind the roles of gateways");
}

/// The author of an Egress in one namespace, and of Leases there.
#[test]
fn a_tenant_takes_no_source_address_with_a_lease_of_its_own_and_hears_that_its_egress_is_for_all() {
    let of = Owner::new("tenant");
    in_force(&of);
    let role = [
        "--namespace",
        "tenant",
        "--verb=*",
        "--resource=leases.coordination.k8s.io,egresses.coil.cybozu.com",
    ];
    of.bed.plane.kubectl(&[&["create", "role", "author"], &role[..]].concat()).unwrap();
    let bind = ["create", "rolebinding", "author", "--namespace", "tenant", "--role=author", "--user=author"];
    of.bed.plane.kubectl(&bind).unwrap();
    let as_author = |object: &Value| {
        let arguments = ["--as=author", "create", "--dry-run=server", "-f", "-"];
        of.bed.plane.kubectl_stdin(&arguments, &object.to_string()).map_err(|error| format!("{error:#}"))
    };
    let mut lease = of.object("coordination.k8s.io/v1", "Lease", "nat-source-9", &json!({}));
    as_author(&lease).unwrap();
    lease["metadata"]["annotations"] = json!({ "egress.coil.cybozu.com/source-addresses": "203.0.113.99" });
    refused(as_author(&lease), "may write a Lease of source addresses");
    of.create(&lease).unwrap();
    let warnings = |object: &str| {
        let arguments = ["--as=author", "create", "--dry-run=server", "--warnings-as-errors", "-f", "-"];
        of.bed
            .plane
            .kubectl_stdin(&arguments, object)
            .err()
            .map(|error| format!("{error:#}"))
            .unwrap_or_default()
    };
    let said = warnings(&egress("tenant", "open", &json!({})));
    let words = "pods of every namespace may use the gateways of Egress tenant/open: spec.allowedNamespaces says which ones may";
    assert!(said.contains(words), "{said}");
    assert_eq!(warnings(&egress("tenant", "listed", &json!({ "allowedNamespaces": ["tenant"] }))), "");
    let condition = |egress: &Value| {
        let all = egress["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|it| it["type"] == "NamespacesRestricted").map(|it| it["reason"].clone())
    };
    of.bed.until("tenant", &["egress", "nat"], |egress| {
        anyhow::ensure!(condition(egress) == Some(json!("EveryNamespaceMayUse")));
        Ok(())
    });
}

/// A type that an expression gets wrong is an error of each write, so that the controller could write nothing.
#[test]
fn the_expressions_of_policies_have_the_types_of_the_objects() {
    let of = Owner::new("types");
    in_force(&of);
    of.bed.until("types", &["validatingadmissionpolicy"], |policies| {
        let policies = policies["items"].as_array().unwrap();
        anyhow::ensure!(policies.len() > 8);
        for policy in policies {
            let observed = &policy["status"]["observedGeneration"];
            anyhow::ensure!(observed == &policy["metadata"]["generation"], "{}", policy["metadata"]["name"]);
            let warnings = &policy["status"]["typeChecking"]["expressionWarnings"];
            assert!(warnings.is_null(), "{}: {warnings}", policy["metadata"]["name"]);
        }
        Ok(())
    });
}

//! `fairlead egress`, as users with different rights run it.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::ensure;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed_lab::{eventually, executable};

use crate::egress::bed::{Bed, TIMEOUT, bed, egress};

/// Namespace of the Egress, and that of its clients.
const EGRESS: &str = "shown-egress";
const SHOP: &str = "shown-shop";
/// Outside of the cluster.
const OUTSIDE: &str = "198.51.100.7";

/// Exit code, standard output and standard error.
fn fairlead(kubeconfig: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(executable("fairlead").unwrap());
    command.arg("egress").args(arguments).arg("--kubeconfig").arg(kubeconfig).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn data(kubeconfig: &Path, arguments: &[&str], code: i32) -> Value {
    let (found, out, err) = fairlead(kubeconfig, &[arguments, &["-o", "json"]].concat());
    assert_eq!(found, Some(code), "{arguments:?}: {out}{err}");
    serde_json::from_str(&out).unwrap()
}

/// An Egress with two gateways, one of them ending, and pods that name it, another one, or none. No pod runs.
fn objects(bed: &Bed) {
    [EGRESS, SHOP].iter().for_each(|namespace| bed.namespace(namespace));
    bed.plane.apply(&egress(EGRESS, "nat", &json!({ "allowedNamespaces": [SHOP] }))).unwrap();
    bed.there(EGRESS, &["service", "nat"]);
    let endpoint = |pod: &str, address: &str, terminating: bool| {
        json!({
            "addresses": [address], "targetRef": { "kind": "Pod", "name": pod, "namespace": EGRESS, "uid": pod },
            "conditions": { "ready": !terminating, "serving": true, "terminating": terminating },
        })
    };
    let labels = json!({
        "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress",
        "kubernetes.io/service-name": "nat",
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "nat-by-hand", "namespace": EGRESS, "labels": labels },
        "endpoints": [endpoint("nat-b", "10.1.0.3", true), endpoint("nat-a", "10.1.0.2", false)],
        "ports": [{ "port": 5555, "protocol": "UDP" }],
    });
    bed.plane.apply(&slice.to_string()).unwrap();
    bed.there(SHOP, &["serviceaccount", "default"]);
    for (name, asked, address) in [
        ("web", Some("nat"), "10.1.2.3"),
        ("lost", Some("nat,gone"), "10.1.2.4"),
        ("plain", None, "10.1.2.5"),
    ] {
        let annotations = asked.map(|asked| json!({ format!("egress.coil.cybozu.com/{EGRESS}"): asked }));
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": SHOP, "annotations": annotations },
            "spec": { "containers": [{ "name": "a", "image": "registry.example.com/a" }] },
        });
        bed.plane.apply(&pod.to_string()).unwrap();
        let status =
            json!({ "status": { "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }] } });
        let arguments =
            ["patch", "pod", name, "--namespace", SHOP, "--subresource=status", "--type=merge", "-p"];
        let status = status.to_string();
        bed.plane.kubectl(&[&arguments[..], &[&status]].concat()).unwrap();
    }
}

/// A kubeconfig of a ServiceAccount with this ClusterRole.
fn user(bed: &Bed, name: &str, role: Option<&str>, directory: &TempDir) -> std::path::PathBuf {
    bed.plane.kubectl(&["create", "serviceaccount", name, "--namespace", SHOP]).unwrap();
    if let Some(role) = role {
        let (role, account) = (format!("--clusterrole={role}"), format!("--serviceaccount={SHOP}:{name}"));
        bed.plane.kubectl(&["create", "clusterrolebinding", name, &role, &account]).unwrap();
    }
    let kubeconfig = directory.path().join(name);
    let token = bed.plane.token(name, SHOP, None).unwrap();
    bed.plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
    kubeconfig
}

#[test]
fn egresses_are_shown_and_the_way_of_packets_is_explained() {
    let bed = bed();
    objects(&bed);
    let admin = bed.plane.kubeconfig();
    let service = bed.there(EGRESS, &["service", "nat"])["spec"]["clusterIP"].as_str().unwrap().to_owned();
    bed.ready(EGRESS, "nat", "False", "NoneAvailable");

    let all = data(admin, &["status"], 3);
    let rows = all["egresses"].as_array().unwrap();
    let row = rows.iter().find(|row| row["namespace"] == EGRESS).unwrap();
    assert_eq!((&row["clientCount"], &row["reason"]), (&json!(2), &json!("NoneAvailable")));
    let (code, table, _) = fairlead(admin, &["status"]);
    assert!(code == Some(3) && table.contains(&format!("{EGRESS}/nat")), "{table}");

    let name = format!("{EGRESS}/nat");
    let one = data(admin, &["status", &name], 3);
    assert_eq!(one["allowedNamespaces"], json!([SHOP]));
    assert!(one["clusterIPs"].as_array().unwrap().contains(&json!(service)), "{one}");
    let gateways: Vec<_> =
        one["gateways"].as_array().unwrap().iter().map(|it| (&it["pod"], &it["state"])).collect();
    let (a, b) = ((json!("nat-a"), json!("ready")), (json!("nat-b"), json!("draining")));
    assert_eq!(gateways, [(&a.0, &a.1), (&b.0, &b.1)]);
    let clients = one["clients"].as_array().unwrap();
    assert_eq!(
        (&clients[0]["name"], &clients[0]["problems"][0]["reason"]),
        (&json!("lost"), &json!("EgressUnknown"))
    );
    assert_eq!((&clients[1]["name"], &clients[1]["problems"]), (&json!("web"), &json!([])));
    assert_eq!(one["notRead"], json!([]));
    let (_, text, _) = fairlead(admin, &["status", &name]);
    assert!(
        text.contains(&format!("{SHOP}/lost: EgressUnknown: there is no Egress {EGRESS}/gone")),
        "{text}"
    );
    let (code, _, error) = fairlead(admin, &["status", &format!("{EGRESS}/none")]);
    assert!(code == Some(1) && error.contains("there is no Egress"), "{error}");

    let explain = |pod: &str, to: &str, code| data(admin, &["explain", &format!("{SHOP}/{pod}"), to], code);
    let out = explain("web", OUTSIDE, 0);
    assert_eq!((&out["way"], &out["source"]), (&json!("gateways"), &json!("10.1.2.3")), "{out:#}");
    assert_eq!((&out["tunnel"]["egress"], &out["tunnel"]["clusterIP"]), (&json!(name), &json!(service)));
    assert_eq!(out["tunnel"]["gateways"].as_array().unwrap().len(), 2);
    assert_eq!(explain("web", &service, 0)["way"], "eth0", "an address of a Service");
    assert_eq!(explain("plain", OUTSIDE, 0)["way"], "eth0");
    assert_eq!(explain("lost", OUTSIDE, 0)["problems"][0]["reason"], "EgressUnknown");
    bed.patch(EGRESS, ["egress", "nat"], &json!({ "spec": { "allowedNamespaces": [] } }));
    let refused = explain("web", OUTSIDE, 1);
    assert_eq!((&refused["way"], &refused["reason"]), (&json!("refused"), &json!("EgressNotAllowed")));
    let (_, text, _) = fairlead(admin, &["explain", &format!("{SHOP}/web"), OUTSIDE]);
    assert!(text.contains("They are refused.\nEgressNotAllowed: "), "{text}");
    bed.patch(EGRESS, ["egress", "nat"], &json!({ "spec": { "allowedNamespaces": [SHOP] } }));
    rights_that_are_missing_are_named(&bed);
}

fn rights_that_are_missing_are_named(bed: &Bed) {
    let directory = TempDir::new().unwrap();
    let viewer = format!("{}/../../deploy/rbac/viewer.yaml", env!("CARGO_MANIFEST_DIR"));
    bed.plane.apply(&std::fs::read_to_string(viewer).unwrap()).unwrap();
    let viewer = user(bed, "shown-viewer", Some("view"), &directory);
    let pod = format!("{SHOP}/web");
    // The controller of Kubernetes adds rights to the role some time later.
    let seen = eventually(TIMEOUT, || {
        let (code, out, err) = fairlead(&viewer, &["explain", &pod, OUTSIDE, "-o", "json"]);
        ensure!(code == Some(0), "{out}{err}");
        Ok(serde_json::from_str::<Value>(&out)?)
    });
    let seen = seen.unwrap();
    assert_eq!(seen["way"], "gateways", "{seen:#}");
    let notes: Vec<&str> = seen["notRead"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(notes[0].contains(r#"cannot list resource "nodes""#), "{notes:?}");
    assert!(notes[1].contains(r#"cannot list resource "servicecidrs""#), "{notes:?}");
    let one = data(&viewer, &["status", &format!("{EGRESS}/nat")], 3);
    assert_eq!(one["clientCount"], 2);

    let nobody = user(bed, "shown-nobody", None, &directory);
    let (code, _, error) = fairlead(&nobody, &["status"]);
    assert!(code == Some(1) && error.contains("cannot list Egresses"), "{error}");
    let (code, _, error) = fairlead(&nobody, &["explain", &pod, OUTSIDE]);
    assert!(code == Some(1) && error.contains("cannot get resource"), "{error}");
    let (code, ..) = fairlead(&nobody, &["explain", "web", OUTSIDE]);
    assert_eq!(code, Some(2));
}

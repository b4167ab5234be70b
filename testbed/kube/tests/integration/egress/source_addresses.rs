//! Source addresses: Leases, rights, what is refused, and when an address may be another Egress's.

use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use testbed_lab::eventually;

use crate::egress::bed::{TIMEOUT, bed, egress};

const ADDRESSES: &str = "egress.coil.cybozu.com/source-addresses";

fn said(found: &Value) -> Value {
    found["status"]["sourceAddresses"].clone()
}

#[test]
fn slots_have_leases_and_gateways_a_right_to_exactly_these() {
    let (bed, namespace) = (bed(), "sources");
    bed.namespace(namespace);
    let fields =
        json!({ "sourceAddresses": ["203.0.113.7", "203.0.113.8", "2001:db8:5::7", "2001:db8:5::8"] });
    bed.plane.apply(&egress(namespace, "nat", &fields)).unwrap();
    let first = bed.there(namespace, &["lease", "nat-source-0"]);
    assert_eq!(first["metadata"]["annotations"][ADDRESSES], "203.0.113.7,2001:db8:5::7");
    let uid = bed.there(namespace, &["egress", "nat"])["metadata"]["uid"].clone();
    assert_eq!(first["metadata"]["ownerReferences"][0]["uid"], uid);
    let second = bed.there(namespace, &["lease", "nat-source-1"]);
    assert_eq!(second["metadata"]["annotations"][ADDRESSES], "203.0.113.8,2001:db8:5::8");
    bed.there(namespace, &["lease", "nat-gateways"]);
    bed.until(namespace, &["egress", "nat"], |found| {
        let wanted =
            json!([{ "addresses": ["203.0.113.7", "2001:db8:5::7"] }, { "addresses": ["203.0.113.8", "2001:db8:5::8"] }]);
        ensure!(said(found) == wanted, "{}", said(found));
        Ok(())
    });
    bed.ready(namespace, "nat", "False", "NoneAvailable");

    let account = format!("--as=system:serviceaccount:{namespace}:coil-egress");
    for (verb, lease, wanted) in [
        ("patch", "leases/nat-source-0", true),
        ("watch", "leases/nat-source-1", true),
        ("patch", "leases/nat-gateways", true),
        ("delete", "leases/nat-source-0", false),
        ("create", "leases", false),
        ("list", "leases", false),
        ("patch", "leases/other", false),
    ] {
        let arguments = ["auth", "can-i", verb, lease, "--namespace", namespace, &account];
        let answer = bed.plane.kubectl(&arguments).is_ok_and(|answer| answer.trim() == "yes");
        assert_eq!(answer, wanted, "{verb} {lease}");
    }

    gateways_change_only_what_is_theirs(namespace, &account);
    bed.patch(namespace, ["lease", "nat-source-1"], &json!({ "spec": { "holderIdentity": "nat-x" } }));
    bed.until(namespace, &["egress", "nat"], |found| {
        ensure!(said(found)[1]["gateway"] == "nat-x", "{}", said(found));
        Ok(())
    });
    gateways_whose_pod_is_gone_are_removed(namespace);
}

fn gateways_change_only_what_is_theirs(namespace: &str, account: &str) {
    let patch = |patch: serde_json::Value| {
        let patch = patch.to_string();
        let words = [
            "--namespace",
            namespace,
            account,
            "patch",
            "lease",
            "nat-source-1",
            "--type=merge",
            "-p",
            &patch,
        ];
        bed().plane.kubectl(&words).map_err(|error| error.to_string())
    };
    let annotation = |name: &str, value: &str| json!({ "metadata": { "annotations": { name: value } } });
    let refused = |change, words: &str| {
        let error = patch(change).unwrap_err();
        assert!(error.contains(words), "{words}: {error}");
    };
    refused(annotation(ADDRESSES, "203.0.113.9"), "may not change the annotation");
    refused(annotation("gateway.egress.coil.cybozu.com/x", &"x".repeat(1025)), "at most 1024 bytes");
    refused(json!({ "metadata": { "labels": { "app.kubernetes.io/instance": "other" } } }), "labels");
    refused(json!({ "metadata": { "finalizers": ["example.com/never"] } }), "finalizers");
    refused(json!({ "metadata": { "ownerReferences": [] } }), "ownerReferences");
    refused(json!({ "spec": { "holderIdentity": "x".repeat(254) } }), "at most 253");
    patch(json!({ "spec": { "holderIdentity": "nat-a", "leaseTransitions": 1 } })).unwrap();
    patch(annotation("egress.coil.cybozu.com/successor", "nat-b")).unwrap();
}

fn gateways_whose_pod_is_gone_are_removed(namespace: &str) {
    let bed = bed();
    let pods = bed.until(namespace, &["pods"], |pods| {
        ensure!(pods["items"].as_array().is_some_and(|pods| !pods.is_empty()));
        Ok(())
    });
    let pod = &pods["items"][0]["metadata"];
    let (name, uid) = (pod["name"].as_str().unwrap(), pod["uid"].as_str().unwrap());
    let key = |pod: &str| format!("gateway.egress.coil.cybozu.com/{pod}");
    let entry = |uid: &str| json!({ "uid": uid, "addresses": ["10.0.0.1"], "key": "" }).to_string();
    let annotations = json!({ key(name): entry(uid), key("nat-gone"): entry("1") });
    bed.patch(namespace, ["lease", "nat-gateways"], &json!({ "metadata": { "annotations": annotations } }));
    bed.until(namespace, &["lease", "nat-gateways"], |lease| {
        let annotations = &lease["metadata"]["annotations"];
        ensure!(annotations[key("nat-gone")].is_null(), "{annotations}");
        ensure!(annotations[key(name)].is_string(), "{annotations}");
        Ok(())
    });
}

#[test]
fn what_is_not_permitted_is_refused_with_its_reason_and_nothing_else() {
    let (bed, namespace) = (bed(), "refused-sources");
    bed.namespace(namespace);
    let pool = "apiVersion: coil.cybozu.com/v2\nkind: AddressPool\nmetadata: {name: sources}\n\
        spec: {blockSizeBits: 2, subnets: [{ipv4: 203.0.113.192/26}]}\n";
    bed.plane.apply(pool).unwrap();
    let list = |addresses: &[&str]| json!({ "sourceAddresses": addresses });
    bed.plane.apply(&egress(namespace, "a", &list(&["203.0.113.20", "198.51.100.1"]))).unwrap();
    let message = bed.ready(namespace, "a", "False", "SourceAddressNotPermitted");
    assert!(message.contains("198.51.100.1 is in none of the prefixes"), "{message}");
    bed.there(namespace, &["lease", "a-source-0"]);
    bed.until(namespace, &["egress", "a"], |found| {
        ensure!(said(found) == json!([{ "addresses": ["203.0.113.20"] }, { "addresses": [] }]));
        Ok(())
    });
    bed.plane.apply(&egress(namespace, "b", &list(&["203.0.113.200"]))).unwrap();
    let message = bed.ready(namespace, "b", "False", "SourceAddressInCluster");
    assert!(message.contains("AddressPool sources"), "{message}");
    // Creation times have seconds.
    std::thread::sleep(Duration::from_millis(1100));
    bed.plane.apply(&egress(namespace, "c", &list(&["203.0.113.20", "203.0.113.21"]))).unwrap();
    let message = bed.ready(namespace, "c", "False", "SourceAddressInUse");
    assert!(message.contains("Egress refused-sources/a"), "{message}");
    bed.there(namespace, &["deployment", "c"]);
    bed.there(namespace, &["lease", "c-source-1"]);
}

#[test]
fn an_address_rests_for_three_seconds_before_it_is_another_egresss() {
    let (bed, namespace) = (bed(), "moved-sources");
    bed.namespace(namespace);
    let fields = json!({ "sourceAddresses": ["203.0.113.30"] });
    bed.plane.apply(&egress(namespace, "old", &fields)).unwrap();
    bed.there(namespace, &["lease", "old-source-0"]);
    std::thread::sleep(Duration::from_millis(1100));
    bed.plane.apply(&egress(namespace, "new", &fields)).unwrap();
    bed.ready(namespace, "new", "False", "SourceAddressInUse");
    bed.patch(namespace, ["egress", "old"], &json!({ "spec": { "sourceAddresses": null } }));
    bed.gone(namespace, "lease", "old-source-0");
    let gone = Instant::now();
    bed.gone(namespace, "lease", "old-gateways");
    bed.until(namespace, &["egress", "old"], |found| {
        ensure!(said(found).is_null(), "{}", said(found));
        Ok(())
    });
    eventually(TIMEOUT, || bed.get(&["lease", "new-source-0", "--namespace", namespace]).map(drop)).unwrap();
    assert!(gone.elapsed() > Duration::from_millis(1800), "after {:?}", gone.elapsed());
    bed.ready(namespace, "new", "False", "NoneAvailable");
    bed.delete(namespace, ["egress", "new"]);
    bed.gone(namespace, "lease", "new-source-0");
    bed.gone(namespace, "role", "coil-egress-source-addresses");
    bed.gone(namespace, "rolebinding", "coil-egress-source-addresses");
}

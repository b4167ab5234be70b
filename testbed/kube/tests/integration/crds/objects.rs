//! Objects that users write are kept and shown.

use serde_json::Value;

use crate::crds::bed::{bed, fixture};

#[test]
fn definitions_are_established_without_complaint() {
    let bed = bed();
    let definitions = bed.get(&["crd"]);
    let definitions = definitions["items"].as_array().unwrap();
    assert_eq!(definitions.len(), 7);
    for definition in definitions {
        let name = &definition["metadata"]["name"];
        for condition in definition["status"]["conditions"].as_array().unwrap() {
            let expected = if condition["type"] == "NonStructuralSchema" { "False" } else { "True" };
            assert_eq!(condition["status"], expected, "{name}: {condition}");
        }
    }
    let policy = bed.get(&["validatingadmissionpolicy", "fairlead-node-speaks-for-itself"]);
    assert!(policy["status"]["typeChecking"]["expressionWarnings"].is_null(), "{policy}");
}

#[test]
fn columns_are_as_documented() {
    let bed = bed();
    bed.namespace("columns");
    let objects = [
        (
            "addresspools",
            "NAME BLOCKSIZE_BITS BLOCKS CAPACITY FREE NODES READY REASON AGE",
            fixture("address_pool.yaml").replace("pool1", "columns"),
        ),
        (
            "addressblocks",
            "NAME NODE POOL IPV4 IPV6 AGE",
            fixture("address_block.yaml").replace("pool1", "columns"),
        ),
        (
            "blockrequests",
            "NAME NODE POOL BLOCK COMPLETE REASON AGE",
            fixture("block_request.yaml").replace("pool1", "columns"),
        ),
        (
            "egresses",
            "NAME DESTINATION DESIRED AVAILABLE AGE",
            fixture("egress.yaml").replace("internet-egress", "columns"),
        ),
        (
            "wkmesh",
            "NAME PORT INTERFACE READY TOTAL AGE",
            fixture("wirekube_mesh.yaml").replace("name: default", "name: columns"),
        ),
        (
            "wkpeer",
            "NAME ENDPOINT ALLOWEDIP CONNECTED NAT MODE AGE",
            fixture("wirekube_peer.yaml").replace("name: home-1", "name: columns"),
        ),
        (
            "peers.kilo.squat.ai",
            "NAME PUBLIC_KEY ALLOWEDIP AGE",
            fixture("kilo_peer.yaml").replace("name: laptop", "name: columns"),
        ),
    ];
    for (kind, columns, object) in objects {
        bed.plane.apply(&object).unwrap();
        let table = bed.plane.kubectl(&["get", kind, "--namespace", "columns"]).unwrap();
        let header = table.lines().next().unwrap();
        // Two spaces part columns, one is part of a name.
        let names: Vec<String> = header
            .split("  ")
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(|name| name.replace(' ', "_"))
            .collect();
        assert_eq!(names.join(" "), columns, "{kind}");
        assert!(table.contains("columns") || table.contains("internet"), "{table}");
        // The API server would print a list as JSON.
        assert!(!table.contains('['), "{table}");
    }
}

#[test]
fn columns_show_the_status() {
    let bed = bed();
    let peer = fixture("wirekube_peer.yaml").replace("name: home-1", "name: shown");
    bed.plane.apply(&peer).unwrap();
    bed.plane.kubectl_stdin(&["replace", "--subresource=status", "-f", "-"], &peer).unwrap();
    let row = bed.plane.kubectl(&["get", "wkpeer", "shown", "--no-headers"]).unwrap();
    for cell in ["203.0.113.7:40001", "192.168.1.10/32", "true", "port-restricted-cone", "mixed"] {
        assert!(row.contains(cell), "{cell} in {row}");
    }
    let request = fixture("block_request.yaml").replace("pool1", "shown");
    bed.plane.apply(&request).unwrap();
    bed.plane.kubectl_stdin(&["replace", "--subresource=status", "-f", "-"], &request).unwrap();
    let table = bed.plane.kubectl(&["get", "blockrequest", "req-shown-node1"]).unwrap();
    let (header, row) = table.split_once('\n').unwrap();
    let columns: Vec<&str> = header.split_whitespace().collect();
    assert_eq!(columns, ["NAME", "NODE", "POOL", "BLOCK", "COMPLETE", "REASON", "AGE"]);
    assert!(row.contains("shown-16") && row.contains("reason of the error"), "{row}");
    let selected =
        bed.plane.kubectl(&["get", "blockrequests", "--field-selector=spec.nodeName=nobody", "-o", "name"]);
    assert_eq!(selected.unwrap(), "");
}

/// Everything but the metadata that the API server adds.
fn body(mut object: Value) -> Value {
    object.as_object_mut().unwrap().remove("metadata");
    object
}

#[test]
fn objects_come_back_as_they_were_written() {
    let bed = bed();
    bed.namespace("internet-egress");
    let objects = [
        ("addresspool", "pool1", "address_pool.yaml", false),
        ("addressblock", "pool1-16", "address_block.yaml", false),
        ("blockrequest", "req-pool1-node1", "block_request.yaml", true),
        ("egress", "internet", "egress.yaml", true),
        ("wkmesh", "default", "wirekube_mesh.yaml", true),
        ("wkpeer", "home-1", "wirekube_peer.yaml", true),
        ("peers.kilo.squat.ai", "laptop", "kilo_peer.yaml", false),
    ];
    for (kind, name, file, has_status) in objects {
        let text = fixture(file);
        bed.plane.apply(&text).unwrap();
        if has_status {
            bed.plane.kubectl_stdin(&["replace", "--subresource=status", "-f", "-"], &text).unwrap();
        }
        let as_written =
            bed.plane.kubectl_stdin(&["create", "--dry-run=client", "-o", "json", "-f", "-"], &text);
        let as_written: Value = serde_json::from_str(&as_written.unwrap()).unwrap();
        let stored = bed.get(&["--namespace", "internet-egress", kind, name]);
        for field in ["name", "labels", "finalizers", "ownerReferences"] {
            assert_eq!(stored["metadata"][field], as_written["metadata"][field], "{file}: {field}");
        }
        assert_eq!(body(stored), body(as_written), "{file}");
    }
}

#[test]
fn egress_scales_like_a_deployment() {
    let bed = bed();
    bed.namespace("domestic-egress");
    bed.plane.apply(&fixture("egress_domestic.yaml")).unwrap();
    bed.plane.kubectl(&["scale", "egress", "nat", "--namespace", "domestic-egress", "--replicas=5"]).unwrap();
    let egress = bed.get(&["--namespace", "domestic-egress", "egress", "nat"]);
    assert_eq!(egress["spec"]["replicas"], 5);
    assert_eq!(egress["spec"]["sessionAffinity"], "ClientIP");
}

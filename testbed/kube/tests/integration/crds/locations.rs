//! Rights to set the location of a node, and the networks of its pods: administrators and controllers have them, and its kubelet has not. Nor has it
//! the right to add addresses, where `deploy/examples/node-addresses.yaml` is applied.

use serde_json::json;

use crate::crds::bed::{bed, is_refused_soon, mesh, refused};

/// kubectl as the kubelet of a node.
fn kubelet(node: &str, arguments: &[&str]) -> Result<String, String> {
    let user = format!("--as=system:node:{node}");
    let arguments = [&[user.as_str(), "--as-group=system:nodes"], arguments].concat();
    bed().plane.kubectl(&arguments).map_err(|error| format!("{error:#}"))
}

#[test]
fn a_stolen_kubelet_certificate_sets_no_location() {
    let bed = bed();
    bed.plane.apply("{apiVersion: v1, kind: Node, metadata: {name: n8}}").unwrap();
    bed.plane.kubectl(&["label", "node", "n8", "topology.kubernetes.io/region=lab"]).unwrap();
    for annotation in [
        "kilo.squat.ai/location",
        "kilo.squat.ai/leader",
        "kilo.squat.ai/force-endpoint",
        "kilo.squat.ai/force-internal-ip",
        "kilo.squat.ai/allowed-location-ips",
        "kilo.squat.ai/persistent-keepalive",
        "wirekube.io/endpoint",
        "wirekube.io/internal-ip",
        "wirekube.io/endpoint-filters",
        "wirekube.io/peer-endpoint-filters",
    ] {
        let set = format!("{annotation}=lab");
        let words = format!("a kubelet may not set or remove the annotation {annotation}");
        is_refused_soon(&words, || kubelet("n8", &["annotate", "node", "n8", &set, "--dry-run=server"]));
    }
    // The status of a Node brings its annotations along.
    let mut node = bed.get(&["node", "n8"]);
    node["metadata"]["annotations"]["kilo.squat.ai/location"] = "lab".into();
    let through_status = ["replace", "--raw", "/api/v1/nodes/n8/status", "-f", "-"];
    let as_kubelet = [&["--as=system:node:n8", "--as-group=system:nodes"][..], &through_status].concat();
    let replaced = bed.plane.kubectl_stdin(&as_kubelet, &node.to_string());
    refused(replaced.map_err(|error| format!("{error:#}")), "set or remove the annotation");
    bed.plane.kubectl(&["annotate", "node", "n8", "kilo.squat.ai/location=lab"]).unwrap();
    refused(kubelet("n8", &["annotate", "node", "n8", "kilo.squat.ai/location-"]), "set or remove");
    for label in ["region=other", "region-"] {
        let label = format!("topology.kubernetes.io/{label}");
        let moved = kubelet("n8", &["label", "node", "n8", "--overwrite", &label]);
        let name = label.trim_end_matches("=other").trim_end_matches('-');
        refused(moved, &format!("may not change the label {name}"));
    }
    let restricted = "node-restriction.kubernetes.io/site";
    let words = format!("may not set or remove the label {restricted}");
    refused(kubelet("n8", &["label", "node", "n8", &format!("{restricted}=lab")]), &words);
    bed.plane.kubectl(&["label", "node", "n8", &format!("{restricted}=lab")]).unwrap();
    for label in [format!("{restricted}=other"), format!("{restricted}-")] {
        refused(kubelet("n8", &["label", "node", "n8", "--overwrite", &label]), &words);
    }
    kubelet("n8", &["annotate", "node", "n8", "volumes.kubernetes.io/controller-managed-attach-detach=true"])
        .unwrap();
    bed.plane.kubectl(&["annotate", "node", "n8", "kilo.squat.ai/location-"]).unwrap();
}

/// Kubelets set the labels that a driver of storage names (`NodeGetInfo`) when it registers, and without them it is not registered.
#[test]
fn the_topology_of_a_storage_driver_is_set_where_there_is_none_unless_it_names_locations() {
    let bed = bed();
    bed.plane.apply("{apiVersion: v1, kind: Node, metadata: {name: n12}}").unwrap();
    let label = |label: &str| kubelet("n12", &["label", "node", "n12", "--overwrite", label]);
    let (zone, region) = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region");
    label(&format!("{zone}=a")).unwrap();
    label("topology.ebs.csi.aws.com/zone=a").unwrap();
    for change in [format!("{zone}=b"), format!("{zone}-")] {
        is_refused_soon(&format!("may not change the label {zone} of a Node that is there"), || {
            kubelet("n12", &["label", "node", "n12", "--overwrite", &change, "--dry-run=server"])
        });
    }
    bed.plane.kubectl(&["label", "node", "n12", &format!("{zone}-")]).unwrap();
    // Now the zone names locations.
    let by_zone = mesh(&format!("{{topology: {{label: {zone}}}}}"));
    bed.plane.apply(&by_zone.replace("name: bad", "name: by-zone")).unwrap();
    let words = format!(
        "may not set the label {zone} of a Node that is there: it names locations in WireKubeMesh 'by-zone'"
    );
    is_refused_soon(&words, || {
        kubelet("n12", &["label", "node", "n12", &format!("{zone}=a"), "--dry-run=server"])
    });
    label(&format!("{region}=lab")).unwrap();
    // What an administrator has set stays as it is, and the kubelet goes on.
    bed.plane.kubectl(&["label", "node", "n12", &format!("{zone}=a"), &format!("{region}-")]).unwrap();
    label("topology.gke.io/zone=a").unwrap();
    // Without a label in the mesh it is the region.
    bed.plane.apply(&mesh("{topology: {granularity: cross}}").replace("name: bad", "name: by-zone")).unwrap();
    is_refused_soon(&format!("may not set the label {region} of a Node that is there"), || {
        kubelet("n12", &["label", "node", "n12", &format!("{region}=lab"), "--dry-run=server"])
    });
    bed.plane.kubectl(&["delete", "wkmesh", "by-zone"]).unwrap();
}

#[test]
fn a_stolen_kubelet_certificate_sets_no_networks_of_pods() {
    let bed = bed();
    bed.plane.apply("{apiVersion: v1, kind: Node, metadata: {name: n9}}").unwrap();
    let words = "a kubelet may not set spec.podCIDRs";
    let networks = r#"{"spec": {"podCIDR": "10.244.7.0/24", "podCIDRs": ["10.244.7.0/24"]}}"#;
    let patch = ["patch", "node", "n9", "--type=merge", "-p", networks];
    is_refused_soon(words, || kubelet("n9", &[&patch[..], &["--dry-run=server"]].concat()));
    let registered = r#"{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n10"},
        "spec": {"podCIDR": "10.244.8.0/24", "podCIDRs": ["10.244.8.0/24"]}}"#;
    let create = ["--as=system:node:n10", "--as-group=system:nodes", "create", "-f", "-"];
    let created = bed.plane.kubectl_stdin(&create, registered);
    refused(created.map_err(|error| format!("{error:#}")), words);
    // A controller gives them, and then the kubelet goes on as before.
    bed.plane.kubectl(&patch).unwrap();
    kubelet("n9", &["annotate", "node", "n9", "volumes.kubernetes.io/controller-managed-attach-detach=true"])
        .unwrap();
}

/// Policy for clusters in which the controller of the cloud, or an administrator, writes the addresses of Nodes.
#[test]
fn a_stolen_kubelet_certificate_adds_no_address_with_the_policy_for_it() {
    let bed = bed();
    for node in ["n13", "n14"] {
        bed.plane.apply(&format!("{{apiVersion: v1, kind: Node, metadata: {{name: {node}}}}}")).unwrap();
    }
    // The cloud has not looked at this Node yet.
    let taint = "node.cloudprovider.kubernetes.io/uninitialized=true:NoSchedule";
    bed.plane.kubectl(&["taint", "node", "n14", taint]).unwrap();
    bed.plane.apply(include_str!("../../../../../deploy/examples/node-addresses.yaml")).unwrap();
    // Kubelets may not read this subresource, which `kubectl patch` does first.
    let status = |node: &str, addresses: &[(&str, &str)]| {
        let addresses: Vec<_> =
            addresses.iter().map(|(of, address)| json!({"type": of, "address": address})).collect();
        let mut object = bed.get(&["node", node]);
        object["metadata"]["resourceVersion"].take();
        object["status"]["addresses"] = json!(addresses);
        object.to_string()
    };
    let put = |who: &[&str], (node, query): (&str, &str), addresses: &[(&str, &str)]| {
        let path = format!("/api/v1/nodes/{node}/status{query}");
        let words = [who, &["replace", "--raw", path.as_str(), "-f", "-"]].concat();
        bed.plane.kubectl_stdin(&words, &status(node, addresses)).map_err(|error| format!("{error:#}"))
    };
    let by_kubelet = |(node, query): (&str, &str), addresses: &[(&str, &str)]| {
        let user = format!("--as=system:node:{node}");
        put(&[user.as_str(), "--as-group=system:nodes"], (node, query), addresses)
    };
    let by_cloud = |addresses: &[(&str, &str)]| put(&[], ("n13", ""), addresses).unwrap();
    let first = ("InternalIP", "192.0.2.13");
    by_cloud(&[first]);
    let both = [first, ("InternalIP", "192.0.2.99")];
    let words = "a kubelet may not add the InternalIP 192.0.2.99 to a Node that is there";
    is_refused_soon(words, || by_kubelet(("n13", "?dryRun=All"), &both));
    refused(by_kubelet(("n13", ""), &[("InternalIP", "192.0.2.99")]), words);
    // What a field manager calls itself makes no difference.
    refused(by_kubelet(("n13", "?fieldManager=cloud-controller-manager"), &both), words);
    by_kubelet(("n13", ""), &[first, ("Hostname", "n13"), ("ExternalIP", "192.0.2.99")]).unwrap();
    by_cloud(&both);
    by_kubelet(("n13", ""), &both).unwrap();
    by_kubelet(("n13", ""), &[first]).unwrap();
    by_kubelet(("n14", ""), &[("InternalIP", "192.0.2.14")]).unwrap();
}

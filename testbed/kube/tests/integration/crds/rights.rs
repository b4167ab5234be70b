//! RBAC and admission policy hold the programs to what they need.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::crds::bed::{Access, KEY, bed, block, is_refused_soon, mesh, owned_peer, peer, refused, request};

#[test]
fn a_node_writes_only_its_own_peer() {
    let bed = bed();
    let (n1, n2) = (bed.program("fairlead-node", Some("n1")), bed.program("fairlead-node", Some("n2")));
    n1.create(&owned_peer(&bed, "n1", "[192.168.1.10/32, fd00::10/128]")).unwrap();
    n2.create(&owned_peer(&bed, "n2", "[]")).unwrap();
    n1.merge("wkpeer", "n1", r#"{"spec": {"endpoint": "203.0.113.7:1"}}"#).unwrap();
    n1.run(
        &[
            "patch",
            "wkpeer",
            "n1",
            "--subresource=status",
            "--type=merge",
            "--patch",
            r#"{"status": {"connected": true}}"#,
        ],
        "",
    )
    .unwrap();

    refused(
        n1.create_dry(&peer("n3", "[]")),
        "node 'n1' may only write the WireKubePeer of its own name, not 'n3'",
    );
    refused(n1.merge("wkpeer", "n2", r#"{"spec": {"endpoint": "203.0.113.7:1"}}"#), "not 'n2'");
    refused(
        n1.run(
            &[
                "patch",
                "wkpeer",
                "n2",
                "--subresource=status",
                "--type=merge",
                "--patch",
                r#"{"status": {"connected": false}}"#,
            ],
            "",
        ),
        "not 'n2'",
    );
    refused(n1.run(&["delete", "wkpeer", "n2"], ""), "cannot delete");
    for prefix in ["0.0.0.0/0", "10.0.0.0/31", "fd00::/64"] {
        let patch = format!(r#"{{"spec": {{"allowedIPs": ["192.168.1.10/32", "{prefix}"]}}}}"#);
        refused(n1.merge("wkpeer", "n1", &patch), &format!("in spec.allowedIPs, not {prefix}"));
    }
    refused(
        n1.merge("wkpeer", "n1", r#"{"metadata": {"labels": {"wirekube.io/node": "n2"}}}"#),
        "the label wirekube.io/node",
    );
    n1.merge("wkpeer", "n1", r#"{"metadata": {"labels": {"wirekube.io/node": "n1"}}}"#).unwrap();
}

/// Other nodes judge by it which addresses are the node's own.
#[test]
fn only_the_controller_writes_what_the_node_of_a_peer_says() {
    let bed = bed();
    bed.plane.apply("apiVersion: v1\nkind: Node\nmetadata: {name: facts}\n").unwrap();
    let (node, controller) =
        (bed.program("fairlead-node", Some("facts")), bed.program("fairlead-controller", None));
    node.create(&owned_peer(&bed, "facts", "[192.0.2.1/32]")).unwrap();
    let status = |address: &str| format!(r#"{{"status": {{"node": {{"internalIPs": ["{address}"]}}}}}}"#);
    let write = |patch: &str| {
        ["patch", "wkpeer", "facts", "--subresource=status", "--type=merge", "--patch", patch]
            .map(str::to_owned)
    };
    let by = |program: &crate::crds::bed::Program<'_>, patch: &str| {
        let words = write(patch);
        program.run(&words.each_ref().map(String::as_str), "")
    };
    refused(by(&node, &status("192.0.2.9")), "may not change status.node of its WireKubePeer");
    // As the controller, whose right on it is in the list below: kubectl reads first, which the controller need not.
    bed.plane.kubectl(&write(&status("192.0.2.1")).each_ref().map(String::as_str)).unwrap();
    by(&node, r#"{"status": {"connected": true}}"#).unwrap();
    for forged in [&status("192.0.2.9"), r#"{"status": {"node": null}}"#, r#"{"status": null}"#] {
        refused(by(&node, forged), "may not change status.node of its WireKubePeer");
    }
    // The controller does not write the specification.
    refused(controller.merge("wkpeer", "facts", r#"{"spec": {"publicKey": ""}}"#), "cannot patch");
}

#[test]
fn who_is_revoked_publishes_no_peer_until_it_is_taken_back() {
    const REVOKED: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";
    let bed = bed();
    let create = |name: &str, key: &str| {
        let object = peer(name, "[]").replace(KEY, key);
        let dry_run = ["create", "--dry-run=server", "-f", "-"];
        bed.plane.kubectl_stdin(&dry_run, &object).map_err(|error| format!("{error:#}"))
    };
    let comes_into_force = |is_refused: bool| {
        let end = Instant::now() + Duration::from_secs(60);
        while create("revoked-1", KEY).is_err() != is_refused {
            assert!(Instant::now() < end, "the list of revoked peers does not come into force");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let list = format!("{{revokedPeers: [{{name: revoked-1}}, {{publicKey: {REVOKED}}}]}}");
    bed.plane.apply(&mesh(&list).replace("name: bad", "name: revoking")).unwrap();
    comes_into_force(true);
    refused(create("revoked-1", KEY), "fairlead peer unrevoke revoked-1");
    refused(create("revoked-2", REVOKED), "the key of node 'revoked-2' was revoked");
    let announcing = format!("{KEY}, nextPublicKey: {REVOKED}");
    refused(create("revoked-2", &announcing), "the key of node 'revoked-2' was revoked");
    create("revoked-2", KEY).unwrap();
    let policy = bed.get(&["validatingadmissionpolicy", "fairlead-revoked-peers"]);
    assert!(policy["status"]["typeChecking"]["expressionWarnings"].is_null(), "{policy}");
    bed.plane.kubectl(&["delete", "wkmesh", "revoking"]).unwrap();
    comes_into_force(false);
}

#[test]
fn a_node_asks_only_for_itself() {
    let bed = bed();
    let (n1, n2) = (bed.program("fairlead-node", Some("n1")), bed.program("fairlead-node", Some("n2")));
    n1.create(&request("req-default-n1", "n1")).unwrap();
    refused(
        n1.create(&request("req-default-n2", "n2")),
        "may only ask for blocks for itself, not for spec.nodeName 'n2'",
    );
    refused(n2.run(&["delete", "blockrequest", "req-default-n1"], ""), "may only ask for blocks for itself");
    n1.run(&["delete", "blockrequest", "req-default-n1"], "").unwrap();
}

/// The deletion of another object would wait for it, and it could be as large as the API server lets it be.
#[test]
fn a_request_for_a_block_has_nothing_but_what_it_asks_for() {
    let bed = bed();
    let n1 = bed.program("fairlead-node", Some("n1"));
    let node = bed.get(&["node", "n1"])["metadata"]["uid"].as_str().unwrap().to_owned();
    let owned = |kind: &str, name: &str, more: &str| {
        let version = "apiVersion: v1";
        format!("ownerReferences: [{{{version}, kind: {kind}, name: {name}, uid: {node}{more}}}]")
    };
    let with = |metadata: &str| {
        let name = "name: req-default-more";
        request("req-default-more", "n1").replace(name, &format!("{name}, {metadata}"))
    };
    let others = [
        owned("Node", "n2", ""),
        owned("Namespace", "n1", ""),
        owned("Node", "n1", ", blockOwnerDeletion: true"),
        owned("Node", "n1", ", controller: true"),
        owned("Node", "n1", "}, {apiVersion: v1, kind: Node, name: n1, uid: another"),
        "finalizers: [example.com/stays]".to_owned(),
        "labels: {a: b}".to_owned(),
        "annotations: {a: b}".to_owned(),
    ];
    let words = "a BlockRequest of node 'n1' has no owner but its Node";
    is_refused_soon(words, || n1.create_dry(&with("annotations: {a: b}")));
    for metadata in &others {
        refused(n1.create_dry(&with(metadata)), words);
    }
    n1.create_dry(&with(&owned("Node", "n1", ""))).unwrap();
}

#[test]
fn a_node_frees_only_its_own_blocks() {
    let bed = bed();
    let (n1, controller) =
        (bed.program("fairlead-node", Some("n1")), bed.program("fairlead-controller", None));
    for (name, node) in [("own", "n1"), ("other", "n2")] {
        let labels = format!(
            "name: {name}, finalizers: [coil.cybozu.com], labels: {{coil.cybozu.com/node: {node}, coil.cybozu.com/pool: p}}"
        );
        controller.create(&block("index: 0, ipv4: 10.0.0.0/27").replace("name: bad-0", &labels)).unwrap();
    }
    let unfinalize = r#"{"metadata": {"finalizers": []}}"#;
    refused(n1.merge("addressblock", "other", unfinalize), "'other' is not one");
    refused(n1.run(&["delete", "addressblock", "other"], ""), "'other' is not one");
    for labels in [r#"{"coil.cybozu.com/node": "n2"}"#, r#"{"coil.cybozu.com/request": "1234"}"#, "null"] {
        let patch = format!(r#"{{"metadata": {{"labels": {labels}}}}}"#);
        refused(n1.merge("addressblock", "own", &patch), "may not change the labels or the owner");
    }
    let finalizers = r#"{"metadata": {"finalizers": ["coil.cybozu.com", "example.com/stays"]}}"#;
    refused(n1.merge("addressblock", "own", finalizers), "may not add finalizers to AddressBlock 'own'");
    // Every node reads all blocks.
    let words = "may not change annotations of AddressBlock 'own', nor apply it as another field manager";
    refused(n1.merge("addressblock", "own", r#"{"metadata": {"annotations": {"a": "b"}}}"#), words);
    let applied = block("index: 0, ipv4: 10.0.0.0/27").replace("name: bad-0", "name: own");
    refused(n1.run(&["apply", "--server-side", "--field-manager=another", "-f", "-"], &applied), words);
    refused(n1.create(&block("index: 0, ipv4: 10.0.0.0/27")), "cannot create");
    n1.merge("addressblock", "own", unfinalize).unwrap();
    n1.run(&["delete", "addressblock", "own"], "").unwrap();

    // The controller sweeps up after nodes that are gone.
    controller.merge("addressblock", "other", unfinalize).unwrap();
    controller.run(&["delete", "addressblock", "other"], "").unwrap();
}

#[test]
fn a_token_that_names_no_node_writes_nothing() {
    let bed = bed();
    let unbound = bed.program("fairlead-node", None);
    unbound.run(&["get", "wkpeer"], "").unwrap();
    let words = "does not say which node it belongs to";
    refused(unbound.create_dry(&peer("n3", "[]")), words);
    refused(unbound.create_dry(&request("req-default-n3", "n3")), words);
}

/// With a Service that has external IPs, or is of the cluster alone, the controller's token could attract connections of others; with a pod that has
/// privileges, take over a node.
#[test]
fn the_namespace_of_the_managed_relay_takes_no_other_services_and_no_pods_with_privileges() {
    let bed = bed();
    let controller = bed.program("fairlead-controller", None);
    let apply = |spec: &str| {
        let service = format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: fairlead-relay, namespace: {RELAY}}}, \
             spec: {{ports: [{{port: 443, protocol: TCP}}], {spec}}}}}"
        );
        let arguments = ["apply", "--server-side", "--dry-run=server", "--validate=false", "-f", "-"];
        controller.run(&arguments, &service)
    };
    let words = "Services of fairlead-relay have no external IPs";
    is_refused_soon(words, || apply("type: NodePort, externalIPs: [192.0.2.1]"));
    let words = "Services of fairlead-relay are of type LoadBalancer or NodePort, or headless";
    for other in ["type: ClusterIP", "type: ExternalName, externalName: example.com"] {
        refused(apply(other), words);
    }
    for own in ["type: LoadBalancer", "type: NodePort", "clusterIP: None"] {
        apply(own).unwrap();
    }
    let pod = |fields: &str| {
        let pod = format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: any, namespace: {RELAY}}}, \
             spec: {{serviceAccountName: fairlead-relay, {fields}}}}}"
        );
        let create = ["create", "--dry-run=server", "-f", "-"];
        bed.plane.kubectl_stdin(&create, &pod).map_err(|error| format!("{error:#}"))
    };
    for fields in [
        "hostNetwork: true, containers: [{name: a, image: a}]",
        "containers: [{name: a, image: a, securityContext: {privileged: true}}]",
    ] {
        refused(pod(fields), "violates PodSecurity \"restricted:latest\"");
    }
}

/// Verbs separated by spaces, resource, subresource, name, namespace, and whether they are allowed.
type Right = (&'static str, &'static str, &'static str, &'static str, &'static str, bool);

const NODE_RIGHTS: &[Right] = &[
    ("get list watch", "nodes", "", "", "", true),
    ("get list watch", "namespaces", "", "", "", true),
    ("get", "endpointslices.discovery.k8s.io", "", "kubernetes", "default", true),
    // Egress gateways of pods: those of all namespaces, and their Services.
    ("get list watch", "egresses.coil.cybozu.com", "", "", "", true),
    ("create update patch delete", "egresses.coil.cybozu.com", "", "", "default", false),
    ("list watch", "services", "", "", "", true),
    ("create update patch delete", "services", "", "", "default", false),
    ("list watch", "endpointslices.discovery.k8s.io", "", "", "", true),
    ("get create update patch delete", "endpointslices.discovery.k8s.io", "", "", "default", false),
    ("get list watch", "pods", "", "", "", true),
    ("get list watch", "addresspools.coil.cybozu.com", "", "", "", true),
    // Where no node can be: addresses of Services.
    ("get list watch", "servicecidrs.networking.k8s.io", "", "", "", true),
    ("create update patch delete", "servicecidrs.networking.k8s.io", "", "", "", false),
    // Peers outside of the cluster.
    ("get list watch", "peers.kilo.squat.ai", "", "", "", true),
    ("create update patch delete", "peers.kilo.squat.ai", "", "", "", false),
    ("get list watch", "wirekubemeshes.wirekube.io", "", "", "", true),
    ("get list watch create update patch", "wirekubepeers.wirekube.io", "", "", "", true),
    ("get update patch", "wirekubepeers.wirekube.io", "status", "", "", true),
    ("get list watch update patch delete", "addressblocks.coil.cybozu.com", "", "", "", true),
    ("get list watch create delete", "blockrequests.coil.cybozu.com", "", "", "", true),
    ("create patch", "events.events.k8s.io", "", "", "default", true),
    ("create update patch delete", "nodes", "", "", "", false),
    ("update patch", "nodes", "status", "", "", false),
    ("create update patch delete", "pods", "", "", "", false),
    ("create update patch delete", "addresspools.coil.cybozu.com", "", "", "", false),
    ("create update patch delete", "wirekubemeshes.wirekube.io", "", "", "", false),
    ("create deletecollection", "addressblocks.coil.cybozu.com", "", "", "", false),
    ("delete deletecollection", "wirekubepeers.wirekube.io", "", "", "", false),
    ("update patch", "blockrequests.coil.cybozu.com", "", "", "", false),
    ("update patch", "blockrequests.coil.cybozu.com", "status", "", "", false),
    // The token of an external relay.
    ("get", "secrets", "", "fairlead-relay", "kube-system", true),
    // What nodes share for discovery services.
    ("get", "secrets", "", "fairlead-discovery", "kube-system", true),
    ("create update patch delete", "secrets", "", "fairlead-discovery", "kube-system", false),
    // Preshared keys of Peers.
    ("get list watch", "secrets", "", "fairlead-peer-preshared-keys", "kube-system", true),
    ("create update patch delete", "secrets", "", "fairlead-peer-preshared-keys", "kube-system", false),
    ("get list", "secrets", "", "", "kube-system", false),
    ("create get update", "leases.coordination.k8s.io", "", "coil-ipam-leader", "kube-system", false),
    // For gateways of Egresses; see `tokens`.
    ("create", "serviceaccounts", "token", "fairlead-node", "kube-system", true),
    ("create", "serviceaccounts", "token", "fairlead-controller", "kube-system", false),
    ("create", "serviceaccounts", "token", "fairlead-node", "default", false),
];

const VALIDATING: &str = "validatingwebhookconfigurations.admissionregistration.k8s.io";
const MUTATING: &str = "mutatingwebhookconfigurations.admissionregistration.k8s.io";
const POLICIES: &str = "validatingadmissionpolicies.admissionregistration.k8s.io";

const CONTROLLER_RIGHTS: &[Right] = &[
    ("get list watch update patch", "addresspools.coil.cybozu.com", "", "", "", true),
    ("get update patch", "addresspools.coil.cybozu.com", "status", "", "", true),
    ("update", "addresspools.coil.cybozu.com", "finalizers", "", "", true),
    ("get list watch create update patch delete", "addressblocks.coil.cybozu.com", "", "", "", true),
    ("get list watch", "blockrequests.coil.cybozu.com", "", "", "", true),
    ("get update patch", "blockrequests.coil.cybozu.com", "status", "", "", true),
    ("get list watch", "nodes", "", "", "", true),
    // Ranges with which pools are compared.
    ("list watch", "servicecidrs.networking.k8s.io", "", "", "", true),
    ("create update patch delete", "servicecidrs.networking.k8s.io", "", "", "", false),
    ("list watch", "peers.kilo.squat.ai", "", "", "", true),
    ("get create update patch delete", "peers.kilo.squat.ai", "", "", "", false),
    ("get list watch", "secrets", "", "fairlead-peer-preshared-keys", "kube-system", false),
    ("get list watch", "egresses.coil.cybozu.com", "", "", "", true),
    ("patch", "egresses.coil.cybozu.com", "status", "", "", true),
    ("get list watch delete", "wirekubepeers.wirekube.io", "", "", "", true),
    // What the Node of a peer says.
    ("patch", "wirekubepeers.wirekube.io", "status", "", "", true),
    ("get list watch", "wirekubemeshes.wirekube.io", "", "", "", true),
    ("get update patch", "wirekubemeshes.wirekube.io", "status", "", "", true),
    ("create", "leases.coordination.k8s.io", "", "", "kube-system", true),
    ("get update patch", "leases.coordination.k8s.io", "", "coil-ipam-leader", "kube-system", true),
    ("create patch", "events.events.k8s.io", "", "", "default", true),
    ("create get list watch update patch delete", "secrets", "", "", "kube-system", false),
    ("create get update patch delete", VALIDATING, "", "", "", false),
    ("create get update patch delete", MUTATING, "", "", "", false),
    ("create get update patch delete", POLICIES, "", "", "", false),
    ("get update patch delete", "leases.coordination.k8s.io", "", "kube-scheduler", "kube-system", false),
    ("create", "leases.coordination.k8s.io", "", "", "default", false),
    ("create delete", "addresspools.coil.cybozu.com", "", "", "", false),
    ("create update patch delete", "nodes", "", "", "", false),
    // Whether a program enforces NetworkPolicies.
    ("list", "networkpolicies.networking.k8s.io", "", "", "", true),
    ("list", "daemonsets.apps", "", "", "", true),
    ("get watch create update patch delete", "networkpolicies.networking.k8s.io", "", "", "default", false),
    ("get watch create update patch delete", "daemonsets.apps", "", "", "kube-system", false),
    // The condition NetworkUnavailable; see `network_unavailable`.
    ("patch", "nodes", "status", "", "", true),
    ("get update", "nodes", "status", "", "", false),
    ("create update patch", "wirekubepeers.wirekube.io", "", "", "", false),
    ("list", "pods", "", "", "", true),
    ("get watch create delete", "pods", "", "", "", false),
    ("get list", "secrets", "", "", "kube-system", false),
    // The same secret, which is made once.
    ("get create patch", "secrets", "", "fairlead-discovery", "kube-system", true),
    ("list watch update delete", "secrets", "", "fairlead-discovery", "kube-system", false),
    // The managed relay, by name, in a namespace where no other ServiceAccount is and no pod has privileges.
    ("create patch delete", "deployments.apps", "", "fairlead-relay", RELAY, true),
    ("create patch delete", "services", "", "fairlead-relay", RELAY, true),
    ("create patch delete", "services", "", "fairlead-relay-replicas", RELAY, true),
    ("create patch delete", "poddisruptionbudgets.policy", "", "fairlead-relay", RELAY, true),
    ("create patch delete", "poddisruptionbudgets.policy", "", "", RELAY, false),
    ("get create patch delete", "secrets", "", "fairlead-relay-ca", RELAY, true),
    ("get create patch delete", "secrets", "", "fairlead-relay-tls", RELAY, true),
    ("create patch delete", "deployments.apps", "", "", RELAY, false),
    ("create patch delete", "deployments.apps", "", "fairlead-relay", "kube-system", false),
    ("create patch delete", "services", "", "", RELAY, false),
    ("get list watch create patch delete", "secrets", "", "", RELAY, false),
    ("create", "serviceaccounts", "token", "fairlead-relay", RELAY, false),
    ("create patch delete", "pods", "", "", RELAY, false),
    // Its UID is the identifier of the cluster.
    ("get", "namespaces", "", "kube-system", "", true),
    ("list watch create update patch delete", "namespaces", "", "", "", false),
];

const RELAY: &str = "fairlead-relay";

const RELAY_RIGHTS: &[Right] = &[
    ("get list watch", "wirekubepeers.wirekube.io", "", "", "", true),
    ("create update patch delete", "wirekubepeers.wirekube.io", "", "", "", false),
    ("get list", "secrets", "", "", RELAY, false),
    ("get list", "pods", "", "", "", false),
];

#[test]
fn programs_have_the_rights_they_need_and_no_more() {
    let bed = bed();
    for (program, account, rights) in [
        (bed.program("fairlead-node", Some("n1")), "fairlead-node", NODE_RIGHTS),
        (bed.program("fairlead-controller", None), "fairlead-controller", CONTROLLER_RIGHTS),
        (bed.relay(), "fairlead-relay", RELAY_RIGHTS),
    ] {
        let mut accesses = Vec::new();
        let mut expected = Vec::new();
        for &(verbs, resource, subresource, name, namespace, allowed) in rights {
            for verb in verbs.split(' ') {
                accesses.push(Access { verb, resource, subresource, name, namespace });
                expected.push(allowed);
            }
        }
        let answers = program.may(&accesses);
        assert_eq!(answers.len(), accesses.len());
        for ((access, answer), expected) in accesses.iter().zip(answers).zip(expected) {
            assert_eq!(answer, expected, "{account}: {access:?}");
        }
    }
}

/// The tables above name every right: one that a role gains must be added there, with its reason in the review.
#[test]
fn programs_have_no_right_that_is_not_listed() {
    let bed = bed();
    bed.plane
        .apply("{apiVersion: v1, kind: ServiceAccount, metadata: {name: unbound, namespace: kube-system}}")
        .unwrap();
    for (account, node, rights) in
        [("fairlead-node", Some("n1"), NODE_RIGHTS), ("fairlead-controller", None, CONTROLLER_RIGHTS)]
    {
        for namespace in ["default", "kube-system", RELAY] {
            // What every ServiceAccount may do, like asking for its own rights.
            let of_everyone = bed.program("unbound", None).rights(namespace);
            let found: BTreeSet<_> =
                bed.program(account, node).rights(namespace).difference(&of_everyone).cloned().collect();
            let listed: BTreeSet<_> = rights
                .iter()
                .filter(|right| right.5)
                .flat_map(|&(verbs, resource, subresource, name, _, _)| {
                    verbs.split(' ').map(move |verb| [verb, resource, subresource, name].map(str::to_owned))
                })
                .collect();
            let more: Vec<_> = found.difference(&listed).collect();
            assert!(more.is_empty(), "{account} in {namespace}: {more:?}");
            assert!(found.len() > 10, "{account} in {namespace}: {found:?}");
        }
    }
}

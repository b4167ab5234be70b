//! The node program with the rights of Coil's `coild`, as where only the image was replaced.

#![cfg(test)]

mod outage;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use fairlead_demo::{World, topology};
use outage::TIMEOUT;
use serde_json::Value;
use testbed_lab::Progress;

/// Coil v2.15, `config/rbac`, ClusterRole coild.
const COILD: &str = "\
apiVersion: v1
kind: ServiceAccount
metadata: {name: coild, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coild}
rules:
- {apiGroups: [''], resources: [nodes], verbs: [get]}
- {apiGroups: [''], resources: [pods, namespaces, services], verbs: [get, list, watch]}
- {apiGroups: [coil.cybozu.com], resources: [addressblocks], verbs: [get, list, update, patch, delete]}
- {apiGroups: [coil.cybozu.com], resources: [blockrequests], verbs: [get, list, watch, create, delete]}
- {apiGroups: [coil.cybozu.com], resources: [blockrequests/status], verbs: [get]}
- {apiGroups: [coil.cybozu.com], resources: [egresses], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coild}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coild}
subjects: [{kind: ServiceAccount, name: coild, namespace: kube-system}]
";

/// What `docs/migrate-from-coil.md` says is missing.
const MISSING: &str = "\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coild-fairlead}
rules:
- {apiGroups: [''], resources: [nodes], verbs: [list, watch]}
- {apiGroups: [coil.cybozu.com], resources: [addressblocks], verbs: [watch]}
- {apiGroups: [coil.cybozu.com], resources: [addresspools], verbs: [get, list, watch]}
- {apiGroups: [wirekube.io], resources: [wirekubemeshes], verbs: [get, list, watch]}
- {apiGroups: [wirekube.io], resources: [wirekubepeers], verbs: [get, list, watch, create, update, patch]}
- {apiGroups: [wirekube.io], resources: [wirekubepeers/status], verbs: [get, update, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coild-fairlead}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coild-fairlead}
subjects: [{kind: ServiceAccount, name: coild, namespace: kube-system}]
";

const NODE: &str = "cloud-1";

fn readiness(world: &mut World) -> String {
    let host = &world.node(NODE).unwrap().host;
    let mut stream = host.run(|| TcpStream::connect(("127.0.0.1", 9385))).unwrap().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn problems(world: &mut World) -> Vec<String> {
    let status = world.node(NODE).unwrap().status().unwrap();
    let problems = status["problems"].as_array().unwrap().iter();
    problems.map(|problem| problem.as_str().unwrap().to_owned()).collect()
}

/// Pods start and the program is ready; it says what it may not read and what does not work for that. When the rights
/// come, the node joins the mesh without a restart.
#[test]
fn with_coils_rights_pods_start_and_what_is_refused_is_named() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.plane.apply(COILD).unwrap();
    let token = world.plane.token("coild", "kube-system", Some(NODE)).unwrap();
    let kubeconfig = world.node(NODE).unwrap().kubeconfig();
    world.node(NODE).unwrap().stop().unwrap();
    world.plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
    world.node(NODE).unwrap().start().unwrap();
    world.node(NODE).unwrap().wait_ready(TIMEOUT).unwrap();

    world.start_pod("first", NODE).unwrap();
    let ready = readiness(&mut world);
    assert!(ready.starts_with("HTTP/1.1 200 "), "{ready}");
    let said = problems(&mut world).join("\n");
    for words in
        ["not in the mesh: ", "wirekubepeers", "wirekubemeshes", "addresspools", "deploy/rbac/node.yaml"]
    {
        assert!(said.contains(words), "{words} is missing in\n{said}");
    }

    world.plane.apply(MISSING).unwrap();
    let joined = |world: &World| -> Result<()> {
        let node = world.nodes.iter().find(|node| node.name == NODE).context("no node")?;
        let status: Value = node.status()?;
        let peers = status["peers"].as_array().context("no peers")?;
        ensure!(!peers.is_empty() && peers.iter().all(|peer| peer["state"] == "up"), "{status:#}");
        ensure!(status["problems"] == serde_json::json!([]), "{status:#}");
        Ok(())
    };
    world.wait_for(TIMEOUT, joined).unwrap();
}

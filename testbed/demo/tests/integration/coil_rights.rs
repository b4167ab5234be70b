//! Node program and controller with the rights of Coil's `coild` and `coil-ipam-controller`, as where only the image was
//! replaced.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::outage::{TIMEOUT, container, node};
use anyhow::{Context, Result, ensure};
use fairlead_demo::objects::{MESHES, NAMESPACE, POOLS};
use fairlead_demo::{World, topology};
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

/// Rights that are missing according to `docs/migrate-from-coil.md`.
const MISSING: &str = "\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coild-fairlead}
rules:
- {apiGroups: [''], resources: [nodes], verbs: [list, watch]}
- {apiGroups: [coil.cybozu.com], resources: [addressblocks], verbs: [watch]}
- {apiGroups: [coil.cybozu.com], resources: [addresspools], verbs: [get, list, watch]}
- {apiGroups: [networking.k8s.io], resources: [servicecidrs], verbs: [get, list, watch]}
- {apiGroups: [wirekube.io], resources: [wirekubemeshes], verbs: [get, list, watch]}
- {apiGroups: [wirekube.io], resources: [wirekubepeers], verbs: [get, list, watch, create, update, patch]}
- {apiGroups: [wirekube.io], resources: [wirekubepeers/status], verbs: [get, update, patch]}
- {apiGroups: [kilo.squat.ai], resources: [peers], verbs: [get, list, watch]}
- {apiGroups: [''], resources: [secrets], resourceNames: [fairlead-peer-preshared-keys], verbs: [get, list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
- {apiGroups: [''], resources: [serviceaccounts/token], resourceNames: [coild], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coild-fairlead}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coild-fairlead}
subjects: [{kind: ServiceAccount, name: coild, namespace: kube-system}]
";

/// Coil v2.15, `config/rbac`: ClusterRole coil-ipam-controller and Role coil-leader-election.
const CONTROLLER: &str = "\
apiVersion: v1
kind: ServiceAccount
metadata: {name: coil-ipam-controller, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coil-ipam-controller}
rules:
- {apiGroups: [''], resources: [nodes], verbs: [get, list]}
- {apiGroups: [''], resources: [pods], verbs: [get, list, watch]}
- {apiGroups: [coil.cybozu.com], resources: [addressblocks], verbs: [create, delete, get, list, patch, update, watch]}
- {apiGroups: [coil.cybozu.com], resources: [addresspools], verbs: [get, list, patch, update, watch]}
- {apiGroups: [coil.cybozu.com], resources: [blockrequests], verbs: [get, list, watch]}
- {apiGroups: [coil.cybozu.com], resources: [blockrequests/status], verbs: [get, patch, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coil-ipam-controller}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coil-ipam-controller}
subjects: [{kind: ServiceAccount, name: coil-ipam-controller, namespace: kube-system}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: coil-leader-election, namespace: kube-system}
rules:
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, list, watch, create, update, patch, delete]}
- {apiGroups: [''], resources: [events], verbs: [create, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: coil-leader-election, namespace: kube-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: coil-leader-election}
subjects: [{kind: ServiceAccount, name: coil-ipam-controller, namespace: kube-system}]
";

/// Rights of the controller that are missing according to `docs/migrate-from-coil.md`.
const MISSING_OF_CONTROLLER: &str = "\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coil-ipam-controller-fairlead}
rules:
- {apiGroups: [''], resources: [nodes], verbs: [watch]}
- {apiGroups: [coil.cybozu.com], resources: [addresspools/status], verbs: [get, update, patch]}
- {apiGroups: [coil.cybozu.com], resources: [egresses], verbs: [get, list, watch]}
- {apiGroups: [coil.cybozu.com], resources: [egresses/status], verbs: [patch]}
- {apiGroups: [networking.k8s.io], resources: [servicecidrs], verbs: [list, watch]}
- {apiGroups: [kilo.squat.ai], resources: [peers], verbs: [list, watch]}
- {apiGroups: [wirekube.io], resources: [wirekubemeshes], verbs: [get, list, watch]}
- {apiGroups: [wirekube.io], resources: [wirekubemeshes/status], verbs: [get, update, patch]}
- {apiGroups: [wirekube.io], resources: [wirekubepeers], verbs: [get, list, watch, delete]}
- {apiGroups: [events.k8s.io], resources: [events], verbs: [create, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coil-ipam-controller-fairlead}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coil-ipam-controller-fairlead}
subjects: [{kind: ServiceAccount, name: coil-ipam-controller, namespace: kube-system}]
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

    world.make_pod("first", NODE).unwrap();
    let (plugin, first) = (node(&world, NODE).plugin().unwrap(), container(&world, "first", NAMESPACE));
    // A refusal counts once it has lasted: the API server may be starting.
    world.wait_for(TIMEOUT, |_| plugin.add(&first)).unwrap();
    let ready = readiness(&mut world);
    assert!(ready.starts_with("HTTP/1.1 200 "), "{ready}");
    let said = problems(&mut world).join("\n");
    for words in [
        "not in the mesh: ",
        "wirekubepeers",
        "wirekubemeshes",
        "addresspools",
        "servicecidrs",
        "deploy/rbac/node.yaml",
    ] {
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

fn conditions(world: &World, objects: &str) -> Result<usize> {
    let object = world.plane.get(&format!("{objects}/default"))?;
    Ok(object["status"]["conditions"].as_array().map_or(0, Vec::len))
}

/// It leads and grants blocks, and its log names what it may not read. When the rights come, the rest works without a
/// restart.
#[test]
fn with_the_rights_of_coils_controller_blocks_are_granted_and_what_is_refused_is_named() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.kill_controller().unwrap();
    world.plane.apply(CONTROLLER).unwrap();
    let token = world.plane.token("coil-ipam-controller", "kube-system", None).unwrap();
    let kubeconfig = world.directory().join("controller.kubeconfig");
    world.plane.kubeconfig_for_token(&token, &kubeconfig, None).unwrap();
    world.start_controller().unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();

    let named = |world: &World| {
        let log = std::fs::read_to_string(world.directory().join("controller.log"))?;
        for resource in ["nodes", "addresspools/status", "egresses", "wirekubemeshes", "wirekubepeers"] {
            ensure!(
                log.lines().any(|line| line.contains("forbidden") && line.contains(resource)),
                "{resource} is not in the log:\n{log}"
            );
        }
        Ok(())
    };
    world.wait_for(TIMEOUT, named).unwrap();
    assert_eq!((conditions(&world, POOLS).unwrap(), conditions(&world, MESHES).unwrap()), (0, 0));

    world.plane.apply(MISSING_OF_CONTROLLER).unwrap();
    let complete = |world: &World| {
        for objects in [POOLS, MESHES] {
            ensure!(conditions(world, objects)? > 0, "{objects}/default has no conditions");
        }
        Ok(())
    };
    world.wait_for(TIMEOUT, complete).unwrap();
}

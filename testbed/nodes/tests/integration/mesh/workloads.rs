//! Workloads that people run: DaemonSets, probes, exec and logs, rolling updates.

use std::collections::BTreeSet;

use anyhow::ensure;
use testbed_kube::images::{AGNHOST, AGNHOST_BEFORE, BUSYBOX};
use testbed_lab::eventually;

use crate::bed::{Room, TIMEOUT, all_different, blocks_of, server};
use crate::mesh::BED;

#[test]
fn a_daemonset_has_a_pod_with_addresses_of_its_nodes_blocks_on_every_node() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "daemonset");
    let manifest = server("agent", 1)
        .replace("kind: Deployment", "kind: DaemonSet")
        .replace("  replicas: 1\n", "")
        .replace("          matchLabelKeys: [pod-template-hash]\n", "");
    let pods = room.run("daemonset/agent", &manifest);
    let on: BTreeSet<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
    let nodes: BTreeSet<&str> = cluster.nodes().iter().map(|node| node.name()).collect();
    assert_eq!((pods.len(), &on), (nodes.len(), &nodes));
    all_different(&pods);
    for pod in &pods {
        let blocks = blocks_of(&cluster, &pod.node).unwrap();
        for address in &pod.addresses {
            assert!(blocks.iter().any(|block| block.contains(address)), "{pod:?} is not in {blocks:?}");
        }
    }
}

/// A web server that is ready while it has the file `ready`, and alive while there is `/tmp/alive`.
fn probed(node: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Pod
metadata: {{name: web, labels: {{app: web}}}}
spec:
  nodeSelector: {{kubernetes.io/hostname: {node}}}
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: {BUSYBOX}
      command: [sh, -c, 'mkdir -p /www; touch /tmp/alive; echo serving; exec httpd -f -p 80 -h /www']
      readinessProbe: {{httpGet: {{path: /ready, port: 80}}, periodSeconds: 1, failureThreshold: 1}}
      livenessProbe: {{exec: {{command: [test, -e, /tmp/alive]}}, periodSeconds: 1, failureThreshold: 1}}
      startupProbe: {{tcpSocket: {{port: 80}}, periodSeconds: 1, failureThreshold: 30}}
"
    )
}

#[test]
fn probes_exec_and_logs_reach_pods_also_on_the_node_behind_the_router() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "probes");
    room.apply(&probed("home-1")).unwrap();
    let ready_is = |wanted: bool| {
        let look = || {
            let pods = room.pods("web")?;
            ensure!(pods.len() == 1 && pods[0].ready == wanted, "{pods:?}");
            Ok(pods[0].clone())
        };
        eventually(TIMEOUT, look).unwrap()
    };
    eventually(TIMEOUT, || room.shell("web", "echo ready > /www/ready")).unwrap();
    let before = ready_is(true);
    room.shell("web", "rm /www/ready").unwrap();
    ready_is(false);
    room.shell("web", "rm /tmp/alive").unwrap();
    let restarted = || {
        let pods = room.pods("web")?;
        ensure!(pods[0].restarts == 1, "{pods:?}");
        Ok(pods[0].clone())
    };
    let after = eventually(TIMEOUT, restarted).unwrap();
    assert_eq!(after.addresses, before.addresses, "a new container, the same pod");
    assert_eq!(room.kubectl("logs web --previous").unwrap().trim(), "serving");
    eventually(TIMEOUT, || room.shell("web", "echo ready > /www/ready")).unwrap();
    ready_is(true);
}

/// Takes a new connection every few milliseconds and writes a line for each that fails.
fn client(service: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: Pod
metadata: {{name: client, labels: {{app: client}}}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: {AGNHOST}
      command: [sh, -c]
      args:
        - |
          while :; do
            curl -gsS -m 5 -o /dev/null http://{service}/hostname && echo good || echo bad
            sleep 0.02
          done
"
    )
}

#[test]
fn a_rolling_update_refuses_no_connection() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "rolling");
    // Kubernetes asks for it: endpoints change after the pod was asked to terminate.
    let manifest = server("web", 3)
        .replace("terminationGracePeriodSeconds: 1", "terminationGracePeriodSeconds: 30")
        .replace(
            "          args: [netexec]",
            "          args: [netexec]\n          lifecycle: {preStop: {sleep: {seconds: 5}}}",
        );
    let before = room.run("deployment/web", &manifest);
    room.apply(
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
         spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}\n",
    )
    .unwrap();
    let address = room.kubectl("get service web -o jsonpath={.spec.clusterIP}").unwrap();
    room.apply(&client(&address)).unwrap();
    room.ready_pod("client");
    let answers =
        || room.kubectl("logs client").map(|log| log.lines().map(str::to_owned).collect::<Vec<_>>());
    // The Service may be younger than the client.
    let start = eventually(TIMEOUT, || {
        let lines = answers()?;
        ensure!(lines.iter().rev().take(10).filter(|line| *line == "good").count() == 10, "{lines:?}");
        Ok(lines.len())
    })
    .unwrap();
    room.kubectl(&format!("set image deployment/web main={AGNHOST_BEFORE}")).unwrap();
    room.rolled_out("deployment/web");
    let gone = || {
        let now = room.kubectl("get pods -l app=web -o name")?;
        ensure!(before.iter().all(|pod| !now.contains(&pod.name)), "{now}");
        Ok(())
    };
    eventually(TIMEOUT, gone).unwrap();
    let during: Vec<String> = answers().unwrap().split_off(start);
    let failed: Vec<&String> = during.iter().filter(|line| *line != "good").collect();
    assert!(failed.is_empty() && during.len() > 50, "{} of {}: {failed:?}", failed.len(), during.len());
    println!("rolling update: {} connections, none failed", during.len());
}

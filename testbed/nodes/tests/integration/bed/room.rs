//! A namespace for one test, and the pods in it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed_kube::images::AGNHOST;
use testbed_lab::eventually;
use testbed_nodes::Cluster;

use super::TIMEOUT;

/// A namespace that is deleted with all that is in it.
pub(crate) struct Room<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) name: String,
}

/// Facts about a pod that tests need.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) node: String,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) restarts: u64,
    pub(crate) ready: bool,
}

impl<'a> Room<'a> {
    pub(crate) fn new(cluster: &'a Cluster, name: &str) -> Self {
        Self::of_pool(cluster, name, None)
    }

    /// With the annotation that chooses a pool.
    pub(crate) fn of_pool(cluster: &'a Cluster, name: &str, pool: Option<&str>) -> Self {
        let annotations = pool.map(|pool| format!("coil.cybozu.com/pool: {pool}")).unwrap_or_default();
        let namespace = format!(
            "apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}, annotations: {{{annotations}}}}}\n"
        );
        cluster.apply(&namespace).unwrap();
        let room = Self { cluster, name: name.to_owned() };
        // Pods that come before it are refused.
        eventually(TIMEOUT, || room.kubectl("get serviceaccount default")).unwrap();
        cluster.progress().step(&format!("test: {name}"));
        room
    }

    /// The same room, after the cluster was changed.
    pub(crate) fn again(cluster: &'a Cluster, name: &str) -> Self {
        Self { cluster, name: name.to_owned() }
    }

    /// Leaves it, for [`Room::again`].
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }

    /// kubectl in this namespace; the words are separated by blanks.
    pub(crate) fn kubectl(&self, words: &str) -> Result<String> {
        let words: Vec<&str> = ["-n", &self.name].into_iter().chain(words.split_whitespace()).collect();
        self.cluster.kubectl(&words)
    }

    pub(crate) fn apply(&self, yaml: &str) -> Result<String> {
        self.cluster.plane().kubectl_stdin(&["-n", &self.name, "apply", "-f", "-"], yaml)
    }

    /// Runs a shell script in a pod.
    pub(crate) fn shell(&self, pod: &str, script: &str) -> Result<String> {
        self.cluster.kubectl(&["-n", &self.name, "exec", pod, "--", "sh", "-c", script])
    }

    /// Applies and waits until it is rolled out.
    pub(crate) fn run(&self, what: &str, yaml: &str) -> Vec<Pod> {
        self.apply(yaml).unwrap();
        self.rolled_out(what);
        self.pods(what.split_once('/').unwrap().1).unwrap()
    }

    /// Waits until a Deployment or DaemonSet has what it wants.
    pub(crate) fn rolled_out(&self, what: &str) {
        self.kubectl(&format!("rollout status {what} --timeout={}s", TIMEOUT.as_secs()))
            .with_context(|| self.explain())
            .unwrap();
    }

    /// The pods with the label `app`, in the order of their names, without those that are being deleted.
    pub(crate) fn pods(&self, app: &str) -> Result<Vec<Pod>> {
        let list: Value = serde_json::from_str(&self.kubectl(&format!("get pods -l app={app} -o json"))?)?;
        let items = list["items"].as_array().context("no list of pods")?;
        let living = items.iter().filter(|item| item["metadata"]["deletionTimestamp"].is_null());
        let mut pods: Vec<Pod> = living.map(pod).collect();
        pods.sort();
        Ok(pods)
    }

    /// Waits for the one pod of that label, ready.
    pub(crate) fn ready_pod(&self, app: &str) -> Pod {
        let ready = || {
            let pods = self.pods(app)?;
            ensure!(pods.len() == 1 && pods[0].ready, "{app}: {pods:?}");
            Ok(pods[0].clone())
        };
        eventually(TIMEOUT, ready).with_context(|| self.explain()).unwrap()
    }

    /// Report for people when something does not work: pods and Events.
    fn explain(&self) -> String {
        let ask = |words: &str| self.kubectl(words).unwrap_or_else(|error| format!("{error:#}\n"));
        ask("get pods -o wide") + &ask("get events --sort-by=.lastTimestamp")
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let keep = std::thread::panicking();
        let wait = ["delete", "namespace", &self.name, "--wait=false"];
        // It goes with the cluster at the latest.
        let _ = if keep { Ok(String::new()) } else { self.cluster.kubectl(&wait) };
    }
}

fn pod(item: &Value) -> Pod {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let status = &item["status"];
    let addresses = status["podIPs"].as_array().into_iter().flatten();
    let containers = || status["containerStatuses"].as_array().into_iter().flatten();
    Pod {
        name: text(&item["metadata"]["name"]),
        node: text(&item["spec"]["nodeName"]),
        addresses: addresses.filter_map(|address| address["ip"].as_str()?.parse().ok()).collect(),
        restarts: containers().filter_map(|container| container["restartCount"].as_u64()).sum(),
        ready: containers().count() > 0 && containers().all(|container| container["ready"] == true),
    }
}

/// A Deployment of agnhost's web server on port 8080, spread over the nodes.
pub(crate) fn server(app: &str, replicas: usize) -> String {
    format!(
        "\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {app}}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: {app}}}}}
  template:
    metadata: {{labels: {{app: {app}}}}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: DoNotSchedule
          labelSelector: {{matchLabels: {{app: {app}}}}}
          matchLabelKeys: [pod-template-hash]
          nodeTaintsPolicy: Honor
      containers:
        - name: main
          image: {AGNHOST}
          args: [netexec]
          readinessProbe: {{httpGet: {{path: /hostname, port: 8080}}, periodSeconds: 1}}
"
    )
}

/// No address twice.
pub(crate) fn all_different(pods: &[Pod]) {
    let all: Vec<IpAddr> = pods.iter().flat_map(|pod| pod.addresses.clone()).collect();
    let different: BTreeSet<IpAddr> = all.iter().copied().collect();
    assert_eq!(all.len(), different.len(), "{pods:#?}");
}

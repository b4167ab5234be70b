//! Runs on the operator's machine.

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use fairlead_api::names::{NODE_PROGRAM, SYSTEM_NAMESPACE};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ContainerState, Namespace, Node as NodeObject, Pod as PodObject, Service};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use tokio::time::{Instant, sleep};

use super::manifests::{self, PROBE, ROLE, TARGET};
use super::plan::{self, Facts, Node, Pod, SERVICE, Target, Test};
use super::report::{self, Row};
use crate::api;
use crate::arguments::queries::ConnectivityTest;
use crate::output::render;
use crate::query::PROBLEM_FOUND;

/// Nodes that are tested unless the user names them.
const DEFAULT_NODES: usize = 4;
/// Most nodes at once: the results of a pod have to fit into its termination message.
const MAX_NODES: usize = 10;
/// Port of a kubelet whose Node does not name it.
const KUBELET_PORT: u16 = 10_250;
/// Interval at which pods are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time for the namespace to go.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the test, and prints the result.
pub(super) async fn run(arguments: &ConnectivityTest) -> anyhow::Result<ExitCode> {
    let client = arguments.api.client().await?;
    let image = match &arguments.image {
        Some(image) => image.clone(),
        None => image_of_node_program(&client).await?,
    };
    let nodes = api::list(&Api::<NodeObject>::all(client.clone()), "Nodes", ListParams::default()).await?;
    let nodes = choose(&nodes, &arguments.nodes)?;
    let namespaces = Api::<Namespace>::all(client.clone());
    let made = namespaces.create(&PostParams::default(), &manifests::namespace()?).await;
    let namespace = made.context("cannot create a namespace for the test")?.name_any();
    let cluster = Cluster { client, namespace, image, nodes, limit: arguments.timeout };
    let outcome = tokio::select! {
        outcome = cluster.test(&arguments.external) => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    if arguments.keep {
        tracing::info!(namespace = cluster.namespace, "kept; delete it with kubectl delete namespace");
    } else {
        cluster.remove(&namespaces).await;
    }
    let rows = outcome?;
    let text = render(arguments.output, || report::data(&rows), |wide| report::text(&rows, wide))?;
    // A closed pipe (`| head`) is not a failure.
    let _ = std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes());
    Ok(if report::succeeded(&rows) { ExitCode::SUCCESS } else { ExitCode::from(PROBLEM_FOUND) })
}

async fn image_of_node_program(client: &Client) -> anyhow::Result<String> {
    let programs = Api::<DaemonSet>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let program = programs.get(NODE_PROGRAM).await;
    let program = program.with_context(|| {
        format!("cannot read DaemonSet {SYSTEM_NAMESPACE}/{NODE_PROGRAM}, whose image the test pods run: use --image")
    })?;
    let containers =
        program.spec.and_then(|spec| spec.template.spec).map(|pod| pod.containers).unwrap_or_default();
    containers
        .into_iter()
        .find_map(|container| container.image)
        .context("the DaemonSet names no image: use --image")
}

/// The nodes that the user named, or the first that are ready.
fn choose(nodes: &[NodeObject], wanted: &[String]) -> anyhow::Result<Vec<Node>> {
    ensure!(wanted.len() <= MAX_NODES, "at most {MAX_NODES} nodes can be tested at once");
    if wanted.is_empty() {
        let mut ready: Vec<Node> = nodes.iter().filter(|node| is_ready(node)).map(facts_of).collect();
        ready.sort_by(|a, b| a.name.cmp(&b.name));
        ready.truncate(DEFAULT_NODES);
        ensure!(!ready.is_empty(), "no node is Ready and schedulable");
        return Ok(ready);
    }
    let find = |name: &String| {
        let node = nodes.iter().find(|node| node.name_any() == *name);
        node.map(facts_of).with_context(|| format!("there is no Node '{name}'"))
    };
    wanted.iter().map(find).collect()
}

fn is_ready(node: &NodeObject) -> bool {
    let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default();
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !unschedulable && conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn facts_of(node: &NodeObject) -> Node {
    let status = node.status.as_ref();
    let addresses = status.and_then(|status| status.addresses.as_ref()).into_iter().flatten();
    let port = status.and_then(|status| status.daemon_endpoints.as_ref()?.kubelet_endpoint.as_ref());
    Node {
        name: node.name_any(),
        addresses: addresses
            .filter(|address| address.type_ == "InternalIP")
            .filter_map(|address| address.address.parse().ok())
            .collect(),
        kubelet_port: port.and_then(|port| u16::try_from(port.port).ok()).unwrap_or(KUBELET_PORT),
    }
}

/// The cluster during one test.
struct Cluster {
    client: Client,
    namespace: String,
    image: String,
    nodes: Vec<Node>,
    limit: Duration,
}

impl Cluster {
    async fn test(&self, external: &[String]) -> anyhow::Result<Vec<Row>> {
        let services = Api::<Service>::namespaced(self.client.clone(), &self.namespace);
        let service = services.create(&PostParams::default(), &manifests::service()?).await;
        let service = service.context("cannot create the Service of the test")?;
        tracing::info!(
            namespace = self.namespace,
            nodes = self.nodes.len(),
            "starting a target pod on each node"
        );
        for (number, node) in self.nodes.iter().enumerate() {
            self.create(&manifests::target(&format!("{TARGET}-{number}"), &node.name, &self.image)?).await?;
        }
        let (pods, mut rows) = self.started().await?;
        if pods.is_empty() {
            return Ok(rows);
        }
        let facts = Facts {
            nodes: self.nodes.clone(),
            dns: self.dns_name().await?,
            api_server: self.addresses_of("default", "kubernetes").await?,
            service: cluster_ips(&service),
            pods,
            external: external.to_vec(),
        };
        let targets = plan::targets(&facts);
        tracing::info!(targets = targets.len(), "connecting from a pod on each node");
        rows.extend(self.probe(&facts.pods, &targets).await?);
        Ok(rows)
    }

    /// The default ServiceAccount, without which no pod is accepted, appears a moment after its namespace.
    async fn create(&self, pod: &PodObject) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.limit;
        loop {
            match self.pods().create(&PostParams::default(), pod).await {
                Ok(_) => return Ok(()),
                Err(kube::Error::Api(status)) if status.code == 403 && Instant::now() < deadline => {
                    sleep(POLL_INTERVAL).await;
                }
                Err(error) => return Err(error).context(format!("cannot create pod {}", pod.name_any())),
            }
        }
    }

    fn pods(&self) -> Api<PodObject> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Pods of this role, when all of them are as wanted or the time is over.
    async fn wait(&self, role: &str, is_done: impl Fn(&PodObject) -> bool) -> anyhow::Result<Vec<PodObject>> {
        let deadline = Instant::now() + self.limit;
        loop {
            let parameters = ListParams::default().labels(&format!("{ROLE}={role}"));
            let pods = api::list(&self.pods(), "the test's Pods", parameters).await?;
            if pods.iter().all(&is_done) || Instant::now() > deadline {
                return Ok(pods);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// The targets that run, and a row for each that does not.
    async fn started(&self) -> anyhow::Result<(Vec<Pod>, Vec<Row>)> {
        let (mut running, mut failed) = (Vec::new(), Vec::new());
        for pod in self.wait(TARGET, is_running).await? {
            let node = node_of(&pod);
            if is_running(&pod) {
                running.push(Pod { name: pod.name_any(), node, addresses: addresses(&pod) });
            } else {
                let (from, address) = (String::new(), "-".to_owned());
                failed.push(Row {
                    test: Test::PodStart,
                    from,
                    to: node,
                    address,
                    result: Err(waits_for(&pod)),
                });
            }
        }
        Ok((running, failed))
    }

    async fn probe(&self, pods: &[Pod], targets: &[Target]) -> anyhow::Result<Vec<Row>> {
        let arguments: Vec<String> = targets.iter().map(Target::argument).collect();
        for (number, pod) in pods.iter().enumerate() {
            let name = format!("{PROBE}-{number}");
            self.create(&manifests::probe(&name, &pod.node, &self.image, &arguments)?).await?;
        }
        let finished = self.wait(PROBE, |pod| terminated(pod).is_some()).await?;
        let rows = finished.iter().flat_map(|pod| {
            let message =
                terminated(pod).ok_or_else(|| format!("the probe pod did not finish: {}", waits_for(pod)));
            report::rows(&node_of(pod), targets, message)
        });
        Ok(rows.collect())
    }

    /// `None` in a cluster without DNS.
    async fn dns_name(&self) -> anyhow::Result<Option<String>> {
        let dns = self.addresses_of(SYSTEM_NAMESPACE, "kube-dns").await?;
        Ok((!dns.is_empty()).then(|| format!("{SERVICE}.{}.svc", self.namespace)))
    }

    /// Addresses of a Service; none if it does not exist.
    async fn addresses_of(&self, namespace: &str, name: &str) -> anyhow::Result<Vec<IpAddr>> {
        let services = Api::<Service>::namespaced(self.client.clone(), namespace);
        let service = services.get_opt(name).await;
        let service = service.with_context(|| format!("cannot read Service {namespace}/{name}"))?;
        Ok(service.as_ref().map(cluster_ips).unwrap_or_default())
    }

    /// Removes everything. What cannot be removed is reported, and does not change the result.
    async fn remove(&self, namespaces: &Api<Namespace>) {
        let gone = async {
            namespaces.delete(&self.namespace, &DeleteParams::default()).await?;
            while namespaces.get_opt(&self.namespace).await?.is_some() {
                sleep(POLL_INTERVAL).await;
            }
            Ok::<(), kube::Error>(())
        };
        match tokio::time::timeout(REMOVE_TIMEOUT, gone).await {
            Ok(Ok(())) => tracing::info!(namespace = self.namespace, "removed"),
            Ok(Err(error)) => {
                tracing::warn!(namespace = self.namespace, %error, "cannot remove the namespace")
            }
            Err(_) => tracing::warn!(namespace = self.namespace, "the namespace is still being deleted"),
        }
    }
}

fn node_of(pod: &PodObject) -> String {
    pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default()
}

fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let texts = service.spec.iter().flat_map(|spec| spec.cluster_ips.iter().flatten());
    texts.filter_map(|text| text.parse().ok()).collect()
}

fn addresses(pod: &PodObject) -> Vec<IpAddr> {
    let listed = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
    listed.filter_map(|address| address.ip.parse().ok()).collect()
}

fn container_states(pod: &PodObject) -> impl Iterator<Item = &ContainerState> {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    containers.filter_map(|container| container.state.as_ref())
}

fn is_running(pod: &PodObject) -> bool {
    api::is_ready(pod) && !addresses(pod).is_empty()
}

/// The termination message of a pod that has ended.
fn terminated(pod: &PodObject) -> Option<&str> {
    let ended = container_states(pod).find_map(|state| state.terminated.as_ref())?;
    Some(ended.message.as_deref().or(ended.reason.as_deref()).unwrap_or_default())
}

/// Reason why a pod does not go on, in Kubernetes's words.
fn waits_for(pod: &PodObject) -> String {
    let waiting = container_states(pod).find_map(|state| state.waiting.as_ref());
    let reason = waiting.and_then(|waiting| waiting.message.clone().or_else(|| waiting.reason.clone()));
    let phase = || pod.status.as_ref().and_then(|status| status.phase.clone());
    reason.or_else(phase).unwrap_or_else(|| "its node has not reported it".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(name: &str, ready: &str, unschedulable: bool) -> NodeObject {
        serde_json::from_value(json!({
            "metadata": { "name": name }, "spec": { "unschedulable": unschedulable },
            "status": {
                "conditions": [{ "type": "Ready", "status": ready }],
                "addresses": [{ "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": name }],
            },
        }))
        .unwrap()
    }

    fn pod(status: &Value) -> PodObject {
        serde_json::from_value(json!({ "metadata": { "name": "p" }, "status": status })).unwrap()
    }

    #[test]
    fn ready_nodes_are_chosen_unless_the_user_names_others() {
        let nodes: Vec<NodeObject> =
            [("f", "True"), ("e", "True"), ("d", "True"), ("c", "True"), ("b", "True"), ("a", "False")]
                .map(|(name, ready)| node(name, ready, name == "b"))
                .to_vec();
        let names = |wanted: &[&str]| {
            let wanted: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
            choose(&nodes, &wanted).map(|nodes| nodes.into_iter().map(|node| node.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).unwrap(), ["c", "d", "e", "f"]);
        assert_eq!(names(&["a"]).unwrap(), ["a"]);
        assert!(names(&["x"]).unwrap_err().to_string().contains("'x'"));
        assert!(choose(&[node("a", "False", false)], &[]).is_err());
        let facts = facts_of(&node("a", "True", false));
        assert_eq!((facts.addresses.len(), facts.kubelet_port), (1, 10_250));
    }

    #[test]
    fn the_state_of_a_pod_is_read() {
        let waiting = json!({ "phase": "Pending", "containerStatuses": [{
            "name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": "ErrImagePull", "message": "not found" } },
        }] });
        assert_eq!(waits_for(&pod(&waiting)), "not found");
        assert_eq!(waits_for(&pod(&json!({ "phase": "Pending" }))), "Pending");
        assert!(!is_running(&pod(&waiting)) && terminated(&pod(&waiting)).is_none());
        let ended = json!({ "containerStatuses": [{
            "name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "terminated": { "exitCode": 0, "message": "[]" } },
        }] });
        assert_eq!(terminated(&pod(&ended)), Some("[]"));
        let running = json!({ "conditions": [{ "type": "Ready", "status": "True" }], "podIPs": [{ "ip": "10.0.0.1" }] });
        assert!(is_running(&pod(&running)));
    }
}

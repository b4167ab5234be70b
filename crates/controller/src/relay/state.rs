//! State of the managed relay, from its objects: where it is reached, and whether it serves. Pure.

use std::net::IpAddr;

use fairlead_api::conditions::Finding;
use fairlead_api::resources::{ManagedRelay, RelayServiceType, RelayTransport};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod, Service};

use super::objects::replicas;

/// The condition of the mesh.
pub(super) const RELAY_READY: &str = "RelayReady";

/// Objects of the relay, as the API server has them.
#[derive(Debug, Clone, Default)]
pub(super) struct Observed {
    pub(super) deployment: Option<Deployment>,
    pub(super) service: Option<Service>,
    pub(super) pods: Vec<Pod>,
    /// The Node of [`serving`].
    pub(super) node: Option<Node>,
    /// Endpoint in the status of the mesh now.
    pub(super) endpoint: Option<String>,
}

/// State of the relay for the status of the mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    /// host:port; `None` if nodes cannot reach it yet.
    pub(super) endpoint: Option<String>,
    /// Addresses of the pods, also of one that ends.
    pub(super) pod_ips: Vec<String>,
    pub(super) finding: Finding<'static>,
}

/// The finding that there is no relay that nodes can use.
pub(super) fn unavailable(reason: &'static str, message: String) -> Finding<'static> {
    Finding { type_: RELAY_READY, holds: false, reason, message }
}

/// Reason why a relay cannot be run with these settings; `None` if it can.
pub(super) fn refusal(managed: &ManagedRelay) -> Option<Finding<'static>> {
    (managed.transport == RelayTransport::Ws).then(|| {
        let message = "a managed relay always uses TLS: set spec.relay.managed.transport to wss or tcp";
        unavailable("UnsupportedTransport", message.to_owned())
    })
}

/// The pod that connections reach: it is ready and does not end. The oldest, so that a rollout moves nodes once.
pub(super) fn serving(pods: &[Pod]) -> Option<&Pod> {
    ready(pods).min_by_key(|pod| (pod.metadata.creation_timestamp.clone(), pod.metadata.name.clone()))
}

fn ready(pods: &[Pod]) -> impl Iterator<Item = &Pod> {
    pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none() && is_ready(pod))
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

pub(super) fn state(managed: &ManagedRelay, observed: &Observed) -> State {
    let endpoint = endpoint(managed, observed);
    let finding = match (&endpoint, serving(&observed.pods)) {
        (Err(finding), _) => finding.clone(),
        (Ok(_), None) => unavailable("PodNotReady", why_no_pod(observed)),
        (Ok(endpoint), Some(_)) => Finding {
            type_: RELAY_READY,
            holds: true,
            reason: "Serving",
            message: format!(
                "nodes reach the relay at {endpoint}{}",
                ready_replicas(managed, &observed.pods)
            ),
        },
    };
    let mut pod_ips: Vec<String> = observed.pods.iter().flat_map(pod_ips).collect();
    pod_ips.sort();
    State { endpoint: endpoint.ok(), pod_ips, finding }
}

/// Number of ready replicas as a suffix for the message; empty for a single replica.
fn ready_replicas(managed: &ManagedRelay, pods: &[Pod]) -> String {
    let wanted = replicas(managed);
    let ready = ready(pods).count();
    if wanted > 1 { format!("; {ready} of {wanted} replicas are ready") } else { String::new() }
}

fn endpoint(managed: &ManagedRelay, observed: &Observed) -> Result<String, Finding<'static>> {
    if let Some(endpoint) = &managed.control_endpoint {
        return Ok(endpoint.clone());
    }
    let (host, port) = match managed.service_type {
        RelayServiceType::LoadBalancer => {
            let host = observed.service.as_ref().and_then(load_balancer);
            (host, Some(i32::from(managed.port)))
        }
        RelayServiceType::NodePort => {
            let host = observed.node.as_ref().and_then(node_address);
            (host, observed.service.as_ref().and_then(node_port))
        }
    };
    match (host.zip(port), managed.service_type) {
        (Some((host, port)), _) => Ok(host_and_port(&host, port)),
        // The pod is restarted: nodes go on connecting to where it was.
        (None, RelayServiceType::NodePort) if observed.node.is_none() && observed.endpoint.is_some() => {
            observed.endpoint.clone().ok_or_else(|| unavailable("PodNotReady", why_no_pod(observed)))
        }
        (None, RelayServiceType::NodePort) => Err(unavailable("PodNotReady", why_no_pod(observed))),
        (None, RelayServiceType::LoadBalancer) => {
            let message = "the Service has no address of a load balancer yet; clusters without load balancers need \
                           serviceType NodePort, or controlEndpoint";
            Err(unavailable("WaitingForLoadBalancer", message.to_owned()))
        }
    }
}

fn load_balancer(service: &Service) -> Option<String> {
    let ingress = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?;
    ingress.iter().find_map(|ingress| ingress.ip.clone().or_else(|| ingress.hostname.clone()))
}

fn node_port(service: &Service) -> Option<i32> {
    service.spec.as_ref()?.ports.as_ref()?.first()?.node_port
}

/// Address of a node for other networks (`ExternalIP`), else for its own (`InternalIP`).
fn node_address(node: &Node) -> Option<String> {
    let addresses = node.status.as_ref()?.addresses.as_ref()?;
    let of_type = |type_: &str| addresses.iter().find(|address| address.type_ == type_);
    of_type("ExternalIP").or_else(|| of_type("InternalIP")).map(|address| address.address.clone())
}

fn host_and_port(host: &str, port: i32) -> String {
    match host.parse() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{port}"),
        _ => format!("{host}:{port}"),
    }
}

fn pod_ips(pod: &Pod) -> Vec<String> {
    let Some(status) = &pod.status else { return Vec::new() };
    let is_over = matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"));
    let ips = status.pod_ips.iter().flatten().filter(|_| !is_over);
    ips.map(|ip| ip.ip.clone()).collect()
}

/// The first reason that pods or the Deployment give.
fn why_no_pod(observed: &Observed) -> String {
    let of_pods = observed.pods.iter().filter_map(|pod| pod.status.as_ref()).find_map(|status| {
        let containers = status.container_statuses.iter().flatten();
        let mut waiting = containers.filter_map(|container| container.state.as_ref()?.waiting.as_ref());
        let waiting = waiting.find_map(|waiting| {
            let reason = waiting.reason.clone()?;
            Some(waiting.message.as_ref().map_or(reason.clone(), |message| format!("{reason}: {message}")))
        });
        waiting.or_else(|| {
            let mut conditions = status.conditions.iter().flatten();
            conditions.find(|condition| condition.type_ == "PodScheduled")?.message.clone()
        })
    });
    let of_deployment = || {
        let status = observed.deployment.as_ref()?.status.as_ref()?;
        let mut conditions = status.conditions.iter().flatten();
        conditions.find(|condition| condition.type_ == "ReplicaFailure")?.message.clone()
    };
    let reason = of_pods.or_else(of_deployment);
    let reason = reason.unwrap_or_else(|| "kubectl get pods -n fairlead-relay shows it".to_owned());
    format!("no pod of the relay is ready: {reason}")
}

/// The finding that the API server refuses something.
pub(super) fn failed(error: &anyhow::Error) -> Finding<'static> {
    let hint = match error.downcast_ref::<kube::Error>() {
        Some(kube::Error::Api(status)) if status.code == 403 || status.code == 404 => {
            "; apply deploy/rbac, which has the namespace and the rights"
        }
        _ => "",
    };
    unavailable("ReconcileFailed", format!("{error:#}{hint}"))
}

#[cfg(test)]
pub(super) mod tests {
    use fairlead_api::resources::WireKubeMesh;
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, node: &str, ready: &str, deleted: bool) -> Pod {
        let created = format!("2026-01-01T00:00:0{}Z", name.len());
        let pod = json!({
            "metadata": {
                "name": name, "creationTimestamp": created,
                "deletionTimestamp": deleted.then_some("2026-01-01T00:01:00Z"),
            },
            "spec": { "nodeName": node, "containers": [] },
            "status": {
                "phase": "Running", "podIPs": [{ "ip": format!("10.64.0.{}", name.len()) }],
                "conditions": [{ "type": "Ready", "status": ready }],
            },
        });
        serde_json::from_value(pod).unwrap()
    }

    fn service() -> Service {
        let ports = json!([{ "port": 3478, "nodePort": 30478 }]);
        serde_json::from_value(json!({ "spec": { "ports": ports } })).unwrap()
    }

    fn node(addresses: &Value) -> Node {
        let addresses: Vec<Value> = addresses
            .as_object()
            .unwrap()
            .iter()
            .map(|(type_, address)| json!({ "type": type_, "address": address }))
            .collect();
        serde_json::from_value(json!({ "status": { "addresses": addresses } })).unwrap()
    }

    fn ingress(entry: &Value) -> Service {
        serde_json::from_value(json!({ "status": { "loadBalancer": { "ingress": [entry] } } })).unwrap()
    }

    fn managed(fields: &Value) -> ManagedRelay {
        serde_json::from_value(fields.clone()).unwrap()
    }

    /// The state, or the refusal, of a mesh whose relay has everything it needs.
    pub(in crate::relay) fn with_ready_pod(mesh: &WireKubeMesh) -> Result<State, Finding<'static>> {
        let managed = mesh.spec.relay.as_ref().unwrap().managed.as_ref().unwrap();
        refusal(managed).map_or(Ok(()), Err)?;
        let mut service = service();
        service.status = ingress(&json!({ "ip": "192.0.2.1" })).status;
        let node = Some(node(&json!({ "InternalIP": "10.0.0.1" })));
        let pods = vec![pod("a", "n1", "True", false)];
        let observed = Observed { service: Some(service), pods, node, ..Observed::default() };
        Ok(state(managed, &observed))
    }

    #[test]
    fn the_endpoint_is_the_load_balancer_s_address() {
        let managed = managed(&json!({ "port": 443 }));
        let at = |service: Option<Service>| {
            let pods = vec![pod("a", "n1", "True", false)];
            state(&managed, &Observed { service, pods, ..Observed::default() })
        };
        for (entry, endpoint) in [
            (json!({ "ip": "192.0.2.1" }), "192.0.2.1:443"),
            (json!({ "ip": "2001:db8::1" }), "[2001:db8::1]:443"),
            (json!({ "hostname": "lb.example" }), "lb.example:443"),
        ] {
            let state = at(Some(ingress(&entry)));
            assert_eq!((state.endpoint.as_deref(), state.finding.holds), (Some(endpoint), true));
        }
        let waiting = at(Some(service()));
        assert_eq!((waiting.endpoint, waiting.finding.reason), (None, "WaitingForLoadBalancer"));
    }

    #[test]
    fn a_node_port_is_reached_at_the_node_that_runs_the_relay() {
        let managed = managed(&json!({ "serviceType": "NodePort" }));
        let at = |node| {
            let pods = vec![pod("a", "n1", "True", false)];
            state(&managed, &Observed { service: Some(service()), pods, node, ..Observed::default() })
        };
        let both = node(&json!({ "InternalIP": "10.0.0.1", "ExternalIP": "192.0.2.1" }));
        assert_eq!(at(Some(both)).endpoint.as_deref(), Some("192.0.2.1:30478"));
        let internal = node(&json!({ "InternalIP": "10.0.0.1" }));
        assert_eq!(at(Some(internal)).endpoint.as_deref(), Some("10.0.0.1:30478"));
        assert_eq!(at(None).endpoint, None);
    }

    #[test]
    fn the_endpoint_stays_while_the_pod_is_restarted() {
        let managed = managed(&json!({ "serviceType": "NodePort" }));
        let endpoint = Some("192.0.2.1:30478".to_owned());
        let pods = vec![pod("a", "n1", "False", false)];
        let observed =
            Observed { service: Some(service()), pods, endpoint: endpoint.clone(), ..Observed::default() };
        let state = state(&managed, &observed);
        assert_eq!((state.endpoint, state.finding.holds), (endpoint, false));
        assert_eq!(state.finding.reason, "PodNotReady");
    }

    #[test]
    fn the_control_endpoint_comes_before_what_the_service_says() {
        let managed = managed(&json!({ "controlEndpoint": "relay.example:443", "replicas": 2 }));
        let state =
            state(&managed, &Observed { pods: vec![pod("a", "n1", "True", false)], ..Observed::default() });
        assert_eq!(state.endpoint.as_deref(), Some("relay.example:443"));
        assert!(state.finding.holds && state.finding.message.ends_with("; 1 of 2 replicas are ready"));
    }

    #[test]
    fn the_oldest_ready_pod_serves_until_it_ends() {
        let old = pod("a", "n1", "True", false);
        let new = pod("bb", "n2", "True", false);
        let name = |pods: &[Pod]| serving(pods).and_then(|pod| pod.metadata.name.clone());
        assert_eq!(name(&[new.clone(), old]).as_deref(), Some("a"));
        let ending = [new, pod("a", "n1", "True", true)];
        assert_eq!(name(&ending).as_deref(), Some("bb"));
        assert_eq!(name(&[pod("a", "n1", "False", false)]), None);
        let observed = Observed { pods: ending.to_vec(), ..Observed::default() };
        // The one that ends still answers its clients.
        assert_eq!(state(&managed(&json!({})), &observed).pod_ips, ["10.64.0.1", "10.64.0.2"]);
    }

    #[test]
    fn why_no_pod_is_ready_is_said() {
        let managed = managed(&json!({ "controlEndpoint": "a:1" }));
        let message = |observed: &Observed| state(&managed, observed).finding.message;
        let waiting = json!({ "reason": "ErrImagePull", "message": "no such image" });
        let mut failing = pod("a", "n1", "False", false);
        let status = json!({ "containerStatuses": [{
            "name": "relay", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": { "waiting": waiting },
        }] });
        failing.status = serde_json::from_value(status).unwrap();
        let observed = Observed { pods: vec![failing], ..Observed::default() };
        assert!(message(&observed).ends_with("ErrImagePull: no such image"), "{}", message(&observed));
        let conditions = json!([{ "type": "ReplicaFailure", "status": "True", "message": "exceeded quota" }]);
        let deployment = json!({ "status": { "conditions": conditions } });
        let deployment = serde_json::from_value(deployment).unwrap();
        let observed = Observed { deployment: Some(deployment), ..Observed::default() };
        assert!(message(&observed).ends_with("exceeded quota"));
    }

    #[test]
    fn a_relay_without_tls_is_refused() {
        let refused = refusal(&managed(&json!({ "transport": "ws" }))).unwrap();
        assert_eq!((refused.holds, refused.reason), (false, "UnsupportedTransport"));
        assert_eq!(refusal(&managed(&json!({ "transport": "wss" }))), None);
    }
}

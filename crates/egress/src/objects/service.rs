//! The Service of an Egress.

use fairlead_api::resources::{Egress, SessionAffinity};
use k8s_openapi::api::core::v1::{ClientIPConfig, Service, ServicePort, ServiceSpec, SessionAffinityConfig};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};

use super::{metadata, name, pod_labels};

/// Seconds for which a client keeps its gateway unless the Egress says otherwise: Kubernetes's default. It is written, so that it is taken
/// back when the affinity is: the API server refuses a time without an affinity.
const AFFINITY_SECONDS: i32 = 10_800;

pub(super) fn service(egress: &Egress, port: u16) -> Service {
    let port = i32::from(port);
    let (affinity, config) = match egress.spec.session_affinity {
        SessionAffinity::ClientIp => ("ClientIP", Some(affinity_config(egress))),
        SessionAffinity::None => ("None", None),
    };
    let spec = ServiceSpec {
        type_: Some("ClusterIP".to_owned()),
        ip_family_policy: Some("PreferDualStack".to_owned()),
        selector: Some(pod_labels(name(egress))),
        ports: Some(vec![ServicePort {
            port,
            target_port: Some(IntOrString::Int(port)),
            protocol: Some("UDP".to_owned()),
            ..ServicePort::default()
        }]),
        session_affinity: Some(affinity.to_owned()),
        session_affinity_config: config,
        ..ServiceSpec::default()
    };
    Service { metadata: metadata(egress), spec: Some(spec), status: None }
}

/// The merge patch that takes ports of other writers back, if the Service that is there has some. Server-side apply leaves them, and
/// refuses two ports without names, so after an edit of the port each apply would fail.
pub fn take_back_ports(live: &Service, wanted: &Service) -> Option<Value> {
    let ports =
        |service: &Service| service.spec.as_ref().and_then(|spec| spec.ports.clone()).unwrap_or_default();
    let wanted = ports(wanted);
    let is_wanted = |port: &ServicePort| {
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        wanted.iter().any(|wanted| (wanted.port, wanted.protocol.as_deref()) == (port.port, Some(protocol)))
    };
    let is_foreign = ports(live).iter().any(|port| !is_wanted(port));
    let version = &live.metadata.resource_version;
    is_foreign.then(|| json!({ "metadata": { "resourceVersion": version }, "spec": { "ports": wanted } }))
}

fn affinity_config(egress: &Egress) -> SessionAffinityConfig {
    let wanted = egress.spec.session_affinity_config.as_ref();
    let seconds = wanted.and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
    let client_ip = ClientIPConfig { timeout_seconds: Some(seconds.unwrap_or(AFFINITY_SECONDS)) };
    SessionAffinityConfig { client_ip: Some(client_ip) }
}

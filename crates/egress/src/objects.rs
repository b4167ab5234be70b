//! The objects of an Egress, as they are applied by server-side apply. Names, labels and defaults are Coil's, so that its objects
//! are taken over.
//!
//! Each Egress has a Deployment, a Service and, if it asks for one, a PodDisruptionBudget, which have its name and are deleted with
//! it. The Egresses of a namespace share a ServiceAccount, and one ClusterRoleBinding is for all of these.

mod carry;
mod deployment;
mod service;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use fairlead_api::names::{
    APP_NAME, COIL_GROUP, EGRESS_COMPONENT, EGRESS_HEALTH_PORT, EGRESS_METRICS_PORT, EGRESS_PROGRAM,
    LABEL_APP_COMPONENT, LABEL_APP_INSTANCE, LABEL_APP_NAME, is_service_name,
};
use fairlead_api::resources::Egress;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use serde_json::Value;

use crate::destinations::{Destinations, InvalidDestination};

pub(crate) use deployment::arguments;
pub use service::take_back_ports;

/// Properties of gateways that their Egress does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// The image of gateways, if it is known.
    pub image: Option<String>,
    /// UDP port of Services and gateways.
    pub port: u16,
    /// Seccomp profile of gateways.
    pub seccomp: SeccompDefault,
}

/// Seccomp profile of gateways whose template names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeccompDefault {
    /// None, so that of the kubelet (`seccompDefault`).
    None,
    /// `RuntimeDefault`. That of containerd 1.6.9 and newer permits `bpf` to containers with `CAP_BPF`; that of CRI-O does not.
    RuntimeDefault,
}

/// The objects of one Egress.
#[derive(Debug, Clone, PartialEq)]
pub struct Objects {
    /// Deployment of the gateways.
    pub deployment: Deployment,
    /// Service by which clients reach the gateways.
    pub service: Service,
    /// Limit on evictions of gateways, if the Egress says one. Otherwise there must be no such object.
    pub disruption_budget: Option<PodDisruptionBudget>,
    /// The Deployment with all fields of the template, also those that this build does not know.
    pub deployment_to_apply: Value,
}

/// Reason why an Egress has no objects.
#[derive(Debug, thiserror::Error)]
pub enum ObjectsError {
    /// It has no image for gateways.
    #[error(
        "the image of gateways is not known: set it in the container egress of spec.template, or start the controller with --egress-image"
    )]
    ImageUnknown,
    /// A destination is no prefix.
    #[error(transparent)]
    InvalidDestination(#[from] InvalidDestination),
    /// A Service cannot have its name (RFC 1035, DNS label).
    #[error(
        "a Service cannot be named {0:?}: the name of an Egress must be a DNS label of at most 63 characters that begins with a letter"
    )]
    InvalidName(String),
    /// The template makes no pod.
    #[error("spec.template.spec: {0}")]
    InvalidTemplate(String),
}

impl ObjectsError {
    /// The reason in conditions and Events, one CamelCase word.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::ImageUnknown => "ImageUnknown",
            Self::InvalidDestination(_) => "InvalidDestination",
            Self::InvalidName(_) => "InvalidName",
            Self::InvalidTemplate(_) => "InvalidTemplate",
        }
    }
}

/// The objects of an Egress.
///
/// # Errors
/// Reason why it cannot have gateways.
pub fn objects(egress: &Egress, defaults: &Defaults) -> Result<Objects, ObjectsError> {
    let name = name(egress);
    if !is_service_name(name) {
        return Err(ObjectsError::InvalidName(name.to_owned()));
    }
    Destinations::parse(&egress.spec.destinations, &egress.spec.excluded_destinations)?;
    let deployment = deployment::deployment(egress, defaults)?;
    let deployment_to_apply = carry::with_unknown_fields(&deployment, egress.spec.template.as_ref());
    Ok(Objects {
        service: service::service(egress, defaults.port),
        disruption_budget: disruption_budget(egress),
        deployment,
        deployment_to_apply,
    })
}

/// The ServiceAccount of all gateways of a namespace.
pub fn service_account(namespace: &str) -> ServiceAccount {
    let metadata = ObjectMeta {
        name: Some(EGRESS_PROGRAM.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(labels(None)),
        ..ObjectMeta::default()
    };
    ServiceAccount { metadata, ..ServiceAccount::default() }
}

/// The binding of the ServiceAccounts of exactly these namespaces to the ClusterRole of gateways.
pub fn role_binding(namespaces: &BTreeSet<String>) -> ClusterRoleBinding {
    let subject = |namespace: &String| Subject {
        kind: "ServiceAccount".to_owned(),
        name: EGRESS_PROGRAM.to_owned(),
        namespace: Some(namespace.clone()),
        ..Subject::default()
    };
    let metadata = ObjectMeta {
        name: Some(EGRESS_PROGRAM.to_owned()),
        labels: Some(labels(None)),
        ..ObjectMeta::default()
    };
    let role_ref = RoleRef {
        api_group: "rbac.authorization.k8s.io".to_owned(),
        kind: "ClusterRole".to_owned(),
        name: EGRESS_PROGRAM.to_owned(),
    };
    // An empty list is written, too: left out, it would leave what another program has written.
    ClusterRoleBinding { metadata, role_ref, subjects: Some(namespaces.iter().map(subject).collect()) }
}

/// The labels by which the pods of an Egress are selected. A Deployment never changes them.
pub fn pod_labels(egress: &str) -> BTreeMap<String, String> {
    labels(Some(egress))
}

/// The label selector of the objects of all Egresses, as the API server takes it.
pub fn selector_of_all() -> String {
    format!("{LABEL_APP_NAME}={APP_NAME},{LABEL_APP_COMPONENT}={EGRESS_COMPONENT}")
}

/// Draining nodes evicts as many gateways as the Egress allows.
fn disruption_budget(egress: &Egress) -> Option<PodDisruptionBudget> {
    let wanted = egress.spec.pod_disruption_budget.as_ref()?;
    let spec = PodDisruptionBudgetSpec {
        min_available: wanted.min_available.clone(),
        max_unavailable: wanted.max_unavailable.clone(),
        selector: Some(label_selector(egress)),
        ..PodDisruptionBudgetSpec::default()
    };
    Some(PodDisruptionBudget { metadata: metadata(egress), spec: Some(spec), status: None })
}

/// Metadata of an object that has the name of the Egress and is deleted with it.
fn metadata(egress: &Egress) -> ObjectMeta {
    let name = name(egress);
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: egress.metadata.namespace.clone(),
        labels: Some(pod_labels(name)),
        owner_references: Some(vec![owner_reference(egress)]),
        ..ObjectMeta::default()
    }
}

/// The port at which a gateway pod serves metrics and says what it has to do.
pub fn metrics_port(pod: &Pod) -> u16 {
    port(pod, "metrics").unwrap_or(EGRESS_METRICS_PORT)
}

/// The port at which a gateway pod says whether it is ready, and why not.
pub fn health_port(pod: &Pod) -> u16 {
    port(pod, "health").unwrap_or(EGRESS_HEALTH_PORT)
}

fn port(pod: &Pod, name: &str) -> Option<u16> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let gateway = containers.filter(|container| container.name == EGRESS_COMPONENT);
    let mut ports = gateway.flat_map(|container| container.ports.iter().flatten());
    let port = ports.find(|port| port.name.as_deref() == Some(name)).map(|port| port.container_port);
    port.and_then(|port| u16::try_from(port).ok())
}

/// Reference to an Egress: objects with it are deleted with the Egress.
pub fn owner_reference(egress: &Egress) -> OwnerReference {
    OwnerReference {
        api_version: format!("{COIL_GROUP}/v2"),
        kind: "Egress".to_owned(),
        name: name(egress).to_owned(),
        uid: egress.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Labels of what the Egresses of a namespace share.
pub fn common_labels() -> BTreeMap<String, String> {
    labels(None)
}

fn label_selector(egress: &Egress) -> LabelSelector {
    LabelSelector { match_labels: Some(pod_labels(name(egress))), match_expressions: None }
}

fn labels(instance: Option<&str>) -> BTreeMap<String, String> {
    let instance = instance.map(|instance| (LABEL_APP_INSTANCE, instance));
    let all =
        [(LABEL_APP_NAME, APP_NAME), (LABEL_APP_COMPONENT, EGRESS_COMPONENT)].into_iter().chain(instance);
    all.map(|(label, value)| (label.to_owned(), value.to_owned())).collect()
}

fn name(egress: &Egress) -> &str {
    egress.metadata.name.as_deref().unwrap_or_default()
}

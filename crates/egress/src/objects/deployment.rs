//! The Deployment of an Egress: the pod of its template, with the gateway in the container `egress`.

use std::collections::BTreeMap;

use fairlead_api::names::{
    EGRESS_COMPONENT, EGRESS_HEALTH_PORT, EGRESS_METRICS_PORT, EGRESS_PROGRAM, EGRESS_REGISTRATION_PORT,
    FOU_PORT,
};
use fairlead_api::resources::{DEFAULT_DRAIN_SECONDS, Egress};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource, HTTPGetAction,
    ObjectFieldSelector, PodSecurityContext, PodSpec, PodTemplateSpec, Probe, ResourceRequirements,
    SeccompProfile, SecurityContext, TopologySpreadConstraint, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Defaults, ObjectsError, SeccompDefault, label_selector, metadata, name, pod_labels};

/// Seconds that a gateway has to end after its flows, unless the template says how many it has in all.
const SECONDS_AFTER_DRAIN: u32 = 10;
/// Linux capabilities of gateways: for links, routes, rules and nftables, and for loading BPF programs.
const CAPABILITIES: [&str; 2] = ["NET_ADMIN", "BPF"];
/// Volume and directory for what the gateway writes.
const RUN_VOLUME: &str = "run";
const RUN_DIRECTORY: &str = "/run";
const CPU_REQUEST: &str = "100m";
const MEMORY_REQUEST: &str = "200Mi";

pub(super) fn deployment(egress: &Egress, defaults: &Defaults) -> Result<Deployment, ObjectsError> {
    let template = egress.spec.template.clone().unwrap_or_default();
    let mut spec = template.pod_spec().map_err(|error| ObjectsError::InvalidTemplate(error.to_string()))?;
    complete_pod(&mut spec, egress, defaults)?;
    let user = template.metadata.unwrap_or_default();
    let mut labels = user.labels;
    labels.extend(pod_labels(name(egress)));
    let annotations = Some(user.annotations).filter(|annotations| !annotations.is_empty());
    let metadata_of_pod = ObjectMeta { labels: Some(labels), annotations, ..ObjectMeta::default() };
    let spec = DeploymentSpec {
        replicas: Some(egress.spec.replicas),
        selector: label_selector(egress),
        strategy: egress.spec.strategy.clone(),
        template: PodTemplateSpec { metadata: Some(metadata_of_pod), spec: Some(spec) },
        ..DeploymentSpec::default()
    };
    Ok(Deployment { metadata: metadata(egress), spec: Some(spec), status: None })
}

fn complete_pod(spec: &mut PodSpec, egress: &Egress, defaults: &Defaults) -> Result<(), ObjectsError> {
    if spec.host_network == Some(true) {
        let why = "hostNetwork must not be true: a gateway would change the routing of its node";
        return Err(ObjectsError::InvalidTemplate(why.to_owned()));
    }
    spec.service_account_name = Some(EGRESS_PROGRAM.to_owned());
    // The older name of the same field, which must not contradict it.
    spec.service_account = None;
    let grace = i64::from(egress.spec.drain_seconds.saturating_add(SECONDS_AFTER_DRAIN));
    spec.termination_grace_period_seconds.get_or_insert(grace);
    spec.topology_spread_constraints.get_or_insert_with(|| vec![spread(egress)]);
    if defaults.seccomp == SeccompDefault::RuntimeDefault {
        confine(spec.security_context.get_or_insert_default());
    }
    let volumes = spec.volumes.get_or_insert_default();
    if volumes.iter().all(|volume| volume.name != RUN_VOLUME) {
        let empty_dir = Some(EmptyDirVolumeSource::default());
        volumes.push(Volume { name: RUN_VOLUME.to_owned(), empty_dir, ..Volume::default() });
    }
    let position = spec.containers.iter().position(|container| container.name == EGRESS_COMPONENT);
    if position.is_none() {
        let container = Container { name: EGRESS_COMPONENT.to_owned(), ..Container::default() };
        spec.containers.insert(0, container);
    }
    match spec.containers.get_mut(position.unwrap_or_default()) {
        Some(container) => complete_container(container, egress, defaults),
        None => Ok(()),
    }
}

/// A profile of the pod, or of one of its containers, goes before.
fn confine(context: &mut PodSecurityContext) {
    let profile = || SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None };
    context.seccomp_profile.get_or_insert_with(profile);
}

/// Gateways on different nodes, where there are some.
fn spread(egress: &Egress) -> TopologySpreadConstraint {
    TopologySpreadConstraint {
        max_skew: 1,
        topology_key: "kubernetes.io/hostname".to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(label_selector(egress)),
        // Gateways that are being replaced do not count.
        match_label_keys: Some(vec!["pod-template-hash".to_owned()]),
        ..TopologySpreadConstraint::default()
    }
}

fn complete_container(
    container: &mut Container,
    egress: &Egress,
    defaults: &Defaults,
) -> Result<(), ObjectsError> {
    if container.image.as_ref().is_none_or(String::is_empty) {
        container.image = Some(defaults.image.clone().ok_or(ObjectsError::ImageUnknown)?);
    }
    if container.command.as_ref().is_none_or(Vec::is_empty) {
        container.command = Some(vec![EGRESS_PROGRAM.to_owned()]);
    }
    if container.args.as_ref().is_none_or(Vec::is_empty) {
        container.args = Some(arguments(egress, defaults.port));
    }
    complete_environment(container.env.get_or_insert_default(), name(egress));
    container.liveness_probe.get_or_insert_with(|| probe("/healthz", 10));
    container.readiness_probe.get_or_insert_with(|| probe("/readyz", 5));
    for (name, port) in [
        ("metrics", EGRESS_METRICS_PORT),
        ("health", EGRESS_HEALTH_PORT),
        ("registration", EGRESS_REGISTRATION_PORT),
    ] {
        add_port(container.ports.get_or_insert_default(), name, port.into());
    }
    let mounts = container.volume_mounts.get_or_insert_default();
    if mounts.iter().all(|mount| mount.mount_path != RUN_DIRECTORY) {
        let (name, mount_path) = (RUN_VOLUME.to_owned(), RUN_DIRECTORY.to_owned());
        mounts.push(VolumeMount { name, mount_path, ..VolumeMount::default() });
    }
    complete_resources(container.resources.get_or_insert_default());
    complete_security_context(container.security_context.get_or_insert_default());
    Ok(())
}

/// Arguments of the program unless the template has some, which are kept as they are. An option that has a default is given only with
/// another value: so a gateway of Coil starts, and an upgrade of the controller alone replaces no gateway.
pub(crate) fn arguments(egress: &Egress, port: u16) -> Vec<String> {
    let port = (port != FOU_PORT).then(|| format!("--fou-port={port}"));
    let auto = egress.spec.fou_source_port_auto.then(|| "--enable-sport-auto=true".to_owned());
    let drain = egress.spec.drain_seconds;
    let drain = (drain != DEFAULT_DRAIN_SECONDS).then(|| format!("--drain-seconds={drain}"));
    [port, auto, drain].into_iter().flatten().collect()
}

/// Adds the variables that the program needs; others of the template stay.
fn complete_environment(variables: &mut Vec<EnvVar>, egress: &str) {
    let field = |name: &str, path: &str| {
        let selector = ObjectFieldSelector { api_version: None, field_path: path.to_owned() };
        let source = EnvVarSource { field_ref: Some(selector), ..EnvVarSource::default() };
        EnvVar { name: name.to_owned(), value_from: Some(source), value: None }
    };
    let ours = [
        field("COIL_POD_NAMESPACE", "metadata.namespace"),
        field("COIL_POD_ADDRESSES", "status.podIPs"),
        EnvVar { name: "COIL_EGRESS_NAME".to_owned(), value: Some(egress.to_owned()), value_from: None },
    ];
    variables.retain(|variable| ours.iter().all(|ours| ours.name != variable.name));
    variables.extend(ours);
}

fn probe(path: &str, period: i32) -> Probe {
    let port = IntOrString::String("health".to_owned());
    let get = HTTPGetAction { path: Some(path.to_owned()), port, ..HTTPGetAction::default() };
    Probe { http_get: Some(get), period_seconds: Some(period), timeout_seconds: Some(5), ..Probe::default() }
}

fn add_port(ports: &mut Vec<ContainerPort>, name: &str, container_port: i32) {
    if ports.iter().all(|port| port.name.as_deref() != Some(name)) {
        ports.push(ContainerPort {
            name: Some(name.to_owned()),
            container_port,
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        });
    }
}

fn complete_resources(resources: &mut ResourceRequirements) {
    let quantity = |name: &str, quantity: &str| (name.to_owned(), Quantity(quantity.to_owned()));
    let defaults = || BTreeMap::from([quantity("cpu", CPU_REQUEST), quantity("memory", MEMORY_REQUEST)]);
    resources.requests.get_or_insert_with(defaults);
}

/// As few privileges as a gateway can do with; more only where the template asks for them. `privileged` is written, so that it is
/// taken back where Coil's controller has written it.
fn complete_security_context(context: &mut SecurityContext) {
    let is_privileged = *context.privileged.get_or_insert(false);
    if !is_privileged {
        context.allow_privilege_escalation.get_or_insert(false);
    }
    context.read_only_root_filesystem.get_or_insert(true);
    let Capabilities { add, drop } = context.capabilities.get_or_insert_default();
    drop.get_or_insert_with(|| vec!["ALL".to_owned()]);
    let add = add.get_or_insert_default();
    let missing = CAPABILITIES.into_iter().filter(|name| !add.iter().any(|added| added == name));
    let missing: Vec<String> = missing.map(str::to_owned).collect();
    add.extend(missing);
}

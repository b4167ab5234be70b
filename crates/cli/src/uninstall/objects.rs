//! Objects that `deploy/` installs beside the custom resources. What has the label `app.kubernetes.io/name: fairlead` is Fairlead's alone;
//! what has the names of Coil is named here, since other programs of Coil have the same label.

use anyhow::Context as _;
use fairlead_api::names::{
    CONTROLLER_PROGRAM, EGRESS_CONTROLLER_PROGRAM, EGRESS_PROGRAM, LEASE_EGRESS, LEASE_IPAM, NODE_PROGRAM,
    RELAY_NAMESPACE, SYSTEM_NAMESPACE,
};
use fairlead_egress::objects::selector_of_all;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PropagationPolicy};
use kube::{Api, Client, ResourceExt};

use super::daemon_set::CLEANUP;

/// Everything of this label but what uninstalls.
const OURS: &str = "app.kubernetes.io/name=fairlead,app.kubernetes.io/component!=uninstall";
/// Name of the ConfigMap with the network configuration, without the hash that kustomize adds.
const NETCONF: &str = "coil-config-";

/// A kind: group, version, kind, plural, and whether its objects are in namespaces.
struct Kind(&'static str, &'static str, &'static str, &'static str, bool);

const ADMISSION: &str = "admissionregistration.k8s.io";
const RBAC: &str = "rbac.authorization.k8s.io";
const MONITORING: &str = "monitoring.coreos.com";
const DEPLOYMENT: Kind = Kind("apps", "v1", "Deployment", "deployments", true);
const DAEMON_SET: Kind = Kind("apps", "v1", "DaemonSet", "daemonsets", true);
const SERVICE_ACCOUNT: Kind = Kind("", "v1", "ServiceAccount", "serviceaccounts", true);
const ROLE: Kind = Kind(RBAC, "v1", "Role", "roles", true);
const ROLE_BINDING: Kind = Kind(RBAC, "v1", "RoleBinding", "rolebindings", true);
const CONFIG_MAP: Kind = Kind("", "v1", "ConfigMap", "configmaps", true);

/// Kinds of which everything with our label is deleted, in the namespaces of [`NAMESPACES`]. Rights come last.
const LABELLED: [Kind; 13] = [
    DAEMON_SET,
    CONFIG_MAP,
    Kind("", "v1", "Secret", "secrets", true),
    Kind(MONITORING, "v1", "PodMonitor", "podmonitors", true),
    Kind(MONITORING, "v1", "PrometheusRule", "prometheusrules", true),
    Kind(ADMISSION, "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", false),
    Kind(ADMISSION, "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", false),
    // The managed relay and what it has.
    Kind("", "v1", "Namespace", "namespaces", false),
    SERVICE_ACCOUNT,
    ROLE_BINDING,
    ROLE,
    Kind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", false),
    Kind(RBAC, "v1", "ClusterRole", "clusterroles", false),
];
const NAMESPACES: [&str; 3] = [SYSTEM_NAMESPACE, "default", RELAY_NAMESPACE];

const MUTATING_WEBHOOKS: Kind =
    Kind(ADMISSION, "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", false);
const VALIDATING_WEBHOOKS: Kind =
    Kind(ADMISSION, "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", false);

/// Objects with names of Coil.
const NAMED: [(Kind, &str); 9] = [
    (MUTATING_WEBHOOKS, "coilv2-mutating-ipam-webhook-configuration"),
    (VALIDATING_WEBHOOKS, "coilv2-validating-ipam-webhook-configuration"),
    (MUTATING_WEBHOOKS, "coilv2-mutating-egress-webhook-configuration"),
    (VALIDATING_WEBHOOKS, "coilv2-validating-egress-webhook-configuration"),
    (Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", true), CONTROLLER_PROGRAM),
    (Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", true), EGRESS_CONTROLLER_PROGRAM),
    (Kind("coordination.k8s.io", "v1", "Lease", "leases", true), LEASE_IPAM),
    (Kind("coordination.k8s.io", "v1", "Lease", "leases", true), LEASE_EGRESS),
    // What the controller of egress gateways has made.
    (Kind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", false), EGRESS_PROGRAM),
];

impl Kind {
    fn resource(&self) -> ApiResource {
        let Self(group, version, kind, plural, _) = self;
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
    }

    fn api(&self, client: &Client, namespace: &str) -> Api<DynamicObject> {
        match self.4 {
            true => Api::namespaced_with(client.clone(), namespace, &self.resource()),
            false => Api::all_with(client.clone(), &self.resource()),
        }
    }
}

/// The controllers, then the node program.
pub(super) async fn delete_programs(client: &Client) -> anyhow::Result<()> {
    delete(client, &DEPLOYMENT, SYSTEM_NAMESPACE, EGRESS_CONTROLLER_PROGRAM).await?;
    delete(client, &DEPLOYMENT, SYSTEM_NAMESPACE, CONTROLLER_PROGRAM).await?;
    delete(client, &DAEMON_SET, SYSTEM_NAMESPACE, NODE_PROGRAM).await
}

/// Everything else.
pub(super) async fn delete_rest(client: &Client) -> anyhow::Result<()> {
    delete(client, &DAEMON_SET, SYSTEM_NAMESPACE, CLEANUP).await?;
    for (kind, name) in &NAMED {
        delete(client, kind, SYSTEM_NAMESPACE, name).await?;
    }
    for object in listed(client, &CONFIG_MAP, SYSTEM_NAMESPACE, "app.kubernetes.io/name=coil").await? {
        if object.starts_with(NETCONF) {
            delete(client, &CONFIG_MAP, SYSTEM_NAMESPACE, &object).await?;
        }
    }
    delete_rights_of_gateways(client).await?;
    for kind in &LABELLED {
        let namespaces = if kind.4 { &NAMESPACES[..] } else { &[SYSTEM_NAMESPACE] };
        for namespace in namespaces {
            for object in listed(client, kind, namespace, OURS).await? {
                delete(client, kind, namespace, &object).await?;
            }
        }
    }
    Ok(())
}

/// Deletes what gateways of a namespace share, so that no Egress owns it: ServiceAccounts, and the right to the Leases of source addresses.
async fn delete_rights_of_gateways(client: &Client) -> anyhow::Result<()> {
    for kind in [ROLE_BINDING, ROLE, SERVICE_ACCOUNT] {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind.resource());
        let found = api.list_metadata(&ListParams::default().labels(&selector_of_all())).await;
        for object in found.with_context(|| format!("cannot list {}", kind.3))?.items {
            let namespace = object.namespace().unwrap_or_default();
            delete(client, &kind, &namespace, &object.name_any()).await?;
        }
    }
    Ok(())
}

/// Names of objects; none where the API server does not have the kind.
async fn listed(client: &Client, kind: &Kind, namespace: &str, labels: &str) -> anyhow::Result<Vec<String>> {
    match kind.api(client, namespace).list_metadata(&ListParams::default().labels(labels)).await {
        Ok(found) => Ok(found.items.iter().map(ResourceExt::name_any).collect()),
        // Without the definition of a kind the answer is no Status.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot list {}", kind.3)),
    }
}

/// Deletes an object and what it owns; one that is not there is deleted.
async fn delete(client: &Client, kind: &Kind, namespace: &str, name: &str) -> anyhow::Result<()> {
    let parameters =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Background), ..DeleteParams::default() };
    match kind.api(client, namespace).delete(name, &parameters).await {
        Ok(_) => tracing::info!(kind = kind.2, name, "deleted"),
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => return Err(error).with_context(|| format!("cannot delete {} {name}", kind.2)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    fn manifests(directory: &Path) -> Vec<Value> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                // Custom resources are deleted with their definitions; what uninstalls deletes itself.
                if !["crds", "examples", "uninstall"].contains(&name.as_str()) {
                    found.extend(manifests(&path));
                }
            } else if name.ends_with(".yaml") && name != "kustomization.yaml" {
                let text = std::fs::read_to_string(&path).unwrap();
                let documents =
                    text.split("\n---\n").map(|document| serde_saphyr::from_str(document).unwrap());
                found.extend(documents);
            }
        }
        found
    }

    #[test]
    fn every_object_of_deploy_is_deleted() {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        let objects = manifests(&deploy);
        assert!(objects.len() > 20, "{}", objects.len());
        let by_name = [
            (DEPLOYMENT, CONTROLLER_PROGRAM),
            (DEPLOYMENT, EGRESS_CONTROLLER_PROGRAM),
            (DAEMON_SET, NODE_PROGRAM),
        ];
        for object in objects {
            let metadata = &object["metadata"];
            let (kind, name) = (object["kind"].as_str().unwrap(), metadata["name"].as_str().unwrap());
            let labelled = metadata["labels"]["app.kubernetes.io/name"] == "fairlead"
                && LABELLED.iter().any(|known| known.2 == kind)
                && metadata["namespace"].as_str().is_none_or(|namespace| NAMESPACES.contains(&namespace));
            let named = NAMED
                .iter()
                .chain(&by_name)
                .any(|(known, known_name)| known.2 == kind && *known_name == name);
            assert!(labelled || named, "{kind} {name} would be left");
        }
    }
}

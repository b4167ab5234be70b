//! `spec.discovery` of a WireKubeMesh.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::relay::{CA_BUNDLE_LENGTH, SecretRef};
use super::rules::{CIDR_LENGTH, cidrs, explained};
use crate::names::{DISCOVERY_SECRET, SYSTEM_NAMESPACE};

/// Discovery services, through which nodes find each other without the Kubernetes API, too.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Discovery {
    /// URLs of the services, as https://discovery.example.com:3000. A node publishes itself at each, and reads all.
    #[schemars(length(min = 1, max = 8), inner(length(max = 270)))]
    #[x_kube(validation = explained(
        "self.all(server, isURL(server) && url(server).getScheme() == 'https' && url(server).getEscapedPath() in ['', '/'])",
        "\"'\" + self.filter(server, !(isURL(server) && url(server).getScheme() == 'https' && url(server).getEscapedPath() in ['', '/']))[0] + \"' is not https://host or https://host:port\"",
    ))]
    pub endpoints: Vec<String>,
    /// PEM certificates of the authorities that certify them, as base64, beside those that the nodes trust.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CA_BUNDLE_LENGTH))]
    pub ca_bundle: Option<String>,
    /// Prefixes in CIDR notation of which a member may have parts that only discovery services know: the secret of the cluster
    /// proves no identity. Its own addresses need none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub allowed_prefixes: Vec<String>,
    /// Secret whose keys `clusterID` and `clusterSecret` (32 bytes in base64) the nodes share. Defaults to
    /// kube-system/fairlead-discovery, which the controller makes if it is missing, and nodes may read; another one needs a Role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
}

impl Discovery {
    /// Namespace and name of the Secret, with the default filled in.
    pub fn secret(&self) -> (&str, &str) {
        let secret = self.secret_ref.as_ref();
        let namespace = secret.and_then(|secret| secret.namespace.as_deref());
        let name = secret.map_or(DISCOVERY_SECRET, |secret| secret.name.as_str());
        (namespace.unwrap_or(SYSTEM_NAMESPACE), name)
    }
}

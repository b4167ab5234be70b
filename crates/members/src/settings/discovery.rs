//! Settings of discovery services, as the mesh resource has them.

use fairlead_api::resources::{Discovery, WireKubeMesh};
use fairlead_discovery::client::{ServerEndpoint, authorities};
use ipnet::IpNet;

use super::base64_bytes;
use crate::SourceProblem;

/// The discovery services of the mesh, and what is believed of what they say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoverySettings {
    /// Endpoints of the services, each once.
    pub servers: Vec<ServerEndpoint>,
    /// PEM certificates of the authorities that certify them, beside those of this host.
    pub ca_bundle: Option<Vec<u8>>,
    /// Prefixes of which a member that only discovery services know may have parts.
    pub allowed: Vec<IpNet>,
    /// Namespace and name of the Secret with the identifier and the secret of the cluster.
    pub secret: (String, String),
}

/// Discovery services of the mesh, as far as this node knows the mesh.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ConfiguredDiscovery {
    /// No discovery services: there is no mesh, or its resource names none.
    Disabled,
    /// Discovery services that the mesh resource names.
    Enabled(DiscoverySettings),
    /// State before the mesh resource is read.
    #[default]
    Unknown,
}

/// Settings; `None` without discovery services. What does not parse is left out and added to `problems`.
pub(super) fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Option<DiscoverySettings> {
    let discovery = mesh.spec.discovery.as_ref()?;
    let mut report = |field, error| {
        problems.push(SourceProblem::InvalidDiscovery {
            mesh: mesh.metadata.name.clone().unwrap_or_default(),
            field,
            error,
        });
    };
    let mut servers: Vec<ServerEndpoint> = Vec::new();
    for entry in &discovery.endpoints {
        match entry.parse::<ServerEndpoint>() {
            Ok(server) if !server.tls => report("endpoints", format!("{entry:?} is not https")),
            Ok(server) if servers.contains(&server) => {}
            Ok(server) => servers.push(server),
            Err(error) => report("endpoints", error.to_string()),
        }
    }
    let mut allowed = Vec::new();
    for entry in &discovery.allowed_prefixes {
        match entry.parse::<IpNet>() {
            Ok(prefix) => allowed.push(prefix.trunc()),
            Err(_) => report("allowedPrefixes", format!("{entry:?} is no CIDR")),
        }
    }
    let ca_bundle = match discovery.ca_bundle.as_deref().map(certificates).transpose() {
        Ok(bundle) => bundle,
        Err(error) => {
            report("caBundle", error);
            return None;
        }
    };
    Some(DiscoverySettings { servers, ca_bundle, allowed, secret: secret(discovery) })
}

fn secret(discovery: &Discovery) -> (String, String) {
    let (namespace, name) = discovery.secret();
    (namespace.to_owned(), name.to_owned())
}

/// PEM certificates in base64.
fn certificates(bundle: &str) -> Result<Vec<u8>, String> {
    let pem = base64_bytes(bundle)?;
    authorities(Some(&pem)).map(|_| pem).map_err(|error| format!("is unusable: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parsed(discovery: &Value) -> (Option<DiscoverySettings>, Vec<String>) {
        let spec = serde_json::from_value(json!({ "discovery": discovery })).unwrap();
        let mut problems = Vec::new();
        let settings = parse(&WireKubeMesh::new("default", spec), &mut problems);
        (settings, problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn services_are_read_and_what_does_not_parse_is_named() {
        let (settings, problems) = parsed(&json!({
            "endpoints": ["https://a.example:3000", "https://a.example:3000/", "http://b", "c"],
            "allowedPrefixes": ["10.1.2.3/16", "x"],
        }));
        let settings = settings.unwrap();
        assert_eq!(settings.servers, ["https://a.example:3000".parse().unwrap()]);
        assert_eq!(settings.allowed, ["10.1.0.0/16".parse().unwrap()]);
        assert_eq!(settings.secret, ("kube-system".to_owned(), "fairlead-discovery".to_owned()));
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems[0].contains("\"http://b\" is not https"), "{problems:?}");
        assert!(problems[2].contains("discovery.allowedPrefixes \"x\" is no CIDR"), "{problems:?}");
        let (none, problems) = parsed(&json!({ "endpoints": ["https://a"], "caBundle": "bm9uZQ==" }));
        assert_eq!((none, problems.len()), (None, 1));
        let named = json!({ "name": "other", "namespace": "here" });
        let (named, _) = parsed(&json!({ "endpoints": ["https://a"], "secretRef": named }));
        assert_eq!(named.unwrap().secret, ("here".to_owned(), "other".to_owned()));
    }
}

//! A node without Kubernetes: what it would read of an API server comes from its command line, its files and its own network.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_api::names::{DISCOVERY_CLUSTER_ID, DISCOVERY_CLUSTER_SECRET};
use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::local_api::LocalObjects;
use serde_json::{Value, json};

/// Addresses that no host has (RFC 5737, RFC 3849): the route to them says which own address is used for others. Nothing is sent.
const ELSEWHERE: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// Settings of a node without Kubernetes.
#[derive(Debug, Clone)]
pub struct Standalone {
    /// The settings of the mesh.
    pub mesh: WireKubeMesh,
    /// Files with the identifier and the secret that members share for discovery services.
    pub credentials: Option<(PathBuf, PathBuf)>,
    /// Addresses of the node; empty means the ones by which it reaches other hosts.
    pub addresses: Vec<IpAddr>,
}

/// The objects of such a node.
pub(crate) struct Objects {
    /// Name of the node.
    pub(crate) node: String,
    pub(crate) settings: Standalone,
}

impl LocalObjects for Objects {
    fn list(&self, path: &str) -> Vec<Value> {
        match path {
            "/api/v1/nodes" => vec![self.node()],
            "/apis/wirekube.io/v1alpha1/wirekubemeshes" => {
                serde_json::to_value(&self.settings.mesh).into_iter().collect()
            }
            _ => Vec::new(),
        }
    }

    /// The Secret of discovery services, read anew each time.
    fn get(&self, path: &str) -> Option<Value> {
        let (namespace, name) = self.settings.mesh.spec.discovery.as_ref()?.secret();
        if path != format!("/api/v1/namespaces/{namespace}/secrets/{name}") {
            return None;
        }
        let (id, secret) = self.settings.credentials.as_ref()?;
        let read = |path: &PathBuf| {
            let content = fs::read(path).inspect_err(|error| {
                tracing::warn!(path = %path.display(), %error, "cannot read what members share for discovery services");
            });
            Some(STANDARD.encode(content.ok()?))
        };
        let data = json!({ DISCOVERY_CLUSTER_ID: read(id)?, DISCOVERY_CLUSTER_SECRET: read(secret)? });
        Some(json!({ "metadata": { "name": name, "namespace": namespace }, "data": data }))
    }
}

impl Objects {
    fn node(&self) -> Value {
        let addresses = match self.settings.addresses.as_slice() {
            [] => ELSEWHERE.into_iter().filter_map(used_towards).collect(),
            given => given.to_vec(),
        };
        let addresses = addresses.iter().map(|address| json!({ "type": "InternalIP", "address": address }));
        json!({
            "metadata": { "name": self.node },
            "status": { "addresses": addresses.collect::<Vec<_>>() },
        })
    }
}

/// The address of this host that packets to another one come from; `None` without a route.
fn used_towards(other: IpAddr) -> Option<IpAddr> {
    let unspecified: IpAddr = match other {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((unspecified, 0)).ok()?;
    socket.connect((other, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_cluster_has_comes_from_files_and_the_command_line() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| {
            let path = directory.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let spec = json!({ "listenPort": 51821, "discovery": { "endpoints": ["https://a"] } });
        let settings = Standalone {
            mesh: WireKubeMesh::new("standalone", serde_json::from_value(spec).unwrap()),
            credentials: Some((file("id", "cluster"), file("secret", "s"))),
            addresses: vec!["192.0.2.7".parse().unwrap()],
        };
        let objects = Objects { node: "n1".to_owned(), settings };
        let node = &objects.list("/api/v1/nodes")[0];
        assert_eq!(
            (&node["metadata"]["name"], &node["status"]["addresses"][0]["address"]),
            (&json!("n1"), &json!("192.0.2.7"))
        );
        let mesh = &objects.list("/apis/wirekube.io/v1alpha1/wirekubemeshes")[0];
        assert_eq!(mesh["spec"]["listenPort"], 51821);
        assert!(objects.list("/apis/wirekube.io/v1alpha1/wirekubepeers").is_empty());
        let path = "/api/v1/namespaces/kube-system/secrets/fairlead-discovery";
        assert_eq!(objects.get(path).unwrap()["data"]["clusterID"], STANDARD.encode("cluster"));
        assert_eq!(objects.get("/api/v1/namespaces/kube-system/secrets/other"), None);
        fs::remove_file(directory.path().join("secret")).unwrap();
        assert_eq!(objects.get(path), None, "not without the secret");
    }
}

//! What is read of Egresses, their Services and the ranges of the cluster: by the watches of the node program, and by the command line.
//! Pure.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use fairlead_api::resources::{AddressPool, Egress};
use fairlead_cluster::nodes::SlimNode;
use fairlead_egress::EgressName;
use fairlead_egress::client::SourcePort;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use kube::Resource;
use kube::api::ObjectMeta;
use serde::{Deserialize, Serialize};

use super::plan::{Cluster, KnownEgress, KnownService};

/// The Service of an Egress; other fields are not even parsed.
#[derive(Resource, Serialize, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Service)]
pub struct SlimService {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: ServiceFields,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
struct ServiceFields {
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    ports: Vec<Port>,
    session_affinity: String,
    session_affinity_config: Option<AffinityConfig>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct Port {
    port: u16,
    protocol: String,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default)]
struct AffinityConfig {
    #[serde(rename = "clientIP")]
    client_ip: Option<ClientIp>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
struct ClientIp {
    timeout_seconds: Option<u64>,
}

impl SlimService {
    fn known(&self) -> KnownService {
        let spec = &self.spec;
        let udp = spec.ports.iter().find(|port| port.protocol == "UDP");
        let by_client = spec.session_affinity == "ClientIP";
        let timeout =
            spec.session_affinity_config.as_ref().and_then(|it| it.client_ip.as_ref()?.timeout_seconds);
        KnownService {
            // "None" of a headless Service is no address.
            cluster_ips: spec.cluster_ips.iter().filter_map(|text| text.parse::<IpAddr>().ok()).collect(),
            port: udp.map_or(fairlead_api::names::FOU_PORT, |port| port.port),
            by_client,
            idle_timeout: timeout.map(Duration::from_secs),
        }
    }
}

/// Addresses of a Node, and the networks of its pods.
pub(super) fn ranges_of(node: &SlimNode) -> impl Iterator<Item = IpNet> + '_ {
    let pods = node.pod_cidrs().iter().filter_map(|text| text.parse::<IpNet>().ok());
    node.addresses().map(IpNet::from).chain(pods)
}

/// The ranges of the cluster as the controller has written them into the status of an Egress; `None` before it has.
pub(super) fn written_ranges(egress: &Egress) -> Option<impl Iterator<Item = IpNet> + '_> {
    let written = egress.status.as_ref()?.cluster_ranges.as_ref()?;
    Some(written.iter().filter_map(|text| text.parse::<IpNet>().ok()))
}

fn known_egress(egress: &Egress) -> KnownEgress {
    let spec = &egress.spec;
    KnownEgress {
        destinations: fairlead_egress::destinations::prefixes(&spec.destinations)
            .map_err(|error| error.to_string()),
        source_port: if spec.fou_source_port_auto { SourcePort::Auto } else { SourcePort::Fixed },
        originating_only: spec.originating_only,
        cluster_ranges: written_ranges(egress).map(Iterator::collect),
        allowed_namespaces: spec.allowed_namespaces.as_ref().map(|all| all.iter().cloned().collect()),
        service: None,
    }
}

impl Cluster {
    /// What client pods are planned by. A Service without an Egress of its name does not count.
    pub(super) fn of(
        egresses: impl IntoIterator<Item = impl Borrow<Egress>>,
        services: impl IntoIterator<Item = impl Borrow<SlimService>>,
    ) -> Self {
        let known = |egress: &Egress| (name_of(&egress.metadata), known_egress(egress));
        let mut egresses: BTreeMap<EgressName, KnownEgress> =
            egresses.into_iter().map(|egress| known(egress.borrow())).collect();
        for service in services {
            let service: &SlimService = service.borrow();
            if let Some(egress) = egresses.get_mut(&name_of(&service.metadata)) {
                egress.service = Some(service.known());
            }
        }
        Self { egresses, originating_only: false }
    }
}

/// The subnets of a pool. Blocks lie in pools: a pool is not deleted before its blocks.
pub(super) fn subnets(pool: &AddressPool) -> Vec<IpNet> {
    pool.spec.parse_subnets().unwrap_or_default().iter().flat_map(|nets| nets.iter()).collect()
}

/// Namespace and name of an Egress or its Service.
pub(super) fn name_of(metadata: &ObjectMeta) -> EgressName {
    EgressName {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_a_service_only_what_a_client_needs_is_read() {
        let service: SlimService = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": "nat", "namespace": "internet" },
            "spec": {
                "clusterIPs": ["10.68.0.1", "fd04::1"], "sessionAffinity": "ClientIP", "type": "ClusterIP",
                "ports": [{ "port": 80, "protocol": "TCP" }, { "port": 5556, "protocol": "UDP", "targetPort": 1 }],
                "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 300 } },
            },
            "status": { "loadBalancer": {} },
        }))
        .unwrap();
        let expected = KnownService {
            cluster_ips: ["10.68.0.1", "fd04::1"].map(|text| text.parse().unwrap()).into_iter().collect(),
            port: 5556,
            by_client: true,
            idle_timeout: Some(Duration::from_secs(300)),
        };
        assert_eq!(service.known(), expected);
        let headless = json!({ "metadata": { "name": "nat" }, "spec": { "clusterIPs": ["None"] } });
        let headless: SlimService = serde_json::from_value(headless).unwrap();
        let known = headless.known();
        assert_eq!((known.cluster_ips.is_empty(), known.port, known.by_client), (true, 5555, false));
    }

    #[test]
    fn a_node_has_addresses_and_networks_of_pods() {
        let node: SlimNode = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n" },
            "spec": { "podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "?"] },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n" },
            ] },
        }))
        .unwrap();
        let ranges: Vec<String> = ranges_of(&node).map(|range| range.to_string()).collect();
        assert_eq!(ranges, ["192.0.2.1/32", "10.244.1.0/24"]);
    }
}

//! Fields of Egresses, of their Services and of the ranges of the cluster that are read: by the watches of the node program, and by the
//! command line. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::is_reachable;
use fairlead_api::resources::{AddressPool, Egress, EgressSelector, EgressSourceAddress};
use fairlead_cluster::cached_by_name;
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::nodes::SlimNode;
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_egress::client::SourcePort;
use fairlead_egress::client::plan::{KnownEgress, KnownService};
use fairlead_egress::destinations::Destinations;
use fairlead_egress::selectors::PodSelectors;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use kube::api::ObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use serde::{Deserialize, Serialize};

/// Most source addresses of an Egress that count.
const MAX_SOURCE_ADDRESSES: usize = 256;

/// The source addresses that an Egress may have (`status.sourceAddresses`), each with the gateway pod that the controller names as its
/// holder.
pub(crate) type SourceAddressesOf = BTreeMap<IpAddr, Option<String>>;

/// An Egress as far as a node needs it; other fields, such as `spec.template`, are not even parsed.
#[derive(Resource, Serialize, Deserialize, Clone, Debug, Default)]
#[resource(inherit = Egress)]
struct SlimEgress {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: EgressFields,
    #[serde(default)]
    status: Option<EgressStatusFields>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
struct EgressFields {
    destinations: Vec<String>,
    excluded_destinations: Vec<String>,
    fou_source_port_auto: bool,
    allowed_namespaces: Option<Vec<String>>,
    selectors: Option<Vec<EgressSelector>>,
    originating_only: Option<bool>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
struct EgressStatusFields {
    source_addresses: Vec<EgressSourceAddress>,
    cluster_ranges: Option<Vec<String>>,
}

impl From<&Egress> for SlimEgress {
    fn from(egress: &Egress) -> Self {
        let spec = &egress.spec;
        let status = egress.status.as_ref().map(|status| EgressStatusFields {
            source_addresses: status.source_addresses.clone(),
            cluster_ranges: status.cluster_ranges.clone(),
        });
        Self {
            metadata: ObjectMeta {
                namespace: egress.metadata.namespace.clone(),
                name: egress.metadata.name.clone(),
                ..ObjectMeta::default()
            },
            spec: EgressFields {
                destinations: spec.destinations.clone(),
                excluded_destinations: spec.excluded_destinations.clone(),
                fou_source_port_auto: spec.fou_source_port_auto,
                allowed_namespaces: spec.allowed_namespaces.clone(),
                selectors: spec.selectors.clone(),
                originating_only: spec.originating_only,
            },
            status,
        }
    }
}

/// An Egress, as the cache of the node program keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CachedEgress {
    /// Namespace and name.
    key: String,
    /// Namespace and name, parsed.
    pub(crate) name: EgressName,
    /// Specification and cluster ranges, without the Service.
    pub(crate) known: KnownEgress,
    /// Pods that use it without an annotation of theirs.
    pub(crate) selectors: PodSelectors,
    /// Source addresses that its gateways may use.
    pub(crate) source_addresses: SourceAddressesOf,
}

cached_by_name!(CachedEgress, Egress, |egress| &egress.key);

impl From<&Egress> for CachedEgress {
    fn from(egress: &Egress) -> Self {
        Self::from(SlimEgress::from(egress))
    }
}

impl From<SlimEgress> for CachedEgress {
    fn from(egress: SlimEgress) -> Self {
        let name = name_of(&egress.metadata);
        let SlimEgress { spec, status, .. } = egress;
        let EgressStatusFields { source_addresses, cluster_ranges } = status.unwrap_or_default();
        let allowed = spec.allowed_namespaces.as_deref();
        let (selectors, _) = PodSelectors::new(spec.selectors.as_deref().unwrap_or_default(), allowed);
        Self {
            key: name.to_string(),
            selectors,
            known: KnownEgress {
                destinations: Destinations::parse(&spec.destinations, &spec.excluded_destinations)
                    .map_err(|error| error.to_string()),
                source_port: if spec.fou_source_port_auto { SourcePort::Auto } else { SourcePort::Fixed },
                originating_only: spec.originating_only,
                cluster_ranges: cluster_ranges.map(|ranges| written_ranges(&ranges)),
                allowed_namespaces: spec.allowed_namespaces.map(|all| all.into_iter().collect()),
                service: None,
            },
            source_addresses: sources_of(&source_addresses),
            name,
        }
    }
}

/// Starts the watch of Egresses, the only one of a node program.
pub(crate) fn watch_egresses(client: &Client, subsystem: &mut Subsystem) -> Cache<CachedEgress> {
    let events = watcher(Api::<SlimEgress>::all(client.clone()), caches::config());
    caches::start(subsystem, "Egresses", caches::parsed(events, CachedEgress::from))
}

/// Usable source addresses of these slots, at most [`MAX_SOURCE_ADDRESSES`]. Other text is left out: the controller writes none.
fn sources_of(slots: &[EgressSourceAddress]) -> SourceAddressesOf {
    let of_slot = |slot: &EgressSourceAddress| -> Vec<(IpAddr, Option<String>)> {
        let addresses = slot.addresses.iter().filter_map(|text| text.parse().ok());
        let usable = addresses.filter(|address| is_reachable(*address));
        usable.map(|address| (address, slot.gateway.clone())).collect()
    };
    slots.iter().flat_map(of_slot).take(MAX_SOURCE_ADDRESSES).collect()
}

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
    /// Name of its Egress, with what a client needs of it.
    pub(crate) fn named(&self) -> (EgressName, KnownService) {
        (name_of(&self.metadata), self.known())
    }

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
pub(crate) fn ranges_of(node: &SlimNode) -> impl Iterator<Item = IpNet> + '_ {
    let pods = node.pod_cidrs().iter().filter_map(|text| text.parse::<IpNet>().ok());
    node.addresses().map(IpNet::from).chain(pods)
}

/// The ranges of the cluster as the controller has written them into the status of an Egress.
fn written_ranges(written: &[String]) -> Vec<IpNet> {
    written.iter().filter_map(|text| text.parse::<IpNet>().ok()).collect()
}

/// The subnets of a pool. Blocks lie in pools: a pool is not deleted before its blocks.
pub(crate) fn subnets(pool: &AddressPool) -> Vec<IpNet> {
    pool.spec.parse_subnets().unwrap_or_default().iter().flat_map(|nets| nets.iter()).collect()
}

/// Namespace and name of an Egress or its Service.
fn name_of(metadata: &ObjectMeta) -> EgressName {
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
    fn of_an_egress_only_what_a_node_needs_is_read() {
        let whole = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": { "name": "nat", "namespace": "internet" },
            "spec": {
                "destinations": ["0.0.0.0/0"], "excludedDestinations": ["9.9.9.9/24"], "fouSourcePortAuto": true, "originatingOnly": true, "allowedNamespaces": ["shop"],
                "selectors": [{ "podSelector": { "matchLabels": { "app": "web" } } }], "replicas": 2,
            },
            "status": {
                "clusterRanges": ["100.64.0.0/10", "?"], "replicas": 2,
                "sourceAddresses": [{ "addresses": ["192.0.2.40", "127.0.0.1", "?"], "gateway": "nat-a" }],
            },
        });
        let cached = |object: serde_json::Value| {
            CachedEgress::from(serde_json::from_value::<SlimEgress>(object).unwrap())
        };
        let read = cached(whole.clone());
        assert_eq!(read, CachedEgress::from(&serde_json::from_value::<Egress>(whole.clone()).unwrap()));
        assert_eq!((read.key.as_str(), read.known.source_port), ("internet/nat", SourcePort::Auto));
        assert_eq!(
            read.known.destinations.as_ref().unwrap().excluded,
            ["9.9.9.0/24".parse().unwrap()].into()
        );
        assert_eq!(read.known.cluster_ranges, Some(vec!["100.64.0.0/10".parse().unwrap()]));
        assert_eq!(read.source_addresses, [("192.0.2.40".parse().unwrap(), Some("nat-a".to_owned()))].into());
        assert!(!read.selectors.is_empty() && read.known.allowed_namespaces.is_some());
        let mut other = whole;
        other["spec"]["template"] = json!("of a newer version");
        assert_eq!(cached(other), read, "a field that is not read does not matter");
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

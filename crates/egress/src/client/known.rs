//! Egresses and their Services as their client pods use them, by the fields of the objects.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::is_reachable;
use fairlead_api::names::FOU_PORT;
use fairlead_api::resources::{Egress, EgressSelector, EgressSourceAddress};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::{Deserialize, Serialize};

use super::SourcePort;
use super::plan::{KnownEgress, KnownService};
use crate::EgressName;
use crate::destinations::Destinations;
use crate::selectors::PodSelectors;
use crate::status::READY;

/// Most source addresses of an Egress that count.
const MAX_SOURCE_ADDRESSES: usize = 256;

/// Source addresses that an Egress may have (`status.sourceAddresses`), each with the gateway pod that the controller names as its
/// holder.
pub type SourceAddressesOf = BTreeMap<IpAddr, Option<String>>;

/// Fields of the specification of an Egress that its clients need.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
pub struct EgressFields {
    destinations: Vec<String>,
    excluded_destinations: Vec<String>,
    fou_source_port_auto: bool,
    allowed_namespaces: Option<Vec<String>>,
    selectors: Option<Vec<EgressSelector>>,
    originating_only: Option<bool>,
}

/// Fields of the status of an Egress that its clients need.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
pub struct EgressStatusFields {
    source_addresses: Vec<EgressSourceAddress>,
    cluster_ranges: Option<Vec<String>>,
    conditions: Vec<EgressCondition>,
}

/// Fields of a condition of an Egress that its clients need.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(default, rename_all = "camelCase")]
struct EgressCondition {
    #[serde(rename = "type")]
    type_: String,
    observed_generation: Option<i64>,
}

impl EgressCondition {
    fn of(condition: &Condition) -> Self {
        Self { type_: condition.type_.clone(), observed_generation: condition.observed_generation }
    }
}

impl EgressStatusFields {
    /// Whether it was written for an earlier generation of the Egress.
    fn is_before(&self, generation: Option<i64>) -> bool {
        let ready = self.conditions.iter().find(|condition| condition.type_ == READY);
        ready.and_then(|ready| ready.observed_generation) < generation
    }
}

/// An Egress, as its clients use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressInfo {
    /// Namespace and name of the Egress.
    pub name: EgressName,
    /// Specification and cluster ranges, without the Service.
    pub known: KnownEgress,
    /// Pods that use it without an annotation of theirs.
    pub selectors: PodSelectors,
    /// Source addresses that its gateways may use.
    pub source_addresses: SourceAddressesOf,
}

impl EgressInfo {
    /// Egress by its whole object.
    pub fn of(egress: &Egress) -> Self {
        let spec = &egress.spec;
        let status = egress.status.as_ref().map(|status| EgressStatusFields {
            source_addresses: status.source_addresses.clone(),
            cluster_ranges: status.cluster_ranges.clone(),
            conditions: status.conditions.iter().map(EgressCondition::of).collect(),
        });
        let fields = EgressFields {
            destinations: spec.destinations.clone(),
            excluded_destinations: spec.excluded_destinations.clone(),
            fou_source_port_auto: spec.fou_source_port_auto,
            allowed_namespaces: spec.allowed_namespaces.clone(),
            selectors: spec.selectors.clone(),
            originating_only: spec.originating_only,
        };
        Self::new(&egress.metadata, fields, status.unwrap_or_default())
    }

    /// Egress by the fields that count.
    pub fn new(metadata: &ObjectMeta, spec: EgressFields, status: EgressStatusFields) -> Self {
        let allowed = spec.allowed_namespaces.as_deref();
        let (selectors, _) = PodSelectors::new(spec.selectors.as_deref().unwrap_or_default(), allowed);
        Self {
            name: EgressName::of(metadata),
            selectors,
            known: KnownEgress {
                destinations: Destinations::parse(&spec.destinations, &spec.excluded_destinations)
                    .map_err(|error| error.to_string()),
                source_port: if spec.fou_source_port_auto { SourcePort::Auto } else { SourcePort::Fixed },
                originating_only: spec.originating_only,
                ranges_are_stale: status.is_before(metadata.generation),
                cluster_ranges: status.cluster_ranges.map(|ranges| written_ranges(&ranges)),
                allowed_namespaces: spec.allowed_namespaces.map(|all| all.into_iter().collect()),
                service: None,
            },
            source_addresses: sources_of(&status.source_addresses),
        }
    }
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

/// The ranges of the cluster as the controller has written them into the status of an Egress.
fn written_ranges(written: &[String]) -> Vec<IpNet> {
    written.iter().filter_map(|text| text.parse::<IpNet>().ok()).collect()
}

impl KnownService {
    /// Name of the Egress of a Service, and the Service as clients use it.
    pub fn named(service: &Service) -> (EgressName, Self) {
        (EgressName::of(&service.metadata), Self::of(service))
    }

    fn of(service: &Service) -> Self {
        let spec = service.spec.as_ref();
        let mut ports = spec.into_iter().flat_map(|spec| spec.ports.iter().flatten());
        let udp = ports.find(|port| port.protocol.as_deref() == Some("UDP"));
        let affinity = spec.and_then(|spec| spec.session_affinity_config.as_ref());
        let timeout = affinity.and_then(|it| it.client_ip.as_ref()?.timeout_seconds);
        let cluster_ips = spec.into_iter().flat_map(|spec| spec.cluster_ips.iter().flatten());
        Self {
            // "None" of a headless Service is no address.
            cluster_ips: cluster_ips.filter_map(|text| text.parse::<IpAddr>().ok()).collect(),
            port: udp.and_then(|port| u16::try_from(port.port).ok()).unwrap_or(FOU_PORT),
            by_client: spec.and_then(|spec| spec.session_affinity.as_deref()) == Some("ClientIP"),
            idle_timeout: timeout.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ranges_are_stale_until_the_controller_has_seen_the_specification() {
        let is_stale = |generation: i64, status: serde_json::Value| {
            let egress = json!({
                "metadata": { "name": "nat", "namespace": "internet", "generation": generation },
                "spec": { "destinations": ["10.0.0.0/8"] }, "status": status,
            });
            EgressInfo::of(&serde_json::from_value(egress).unwrap()).known.ranges_are_stale
        };
        let ready = |generation: i64| {
            json!({ "clusterRanges": [], "conditions": [{
                "type": "Ready", "status": "True", "reason": "AllAvailable", "message": "", "observedGeneration": generation,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }] })
        };
        assert!(is_stale(1, json!({})) && is_stale(3, ready(2)));
        assert!(!is_stale(3, ready(3)));
    }

    #[test]
    fn of_a_service_only_what_a_client_needs_is_read() {
        let service: Service = serde_json::from_value(json!({
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
        let name = EgressName { namespace: "internet".to_owned(), name: "nat".to_owned() };
        assert_eq!(KnownService::named(&service), (name, expected));
        let headless = json!({ "metadata": { "name": "nat" }, "spec": { "clusterIPs": ["None"] } });
        let headless: Service = serde_json::from_value(headless).unwrap();
        let known = KnownService::of(&headless);
        assert_eq!((known.cluster_ips.is_empty(), known.port, known.by_client), (true, 5555, false));
    }
}

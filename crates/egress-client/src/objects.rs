//! Egresses and their Services, as the watches of the node program read and keep them.

use fairlead_api::resources::Egress;
use fairlead_cluster::cached_by_name;
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::EgressName;
use fairlead_egress::client::known::{EgressFields, EgressInfo, EgressStatusFields};
use fairlead_egress::client::plan::KnownService;
use k8s_openapi::api::core::v1::Service;
use kube::api::ObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use serde::{Deserialize, Serialize};

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

/// An Egress, as the cache of the node program keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CachedEgress {
    /// Namespace and name.
    key: String,
    pub(crate) info: EgressInfo,
}

cached_by_name!(CachedEgress, Egress, |egress| &egress.key);

impl From<EgressInfo> for CachedEgress {
    fn from(info: EgressInfo) -> Self {
        Self { key: info.name.to_string(), info }
    }
}

impl From<SlimEgress> for CachedEgress {
    fn from(egress: SlimEgress) -> Self {
        let SlimEgress { metadata, spec, status } = egress;
        Self::from(EgressInfo::new(&metadata, spec, status.unwrap_or_default()))
    }
}

/// Starts the watch of Egresses, the only one of a node program.
pub(crate) fn watch_egresses(client: &Client, subsystem: &mut Subsystem) -> Cache<CachedEgress> {
    let events = watcher(Api::<SlimEgress>::all(client.clone()), caches::config());
    caches::start(subsystem, "Egresses", caches::parsed(events, CachedEgress::from))
}

/// The Service of an Egress, as the cache of the node program keeps it.
#[derive(Debug, Clone)]
pub(crate) struct CachedService {
    /// Namespace and name.
    key: String,
    pub(crate) egress: EgressName,
    pub(crate) known: KnownService,
}

cached_by_name!(CachedService, Service, |service| &service.key);

impl From<Service> for CachedService {
    fn from(service: Service) -> Self {
        let (egress, known) = KnownService::named(&service);
        Self { key: egress.to_string(), egress, known }
    }
}

#[cfg(test)]
mod tests {
    use fairlead_egress::client::SourcePort;
    use serde_json::json;

    use super::*;

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
        assert_eq!(read, CachedEgress::from(EgressInfo::of(&serde_json::from_value(whole.clone()).unwrap())));
        assert_eq!(read.key, "internet/nat");
        let mut other = whole;
        other["spec"]["template"] = json!("of a newer version");
        assert_eq!(cached(other), read, "a field that is not read does not matter");
        let read = read.info;
        assert_eq!(read.known.source_port, SourcePort::Auto);
        assert_eq!(
            read.known.destinations.as_ref().unwrap().excluded,
            ["9.9.9.0/24".parse().unwrap()].into()
        );
        assert_eq!(read.known.cluster_ranges, Some(vec!["100.64.0.0/10".parse().unwrap()]));
        assert_eq!(read.source_addresses, [("192.0.2.40".parse().unwrap(), Some("nat-a".to_owned()))].into());
        assert!(!read.selectors.is_empty() && read.known.allowed_namespaces.is_some());
    }
}

//! Objects that the commands read. Where the user has not the right, an object that only makes the answer more precise is left out and named.

use std::collections::BTreeSet;
use std::fmt::Debug;

use anyhow::Context as _;
use fairlead_api::names::LABEL_APP_INSTANCE;
use fairlead_api::resources::{AddressPool, Egress};
use fairlead_cluster::nodes::SlimNode;
use fairlead_cluster::pods::{SlimPod, trimmed};
use fairlead_egress::EgressName;
use fairlead_egress::explain::{Objects, PodInfo, Selection};
use fairlead_egress::objects::selector_of_all;
use ipnet::IpNet;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::{ListParams, ObjectMeta};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::gateways::GatewayUse;
use crate::api;
use crate::arguments::egress::Qualified;

/// Field of Events: the reason of the one that the planner cannot know.
const NOT_REGISTERED: &str = "involvedObject.kind=Pod,reason=EgressNotRegistered";

/// A cluster, and what of it may not be read.
pub(super) struct Reader {
    client: Client,
    /// One sentence each, with the missing right.
    pub(super) not_read: Vec<String>,
}

impl Reader {
    pub(super) fn new(client: Client) -> Self {
        Self { client, not_read: Vec::new() }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// The running gateway pods of an Egress, or of all.
    pub(super) async fn gateway_pods(&self, egress: Option<&Qualified>) -> anyhow::Result<Vec<Pod>> {
        let (api, labels) = match egress {
            None => (Api::<Pod>::all(self.client.clone()), selector_of_all()),
            Some(egress) => {
                let labels = format!("{},{LABEL_APP_INSTANCE}={}", selector_of_all(), egress.name);
                (Api::namespaced(self.client.clone(), &egress.namespace), labels)
            }
        };
        let mut pods = api::list(&api, "Pods", ListParams::default().labels(&labels)).await?;
        pods.retain(|pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            phase == Some("Running")
        });
        Ok(pods)
    }

    /// Report of each gateway of an Egress on itself and its clients; `None` where the right is missing. One that does not answer is left
    /// out and named.
    pub(super) async fn gateway_uses(
        &mut self,
        egress: &Qualified,
    ) -> anyhow::Result<Option<Vec<GatewayUse>>> {
        let pods = self.gateway_pods(Some(egress)).await;
        let Some(pods) = self.optional(pods)? else { return Ok(None) };
        let mut uses = Vec::new();
        for pod in &pods {
            match GatewayUse::ask(&self.client, pod).await {
                Ok(found) => uses.push(found),
                Err(error) => {
                    let is_forbidden = api::is_forbidden(&error);
                    self.not_read.push(format!("{error:#}"));
                    if is_forbidden {
                        return Ok(None);
                    }
                }
            }
        }
        // Of nothing that was read there is no sum.
        Ok((pods.is_empty() || !uses.is_empty()).then_some(uses))
    }

    /// `None` where the right is missing.
    fn optional<T>(&mut self, listed: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
        match listed {
            Ok(found) => Ok(Some(found)),
            Err(error) if api::is_forbidden(&error) => {
                self.not_read.push(format!("{error:#}"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// All of a kind that have the labels of Egresses' objects, or those of one namespace where the right for all is missing.
    async fn of_egresses<K>(&mut self, what: &str, namespace: &str) -> anyhow::Result<Vec<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let labels = || ListParams::default().labels(&selector_of_all());
        let all = api::list(&Api::<K>::all(self.client.clone()), what, labels()).await;
        match self.optional(all)? {
            Some(found) => Ok(found),
            None => api::list(&Api::<K>::namespaced(self.client.clone(), namespace), what, labels()).await,
        }
    }

    /// Pods of all namespaces.
    pub(super) async fn pods(&mut self) -> anyhow::Result<Option<Vec<SlimPod>>> {
        let pods = Api::<SlimPod>::all(self.client.clone());
        let pods = api::list(&pods, "Pods", ListParams::default()).await.map(|mut pods| {
            pods.iter_mut().for_each(trimmed);
            pods
        });
        self.optional(pods)
    }

    pub(super) async fn pod(&self, namespace: &str, name: &str) -> anyhow::Result<SlimPod> {
        let pods = Api::<SlimPod>::namespaced(self.client.clone(), namespace);
        let pod = pods.get_opt(name).await.with_context(|| format!("cannot read Pod {namespace}/{name}"))?;
        pod.with_context(|| format!("there is no Pod {namespace}/{name}"))
    }

    /// Warnings of a pod in words of the node program.
    pub(super) async fn events_of(&mut self, pod: &SlimPod) -> anyhow::Result<Vec<Event>> {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let events = Api::<Event>::namespaced(self.client.clone(), pod.namespace());
        let of_pod = ListParams::default().fields(&format!("involvedObject.uid={uid},type=Warning"));
        let found = api::list(&events, "Events", of_pod).await;
        let mut found = self.optional(found)?.unwrap_or_default();
        found.retain(|event| {
            let reason = event.reason.as_deref().unwrap_or_default();
            reason.starts_with("Egress") || ["ApiServerUnavailable", "DataPlaneFailed"].contains(&reason)
        });
        Ok(found)
    }

    /// Events of pods that no gateway took.
    pub(super) async fn not_registered(&mut self) -> anyhow::Result<Vec<Event>> {
        let events = Api::<Event>::all(self.client.clone());
        let found = api::list(&events, "Events", ListParams::default().fields(NOT_REGISTERED)).await;
        Ok(self.optional(found)?.unwrap_or_default())
    }

    /// All Egresses; none where their kind is not installed.
    pub(super) async fn egresses(&self) -> anyhow::Result<Vec<Egress>> {
        api::list_if_served(&Api::<Egress>::all(self.client.clone()), "Egresses").await
    }

    /// Objects that concern the clients of an Egress, also other Egresses that they name.
    pub(super) async fn objects_around(&mut self, egress: &EgressName) -> anyhow::Result<Objects> {
        let namespace = &egress.namespace;
        let all = self.egresses().await;
        let egresses = match self.optional(all)? {
            Some(found) => found,
            None => {
                let own = Api::<Egress>::namespaced(self.client.clone(), namespace);
                api::list(&own, "Egresses", ListParams::default()).await?
            }
        };
        let services = self.of_egresses("Services", namespace).await?;
        let slices = self.of_egresses("EndpointSlices", namespace).await;
        let slices = self.optional(slices)?;
        let namespaces = self.namespaces(&egresses).await?;
        let objects = Objects { egresses, services, slices, namespaces, ..Objects::default() };
        self.with_ranges(objects).await
    }

    /// Egresses that select a pod, as far as Egresses may be read, and the pod's Namespace, where they select pods by these.
    pub(super) async fn selection(&mut self, pod: &SlimPod) -> anyhow::Result<Selection> {
        let listed = self.egresses().await;
        let Some(egresses) = self.optional(listed)? else {
            return Ok(Selection::default().without("the list of Egresses"));
        };
        let selection = Selection::of(&egresses, &[]);
        if !selection.needs_namespaces() {
            return Ok(selection);
        }
        // A user with rights in this namespace alone may read it, and not list all.
        let name = pod.namespace();
        let read = Api::<Namespace>::all(self.client.clone()).get_metadata_opt(name).await;
        let read = read.with_context(|| format!("cannot read Namespace {name}"));
        Ok(match self.optional(read)? {
            Some(namespace) => Selection::of(&egresses, namespace.map(|it| it.metadata).as_slice()),
            None => selection.without("the Namespace of the pod"),
        })
    }

    /// Namespaces, where these Egresses select pods by them.
    pub(super) async fn namespaces(&mut self, egresses: &[Egress]) -> anyhow::Result<Vec<ObjectMeta>> {
        if !Selection::of(egresses, &[]).needs_namespaces() {
            return Ok(Vec::new());
        }
        let all =
            api::list(&Api::<Namespace>::all(self.client.clone()), "Namespaces", ListParams::default()).await;
        let all = self.optional(all)?.unwrap_or_default();
        Ok(all.into_iter().map(|it| it.metadata).collect())
    }

    /// Objects that concern a pod that names these Egresses: only they are read, and nothing without any.
    pub(super) async fn objects_of(&mut self, egresses: &BTreeSet<EgressName>) -> anyhow::Result<Objects> {
        let mut objects = Objects { slices: Some(Vec::new()), ..Objects::default() };
        if egresses.is_empty() {
            return Ok(objects);
        }
        for egress in egresses {
            let api = Api::<Egress>::namespaced(self.client.clone(), &egress.namespace);
            let found = api.get_opt(&egress.name).await;
            objects.egresses.extend(found.with_context(|| format!("cannot read Egress {egress}"))?);
        }
        let namespaces: BTreeSet<&str> = egresses.iter().map(|egress| egress.namespace.as_str()).collect();
        for namespace in namespaces {
            let labels = || ListParams::default().labels(&selector_of_all());
            let services = Api::<Service>::namespaced(self.client.clone(), namespace);
            objects.services.extend(api::list(&services, "Services", labels()).await?);
            let slices = Api::<EndpointSlice>::namespaced(self.client.clone(), namespace);
            let found = self.optional(api::list(&slices, "EndpointSlices", labels()).await)?;
            objects.slices = objects.slices.zip(found).map(|(all, found)| [all, found].concat());
        }
        self.with_ranges(objects).await
    }

    /// With what pods reach by `eth0`.
    async fn with_ranges(&mut self, mut objects: Objects) -> anyhow::Result<Objects> {
        let nodes = api::list(&Api::all(self.client.clone()), "Nodes", ListParams::default()).await;
        let nodes = self.optional(nodes)?.unwrap_or_default();
        objects.node_ranges = nodes.iter().flat_map(ranges_of).collect();
        let pools = api::list_if_served(&Api::<AddressPool>::all(self.client.clone()), "AddressPools").await;
        objects.pools = self.optional(pools)?.unwrap_or_default();
        let ranges = api::list_if_served(&Api::<ServiceCIDR>::all(self.client.clone()), "ServiceCIDRs").await;
        objects.service_ranges = self.optional(ranges)?.unwrap_or_default();
        Ok(objects)
    }
}

/// A pod, as explanations need it.
pub(super) fn pod_info(pod: &SlimPod) -> PodInfo {
    PodInfo {
        namespace: pod.namespace().to_owned(),
        labels: pod.metadata.labels.clone().unwrap_or_default(),
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
        node: pod.node().map(str::to_owned),
        addresses: pod.addresses(),
        gateway_of: pod.gateway_of().map(str::to_owned),
        uses_host_network: pod.uses_host_network(),
        has_ended: pod.has_ended(),
    }
}

/// Addresses of a Node, and the networks of its pods.
fn ranges_of(node: &SlimNode) -> impl Iterator<Item = IpNet> + '_ {
    let pods = node.pod_cidrs().iter().filter_map(|text| text.parse::<IpNet>().ok());
    node.addresses().map(IpNet::from).chain(pods)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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

    #[test]
    fn what_decides_about_the_way_of_a_pod_is_kept() {
        let labels = json!({
            "app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "egress",
            "app.kubernetes.io/instance": "nat",
        });
        let pod: SlimPod = serde_json::from_value(json!({
            "metadata": {
                "name": "web", "namespace": "shop", "labels": labels.clone(),
                "annotations": { "egress.coil.cybozu.com/n": "wide" },
            },
            "spec": { "nodeName": "n1", "hostNetwork": true },
            "status": { "phase": "Failed", "podIPs": [{ "ip": "10.1.2.3" }] },
        }))
        .unwrap();
        let expected = PodInfo {
            namespace: "shop".to_owned(),
            labels: serde_json::from_value(labels).unwrap(),
            annotations: [("egress.coil.cybozu.com/n".to_owned(), "wide".to_owned())].into(),
            node: Some("n1".to_owned()),
            addresses: vec!["10.1.2.3".parse().unwrap()],
            gateway_of: Some("nat".to_owned()),
            uses_host_network: true,
            has_ended: true,
        };
        assert_eq!(pod_info(&pod), expected);
    }
}

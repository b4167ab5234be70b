//! Reports of gateway pods on themselves: JSON at their metrics port, asked through the API server with the rights of the user.

use std::collections::BTreeMap;

use anyhow::Context as _;
use fairlead_egress::objects::metrics_port;
use k8s_openapi::api::core::v1::Pod;
use kube::api::GetParams;
use kube::core::Request;
use kube::{Client, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Answer of a path of the metrics port of a pod. The user needs `get` on `pods/proxy`.
///
/// # Errors
/// The right is missing, the pod does not answer, or its answer is not what was expected.
pub(super) async fn ask<T: DeserializeOwned>(client: &Client, pod: &Pod, path: &str) -> anyhow::Result<T> {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let what = || format!("cannot ask gateway {namespace}/{name}");
    let url = format!("/api/v1/namespaces/{namespace}/pods");
    let mut request = Request::new(url.clone()).get(&name, &GetParams::default()).with_context(what)?;
    let address = format!("{url}/{name}:{}/proxy{path}", metrics_port(pod));
    *request.uri_mut() = address.parse().with_context(what)?;
    let text = client.request_text(request).await.with_context(what)?;
    serde_json::from_str(&text).with_context(what)
}

/// Packets and bytes that a client has exchanged with gateways, and its number of open connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Use {
    pub(super) sent_packets: u64,
    pub(super) sent_bytes: u64,
    pub(super) received_packets: u64,
    pub(super) received_bytes: u64,
    /// `None` where a gateway has too many to count them.
    pub(super) connections: Option<u64>,
}

impl Use {
    fn and(self, other: Self) -> Self {
        let both = self.connections.zip(other.connections);
        Self {
            sent_packets: self.sent_packets.saturating_add(other.sent_packets),
            sent_bytes: self.sent_bytes.saturating_add(other.sent_bytes),
            received_packets: self.received_packets.saturating_add(other.received_packets),
            received_bytes: self.received_bytes.saturating_add(other.received_bytes),
            connections: both.map(|(one, other)| one.saturating_add(other)),
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
struct ClientUse {
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(flatten)]
    used: Use,
}

#[derive(Debug, Deserialize)]
struct Clients {
    clients: Vec<ClientUse>,
}

/// Load of a gateway.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Load {
    pub(super) connections: Option<u64>,
    pub(super) unhealthy: bool,
}

/// Report of a gateway on itself and its clients.
#[derive(Debug, Clone)]
pub(super) struct GatewayUse {
    /// Name of the pod.
    pub(super) pod: String,
    pub(super) load: Load,
    clients: Vec<ClientUse>,
}

impl GatewayUse {
    /// # Errors
    /// As [`ask`].
    pub(super) async fn ask(client: &Client, pod: &Pod) -> anyhow::Result<Self> {
        let load = ask(client, pod, "/load").await?;
        let Clients { clients } = ask(client, pod, "/clients").await?;
        Ok(Self { pod: pod.name_any(), load, clients })
    }

    /// Use of all of these gateways by each client, by namespace and name.
    pub(super) fn by_client(all: &[Self]) -> BTreeMap<(&str, &str), Use> {
        let mut found: BTreeMap<(&str, &str), Use> = BTreeMap::new();
        for client in all.iter().flat_map(|gateway| &gateway.clients) {
            let key = (client.namespace.as_str(), client.name.as_str());
            let sum = found.get(&key).map_or(client.used, |known| known.and(client.used));
            found.insert(key, sum);
        }
        found
    }

    #[cfg(test)]
    pub(super) fn read(pod: &str, load: serde_json::Value, clients: serde_json::Value) -> Self {
        let Clients { clients } = serde_json::from_value(clients).unwrap();
        Self { pod: pod.to_owned(), load: serde_json::from_value(load).unwrap(), clients }
    }
}

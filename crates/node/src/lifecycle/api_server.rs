//! The endpoints of the API server: this node's own connections to it bypass the mesh, or a broken tunnel would cut the node
//! off from what can repair it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};
use tokio::sync::watch;

/// Interval at which the endpoints are looked up again.
const REFRESH_INTERVAL: Duration = Duration::from_secs(60);
/// The same while none are known.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Longest one look-up may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// `None` until the API server has answered: no packet may be routed into the mesh before, or the request could not reach it.
pub(crate) type Endpoints = Option<Vec<SocketAddr>>;

/// Keeps the endpoints current: what host and port of the client's configuration resolve to, and those behind the
/// `kubernetes` Service, which a pod's client uses.
pub(crate) async fn run(client: Client, host: String, port: u16, endpoints: watch::Sender<Endpoints>) {
    loop {
        match behind_service(&client).await {
            Some(behind) => {
                let mut found: BTreeSet<SocketAddr> = behind.into_iter().collect();
                found.extend(resolve(&host).await.into_iter().map(|address| SocketAddr::new(address, port)));
                let found = Some(found.into_iter().collect());
                endpoints.send_if_modified(|known| {
                    let changed = *known != found;
                    *known = found;
                    changed
                });
                tokio::time::sleep(REFRESH_INTERVAL).await;
            }
            None => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}

/// The addresses of a host name or an address in brackets or without.
async fn resolve(host: &str) -> Vec<IpAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = bare.parse() {
        return vec![address];
    }
    match tokio::time::timeout(TIMEOUT, tokio::net::lookup_host((bare, 443))).await {
        Ok(Ok(addresses)) => addresses.map(|address| address.ip()).collect(),
        _ => Vec::new(),
    }
}

/// `None` if the API server did not answer. A refusal is an answer, without endpoints.
async fn behind_service(client: &Client) -> Option<Vec<SocketAddr>> {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), "default");
    match tokio::time::timeout(TIMEOUT, slices.get_opt("kubernetes")).await {
        Ok(Ok(slice)) => Some(slice.as_ref().map(sockets).unwrap_or_default()),
        Ok(Err(kube::Error::Api(refusal))) => {
            tracing::warn!(
                reason = refusal.message,
                "cannot read the EndpointSlice default/kubernetes: the API server may become unreachable with the mesh"
            );
            Some(Vec::new())
        }
        _ => None,
    }
}

/// Every address with every port.
fn sockets(slice: &EndpointSlice) -> Vec<SocketAddr> {
    let ports = || slice.ports.iter().flatten().filter_map(|port| u16::try_from(port.port?).ok());
    let addresses = slice.endpoints.iter().flat_map(|endpoint| &endpoint.addresses);
    let addresses = addresses.filter_map(|address| address.parse().ok());
    addresses.flat_map(|address: IpAddr| ports().map(move |port| SocketAddr::new(address, port))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_of_the_slice_comes_with_its_port() {
        let slice: EndpointSlice = serde_json::from_value(serde_json::json!({
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["198.51.100.10", "nonsense"]}, {"addresses": ["198.51.100.11"]}],
            "ports": [{"name": "https", "port": 6443, "protocol": "TCP"}, {"port": 70_000}],
        }))
        .unwrap();
        let expected: Vec<SocketAddr> =
            ["198.51.100.10:6443", "198.51.100.11:6443"].map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(sockets(&slice), expected);
    }
}

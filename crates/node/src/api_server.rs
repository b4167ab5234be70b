//! Where the API server is: these addresses never enter the mesh, or a broken tunnel would cut this node off from
//! the very thing that could mend it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client};
use tokio::sync::watch;

/// How often the addresses are looked up again.
const REFRESH: Duration = Duration::from_secs(60);
/// Longest one look-up may take.
const LOOK_UP: Duration = Duration::from_secs(5);

/// Keeps the addresses current: what `host` of the client's configuration resolves to, and the end points behind the
/// `kubernetes` Service, which a pod's client is led to.
pub(crate) async fn run(client: Client, host: String, addresses: watch::Sender<Vec<IpAddr>>) {
    loop {
        let mut found: BTreeSet<IpAddr> = BTreeSet::new();
        found.extend(resolve(&host).await);
        found.extend(end_points(&client).await);
        if !found.is_empty() {
            let found: Vec<IpAddr> = found.into_iter().collect();
            addresses.send_if_modified(|known| {
                let changed = *known != found;
                *known = found;
                changed
            });
        }
        tokio::time::sleep(REFRESH).await;
    }
}

/// The addresses of a host name or an address in brackets or without.
pub(crate) async fn resolve(host: &str) -> Vec<IpAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(address) = bare.parse() {
        return vec![address];
    }
    match tokio::time::timeout(LOOK_UP, tokio::net::lookup_host((bare, 443))).await {
        Ok(Ok(addresses)) => addresses.map(|address| address.ip()).collect(),
        _ => Vec::new(),
    }
}

async fn end_points(client: &Client) -> Vec<IpAddr> {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), "default");
    match tokio::time::timeout(LOOK_UP, slices.get_opt("kubernetes")).await {
        Ok(Ok(Some(slice))) => {
            let listed = slice.endpoints.iter().flat_map(|end_point| &end_point.addresses);
            listed.filter_map(|address| address.parse().ok()).collect()
        }
        _ => Vec::new(),
    }
}

//! The watch of the EndpointSlices of Egresses.

use fairlead_cluster::cached_by_name;
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::subsystem::Subsystem;
use fairlead_egress::endpoints::GatewaySlice;
use fairlead_egress::objects::selector_of_all;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};

/// An EndpointSlice, as the cache keeps it.
#[derive(Debug, Clone)]
pub(crate) struct CachedSlice {
    /// Namespace and name.
    key: String,
    pub(crate) gateways: GatewaySlice,
}

cached_by_name!(CachedSlice, EndpointSlice, |slice| &slice.key);

impl CachedSlice {
    pub(crate) fn new(slice: &EndpointSlice) -> Self {
        let key = format!("{}/{}", slice.namespace().unwrap_or_default(), slice.name_any());
        Self { key, gateways: GatewaySlice::new(slice) }
    }
}

/// Starts the watch, of slices of Egresses only.
pub(crate) fn watch(client: &Client, subsystem: &mut Subsystem) -> Cache<CachedSlice> {
    let slices = Api::<EndpointSlice>::all(client.clone());
    let events = watcher(slices, caches::config().labels(&selector_of_all()));
    caches::start(
        subsystem,
        "EndpointSlices of Egresses",
        caches::parsed(events, |slice| CachedSlice::new(&slice)),
    )
}

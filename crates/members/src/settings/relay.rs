//! The relay as the mesh resource describes it, or, of a managed one, as the controller published it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_api::names::{RELAY_PORT, RELAY_SERVER_NAME, SYSTEM_NAMESPACE};
use fairlead_api::resources::{
    ExternalRelay, ManagedRelay, Relay, RelayMode, RelayProvider, RelayTransport, WireKubeMesh,
    WireKubeMeshStatus,
};
use fairlead_relay::client;

use super::{RelayServer, RelaySettings, base64_bytes};
use crate::SourceProblem;

/// The relay; `None` where there is none to use.
pub(super) fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Option<RelaySettings> {
    let relay = mesh.spec.relay.as_ref()?;
    settings(relay, mesh.status.as_ref()).unwrap_or_else(|(field, error)| {
        let mesh = mesh.metadata.name.clone().unwrap_or_default();
        problems.push(SourceProblem::InvalidRelay { mesh, field, error });
        None
    })
}

/// Settings of the relay, `None` where there is none to use; or the field and what is wrong with it.
fn settings(
    relay: &Relay,
    status: Option<&WireKubeMeshStatus>,
) -> Result<Option<RelaySettings>, (&'static str, String)> {
    if relay.mode == RelayMode::Never {
        return Ok(None);
    }
    let server = match relay.provider {
        RelayProvider::External => relay.external.as_ref().map(external_relay).transpose()?,
        RelayProvider::Managed => managed_relay(relay.managed.as_ref(), status)?,
    };
    Ok(server.map(|server| RelaySettings {
        server,
        is_only: relay.mode == RelayMode::Always,
        handshake_timeout: Duration::from_secs(relay.handshake_timeout_seconds.into()),
        direct_retry: Duration::from_secs(relay.direct_retry_interval_seconds.into()),
    }))
}

fn external_relay(external: &ExternalRelay) -> Result<RelayServer, (&'static str, String)> {
    let endpoint = relay_endpoint(external).map_err(|error| ("spec.relay.external.endpoint", error))?;
    let bundle = external.ca_bundle.as_deref().map(certificates).transpose();
    let secret = external.auth_secret_ref.as_ref().map(|secret| {
        let namespace = secret.namespace.clone().unwrap_or_else(|| SYSTEM_NAMESPACE.to_owned());
        (namespace, secret.name.clone())
    });
    Ok(RelayServer {
        endpoint,
        ca_bundle: bundle.map_err(|error| ("spec.relay.external.caBundle", error))?,
        server_name: None,
        secret,
    })
}

/// The relay that the controller runs, once its status says where. The key of this node is known to it.
fn managed_relay(
    managed: Option<&ManagedRelay>,
    status: Option<&WireKubeMeshStatus>,
) -> Result<Option<RelayServer>, (&'static str, String)> {
    let published =
        status.and_then(|status| status.relay_endpoint.as_ref().zip(status.relay_ca_bundle.as_ref()));
    let Some((endpoint, bundle)) = published else { return Ok(None) };
    let scheme = match managed.map(|managed| managed.transport).unwrap_or_default() {
        RelayTransport::Tcp => "tcp",
        // The controller runs no relay without TLS, and says so.
        RelayTransport::Ws => return Ok(None),
        RelayTransport::Wss => "wss",
    };
    let endpoint = format!("{scheme}://{endpoint}").parse();
    let invalid = |error: client::InvalidEndpoint| ("status.relayEndpoint", format!("is invalid: {error}"));
    Ok(Some(RelayServer {
        endpoint: endpoint.map_err(invalid)?,
        ca_bundle: Some(certificates(bundle).map_err(|error| ("status.relayCABundle", error))?),
        server_name: Some(RELAY_SERVER_NAME.to_owned()),
        secret: None,
    }))
}

/// PEM certificates in base64.
fn certificates(bundle: &str) -> Result<Vec<u8>, String> {
    let pem = base64_bytes(bundle)?;
    client::trust(&pem).map(|_| pem).map_err(|error| format!("is unusable: {error}"))
}

/// Addresses and port at which the pods of a managed relay listen.
pub(super) fn pods(mesh: &WireKubeMesh) -> Vec<SocketAddr> {
    let is_managed = mesh.spec.relay.as_ref().is_some_and(|relay| relay.provider == RelayProvider::Managed);
    let published = mesh.status.iter().filter(|_| is_managed).flat_map(|status| &status.relay_pod_ips);
    let addresses = published.filter_map(|address| address.parse::<IpAddr>().ok());
    addresses.map(|address| SocketAddr::new(address, RELAY_PORT)).collect()
}

/// host:port with the transport beside it, or a URL, which says the transport itself.
fn relay_endpoint(external: &ExternalRelay) -> Result<client::Endpoint, String> {
    let scheme = match external.transport {
        RelayTransport::Tcp => "tcp",
        RelayTransport::Ws => "ws",
        RelayTransport::Wss => "wss",
    };
    let text = &external.endpoint;
    let url = if text.contains("://") { text.clone() } else { format!("{scheme}://{text}") };
    if external.transport != RelayTransport::default() && !url.starts_with(&format!("{scheme}://")) {
        return Err(format!("{text:?} contradicts the transport {scheme}"));
    }
    url.parse().map_err(|error: client::InvalidEndpoint| format!("is invalid: {error}"))
}

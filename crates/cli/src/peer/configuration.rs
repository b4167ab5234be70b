//! Configurations of WireGuard as `wg setconf` reads them and as data, and endpoints as Peers name them.

use fairlead_address::Endpoint;
use fairlead_api::resources::{DnsOrIp, PeerEndpoint};
use fairlead_members::configuration::{Configuration, ConfiguredPeer};
use serde_json::{Value, json};

/// For scripts: names and types are stable.
pub(crate) fn data(configuration: &Configuration) -> Value {
    let peers = configuration.peers.iter().map(|peer| {
        json!({
            "name": peer.name,
            "publicKey": peer.public_key.to_string(),
            "presharedKey": peer.preshared_key.map(|key| key.to_base64()),
            "allowedIPs": peer.allowed_ips,
            "endpoint": peer.endpoint,
            "persistentKeepalive": peer.persistent_keepalive,
        })
    });
    json!({ "peers": peers.collect::<Vec<_>>() })
}

/// Sections `[Peer]`; `[Interface]` is up to the user.
pub(crate) fn text(configuration: &Configuration) -> String {
    let mut text = String::new();
    for peer in &configuration.peers {
        section(&mut text, peer);
    }
    text
}

fn section(text: &mut String, peer: &ConfiguredPeer) {
    let allowed_ips: Vec<String> = peer.allowed_ips.iter().map(ToString::to_string).collect();
    text.push_str(&format!("# {}\n[Peer]\n", peer.name));
    let mut line = |name: &str, value: &str| text.push_str(&format!("{name} = {value}\n"));
    line("PublicKey", &peer.public_key.to_string());
    if let Some(key) = peer.preshared_key {
        line("PresharedKey", &key.to_base64());
    }
    if !allowed_ips.is_empty() {
        line("AllowedIPs", &allowed_ips.join(", "));
    }
    if let Some(endpoint) = &peer.endpoint {
        line("Endpoint", endpoint);
    }
    if peer.persistent_keepalive > 0 {
        line("PersistentKeepalive", &peer.persistent_keepalive.to_string());
    }
    text.push('\n');
}

/// An endpoint as a Peer names it; `None` if the text is none.
pub(crate) fn peer_endpoint(text: &str) -> Option<PeerEndpoint> {
    let (dns_or_ip, port) = match text.parse::<Endpoint>().ok()? {
        Endpoint::Address(at) => (DnsOrIp { dns: None, ip: Some(at.ip().to_string()) }, at.port()),
        Endpoint::Name { host, port } => (DnsOrIp { dns: Some(host), ip: None }, port),
    };
    Some(PeerEndpoint { dns_or_ip, port })
}

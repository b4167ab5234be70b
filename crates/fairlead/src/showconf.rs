//! `fairlead showconf`: the WireGuard peers of a Peer or a node, as `wg setconf` and `wg addconf` read them.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_api::resources::{AddressBlock, KiloPeer, WireKubePeer};
use fairlead_node::members::configuration::{Configuration, ConfiguredPeer, Objects, Subject, configuration};
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::api;
use crate::arguments::{ConfigurationFormat, Output, ShowconfCommand};
use crate::logging;
use crate::output::render;
use crate::status::current_thread;

/// Prints the configuration; what is left out of it goes to standard error.
pub(crate) fn run(command: &ShowconfCommand) -> anyhow::Result<ExitCode> {
    let (query, subject, what) = match command {
        ShowconfCommand::Node(query) => (query, Subject::Node(&query.name), "WireKubePeer of node"),
        ShowconfCommand::Peer(query) => (query, Subject::Peer(&query.name), "Peer"),
    };
    let found = current_thread(async { objects(&query.api.client().await?).await })?;
    let found = configuration(found, subject)
        .with_context(|| format!("there is no {what} '{}': is the name right?", query.name))?;
    for problem in &found.problems {
        logging::error(problem);
    }
    let text = match query.output {
        ConfigurationFormat::Json => render(Output::Json, || data(&found), |_| String::new())?,
        ConfigurationFormat::Yaml => render(Output::Yaml, || data(&found), |_| String::new())?,
        ConfigurationFormat::Wireguard => text(&found),
    };
    // A closed pipe (`| head`) is not a failure.
    drop(std::io::stdout().write_all(text.as_bytes()));
    Ok(if found.peers.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn objects(client: &Client) -> anyhow::Result<Objects> {
    let every = ListParams::default;
    let kilo = ApiResource::erase::<KiloPeer>(&());
    let external = Api::<DynamicObject>::all_with(client.clone(), &kilo);
    Ok(Objects {
        peers: api::list(&Api::<WireKubePeer>::all(client.clone()), "WireKubePeers", every()).await?,
        blocks: api::list(&Api::<AddressBlock>::all(client.clone()), "AddressBlocks", every()).await?,
        external: api::list_if_served(&external, "Peers").await?,
    })
}

/// For scripts: names and types are stable.
fn data(configuration: &Configuration) -> Value {
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
fn text(configuration: &Configuration) -> String {
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

#[cfg(test)]
mod tests {
    use fairlead_api::wireguard::{PresharedKey, PublicKey};

    use super::*;

    fn peer() -> ConfiguredPeer {
        ConfiguredPeer {
            name: "cloud-1".to_owned(),
            public_key: PublicKey([1; 32]),
            preshared_key: None,
            allowed_ips: vec!["10.64.0.0/27".parse().unwrap(), "fd00::/64".parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 0,
        }
    }

    #[test]
    fn each_peer_is_a_section_that_wg_reads() {
        let full = ConfiguredPeer {
            preshared_key: Some(PresharedKey([2; 32])),
            endpoint: Some("192.0.2.1:51820".to_owned()),
            persistent_keepalive: 10,
            ..peer()
        };
        let found = Configuration { peers: vec![peer(), full], problems: Vec::new() };
        let (one, two) = (PublicKey([1; 32]), PublicKey([2; 32]));
        assert_eq!(
            text(&found),
            format!(
                "# cloud-1\n[Peer]\nPublicKey = {one}\nAllowedIPs = 10.64.0.0/27, fd00::/64\n\n\
                 # cloud-1\n[Peer]\nPublicKey = {one}\nPresharedKey = {two}\nAllowedIPs = 10.64.0.0/27, fd00::/64\n\
                 Endpoint = 192.0.2.1:51820\nPersistentKeepalive = 10\n\n"
            )
        );
    }

    #[test]
    fn data_for_scripts_has_the_keepalive_in_seconds() {
        let found = Configuration {
            peers: vec![ConfiguredPeer { persistent_keepalive: 10, ..peer() }],
            problems: Vec::new(),
        };
        let data = data(&found);
        assert_eq!(data["peers"][0]["persistentKeepalive"], 10);
        assert!(data["peers"][0]["presharedKey"].is_null() && data["peers"][0]["endpoint"].is_null());
    }
}

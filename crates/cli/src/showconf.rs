//! `fairlead showconf`: the WireGuard peers of a Peer or a node, as `wg setconf` and `wg addconf` read them.

use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_api::resources::{KiloPeer, KiloPeerSpec};
use fairlead_members::configuration::{Configuration, ConfiguredPeer, Subject, as_peer};
use ipnet::IpNet;
use serde_json::json;

use crate::arguments::peers::{ShowconfArguments, ShowconfCommand};
use crate::arguments::queries::ConfigurationFormat;
use crate::output::{self, Output, render};
use crate::peer::configuration::{data, peer_endpoint, text};
use crate::peer::{self, Cluster};
use crate::query::current_thread;

/// Prints the configuration; what is left out of it goes to standard error.
///
/// # Errors
/// The API server refuses or does not answer, or there is no such object.
pub fn run(command: &ShowconfCommand) -> anyhow::Result<ExitCode> {
    let (query, subject) = match command {
        ShowconfCommand::Node(query) => (query, Subject::Node(&query.name)),
        ShowconfCommand::Peer(query) => (query, Subject::Peer(&query.name)),
    };
    let cluster = current_thread(async { Cluster::read(&query.api.client().await?).await })?;
    if query.as_peer {
        return print_as_peer(cluster, subject, query);
    }
    let found = match subject {
        Subject::Node(_) => peer::configuration_of(&cluster.objects, subject, &query.allowed_ips)?,
        Subject::Peer(name) => cluster.configuration(name, None, &query.allowed_ips)?,
    };
    for problem in &found.problems {
        output::error(problem);
    }
    let text = match query.output {
        ConfigurationFormat::Json => render(Output::Json, || data(&found), |_| String::new())?,
        ConfigurationFormat::Yaml => render(Output::Yaml, || data(&found), |_| String::new())?,
        ConfigurationFormat::Wireguard => text(&found),
    };
    output::print(&text);
    Ok(if found.peers.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Prints what others configure for the subject: a section, or the Peer to apply in another cluster.
fn print_as_peer(
    cluster: Cluster,
    subject: Subject<'_>,
    query: &ShowconfArguments,
) -> anyhow::Result<ExitCode> {
    let mut more = query.allowed_ips.clone();
    if query.whole_cluster {
        more.extend(cluster.pools.iter().chain(&cluster.services));
    }
    let found = as_peer(cluster.objects, subject, query.whole_cluster, &more)
        .with_context(|| format!("there is no '{}' with a public key: is the name right?", query.name))?;
    let object = || json!(KiloPeer::new(&found.name, peer_spec(&found)));
    let text = match query.output {
        ConfigurationFormat::Json => render(Output::Json, object, |_| String::new())?,
        ConfigurationFormat::Yaml => render(Output::Yaml, object, |_| String::new())?,
        // Nodes mark what their WireGuard sends; `wg-quick` would lead it into the tunnel.
        ConfigurationFormat::Wireguard => {
            let own = Configuration { peers: vec![found], problems: Vec::new() };
            let endpoints = peer::endpoints(&own);
            text(&own.without_endpoints(endpoints))
        }
    };
    output::print(&text);
    Ok(ExitCode::SUCCESS)
}

fn peer_spec(peer: &ConfiguredPeer) -> KiloPeerSpec {
    let endpoint = peer.endpoint.as_ref().and_then(|endpoint| peer_endpoint(endpoint));
    KiloPeerSpec {
        allowed_ips: peer.allowed_ips.iter().map(IpNet::to_string).collect(),
        endpoint,
        entry_nodes: None,
        persistent_keepalive: Some(peer.persistent_keepalive).filter(|seconds| *seconds > 0),
        preshared_key: peer.preshared_key.map(|key| key.to_base64()),
        preshared_key_ref: None,
        public_key: peer.public_key.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use fairlead_keys::{PresharedKey, PublicKey};

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
    fn a_node_becomes_a_peer_of_another_cluster_with_its_endpoint_by_address_or_name() {
        let spec = |endpoint: Option<&str>| {
            peer_spec(&ConfiguredPeer { endpoint: endpoint.map(str::to_owned), ..peer() })
        };
        let read = |endpoint| spec(endpoint).parse_endpoint().unwrap().map(|endpoint| endpoint.to_string());
        for endpoint in ["192.0.2.1:51820", "[2001:db8::1]:7", "gate.example:7"] {
            assert_eq!(read(Some(endpoint)).as_deref(), Some(endpoint));
        }
        assert_eq!(read(None), None);
        assert_eq!(spec(None).allowed_ips, ["10.64.0.0/27", "fd00::/64"]);
        let object = json!(KiloPeer::new("cloud-1", spec(None)));
        assert_eq!((&object["kind"], &object["metadata"]["name"]), (&json!("Peer"), &json!("cloud-1")));
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

//! Packets to pods of other nodes between the start of this program and the first reconciliation of the mesh, from what an earlier run saved.
//! After a reboot the kernel has nothing of the mesh, and sends them in clear text.

use std::time::Instant;

use fairlead_dataplane::mesh;
use fairlead_dataplane::uplink::{HostNetwork, Ignored};
use fairlead_members::saved::in_tunnels::HostNetworks;
use fairlead_members::state_file::StateFile;
use fairlead_topology::OwnAddress;
use ipnet::IpNet;
use jiff::Timestamp;

use super::settings::Settings;

/// Prefixes that are to be refused, and the name of the mesh's device.
type Refused = (Vec<IpNet>, String);

/// Makes the kernel refuse packets to pods of other nodes, where an earlier run of this program saved a mesh and the kernel has nothing of it. The
/// mesh replaces that, or removes it where there is none any more. A refusal of the kernel is logged: the node starts without it.
pub(crate) async fn refuse(settings: &Settings) {
    let file = StateFile { directory: settings.state_dir.clone(), node: settings.node.clone() };
    let table_pods = settings.numbers.table_pods();
    let refused = tokio::task::spawn_blocking(move || {
        let Some((prefixes, interface)) = refused(&file, &HostNetwork::read()?) else { return Ok(false) };
        mesh::refuse(&prefixes, &interface, table_pods)
    });
    match refused.await {
        Ok(Ok(true)) => tracing::info!("packets to pods of other nodes are refused until the mesh is there"),
        Ok(Ok(false)) => {}
        Ok(Err(error)) => {
            tracing::warn!(%error, "packets to pods of other nodes may leave in clear text until the mesh is there");
        }
        Err(error) => {
            tracing::warn!(%error, "refusing packets to pods of other nodes stopped before it finished");
        }
    }
}

/// Decides what is to be refused; `None` without a usable file. Why a file is not usable, the mesh tells.
fn refused(file: &StateFile, network: &HostNetwork) -> Option<Refused> {
    let now = Instant::now();
    let saved = file.read((now, Timestamp::now())).ok()??;
    let interface = saved.facts.mesh.spec.interface_name.clone();
    let pods = saved.facts.members.iter().flat_map(|member| member.blocks.iter().chain(&member.pod_networks));
    let ignored = Ignored {
        links: vec![interface.clone()],
        link_prefixes: Vec::new(),
        networks: pods.chain(&saved.facts.services).copied().collect(),
    };
    let addresses = network.own_addresses(&ignored);
    let host = HostNetworks {
        addresses: addresses.map(|it| OwnAddress { link: it.link, prefix: it.prefix }).collect(),
        connected: network.connected_prefixes(&ignored),
        gateways: network.default_gateways().into_iter().collect(),
    };
    Some((saved.in_tunnels(&file.node, &host, now), interface))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use fairlead_api::resources::WireKubeMesh;
    use fairlead_keys::PublicKey;
    use fairlead_members::departures::Departures;
    use fairlead_members::saved::cluster::Unsaved;
    use fairlead_topology::Member;
    use serde_json::json;

    use super::*;

    fn file(directory: &Path, node: &str) -> StateFile {
        StateFile { directory: directory.to_owned(), node: node.to_owned() }
    }

    fn unsaved() -> Unsaved {
        let member = |number: u8| Member {
            public_key: Some(PublicKey([number; 32])),
            blocks: vec![format!("10.64.{number}.0/24").parse().unwrap()],
            ..Member::named(format!("n{number}"))
        };
        let spec = serde_json::from_value(json!({ "interfaceName": "wg7" })).unwrap();
        Unsaved {
            mesh: Arc::new(WireKubeMesh::new("default", spec)),
            node: Arc::default(),
            public_key: PublicKey([1; 32]),
            members: vec![Arc::new(member(1)), Arc::new(member(2))],
            api_server: Vec::new(),
            services: Vec::new(),
            sources: Arc::default(),
            departures: Departures::default(),
        }
    }

    #[test]
    fn only_a_file_of_this_node_has_what_is_refused_at_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let (own, network) = (file(directory.path(), "n1"), HostNetwork::default());
        assert_eq!(refused(&own, &network), None, "there was no mesh");
        own.write(&unsaved(), (Instant::now(), Timestamp::now())).unwrap();
        let other: IpNet = "10.64.2.0/24".parse().unwrap();
        assert_eq!(refused(&own, &network), Some((vec![other], "wg7".to_owned())));
        assert_eq!(refused(&file(directory.path(), "n2"), &network), None);
        own.remove();
        assert_eq!(refused(&own, &network), None, "the mesh was deleted");
    }
}

//! Packets to pods of other nodes between the start of this program and the first reconciliation of the mesh, from what an earlier run saved.
//! After a reboot the kernel has nothing of the mesh, and sends them in clear text.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::{Cache, Refusal};
use fairlead_dataplane::mesh;
use fairlead_dataplane::uplink::{HostNetwork, Ignored};
use fairlead_members::saved::in_tunnels::HostNetworks;
use fairlead_members::state_file::StateFile;
use fairlead_topology::OwnAddress;
use ipnet::IpNet;
use jiff::Timestamp;

use super::settings::Settings;

/// Least time for which the API server must have said that it has no WireKubeMeshes until there is no mesh to wait for: while it starts, and while an
/// administrator replaces the CRDs, it says so, too.
const UNKNOWN: Duration = Duration::from_secs(600);
/// Interval at which that is looked at.
const INTERVAL: Duration = Duration::from_secs(60);

/// Prefixes that are to be refused, and the name of the mesh's device.
type Refused = (Vec<IpNet>, String);

/// Makes the kernel refuse packets to pods of other nodes, where an earlier run of this program saved a mesh and the kernel has nothing of it: where
/// it has, as when this program is restarted, the file is not read. The mesh replaces that, or removes it where there is none any more. A refusal of the
/// kernel is logged: the node starts without it.
pub(crate) async fn refuse(settings: &Settings) {
    let file = state_file(settings);
    let table_pods = settings.numbers.table_pods();
    let refused = tokio::task::spawn_blocking(move || {
        mesh::refuse(|| Ok(refused(&file, &HostNetwork::read()?)), table_pods)
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

/// Files of what an earlier run saved of the mesh.
pub(crate) fn state_file(settings: &Settings) -> StateFile {
    StateFile { directory: settings.state_dir.clone(), node: settings.node.clone() }
}

/// Ends what [`refuse`] began on a node that was off while the CRDs of the mesh were deleted: no mesh replaces it, nor removes it. What was saved of
/// the mesh goes, too, or the next start would refuse the same again. Runs forever.
pub(crate) async fn stop_refusing(file: StateFile, meshes: Arc<Cache<WireKubeMesh>>) -> Infallible {
    loop {
        tokio::time::sleep(INTERVAL).await;
        if !has_no_meshes(meshes.refusal().as_ref(), meshes.refused_for()) {
            continue;
        }
        let file = file.clone();
        let stopped = tokio::task::spawn_blocking(move || {
            let was_refused = mesh::stop_refusing()?;
            if was_refused {
                file.remove();
            }
            Ok::<_, fairlead_netlink::Error>(was_refused)
        });
        match stopped.await {
            Ok(Ok(true)) => tracing::warn!(
                "the API server has had no WireKubeMeshes for {UNKNOWN:?}: packets to pods of other nodes are no longer refused"
            ),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "packets to pods of other nodes are still refused"),
            Err(error) => tracing::warn!(%error, "packets to pods of other nodes may still be refused"),
        }
    }
}

/// Whether the API server has said for long enough that it has no WireKubeMeshes. One that does not show them to this node says nothing. Pure.
fn has_no_meshes(refusal: Option<&Refusal>, refused_for: Duration) -> bool {
    matches!(refusal, Some(Refusal::UnknownResource(_))) && refused_for >= UNKNOWN
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

    #[test]
    fn only_an_api_server_that_has_had_no_meshes_for_long_ends_what_is_refused() {
        let (unknown, forbidden) =
            (Refusal::UnknownResource("WireKubeMeshes"), Refusal::Forbidden(String::new()));
        let hour = Duration::from_secs(3600);
        assert!(has_no_meshes(Some(&unknown), UNKNOWN));
        assert!(!has_no_meshes(Some(&unknown), Duration::from_secs(599)), "it starts");
        assert!(!has_no_meshes(Some(&forbidden), hour), "there may be one");
        assert!(!has_no_meshes(None, hour), "it does not answer, or has them");
    }
}

//! Addresses of nodes on the mesh: from the objects to [`mesh_addresses::assign`], and back to the status of the mesh.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::conditions::{Finding, condition};
use fairlead_api::names::{DISCOVERY_CLUSTER_ID, SYSTEM_NAMESPACE};
use fairlead_api::resources::{KeptMeshIp, WireKubeMesh, WireKubePeer};
use fairlead_cluster::naming::some_of;
use fairlead_cluster::writes::apply_status;
use fairlead_wire::discovery::mesh_subnet;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Node, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::timeout;

use crate::mesh_addresses::{Applicant, Assigned, Kept, Space, assign};

/// Field manager of the addresses that are kept, and of the condition.
const MANAGER: &str = "fairlead-controller-addresses";
/// The condition that says whether every node has its addresses.
const CONDITION: &str = "MeshAddressesAssigned";
/// Time for which the identifier of the cluster is used before it is read again.
const READ_INTERVAL: Duration = Duration::from_secs(60);
/// Time limit of reading the identifier of the cluster.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Most nodes that the condition names.
const MAX_NAMED: usize = 8;

/// Mesh addresses of nodes, and of deleted nodes for which they are kept.
pub(super) struct Addresses {
    client: Client,
    cluster: Option<Cluster>,
    /// Assigned addresses by name, with the UID of the object: the watch shows what was written only later.
    known: BTreeMap<String, (String, Vec<IpAddr>)>,
    /// Addresses kept for deleted nodes, also where they could not be written yet or the watch does not show them yet.
    kept: Vec<Kept>,
    has_mesh: bool,
}

/// The identifier of the cluster, as it was read.
struct Cluster {
    /// Namespace and name of the Secret; `None` for the UID of the system namespace.
    from: Option<(String, String)>,
    at: Instant,
    id: String,
}

impl Addresses {
    pub(super) fn new(client: Client) -> Self {
        Self { client, cluster: None, known: BTreeMap::new(), kept: Vec::new(), has_mesh: false }
    }

    /// Addresses that the status of a peer should list. Without a mesh it keeps the present ones.
    pub(super) fn of(&self, peer: &WireKubePeer) -> Vec<String> {
        match self.known.get(&peer.name_any()).filter(|_| self.has_mesh) {
            Some((_, addresses)) => addresses.iter().map(ToString::to_string).collect(),
            None => peer
                .status
                .iter()
                .flat_map(|status| &status.node)
                .flat_map(|node| node.mesh_ips.clone())
                .collect(),
        }
    }

    /// Decides anew. Whether everything that it needs could be read.
    pub(super) async fn update(
        &mut self,
        meshes: &[Arc<WireKubeMesh>],
        peers: &[Arc<WireKubePeer>],
        nodes: &[Arc<Node>],
    ) -> bool {
        let mesh = WireKubeMesh::selected(meshes);
        self.has_mesh = mesh.is_some();
        let Some(mesh) = mesh else { return true };
        let cluster = self.cluster_id(mesh).await;
        let space = Space {
            ipv6: cluster.as_deref().ok().map(mesh_subnet),
            ipv4: mesh.spec.mesh_cidr.as_ref().and_then(|text| text.parse().ok()),
        };
        let applicants: Vec<Applicant> = peers.iter().map(|peer| self.applicant(peer)).collect();
        let now = Timestamp::now();
        let kept = also_kept(std::mem::take(&mut self.kept), kept(mesh));
        let assigned =
            assign(&applicants, space, &kept, &self.departed(&applicants), &addresses_of(nodes), now);
        self.kept.clone_from(&assigned.kept);
        self.known = applicants
            .into_iter()
            .filter_map(|it| {
                let addresses = assigned.addresses.get(&it.name)?.clone();
                Some((it.name, (it.since.1, addresses)))
            })
            .collect();
        // Before the nodes are told: what is kept must not get lost between two programs.
        self.publish(mesh, &assigned, cluster.as_ref().err(), now).await;
        cluster.is_ok()
    }

    fn applicant(&self, peer: &WireKubePeer) -> Applicant {
        let name = peer.name_any();
        let uid = peer.uid().unwrap_or_default();
        let status = peer.status.as_ref();
        let given =
            status.and_then(|status| status.node.as_ref()).into_iter().flat_map(|node| &node.mesh_ips);
        let written: Vec<IpAddr> = given.filter_map(|address| address.parse().ok()).collect();
        let known = self.known.get(&name).filter(|(of, addresses)| *of == uid && !addresses.is_empty());
        let created = peer.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second());
        Applicant {
            since: (created.unwrap_or(i64::MAX), uid),
            present: known.map_or(written, |(_, addresses)| addresses.clone()),
            interface_id: status.and_then(|status| status.interface_id.as_ref()?.parse().ok()),
            has_reported: status.is_some_and(|status| status.last_reported_at.is_some()),
            public_key: peer.spec.parse_public_key().ok(),
            name,
        }
    }

    /// Nodes that are gone since the last time.
    fn departed(&self, applicants: &[Applicant]) -> BTreeMap<String, Ipv4Addr> {
        let names: BTreeSet<&str> = applicants.iter().map(|it| it.name.as_str()).collect();
        let gone = self.known.iter().filter(|(name, _)| !names.contains(name.as_str()));
        let ipv4 = |addresses: &[IpAddr]| {
            addresses.iter().find_map(|address| match address {
                IpAddr::V4(address) => Some(*address),
                IpAddr::V6(_) => None,
            })
        };
        gone.filter_map(|(name, (_, addresses))| Some((name.clone(), ipv4(addresses)?))).collect()
    }

    /// That of the discovery services, so that nodes of Talos have addresses in the same subnet; else that which Kubernetes has of its own.
    async fn cluster_id(&mut self, mesh: &WireKubeMesh) -> Result<String, String> {
        let from = mesh.spec.discovery.as_ref().map(|discovery| {
            let (namespace, name) = discovery.secret();
            (namespace.to_owned(), name.to_owned())
        });
        if let Some(known) = &self.cluster
            && known.from == from
            && known.at.elapsed() < READ_INTERVAL
        {
            return Ok(known.id.clone());
        }
        let read = match &from {
            Some((namespace, name)) => timeout(READ_TIMEOUT, self.id_of_secret(namespace, name)).await,
            None => timeout(READ_TIMEOUT, self.id_of_namespace()).await,
        };
        let id = read.map_err(|_| "the API server does not answer".to_owned()).flatten();
        match id {
            Ok(id) => {
                self.cluster = Some(Cluster { from, at: Instant::now(), id: id.clone() });
                Ok(id)
            }
            // While it cannot be read, the last one stays in force.
            Err(error) => {
                self.cluster.as_ref().filter(|known| known.from == from).map(|it| it.id.clone()).ok_or(error)
            }
        }
    }

    async fn id_of_secret(&self, namespace: &str, name: &str) -> Result<String, String> {
        let secret = Api::<Secret>::namespaced(self.client.clone(), namespace).get(name).await;
        let secret = secret.map_err(|error| format!("cannot read Secret {namespace}/{name}: {error}"))?;
        let id = secret.data.and_then(|mut data| data.remove(DISCOVERY_CLUSTER_ID));
        let id =
            id.and_then(|id| String::from_utf8(id.0.trim_ascii().to_vec()).ok()).filter(|id| !id.is_empty());
        id.ok_or_else(|| format!("Secret {namespace}/{name} has no text {DISCOVERY_CLUSTER_ID}"))
    }

    async fn id_of_namespace(&self) -> Result<String, String> {
        let read = Api::<Namespace>::all(self.client.clone()).get_metadata(SYSTEM_NAMESPACE).await;
        let read = read.map_err(|error| format!("cannot read Namespace {SYSTEM_NAMESPACE}: {error}"))?;
        read.metadata.uid.ok_or_else(|| format!("Namespace {SYSTEM_NAMESPACE} has no UID"))
    }

    async fn publish(
        &self,
        mesh: &WireKubeMesh,
        assigned: &Assigned,
        failure: Option<&String>,
        now: Timestamp,
    ) {
        let status = mesh.status.clone().unwrap_or_default();
        let kept: Vec<KeptMeshIp> = assigned.kept.iter().map(published).collect();
        let condition = finding(assigned, failure, &status.conditions, now);
        if status.kept_mesh_ips == kept && status.conditions.contains(&condition) {
            return;
        }
        let name = mesh.name_any();
        let patch = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": name },
            "status": { "keptMeshIPs": kept, "conditions": [condition] },
        });
        let api = Api::<WireKubeMesh>::all(self.client.clone());
        if let Err(error) = apply_status(&api, &name, MANAGER, &patch).await {
            tracing::warn!(mesh = name, %error, "cannot write the status; retrying");
        }
    }
}

/// Addresses that Nodes have already: no address on the mesh is to be one of these.
fn addresses_of(nodes: &[Arc<Node>]) -> BTreeSet<IpAddr> {
    let listed =
        nodes.iter().flat_map(|node| node.status.iter().flat_map(|status| status.addresses.iter().flatten()));
    listed.filter_map(|address| address.address.parse().ok()).collect()
}

/// Kept addresses in the status of the mesh. Entries that do not parse were written by another program, and are dropped.
fn kept(mesh: &WireKubeMesh) -> Vec<Kept> {
    let kept = mesh.status.iter().flat_map(|status| &status.kept_mesh_ips);
    kept.filter_map(|kept| {
        Some(Kept { node: kept.node.clone(), ip: kept.ip.parse().ok()?, until: kept.until.0 })
    })
    .collect()
}

/// Addresses that this program keeps, and others from the status, which an earlier program wrote.
fn also_kept(mut kept: Vec<Kept>, written: Vec<Kept>) -> Vec<Kept> {
    let known: BTreeSet<String> = kept.iter().map(|it| it.node.clone()).collect();
    kept.extend(written.into_iter().filter(|it| !known.contains(&it.node)));
    kept
}

fn published(kept: &Kept) -> KeptMeshIp {
    // Times in objects have whole seconds.
    let until = Timestamp::from_second(kept.until.as_second()).unwrap_or(kept.until);
    KeptMeshIp { node: kept.node.clone(), ip: kept.ip.to_string(), until: Time(until) }
}

fn finding(
    assigned: &Assigned,
    failure: Option<&String>,
    present: &[Condition],
    now: Timestamp,
) -> Condition {
    let (reason, message) = match (failure, assigned.without.as_slice()) {
        (Some(error), _) => {
            ("ClusterIDUnknown", format!("new nodes get no IPv6 address on the mesh: {error}"))
        }
        (None, []) => ("Assigned", "every node has its addresses on the mesh".to_owned()),
        (None, without) => {
            let named = some_of(without, MAX_NAMED);
            (
                "MeshCIDRFull",
                format!("spec.meshCIDR has no address left for {named}: choose a shorter prefix"),
            )
        }
    };
    let holds = reason == "Assigned";
    condition(present, Finding { type_: CONDITION, holds, reason, message }, None, Time(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assigned(without: usize) -> Assigned {
        Assigned { without: (0..without).map(|n| format!("n{n}")).collect(), ..Assigned::default() }
    }

    #[test]
    fn the_condition_names_the_nodes_without_an_address() {
        let now = Timestamp::UNIX_EPOCH;
        let found = finding(&assigned(9), None, &[], now);
        assert_eq!((found.status.as_str(), found.reason.as_str()), ("False", "MeshCIDRFull"));
        assert!(found.message.contains("n0, n1") && found.message.contains(" more: "), "{}", found.message);
        let found = finding(&assigned(0), Some(&"forbidden".to_owned()), &[], now);
        assert_eq!(found.reason, "ClusterIDUnknown");
        assert_eq!(finding(&assigned(0), None, &[], now).status, "True");
    }

    #[test]
    fn what_could_not_be_written_yet_is_kept_beside_what_an_earlier_program_wrote() {
        let kept = |node: &str, last: u8, seconds| Kept {
            node: node.to_owned(),
            ip: [100, 64, 0, last].into(),
            until: Timestamp::from_second(seconds).unwrap(),
        };
        let (own, written) = (vec![kept("a", 1, 200)], vec![kept("a", 2, 100), kept("b", 3, 100)]);
        assert_eq!(also_kept(own.clone(), written), [kept("a", 1, 200), kept("b", 3, 100)]);
        assert_eq!(also_kept(own.clone(), Vec::new()), own);
    }

    #[test]
    fn what_is_kept_is_read_back_and_what_others_wrote_is_dropped() {
        let until = Timestamp::from_second(100).unwrap();
        let one = Kept { node: "a".to_owned(), ip: [100, 64, 0, 1].into(), until };
        let mut mesh = WireKubeMesh::new("m", Default::default());
        let broken = KeptMeshIp { ip: "nonsense".to_owned(), ..published(&one) };
        mesh.status.get_or_insert_default().kept_mesh_ips = vec![broken, published(&one)];
        assert_eq!(kept(&mesh), [one]);
    }
}

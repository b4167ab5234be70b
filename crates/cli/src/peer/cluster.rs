//! Objects of the cluster from which the configuration of a Peer is made.

use std::borrow::Borrow;
use std::net::{IpAddr, ToSocketAddrs as _};

use anyhow::{Context as _, bail, ensure};
use fairlead_api::names::SYSTEM_NAMESPACE;
use fairlead_api::resources::{AddressBlock, AddressPool, KiloPeer, WireKubeMesh, WireKubePeer};
use fairlead_members::configuration::{
    Configuration, ConfiguredPeer, Objects, Subject, configuration, entry_nodes, through_entry,
};
use fairlead_members::preshared_keys;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Client, ResourceExt};

use super::secret;
use crate::api;

/// The Service of the cluster's DNS (the name that kubeadm and CoreDNS's manifests keep).
const DNS_SERVICE: &str = "kube-dns";

/// Objects of the cluster that configurations of Peers are made from.
pub struct Cluster {
    /// Nodes, blocks and Peers.
    pub objects: Objects,
    /// Subnets of pools.
    pub pools: Vec<IpNet>,
    /// Ranges of Services.
    pub services: Vec<IpNet>,
    /// Addresses of the cluster's DNS.
    pub dns: Vec<IpAddr>,
}

/// Nodes, blocks and Peers.
pub(super) async fn objects(client: &Client) -> anyhow::Result<Objects> {
    let every = ListParams::default;
    let kilo = ApiResource::erase::<KiloPeer>(&());
    let external = Api::<DynamicObject>::all_with(client.clone(), &kilo);
    let mut external = api::list_if_served(&external, "Peers").await?;
    if external.iter().any(|peer| preshared_keys::reference(peer).is_some()) {
        preshared_keys::insert(&mut external, &secret::read(client).await);
    }
    let meshes = api::list_if_served(&Api::<WireKubeMesh>::all(client.clone()), "WireKubeMeshes").await?;
    Ok(Objects {
        peers: api::list(&Api::<WireKubePeer>::all(client.clone()), "WireKubePeers", every()).await?,
        blocks: api::list(&Api::<AddressBlock>::all(client.clone()), "AddressBlocks", every()).await?,
        external,
        // Nodes follow the first by name.
        mesh: meshes.into_iter().min_by_key(ResourceExt::name_any),
    })
}

impl Cluster {
    pub(crate) async fn read(client: &Client) -> anyhow::Result<Self> {
        let objects = objects(client).await?;
        let pools = api::list_if_served(&Api::<AddressPool>::all(client.clone()), "AddressPools").await?;
        let ranges = api::list_if_served(&Api::<ServiceCIDR>::all(client.clone()), "ServiceCIDRs").await?;
        let dns: Api<Service> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
        let dns = dns.get_opt(DNS_SERVICE).await.context("cannot read Service kube-system/kube-dns")?;
        let addresses = dns.and_then(|service| service.spec?.cluster_ips).unwrap_or_default();
        let dns = addresses.iter().filter_map(|text| text.parse().ok()).collect();
        Ok(Self { dns, ..Self::of(objects, &pools, &ranges) })
    }

    /// Cluster of objects that were read, without DNS.
    pub fn of(
        objects: Objects,
        pools: &[impl Borrow<AddressPool>],
        ranges: &[impl Borrow<ServiceCIDR>],
    ) -> Self {
        let subnets = pools.iter().flat_map(|pool| &pool.borrow().spec.subnets);
        let pools = subnets.flat_map(|subnet| [&subnet.ipv4, &subnet.ipv6]).flatten();
        let services =
            ranges.iter().filter_map(|range| range.borrow().spec.as_ref()?.cidrs.as_ref()).flatten();
        Self {
            objects,
            pools: pools.filter_map(|text| text.parse().ok()).collect(),
            services: services.filter_map(|text| text.parse().ok()).collect(),
            dns: Vec::new(),
        }
    }

    /// The Peer of this name.
    pub(crate) fn peer(&self, name: &str) -> Option<&DynamicObject> {
        self.objects.external.iter().find(|peer| peer.name_any() == name)
    }

    /// Refuses names of nodes that the mesh does not have.
    ///
    /// # Errors
    /// One of them has no WireKubePeer.
    pub fn check_nodes(&self, names: &[String]) -> anyhow::Result<()> {
        let is_known = |name: &&String| self.objects.peers.iter().any(|peer| peer.name_any() == **name);
        let unknown: Vec<&str> = names.iter().filter(|name| !is_known(name)).map(String::as_str).collect();
        ensure!(
            unknown.is_empty(),
            "there is no WireKubePeer of node {}: are the names right, and are these nodes in the mesh?",
            unknown.join(", ")
        );
        Ok(())
    }

    /// Configuration of the machine of a Peer: through an entry node of it, by default the first, and with more prefixes.
    ///
    /// # Errors
    /// There is no such Peer, it has no such entry node, or it is not clear which tunnel the prefixes are for.
    pub fn configuration(
        &self,
        peer: &str,
        through: Option<&str>,
        more: &[IpNet],
    ) -> anyhow::Result<Configuration> {
        let object =
            self.peer(peer).with_context(|| format!("there is no Peer '{peer}': is the name right?"))?;
        let entries = entry_nodes(object);
        let Some(first) = entries.first() else {
            if let Some(node) = through {
                bail!("Peer '{peer}' has no entry node '{node}': every node has a tunnel with it");
            }
            return configuration_of(&self.objects, Subject::Peer(peer), more);
        };
        let entry = through.unwrap_or(first);
        ensure!(
            entries.iter().any(|name| name == entry),
            "node '{entry}' is no entry node of Peer '{peer}', which has {}",
            entries.join(", ")
        );
        let all: Vec<IpNet> = self.pools.iter().chain(&self.services).chain(more).copied().collect();
        let found = through_entry(&self.objects, peer, entry, &all).unwrap_or_default();
        let endpoints = endpoints(&found);
        Ok(found.without_endpoints(endpoints))
    }

    /// Whether packets to Services go to this peer.
    pub(crate) fn carries_services(&self, peer: &ConfiguredPeer) -> bool {
        let carries = |address: &IpAddr| peer.allowed_ips.iter().any(|prefix| prefix.contains(address));
        self.dns.iter().all(carries)
    }

    /// Addresses of the Peer's own machine: those of its allowed IPs that are one address.
    pub fn addresses(&self, peer: &str) -> Vec<IpNet> {
        let spec = self.peer(peer).and_then(|peer| peer.data.get("spec")?.get("allowedIPs")?.as_array());
        let prefixes = spec.into_iter().flatten().filter_map(|text| text.as_str()?.parse::<IpNet>().ok());
        prefixes.filter(|prefix| prefix.prefix_len() == prefix.max_prefix_len()).collect()
    }
}

/// Configuration of a node, or of a Peer with tunnels to all nodes; of a Peer without the addresses that its tunnels go to.
pub(crate) fn configuration_of(
    objects: &Objects,
    subject: Subject<'_>,
    more: &[IpNet],
) -> anyhow::Result<Configuration> {
    let objects = objects.clone();
    let (Subject::Node(name) | Subject::Peer(name)) = subject;
    let what = if matches!(subject, Subject::Node(_)) { "WireKubePeer of node" } else { "Peer" };
    let mut found = configuration(objects, subject)
        .with_context(|| format!("there is no {what} '{name}': is the name right?"))?;
    match &mut found.peers[..] {
        [] => {}
        [only] => only.allowed_ips.extend(more),
        _ if more.is_empty() => {}
        _ => bail!("--allowed-ips needs one peer to send them to, and '{name}' has several: name entryNodes"),
    }
    match subject {
        Subject::Node(_) => Ok(found),
        Subject::Peer(_) => {
            let endpoints = endpoints(&found);
            Ok(found.without_endpoints(endpoints))
        }
    }
}

/// The addresses of the endpoints; those of names as they are here and now.
pub(crate) fn endpoints(configuration: &Configuration) -> Vec<IpAddr> {
    let endpoints = configuration.peers.iter().filter_map(|peer| peer.endpoint.as_ref());
    endpoints
        .flat_map(|endpoint| endpoint.to_socket_addrs().into_iter().flatten())
        .map(|endpoint| endpoint.ip())
        .collect()
}

//! `fairlead ipam`: every address of this node explained, compared with kernel and cluster, and freed by hand.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fairlead_api::names::LINK_ALIAS_PREFIX;
use fairlead_api::resources::AddressPool;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::pods::SlimPod;
use fairlead_dataplane::pods::{self, PodOnNode};
use fairlead_dataplane::routes;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::uplink::has_ipv6;
use fairlead_ipam::check::{self, KnownBlock, KnownPod, NodeView, PodLink, Reservation};
use fairlead_ipam::{Allocated, Key};
use fairlead_members::cached_block::CachedBlock;
use fairlead_members::ipam_check::{known_pod, to_wire};
use fairlead_netlink::route::RouteSocket;
use fairlead_wire::node::{HeldAddresses, IpamCheckResponse, IpamReleaseResponse, IpamShowResponse};
use ipnet::IpNet;
use tonic::{Code, Status};

use crate::cni::CniHandle;
use crate::cni::records::{Record, Records};
use crate::container_locks::ContainerLocks;
use crate::ipam::{Attachment, Ipam};

/// A finding counts only if it is still there after this pause: the parts are not read at one moment.
const SECOND_READ: Duration = Duration::from_millis(750);
/// Fewer characters of a container ID may be a typing error.
const MIN_PREFIX: usize = 8;

/// Answers what `fairlead ipam` asks.
pub struct Inventory {
    /// Whether this program allocates the addresses.
    pub enable_ipam: bool,
    /// Addresses of this node.
    pub ipam: Arc<Ipam>,
    /// Files beside the socket.
    pub records: Records,
    /// Serializes the operations of each container.
    pub locks: Arc<ContainerLocks>,
    /// Detaches what is released.
    pub cni: CniHandle,
    /// All pools.
    pub pools: Arc<Cache<AddressPool>>,
    /// All blocks of all nodes.
    pub blocks: Arc<Cache<CachedBlock>>,
    /// The pods of this node.
    pub pods: Arc<Cache<SlimPod>>,
}

/// State of the pods' network that was read from the kernel.
struct Kernel {
    pods: Vec<PodOnNode>,
    /// Single addresses of the pods' table that lead to no pod's link.
    stray: Vec<IpAddr>,
    exported: Vec<IpNet>,
}

impl Inventory {
    /// Every address with its pod, link and block.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub async fn show(&self) -> Result<IpamShowResponse, Status> {
        let kernel = kernel(self.ipam.numbers()).await?;
        let explain = self.explainer(&kernel);
        Ok(IpamShowResponse {
            node: self.ipam.node().to_owned(),
            blocks: self.ipam.describe_blocks(),
            attachments: self.ipam.attachments().into_iter().map(|one| explain.explain(one)).collect(),
        })
    }

    fn explainer<'a>(&self, kernel: &'a Kernel) -> Explainer<'a> {
        let link = |pod: &'a PodOnNode| {
            let key = Key { container_id: pod.container_id.clone(), ifname: pod.ifname.clone() };
            (key, pod.host_name.as_str())
        };
        Explainer {
            links: kernel.pods.iter().map(link).collect(),
            records: self.records.all().unwrap_or_default(),
            pods: self.known_pods().unwrap_or_default(),
        }
    }

    /// The findings of two reads in a row.
    ///
    /// # Errors
    /// The kernel cannot be read, or there is nothing to compare because another plugin gives the addresses.
    pub async fn check(&self) -> Result<IpamCheckResponse, Status> {
        if !self.enable_ipam {
            let why =
                "another plugin gives the addresses of this node (--enable-ipam=false): nothing to compare";
            return Err(Status::failed_precondition(why));
        }
        let view = self.view(kernel(self.ipam.numbers()).await?);
        let mut findings = check::node(&view);
        if !findings.is_empty() {
            tokio::time::sleep(SECOND_READ).await;
            let again = check::node(&self.view(kernel(self.ipam.numbers()).await?));
            findings.retain(|finding| again.contains(finding));
        }
        Ok(IpamCheckResponse {
            node: view.node.clone(),
            findings: findings.into_iter().map(to_wire).collect(),
            unknown: unknown(&view),
        })
    }

    fn view(&self, kernel: Kernel) -> NodeView {
        let blocks = &self.blocks;
        let pools = &self.pools;
        let pods = self.known_pods();
        let reservation = |one| self.reservation(one, pods.as_deref().unwrap_or_default());
        NodeView {
            node: self.ipam.node().to_owned(),
            reservations: self.ipam.attachments().into_iter().map(reservation).collect(),
            links: kernel.pods.into_iter().map(link).collect(),
            stray: kernel.stray,
            exported: kernel.exported,
            blocks: blocks
                .is_ready()
                .then(|| blocks.store.state().iter().map(|block| exportable(block)).collect()),
            pools: pools
                .is_ready()
                .then(|| pools.store.state().iter().map(|pool| pool.as_ref().into()).collect()),
            pods,
        }
    }

    fn known_pods(&self) -> Option<Vec<KnownPod>> {
        let pods = || self.pods.store.state().iter().map(|pod| known_pod(pod)).collect();
        self.pods.is_ready().then(pods)
    }

    fn reservation(
        &self,
        Attachment { key, allocated, owner, .. }: Attachment,
        pods: &[KnownPod],
    ) -> Reservation {
        let owner = owner.or_else(|| owner_by_address(&allocated, pods));
        let busy = self.locks.try_lock(&key.container_id).is_none();
        Reservation { key, allocated, owner, busy }
    }

    /// Frees what an address or a container has.
    ///
    /// # Errors
    /// Nothing is reserved for it, it is not clear whose it is, or the pod is alive and `force` is not given.
    pub async fn release(&self, subject: &str, force: bool) -> Result<IpamReleaseResponse, Status> {
        let attached = self.ipam.attachments();
        let keys = resolve_subject(subject, &attached)?;
        let mut released = Vec::new();
        for key in keys {
            released.push(self.release_one(&key, force).await?);
        }
        Ok(IpamReleaseResponse { released })
    }

    /// While no CNI operation of the container can run.
    async fn release_one(&self, key: &Key, force: bool) -> Result<HeldAddresses, Status> {
        let _guard = self.locks.lock(&key.container_id).await;
        let kernel = kernel(self.ipam.numbers()).await?;
        let attached = self.ipam.attachments();
        let Some(attached) = attached.into_iter().find(|one| one.key == *key) else {
            return Err(Status::not_found(format!("container {} was detached meanwhile", key.container_id)));
        };
        let explained = self.explainer(&kernel).explain(attached.clone());
        if !force {
            still_used(&explained, &attached, self.known_pods().as_deref())?;
        }
        self.cni.detach(key).await?;
        tracing::warn!(
            container = key.container_id,
            ifname = key.ifname,
            pod = explained.pod_name,
            namespace = explained.pod_namespace,
            force,
            "an administrator freed an attachment"
        );
        Ok(explained)
    }
}

/// Fails with the reason why the attachment must not be freed: its link is there, or its pod exists or may exist.
fn still_used(
    explained: &HeldAddresses,
    attached: &Attachment,
    pods: Option<&[KnownPod]>,
) -> Result<(), Status> {
    let refuse = |why: String| {
        Err(Status::new(Code::FailedPrecondition, format!("{why}; --force frees it all the same")))
    };
    let id = &explained.container_id;
    if !explained.link.is_empty() {
        return refuse(format!(
            "container {id} is connected by link {}: delete its pod instead",
            explained.link
        ));
    }
    let Some(pods) = pods else {
        return refuse(format!("the API server has not said whether the pod of container {id} exists"));
    };
    let own: Vec<IpAddr> = attached.allocated.addresses().collect();
    let alive = |pod: &&KnownPod| {
        let by_name = attached.owner.as_ref().is_some_and(|owner| pod.is(owner));
        pod.has_network && (by_name || pod.addresses.iter().any(|address| own.contains(address)))
    };
    match pods.iter().find(alive) {
        Some(pod) => refuse(format!("pod {} of container {id} exists: delete it instead", pod.full_name())),
        None => Ok(()),
    }
}

/// The attachments that an address, a container ID or a prefix of one names.
fn resolve_subject(subject: &str, attached: &[Attachment]) -> Result<Vec<Key>, Status> {
    let nothing = || Status::not_found(format!("nothing on this node is reserved for {subject:?}"));
    if let Ok(address) = subject.parse::<IpAddr>() {
        let holder =
            attached.iter().find(|one| one.allocated.addresses().any(|allocated| allocated == address));
        return holder.map(|one| vec![one.key.clone()]).ok_or_else(nothing);
    }
    let whole = attached.iter().any(|one| one.key.container_id == subject);
    let by_prefix = !whole && subject.len() >= MIN_PREFIX;
    let wanted =
        |key: &&Key| key.container_id == subject || (by_prefix && key.container_id.starts_with(subject));
    let keys: Vec<Key> = attached.iter().map(|one| &one.key).filter(wanted).cloned().collect();
    let containers: BTreeSet<&str> = keys.iter().map(|key| key.container_id.as_str()).collect();
    match containers.len() {
        0 => Err(nothing()),
        1 => Ok(keys),
        _ => {
            let all: Vec<&str> = containers.into_iter().collect();
            Err(Status::invalid_argument(format!("{subject:?} may be any of {}", all.join(", "))))
        }
    }
}

/// The pod that has the addresses in its status: for attachments of before the start.
fn owner_by_address(allocated: &Allocated, pods: &[KnownPod]) -> Option<check::Owner> {
    let own: Vec<IpAddr> = allocated.addresses().collect();
    let claims =
        |pod: &&KnownPod| pod.has_network && pod.addresses.iter().any(|address| own.contains(address));
    let pod = pods.iter().find(claims)?;
    let namespace = pod.namespace.clone();
    let name = pod.name.clone();
    Some(check::Owner { namespace, name, uid: pod.uids.first().cloned() })
}

async fn kernel(numbers: RoutingIds) -> Result<Kernel, Status> {
    let failed =
        |error: &dyn std::fmt::Display| Status::internal(format!("cannot read the kernel's state: {error}"));
    let read =
        tokio::task::spawn_blocking(move || read_kernel(numbers)).await.map_err(|error| failed(&error))?;
    read.map_err(|error| failed(&error))
}

fn read_kernel(numbers: RoutingIds) -> fairlead_netlink::Result<Kernel> {
    let mut socket = RouteSocket::open()?;
    let links = socket.links_by_alias(LINK_ALIAS_PREFIX)?;
    let routes = socket.routes(numbers.table_pods())?;
    let pods = pods::pods_among(&links, &routes);
    let known: BTreeSet<u32> = pods.iter().map(|pod| pod.host_index).collect();
    let stray = routes
        .iter()
        .filter(|route| route.link.is_none_or(|link| !known.contains(&link)))
        .filter(|route| !routes::is_last_unreachable(route) && !routes::is_source(route))
        .map(|route| route.destination.addr())
        .collect();
    let exported = socket.routes(numbers.table_export())?;
    let exported = exported.iter().filter(|route| !routes::is_source(route));
    let exported = exported.map(|route| route.destination).collect();
    Ok(Kernel { pods, stray, exported })
}

/// A kernel without IPv6 exports IPv4 alone.
fn exportable(block: &CachedBlock) -> KnownBlock {
    let mut known = KnownBlock::from(block.existing());
    known.nets.retain(|net| net.addr().is_ipv4() || has_ipv6());
    known
}

fn link(pod: PodOnNode) -> PodLink {
    PodLink {
        addresses: pod.addresses.iter().collect(),
        key: Key { container_id: pod.container_id, ifname: pod.ifname },
        name: pod.host_name,
    }
}

fn unknown(view: &NodeView) -> Vec<String> {
    [
        ("AddressBlocks", view.blocks.is_none()),
        ("AddressPools", view.pools.is_none()),
        ("Pods", view.pods.is_none()),
    ]
    .into_iter()
    .filter(|(_, missing)| *missing)
    .map(|(what, _)| {
        format!("the API server has not said which {what} there are since the node program started")
    })
    .collect()
}

/// Adds to an attachment what others know of it.
struct Explainer<'a> {
    links: BTreeMap<Key, &'a str>,
    records: BTreeMap<Key, Record>,
    pods: Vec<KnownPod>,
}

impl Explainer<'_> {
    fn explain(&self, Attachment { key, allocated, block, owner }: Attachment) -> HeldAddresses {
        let owner = owner.or_else(|| owner_by_address(&allocated, &self.pods));
        let record = self.records.get(&key);
        let seconds =
            |at: SystemTime| i64::try_from(at.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs()).ok();
        HeldAddresses {
            link: self.links.get(&key).map(|name| (*name).to_owned()).unwrap_or_default(),
            network: record.map(|record| record.network.clone()).unwrap_or_default(),
            attached_unix_seconds: record.and_then(|record| seconds(record.since?)),
            container_id: key.container_id,
            ifname: key.ifname,
            pool: allocated.pool,
            block: block.unwrap_or_default(),
            ipv4: allocated.ipv4.map(|ip| ip.to_string()).unwrap_or_default(),
            ipv6: allocated.ipv6.map(|ip| ip.to_string()).unwrap_or_default(),
            pod_namespace: owner.as_ref().map(|owner| owner.namespace.clone()).unwrap_or_default(),
            pod_name: owner.as_ref().map(|owner| owner.name.clone()).unwrap_or_default(),
            pod_uid: owner.and_then(|owner| owner.uid).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attached(id: &str, ipv4: &str) -> Attachment {
        Attachment {
            key: Key { container_id: id.to_owned(), ifname: "eth0".to_owned() },
            allocated: Allocated { pool: "default".to_owned(), ipv4: ipv4.parse().ok(), ipv6: None },
            block: None,
            owner: None,
        }
    }

    fn ids(subject: &str, all: &[Attachment]) -> Result<Vec<String>, Code> {
        let keys = resolve_subject(subject, all).map_err(|status| status.code())?;
        Ok(keys.into_iter().map(|key| key.container_id).collect())
    }

    #[test]
    fn an_attachment_is_named_by_address_by_id_and_by_a_long_prefix() {
        let all = [
            attached("0123456789ab", "10.0.0.1"),
            attached("0123456789cd", "10.0.0.2"),
            attached("0123", "10.0.0.3"),
        ];
        assert_eq!(ids("10.0.0.2", &all), Ok(vec!["0123456789cd".to_owned()]));
        assert_eq!(ids("0123456789ab", &all), Ok(vec!["0123456789ab".to_owned()]));
        assert_eq!(ids("0123456789c", &all), Ok(vec!["0123456789cd".to_owned()]));
        assert_eq!(ids("0123", &all), Ok(vec!["0123".to_owned()]));
        assert_eq!(ids("0123456789", &all), Err(Code::InvalidArgument));
        for unknown in ["10.0.0.9", "01234", "", "ffffffffff"] {
            assert_eq!(ids(unknown, &all), Err(Code::NotFound), "{unknown}");
        }
    }

    #[test]
    fn only_unused_attachments_are_freed_without_force() {
        let one = attached("c", "10.0.0.1");
        let nothing = Explainer { links: BTreeMap::new(), records: BTreeMap::new(), pods: Vec::new() };
        let explained = nothing.explain(one.clone());
        let pod = KnownPod {
            namespace: "shop".into(),
            name: "web".into(),
            uids: vec!["u".into()],
            node: "n".into(),
            addresses: vec!["10.0.0.1".parse().unwrap()],
            has_network: true,
        };
        assert!(still_used(&explained, &one, Some(&[])).is_ok());
        assert!(still_used(&explained, &one, None).is_err());
        let refused = still_used(&explained, &one, Some(std::slice::from_ref(&pod))).unwrap_err();
        assert!(refused.message().contains("shop/web") && refused.message().contains("--force"), "{refused}");
        let ended = KnownPod { has_network: false, ..pod };
        assert!(still_used(&explained, &one, Some(&[ended])).is_ok());
        let linked = HeldAddresses { link: "veth1".into(), ..explained };
        assert!(still_used(&linked, &one, Some(&[])).unwrap_err().message().contains("veth1"));
    }
}

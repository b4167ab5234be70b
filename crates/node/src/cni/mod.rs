//! The CNI service: what the plugin asks, turned into an address and a link, and back into words.

mod args;
mod calico;
mod chained;
mod check;
pub mod gc;
pub mod metrics;
pub mod records;
mod status;
mod verbs;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::{ANNOTATION_POOL, DEFAULT_POOL};
use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_dataplane::pods::{self, Inspection, PodLinks, PodSpec, Removal};
use fairlead_ipam::check::Owner;
use fairlead_ipam::{Allocation, Key};
use fairlead_wire::cni::{CniArgs, ErrorCode};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};
use tonic::Status;

use self::args::{Attachment, netns, refuse};
use self::check::{Previous, differences};
use self::records::Records;
use crate::container_locks::ContainerLocks;
use crate::ipam::{AllocationError, Ipam};
use crate::metrics::Metrics;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, PendingEvent, pod_reference};

/// How long an ADD may wait for a block before the runtime is told to try again.
const BLOCK_WAIT: Duration = Duration::from_secs(20);

/// How often to look whether a link is gone while the kernel deletes it.
const DELETION_LOOK: Duration = Duration::from_millis(1);

/// How long the API server may take to say what a namespace is that the cache has not seen.
const NAMESPACE_WAIT: Duration = Duration::from_secs(5);

/// Serves ADD, DEL, CHECK, GC and STATUS.
pub struct Service {
    /// Whether this program gives addresses and makes interfaces; otherwise another plugin did both before.
    pub gives_addresses: bool,
    /// Addresses of this node.
    pub ipam: Arc<Ipam>,
    /// Metadata of all namespaces.
    pub namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    /// All pools.
    pub pools: Arc<Cache<AddressPool>>,
    /// All blocks of all nodes.
    pub blocks: Arc<Cache<AddressBlock>>,
    /// For namespaces that the cache has not seen yet.
    pub client: Client,
    /// Serializes the operations of each container.
    pub locks: Arc<ContainerLocks>,
    /// MTU of pod links, as it is when a pod starts.
    pub pod_mtu: Arc<dyn Fn() -> Option<u32> + Send + Sync>,
    /// Whether links on the host have the names that Calico's policy program expects.
    pub calico_names: bool,
    /// Why pods of this node may not reach other nodes, if something is wrong.
    pub mesh_problem: Arc<dyn Fn() -> Option<String> + Send + Sync>,
    /// Files beside the socket.
    pub records: Records,
    /// One GC at a time.
    pub collecting: tokio::sync::Mutex<()>,
    /// Told of pods that get no address.
    pub events: EventPublisher,
    /// Counters.
    pub metrics: Arc<Metrics>,
}

impl Service {
    /// The pool of a namespace's pods: from the watch cache, or from the API server for a namespace just made.
    async fn pool_of(&self, namespace: &str) -> Result<String, Status> {
        let pool = |object: &PartialObjectMeta<Namespace>| {
            let annotations = object.metadata.annotations.as_ref();
            annotations
                .and_then(|map| map.get(ANNOTATION_POOL))
                .map_or(DEFAULT_POOL, String::as_str)
                .to_owned()
        };
        if let Some(known) = self.namespaces.store.get(&ObjectRef::new(namespace)) {
            return Ok(pool(&known));
        }
        let namespaces = Api::<Namespace>::all(self.client.clone());
        let unanswered = |_| refuse(ErrorCode::TryAgainLater, "the API server does not answer", "");
        let asked =
            timeout(NAMESPACE_WAIT, namespaces.get_metadata_opt(namespace)).await.map_err(unanswered)?;
        match asked {
            Ok(Some(object)) => Ok(pool(&object)),
            Ok(None) => {
                Err(refuse(ErrorCode::UnknownContainer, format!("namespace {namespace} does not exist"), ""))
            }
            Err(error) => Err(refuse(
                ErrorCode::TryAgainLater,
                format!("cannot read namespace {namespace} from the API server"),
                error.to_string(),
            )),
        }
    }

    async fn attach(&self, attachment: &Attachment) -> Result<Vec<u8>, Status> {
        let pool = self.pool_of(&attachment.namespace).await?;
        let deadline = Instant::now() + BLOCK_WAIT;
        let asked = std::time::Instant::now();
        let given = self.ipam.allocate(&pool, &attachment.key, deadline).await;
        self.metrics.ipam.block_wait(asked.elapsed());
        let allocation = given.map_err(|failure| {
            self.tell(attachment, &failure);
            let code = match failure.is_temporary() {
                true => ErrorCode::TryAgainLater,
                false => ErrorCode::InvalidNetworkConfig,
            };
            refuse(code, failure.to_string(), "")
        })?;
        let mut spec = PodSpec {
            container_id: attachment.key.container_id.clone(),
            ifname: attachment.key.ifname.clone(),
            netns: attachment.netns.clone(),
            pool: allocation.pool.clone(),
            ipv4: allocation.ipv4,
            ipv6: allocation.ipv6,
            mtu: None,
            link_name: self.calico_names.then(|| calico::link_name(&attachment.namespace, &attachment.pod)),
            ids: self.ipam.numbers(),
        };
        let pod_mtu = Arc::clone(&self.pod_mtu);
        let add = move || {
            spec.mtu = pod_mtu();
            pods::add(&spec)
        };
        let made = tokio::task::spawn_blocking(add).await;
        match made {
            Ok(Ok(links)) => {
                self.ipam.set_owner(&attachment.key, owner(attachment));
                Ok(result(attachment, &allocation, &links))
            }
            Ok(Err(error)) => {
                self.give_back(attachment, &allocation);
                Err(pod_refusal(&error))
            }
            Err(error) => {
                self.give_back(attachment, &allocation);
                Err(refuse(
                    ErrorCode::Internal,
                    "setting up the pod's link stopped half-way",
                    error.to_string(),
                ))
            }
        }
    }

    /// Users look for the reason at their pod.
    fn tell(&self, attachment: &Attachment, failure: &AllocationError) {
        let Attachment { namespace, pod, pod_uid, .. } = attachment;
        self.events.warn(PendingEvent {
            regarding: pod_reference(namespace, pod, pod_uid.clone()),
            reason: failure.event_reason(),
            action: "AllocateAddress",
            note: failure.to_string(),
        });
    }

    /// An ADD that failed holds nothing, unless an earlier one of the same container succeeded.
    fn give_back(&self, attachment: &Attachment, allocation: &Allocation) {
        if allocation.is_new {
            self.ipam.release(&attachment.key);
            self.leave_records(&attachment.key);
        }
    }

    /// Before anything is made, so that GC finds also what a crash left half-made.
    fn enter_in_records(&self, key: &Key, network: Option<String>) -> Result<(), Status> {
        // A DEL of the past must not hit what is made now.
        self.records.forget_pending(key).map_err(|error| {
            refuse(ErrorCode::IoFailure, "cannot cancel an earlier DEL of this container", error.to_string())
        })?;
        if let Some(network) = network
            && let Err(error) = self.records.note(&network, key)
        {
            tracing::warn!(container = key.container_id, %error, "GC will not find this attachment");
        }
        Ok(())
    }

    fn leave_records(&self, key: &Key) {
        if let Err(error) = self.records.forget(key).and_then(|()| self.records.forget_pending(key)) {
            tracing::warn!(container = key.container_id, %error, "a record of a removed attachment remains");
        }
    }

    /// Removes link and address and says whether there was a link; the caller has the container's turn.
    pub(crate) async fn detach(&self, key: &Key) -> Result<bool, Status> {
        let (container, ifname) = (key.container_id.clone(), key.ifname.clone());
        let existed = match tokio::task::spawn_blocking(move || Removal::find(&container, &ifname)).await {
            Ok(Ok(removal)) if removal.is_needed() => delete(removal).await.map(|()| true),
            Ok(Ok(_)) => Ok(false),
            Ok(Err(error)) => Err(refuse(ErrorCode::IoFailure, error.to_string(), "")),
            Err(error) => Err(stopped_half_way(&error)),
        }?;
        // The address is free only when nothing answers to it any more.
        self.ipam.release(key);
        self.leave_records(key);
        Ok(existed)
    }

    /// Compares what ADD made with what is there.
    async fn inspect(&self, args: &CniArgs, key: &Key) -> Result<(), Status> {
        let netns = netns(args)?;
        let previous = Previous::of_configuration(&args.stdin_data).map_err(|error| {
            refuse(ErrorCode::DecodingFailure, "prevResult cannot be decoded", error.to_string())
        })?;
        let Some(allocated) = self.ipam.allocated(key) else {
            let msg = format!("container {} has no address reserved for {}", key.container_id, key.ifname);
            return Err(refuse(ErrorCode::UnknownContainer, msg, "the runtime has to make the sandbox anew"));
        };
        let seen = self.look(key, &netns, previous.clone().unwrap_or_default().tables()).await?;
        verdict(&differences((&key.ifname, &netns), previous.as_ref(), &allocated, &seen))
    }

    /// What the kernel shows of both ends of a link, and the routes of `tables` in the pod.
    async fn look(&self, key: &Key, netns: &Path, tables: Vec<u32>) -> Result<Inspection, Status> {
        let (numbers, key, file) = (self.ipam.numbers(), key.clone(), netns.to_owned());
        let read = move || pods::inspect(numbers, (&key.container_id, &key.ifname), &file, &tables);
        match tokio::task::spawn_blocking(read).await {
            Ok(seen) => seen.map_err(|error| pod_refusal(&error)),
            Err(error) => {
                let msg = "reading the pod's link stopped half-way";
                Err(refuse(ErrorCode::Internal, msg, error.to_string()))
            }
        }
    }
}

/// The answer of CHECK to what was found.
fn verdict(found: &[String]) -> Result<(), Status> {
    if found.is_empty() {
        return Ok(());
    }
    let details = "something changed it after ADD; the runtime has to make the sandbox anew";
    Err(refuse(ErrorCode::AttachmentChanged, found.join("; "), details))
}

/// Returns as soon as the links are gone. The kernel keeps the thread that asked for it until their memory is free,
/// several times as long.
async fn delete(removal: Removal) -> Result<(), Status> {
    let links = removal.clone();
    let mut deleting = tokio::task::spawn_blocking(move || links.carry_out());
    loop {
        match timeout(DELETION_LOOK, &mut deleting).await {
            Ok(Ok(outcome)) => {
                return outcome.map_err(|error| refuse(ErrorCode::IoFailure, error.to_string(), ""));
            }
            Ok(Err(error)) => return Err(stopped_half_way(&error)),
            Err(_) if removal.is_over() => return Ok(()),
            Err(_) => {}
        }
    }
}

fn stopped_half_way(error: &tokio::task::JoinError) -> Status {
    refuse(ErrorCode::Internal, "removing the pod's link stopped half-way", error.to_string())
}

fn owner(attachment: &Attachment) -> Owner {
    Owner {
        namespace: attachment.namespace.clone(),
        name: attachment.pod.clone(),
        uid: attachment.pod_uid.clone(),
    }
}

fn pod_refusal(error: &pods::Error) -> Status {
    let (code, details) = match error {
        pods::Error::Netns { .. } => (ErrorCode::UnknownContainer, ""),
        pods::Error::Invalid { .. } => (ErrorCode::InvalidEnvironmentVariables, ""),
        // What cannot be made is the interface that CNI_IFNAME asks for (CNI specification, "Parameters").
        pods::Error::InterfaceExists { .. } => (
            ErrorCode::InvalidEnvironmentVariables,
            "CNI_IFNAME must name an interface that is not there yet: put Fairlead before the plugin that made it, \
             or start `fairlead node` with --enable-ipam=false",
        ),
        _ => (ErrorCode::IoFailure, ""),
    };
    refuse(code, error.to_string(), details)
}

/// The CNI result: the container's interface first, as Coil has it; no gateways, no routes.
fn result(attachment: &Attachment, allocation: &Allocation, links: &PodLinks) -> Vec<u8> {
    let addresses = allocation
        .ipv4
        .map(IpAddr::from)
        .into_iter()
        .chain(allocation.ipv6.map(IpAddr::from))
        .map(|ip| serde_json::json!({ "address": format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 }), "interface": 0 }))
        .collect::<Vec<_>>();
    serde_json::json!({
        "cniVersion": "1.1.0",
        "interfaces": [
            { "name": attachment.key.ifname, "mac": links.container_mac.to_string(), "sandbox": attachment.netns, "mtu": links.mtu },
            { "name": links.host_name, "mac": links.host_mac.to_string(), "mtu": links.mtu },
        ],
        "ips": addresses,
    })
    .to_string()
    .into_bytes()
}

//! The pod's addresses: allocated from the pool of its namespace.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::DualStackAddrs;
use fairlead_api::names::{ANNOTATION_POOL, DEFAULT_POOL};
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::EventPublisher;
use fairlead_dataplane::uplink::has_ipv6;
use fairlead_ipam::Key;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};

use super::namespace_pools::NamespacePools;
use super::{AllocateAddresses, PodAddresses, Stage, warn_at_pod};
use crate::cni::attachment::Attachment;
use crate::cni::failure::{Failure, Reason};
use crate::ipam::Ipam;
use crate::ipam::metrics::IpamMetrics;

/// Longest wait of an ADD for a block before the runtime is told to try again.
const BLOCK_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for the API server to return a namespace that the cache does not have.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(5);

/// Allocates and releases addresses.
pub(in crate::cni) struct AddressStage {
    pub(in crate::cni) ipam: Arc<Ipam>,
    pub(in crate::cni) namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    /// Pools of namespaces whose pods ran here, for when the API server is away.
    pub(in crate::cni) pools: NamespacePools,
    /// For namespaces that the cache does not have yet.
    pub(in crate::cni) client: Client,
    pub(in crate::cni) events: EventPublisher,
    pub(in crate::cni) metrics: IpamMetrics,
}

#[tonic::async_trait]
impl AllocateAddresses for AddressStage {
    async fn allocate(&self, attachment: &Attachment) -> Result<PodAddresses, Failure> {
        let Attachment { key, pod, .. } = attachment;
        let pool = self.pool_of(&pod.namespace).await?;
        let start = std::time::Instant::now();
        let allocated = self.ipam.allocate(&pool, key, Instant::now() + BLOCK_TIMEOUT).await;
        self.metrics.block_wait(start.elapsed());
        let allocation = allocated.map_err(Failure::from).inspect_err(|failure| {
            warn_at_pod(&self.events, attachment, "AllocateAddress", failure);
        })?;
        if allocation.ipv4.is_none() && !has_ipv6() {
            self.ipam.release(key);
            let failure = ipv6_disabled(&pool);
            warn_at_pod(&self.events, attachment, "AllocateAddress", &failure);
            return Err(failure);
        }
        self.ipam.set_owner(key, pod.clone());
        let addresses = DualStackAddrs { ipv4: allocation.ipv4, ipv6: allocation.ipv6 };
        Ok(PodAddresses { pool: allocation.pool, addresses })
    }

    fn allocated(&self, key: &Key) -> Result<Vec<IpAddr>, Failure> {
        let Key { container_id, ifname } = key;
        let allocated = self.ipam.allocated(key).ok_or_else(|| {
            let message = format!("container {container_id} has no address allocated for {ifname}");
            Failure::new(Reason::NotAttached, message).details("the runtime must recreate the sandbox")
        })?;
        Ok(allocated.addresses().collect())
    }
}

#[tonic::async_trait]
impl Stage for AddressStage {
    async fn detach(&self, key: &Key) -> Result<(), Failure> {
        self.ipam.release(key);
        Ok(())
    }
}

fn ipv6_disabled(pool: &str) -> Failure {
    let message =
        format!("pool {pool} has only IPv6 addresses, and the kernel of this node has IPv6 disabled");
    Failure::new(Reason::Ipv6Disabled, message)
        .details("boot without ipv6.disable=1, or add IPv4 to a pool for these pods")
}

impl AddressStage {
    /// The pool of a namespace's pods, as the API server said it last where it does not answer.
    async fn pool_of(&self, namespace: &str) -> Result<String, Failure> {
        match self.current_pool_of(namespace).await {
            Ok(pool) => {
                let namespaces = &self.namespaces;
                let exists = |name: &str| {
                    !namespaces.is_ready() || namespaces.store.get(&ObjectRef::new(name)).is_some()
                };
                self.pools.remember(namespace, &pool, exists);
                Ok(pool)
            }
            Err(failure) if failure.reason == Reason::ApiServerUnavailable => {
                self.pools.get(namespace).ok_or(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    /// The pool as it is now: from the watch cache, or from the API server for a namespace just created.
    async fn current_pool_of(&self, namespace: &str) -> Result<String, Failure> {
        let pool = |object: &PartialObjectMeta<Namespace>| {
            let annotation =
                object.metadata.annotations.as_ref().and_then(|annotations| annotations.get(ANNOTATION_POOL));
            annotation.map_or(DEFAULT_POOL, String::as_str).to_owned()
        };
        if let Some(known) = self.namespaces.store.get(&ObjectRef::new(namespace)) {
            return Ok(pool(&known));
        }
        let namespaces = Api::<Namespace>::all(self.client.clone());
        let unavailable = |message| Failure::new(Reason::ApiServerUnavailable, message);
        match timeout(NAMESPACE_TIMEOUT, namespaces.get_metadata_opt(namespace)).await {
            Ok(Ok(Some(object))) => Ok(pool(&object)),
            Ok(Ok(None)) => {
                Err(Failure::new(Reason::UnknownNamespace, format!("namespace {namespace} does not exist")))
            }
            Ok(Err(error)) => {
                let message = format!("cannot read namespace {namespace} from the API server");
                Err(unavailable(message).details(error))
            }
            Err(_) => Err(unavailable("the API server does not answer".to_owned())),
        }
    }
}

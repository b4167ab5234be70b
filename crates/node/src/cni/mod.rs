//! The CNI service: what the plugin asks, turned into an address and a link, and back into words.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::names::{ANNOTATION_POOL, DEFAULT_POOL};
use fairlead_dataplane::pods::{self, PodLinks, PodSpec};
use fairlead_ipam::{Allocation, Key};
use fairlead_wire::cni::cni_server::Cni;
use fairlead_wire::cni::{AddResponse, CniArgs, CniError, ErrorCode, status_with_error};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::PartialObjectMeta;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};
use tonic::{Code, Request, Response, Status};

use crate::ipam::Ipam;
use crate::metrics::Metrics;
use crate::order::Order;
use crate::requests::Requester;
use fairlead_cluster::caches::Cache;

/// How long an ADD may wait for a block before the runtime is told to try again.
const BLOCK_WAIT: Duration = Duration::from_secs(20);

/// How long the API server may take to say what a namespace is that the cache has not seen.
const NAMESPACE_WAIT: Duration = Duration::from_secs(5);

/// Serves ADD, DEL and CHECK.
pub struct Service {
    /// Addresses of this node.
    pub ipam: Arc<Ipam>,
    /// Asks the controller for blocks.
    pub requester: Requester,
    /// Metadata of all namespaces.
    pub namespaces: Arc<Cache<PartialObjectMeta<Namespace>>>,
    /// For namespaces that the cache has not seen yet.
    pub client: Client,
    /// Turns by container.
    pub order: Order,
    /// MTU of pod links, as it is when a pod starts.
    pub pod_mtu: Arc<dyn Fn() -> Option<u32> + Send + Sync>,
    /// Counters.
    pub metrics: Arc<Metrics>,
}

/// One container's interface, as the runtime named it.
struct Attachment {
    key: Key,
    netns: PathBuf,
    namespace: String,
    pod: String,
}

fn refuse(code: ErrorCode, message: impl Into<String>, details: impl Into<String>) -> Status {
    let grpc = match code {
        ErrorCode::TryAgainLater => Code::Unavailable,
        ErrorCode::InvalidEnvironmentVariables
        | ErrorCode::InvalidNetworkConfig
        | ErrorCode::UnsupportedField => Code::InvalidArgument,
        ErrorCode::UnknownContainer => Code::NotFound,
        _ => Code::Internal,
    };
    status_with_error(grpc, CniError { code: code.into(), msg: message.into(), details: details.into() })
}

fn is_identifier(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
        // Longer ones would not fit the alias of the pod's link (`IFALIASZ`, 256 bytes).
        && text.len() <= 128
}

fn is_interface_name(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && !matches!(text, "." | "..")
        && !text.contains(['/', ':'])
        && !text.chars().any(|c| c.is_whitespace() || c.is_control())
}

fn key(args: &CniArgs) -> Result<Key, Status> {
    let invalid = |what: &str, value: &str| {
        refuse(ErrorCode::InvalidEnvironmentVariables, format!("{what} is invalid"), format!("{value:?}"))
    };
    if !is_identifier(&args.container_id) {
        return Err(invalid("CNI_CONTAINERID", &args.container_id));
    }
    if !is_interface_name(&args.ifname) {
        return Err(invalid("CNI_IFNAME", &args.ifname));
    }
    Ok(Key { container_id: args.container_id.clone(), ifname: args.ifname.clone() })
}

fn attachment(args: &CniArgs) -> Result<Attachment, Status> {
    let argument = |name: &str| {
        args.args.get(name).filter(|value| !value.is_empty()).cloned().ok_or_else(|| {
            refuse(
                ErrorCode::InvalidEnvironmentVariables,
                format!("CNI_ARGS names no {name}"),
                "Fairlead attaches Kubernetes pods: the runtime must pass K8S_POD_NAMESPACE and K8S_POD_NAME",
            )
        })
    };
    if args.netns.is_empty() {
        return Err(refuse(ErrorCode::InvalidEnvironmentVariables, "CNI_NETNS is empty", ""));
    }
    Ok(Attachment {
        key: key(args)?,
        netns: PathBuf::from(&args.netns),
        namespace: argument("K8S_POD_NAMESPACE")?,
        pod: argument("K8S_POD_NAME")?,
    })
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
        let allocation = self
            .ipam
            .allocate(&self.requester, &pool, &attachment.key, deadline)
            .await
            .map_err(|failure| refuse(failure.code(), failure.to_string(), ""))?;
        let spec = PodSpec {
            container_id: attachment.key.container_id.clone(),
            ifname: attachment.key.ifname.clone(),
            netns: attachment.netns.clone(),
            pool,
            ipv4: allocation.ipv4,
            ipv6: allocation.ipv6,
            mtu: (self.pod_mtu)(),
        };
        let made = tokio::task::spawn_blocking(move || pods::add(&spec)).await;
        match made {
            Ok(Ok(links)) => Ok(result(attachment, &allocation, &links)),
            Ok(Err(error)) => {
                self.give_back(attachment, &allocation);
                Err(refuse(pod_error_code(&error), error.to_string(), ""))
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

    /// An ADD that failed holds nothing, unless an earlier one of the same container succeeded.
    fn give_back(&self, attachment: &Attachment, allocation: &Allocation) {
        if allocation.fresh {
            self.ipam.release(&attachment.key);
        }
    }
}

fn pod_error_code(error: &pods::Error) -> ErrorCode {
    match error {
        pods::Error::Netns { .. } => ErrorCode::UnknownContainer,
        pods::Error::Invalid { .. } => ErrorCode::InvalidEnvironmentVariables,
        _ => ErrorCode::IoFailure,
    }
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
            { "name": attachment.key.ifname, "mac": links.container_mac.to_string(), "sandbox": attachment.netns },
            { "name": links.host_name, "mac": links.host_mac.to_string() },
        ],
        "ips": addresses,
    })
    .to_string()
    .into_bytes()
}

#[tonic::async_trait]
impl Cni for Service {
    async fn add(&self, request: Request<CniArgs>) -> Result<Response<AddResponse>, Status> {
        let args = request.into_inner();
        let start = std::time::Instant::now();
        let outcome = async {
            if !args.interfaces.is_empty() || !args.ips.is_empty() {
                return Err(refuse(
                    ErrorCode::InvalidNetworkConfig,
                    "Fairlead must be the first plugin of the chain: it makes the pod's interface",
                    "put it before the plugins that change an interface (portmap, bandwidth, tuning)",
                ));
            }
            let attachment = attachment(&args)?;
            let _turn = self.order.enter(&attachment.key.container_id).await;
            let result = self.attach(&attachment).await?;
            tracing::info!(
                pod = attachment.pod,
                namespace = attachment.namespace,
                container = attachment.key.container_id,
                ifname = attachment.key.ifname,
                elapsed_ms = start.elapsed().as_millis() as u64,
                "pod attached"
            );
            Ok(Response::new(AddResponse { result }))
        }
        .await;
        self.metrics.add(start.elapsed(), outcome.is_ok());
        outcome.inspect_err(|status| {
            tracing::warn!(container = args.container_id, error = status.message(), "cannot attach pod");
        })
    }

    async fn del(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let args = request.into_inner();
        let start = std::time::Instant::now();
        let key = key(&args)?;
        let _turn = self.order.enter(&key.container_id).await;
        let (container, ifname) = (key.container_id.clone(), key.ifname.clone());
        let removed = tokio::task::spawn_blocking(move || pods::remove(&container, &ifname)).await;
        let outcome = match removed {
            // The address is free only when nothing answers to it any more.
            Ok(Ok(existed)) => {
                self.ipam.release(&key);
                tracing::info!(container = key.container_id, ifname = key.ifname, existed, "pod detached");
                Ok(Response::new(()))
            }
            Ok(Err(error)) => Err(refuse(ErrorCode::IoFailure, error.to_string(), "")),
            Err(error) => Err(refuse(
                ErrorCode::Internal,
                "removing the pod's link stopped half-way",
                error.to_string(),
            )),
        };
        self.metrics.del(start.elapsed(), outcome.is_ok());
        outcome
    }

    async fn check(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let args = request.into_inner();
        let key = key(&args)?;
        let _turn = self.order.enter(&key.container_id).await;
        let known = tokio::task::spawn_blocking(pods::list).await;
        match known {
            Ok(Ok(pods))
                if pods
                    .iter()
                    .any(|pod| pod.container_id == key.container_id && pod.ifname == key.ifname) =>
            {
                Ok(Response::new(()))
            }
            Ok(Ok(_)) => Err(refuse(
                ErrorCode::UnknownContainer,
                format!("container {} has no link for {} on this node", key.container_id, key.ifname),
                "",
            )),
            Ok(Err(error)) => Err(refuse(ErrorCode::IoFailure, error.to_string(), "")),
            Err(error) => Err(refuse(
                ErrorCode::Internal,
                "reading the node's links stopped half-way",
                error.to_string(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_ids_follow_the_specification() {
        for good in ["a", "0123456789abcdef", "A-b_c.d"] {
            assert!(is_identifier(good), "{good}");
        }
        for bad in ["", "-a", ".a", "a b", "a/b", "a:b", "é"] {
            assert!(!is_identifier(bad), "{bad}");
        }
    }

    #[test]
    fn interface_names_follow_the_kernel() {
        for good in ["eth0", "net1", "a23456789012345"] {
            assert!(is_interface_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a:b", "a b", "a234567890123456", "a\n"] {
            assert!(!is_interface_name(bad), "{bad:?}");
        }
    }
}
